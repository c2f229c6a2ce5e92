"""Attribution: the planned operations of compiled collectives.

The compiler merges collectives, products and sums, and keeps one name of several. The first of these rules that applies
attributes a tensor of a compiled collective:

1. an operation of its metadata with a planned collective of the same kind, mesh axes and size;
2. any operation with such a planned collective that is still unattributed;
3. several operations of one source line whose planned sizes add up to its own, since products of one operand merge;
4. all remaining planned collectives of its kind and mesh axes, if both sides have the same sum, since XLA concatenates
   tensors;
5. several operations of its metadata whose planned sizes add up to its own, and then the rest as before;
6. the first operation of its metadata, unplanned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from shardplan.compiled.hlo.collectives import CompiledCollective
from shardplan.compiled.program import Axes, operation_of, origins

_SAME_SIZE = 0.01
"""The largest difference in size of the same planned and compiled collective. Padding makes some larger."""


class PlannedCollective(Protocol):
    """The attributes of a plan's collective for an audit. `operation` starts with its scope (`op12`)."""

    @property
    def kind(self) -> str: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def bytes(self) -> float: ...
    @property
    def times(self) -> int: ...
    @property
    def operation(self) -> str: ...
    @property
    def source(self) -> str: ...


@dataclass(frozen=True, slots=True)
class OperationTraffic:
    """Bytes that one operation of the plan makes a device send, planned and compiled.

    `operation` is its number, or None for an unattributed collective. `description` and `source` are for the reader.
    """

    operation: int | None
    description: str
    source: str
    predicted_bytes: float
    compiled_bytes: float

    @property
    def difference(self) -> float:
        return self.compiled_bytes - self.predicted_bytes


@dataclass(frozen=True, slots=True)
class _Planned:
    """A planned collective without a compiled one so far."""

    operation: int | None
    source: str
    size: float


@dataclass(frozen=True, slots=True)
class _CompiledTensor:
    """A tensor of a compiled collective, its bytes per step, and the metadata paths of its operations."""

    found: CompiledCollective
    axes: Axes
    paths: tuple[str, ...]
    size: float

    @property
    def nearest(self) -> int | None:
        return operation_of(self.paths[0]) if self.paths else None


class _Unattributed:
    """The planned collectives without a compiled one, per kind and mesh axes, in the order of the plan."""

    def __init__(self, planned: Iterable[PlannedCollective], mesh_axes: Mapping[str, int]) -> None:
        self._found: dict[tuple[str, Axes], list[_Planned]] = {}
        for plan in planned:
            entry = _Planned(operation_of(plan.operation), plan.source, plan.bytes * plan.times)
            self._found.setdefault((plan.kind, axes_in_order(plan, mesh_axes)), []).append(entry)

    def by_path(self, carried: _CompiledTensor) -> list[_Planned]:
        """The collective of the first operation on the tensor's paths that has its size."""
        here = self._of_same_kind(carried)
        for path in carried.paths:
            for entry in here:
                if entry.operation == operation_of(path):
                    return self._take(carried, [entry])
        return []

    def by_size(self, carried: _CompiledTensor) -> list[_Planned]:
        """The collective of its size whose operation is the nearest in the order of the program."""
        here = self._of_same_kind(carried)
        nearest = carried.nearest or 0
        return self._take(carried, sorted(here, key=lambda entry: abs((entry.operation or 0) - nearest))[:1])

    def by_sum(self, carried: _CompiledTensor) -> list[_Planned]:
        """Collectives of one source line, that of the nearest operation among them, whose sizes add up to its own."""
        here = self._found.get((carried.found.kind, carried.axes), [])
        first = next((entry for entry in here if entry.operation == carried.nearest), None)
        if first is None:
            return []
        taken, total = [first], first.size
        for entry in here:
            if (
                entry.source == first.source
                and entry is not first
                and total + entry.size <= carried.size * _SIZE_TOLERANCE
            ):
                taken.append(entry)
                total += entry.size
        return self._take(carried, taken) if _same(total, carried.size) else []

    def by_parts(self, carried: _CompiledTensor) -> list[_Planned]:
        """Collectives of the operations on the tensor's paths, the nearest first, whose sizes add up to its own."""
        here = self._found.get((carried.found.kind, carried.axes), [])
        taken, total = list[_Planned](), 0.0
        for operation in dict.fromkeys(map(operation_of, carried.paths)):
            for entry in here:
                if entry.operation == operation and total + entry.size <= carried.size * _SIZE_TOLERANCE:
                    taken.append(entry)
                    total += entry.size
        return self._take(carried, taken) if taken and _same(total, carried.size) else []

    def rest(self, kind: str, axes: Axes, size: float) -> list[_Planned]:
        """All remaining collectives of a kind over these mesh axes, if their sizes add up to this one."""
        here = self._found.get((kind, axes), [])
        return here if _same(sum(entry.size for entry in here), size) else []

    def _of_same_kind(self, carried: _CompiledTensor) -> list[_Planned]:
        here = self._found.get((carried.found.kind, carried.axes), ())
        return [entry for entry in here if _same(entry.size, carried.size)]

    def _take(self, carried: _CompiledTensor, entries: list[_Planned]) -> list[_Planned]:
        here = self._found.get((carried.found.kind, carried.axes), [])
        for entry in entries:
            here.remove(entry)
        return entries


_SIZE_TOLERANCE = 1 + _SAME_SIZE


def _same(planned: float, compiled: float) -> bool:
    return abs(planned - compiled) <= _SAME_SIZE * planned


def attribute(
    planned: Sequence[PlannedCollective], compiled: Iterable[CompiledCollective], mesh_axes: Mapping[str, int]
) -> tuple[OperationTraffic, ...]:
    """Predicted and compiled bytes per operation, largest difference first."""
    found: dict[int | None, OperationTraffic] = {}

    def add(operation: int | None, description: str, source: str, predicted: float, sent: float) -> None:
        known = found.get(operation, OperationTraffic(operation, description, source, 0, 0))
        found[operation] = replace(
            known, predicted_bytes=known.predicted_bytes + predicted, compiled_bytes=known.compiled_bytes + sent
        )

    for plan in planned:
        add(operation_of(plan.operation), plan.operation, plan.source, plan.bytes * plan.times, 0)
    still = _Unattributed(planned, mesh_axes)
    left = [
        _CompiledTensor(one, one.axes(mesh_axes), paths, size)
        for one in compiled
        for paths, size in origins(one)
        if size
    ]

    def explain(carried: _CompiledTensor, entries: Sequence[_Planned]) -> None:
        scale = carried.size / sum(entry.size for entry in entries)
        for entry in entries:
            add(entry.operation, "", entry.source, 0, entry.size * scale)

    for search in (still.by_path, still.by_size, still.by_sum):
        left = _unexplained(left, search, explain)
    together: dict[tuple[str, Axes], list[_CompiledTensor]] = {}
    for carried in left:
        together.setdefault((carried.found.kind, carried.axes), []).append(carried)
    for (kind, axes), group in together.items():
        rest = still.rest(kind, axes, sum(carried.size for carried in group))
        if not rest:
            group = _unexplained(group, still.by_parts, explain)
            rest = still.rest(kind, axes, sum(carried.size for carried in group))
        for entry in rest:
            add(entry.operation, "", entry.source, 0, entry.size)
        for carried in group if not rest else ():
            operation, path = carried.nearest, carried.paths[0] if carried.paths else ""
            name = "no operation of the plan" if operation is None else f"op{operation} {path.rsplit('/', 1)[-1]}"
            add(operation, name, "" if operation is None else carried.found.source, 0, carried.size)
    return tuple(sorted(found.values(), key=lambda traffic: -abs(traffic.difference)))


def _unexplained(
    left: Iterable[_CompiledTensor],
    search: Callable[[_CompiledTensor], list[_Planned]],
    explain: Callable[[_CompiledTensor, Sequence[_Planned]], None],
) -> list[_CompiledTensor]:
    """The tensors for which a search finds no planned collective. The function explains the others by its results."""
    unexplained = []
    for carried in left:
        entries = search(carried)
        if entries:
            explain(carried, entries)
        else:
            unexplained.append(carried)
    return unexplained


def axes_in_order(planned: PlannedCollective, mesh_axes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes of a planned collective in the order of the mesh, without those of one device."""
    return tuple(axis for axis in mesh_axes if axis in planned.axes and mesh_axes[axis] > 1)
