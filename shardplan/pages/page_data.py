"""The data of a page: tables of numbers, with each text, type and layout once.

Equal layers are folded. Operations that differ in their layer alone have one *kind*, and tensors of equal kinds one row
with a count. An operation names its operands by the distance to their makers, which equal layers share as well.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cached_property
from typing import Any

from shardplan.hardware import Link
from shardplan.layout.layout import Layout
from shardplan.memory import Buffer, lifetimes_of
from shardplan.pages.categories import CATEGORIES, categories_of, category_of, gradients_of
from shardplan.pages.places import PHASES, places_of, with_stars
from shardplan.problem.schedule import Schedule, Sent
from shardplan.program.program import Operation
from shardplan.timing.simulator import simulate_tasks
from shardplan.timing.step_time import sent_seconds, time_prices, timing_of, work_seconds
from shardplan.timing.tasks import tasks_of

NANOSECONDS = 1e9

_CASTS = frozenset({"convert_element_type", "transpose", "reshape"})


def path_with_stars(path: str) -> str:
    """A path with `*` for numbers after its first component, which is an argument's position.

    >>> path_with_stars("0/params/layer_11/kernel")
    '0/params/layer_*/kernel'
    """
    first, *rest = path.split("/")
    return "/".join([first, *map(with_stars, rest)])


class Rows:
    """Rows of a table, each once, by their numbers."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}

    def number(self, row: Hashable) -> int:
        """The number of a row. It is added if it is new."""
        return self.numbers.setdefault(row, len(self.numbers))

    def __iter__(self) -> Any:
        return iter(self.numbers)


def page_data(schedule: Schedule, donated: frozenset[int], held: Mapping[int, float] | None = None) -> dict[str, Any]:
    """The data of a schedule. ``donated`` are the positions of donated inputs, ``held`` the bytes that a compiled step
    holds at each operation."""
    document = _PageData(schedule, donated).document()
    if held:
        places = enumerate(document["memory"]["at"])
        document["memory"]["compiled"] = [[place, round(held[index])] for place, index in places if index in held]
    return document


class _PageData:
    def __init__(self, schedule: Schedule, donated: frozenset[int]) -> None:
        self.schedule, self.donated = schedule, donated
        self.problem, self.program, self.mesh = schedule.problem, schedule.program, schedule.space.mesh
        self.assignment = schedule.assignment
        self.texts, self.types, self.layouts, self.modules = Rows(), Rows(), Rows(), Rows()
        self.places = places_of(self.program)
        self.gradients = gradients_of(self.program, self.places)
        self.categories = categories_of(self.program, self.places, self.gradients)
        self.prices = time_prices(self.problem)
        self.inputs = {value: number for number, value in enumerate(self.program.inputs)}

    def document(self) -> dict[str, Any]:
        """All tables. The tables of texts, types, layouts and modules are filled by the others."""
        operations, collectives = self._operations(), self._collectives()
        memory, timeline = self._memory(), self._timeline()
        return {
            "mesh": [list(pair) for pair in zip(self.mesh.names, self.mesh.sizes, strict=True)],
            "phases": PHASES,
            "categories": CATEGORIES,
            "operations": operations,
            "collectives": collectives,
            "memory": memory,
            "timeline": timeline,
            "inputs": [self.program.values[index].name or "" for index in self.program.inputs],
            "texts": list(self.texts),
            "types": list(self.types),
            "layouts": list(self.layouts),
            "modules": list(self.modules),
        }

    # ---- parts of rows

    def _layout(self, value: int, layout: Layout | None) -> int:
        """A layout as the axes of a partial sum, and the axes of each dimension. -1: the layout of each reader."""
        if layout is None:
            return -1
        partial = self.schedule.is_partial(value, layout)
        pending, dims = (layout[0], layout[1:]) if partial else ((), layout)
        return self.layouts.number((tuple(pending), tuple(tuple(axes) for axes in dims)))

    def _type(self, value: int) -> int:
        own = self.program.values[value]
        kind = f"<{own.memory_kind}>" if own.memory_kind else ""
        return self.types.number((f"{own.dtype}{kind}", own.shape))

    def _module(self, operation: Operation | None) -> int:
        names = self.places[operation.index].modules if operation is not None else ()
        return self.modules.number(tuple(self.texts.number(name) for name in names))

    def _label(self, value: int | None) -> str:
        """The path of an argument, with `*` for numbers, or the primitive that makes a value, and of what."""
        if value is None:
            return "workspace"
        name, maker = self.program.values[value].name, self.program.makers.get(value)
        if name:
            return path_with_stars(name)
        if maker is None:
            return f"part of {self._label(self._cast[value])}" if value in self._cast else "carry of a loop"
        if value in self.gradients:
            return f"gradient of {self._label(self.gradients[value])}"
        root = self._cast.get(value)
        return f"{maker.primitive.name} of {self._label(root)}" if root is not None else maker.primitive.name

    @cached_property
    def _cast(self) -> dict[int, int]:
        """The argument of each value that is a cast or a transpose of one, also inside a loop that reads it."""
        found = {value: value for value in self.inputs}
        for _ in range(2):  # the operations of a body come before its loop
            for operation in self.program.operations:
                read = operation.operands[0] if operation.primitive.name in _CASTS else None
                if isinstance(read, int) and read in found:
                    found.update(dict.fromkeys(operation.results, found[read]))
                links = self.problem.links.get(operation.index)
                for link in links.enter if links is not None else ():
                    if isinstance(link.source, int) and link.source in found:
                        found[link.target] = found[link.source]
        return found

    # ---- operations

    def _operations(self) -> dict[str, Any]:
        kinds, of_operation, operands = Rows(), [], []
        makers = self.program.makers
        for operation in self.program.operations:
            of_operation.append(kinds.number(self._kind(operation)))
            operands.append(
                [
                    operation.index - makers[o].index if o in makers else -1 - self.inputs.get(o, -1)
                    for o in operation.operands
                    if isinstance(o, int)
                ]
            )
        return {"kinds": list(kinds), "kind": of_operation, "operands": operands}

    def _kind(self, operation: Operation) -> tuple[Any, ...]:
        """Phase, module, primitive, source line, operands, results, sharing devices, times, nanoseconds.

        An operand has its type, its stored layout and the layout that the operation reads. A result has its type, the
        layout in which it is made, the axes of its partial sum, and its stored layout."""
        strategy, kept = self.assignment.strategies.get(operation.index), self.assignment.values
        wanted = strategy.operands if strategy else (None,) * len(operation.operands)
        reads = tuple(
            (self._type(o), self._layout(o, kept.get(o)), self._layout(o, layout))
            for o, layout in zip(operation.operands, wanted, strict=True)
            if isinstance(o, int)
        )
        makes = []
        for number, result in enumerate(operation.results):
            made = strategy.results[number] if strategy else None
            pending = tuple(strategy.pending[number]) if strategy else ()
            makes.append(
                (self._type(result), self._layout(result, made), pending, self._layout(result, kept.get(result)))
            )
        degree = strategy.degree if strategy else 0
        seconds = work_seconds(self.problem, self.prices, operation, degree) if strategy else 0.0
        return (
            PHASES.index(self.places[operation.index].phase),
            self._module(operation),
            self.texts.number(operation.primitive.name),
            self.texts.number(operation.source),
            reads,
            tuple(makes),
            int(degree),
            self.problem.times(operation),
            round(seconds * NANOSECONDS),
        )

    # ---- collectives

    def _collectives(self) -> list[list[Any]]:
        """Rows of equal collectives, most bytes first: kind, axes, bytes each, times each, tensor, type, layout after,
        phase, module, source line, nanoseconds each, whether work can hide it, and the operations (-1: a result)."""
        hidden = timing_of(self.problem).hidden
        rows: dict[tuple[Any, ...], list[int]] = {}
        for sent in self.schedule.collectives():
            rows.setdefault(self._collective(sent, hidden), []).append(sent.operation.index if sent.operation else -1)
        ordered = sorted(rows.items(), key=lambda row: -row[0][2] * row[0][3] * len(row[1]))
        return [[*row, operations] for row, operations in ordered]

    def _collective(self, sent: Sent, hidden: frozenset[int]) -> tuple[Any, ...]:
        operation, value = sent.operation, sent.tensor.index
        place = self.places[operation.index] if operation is not None else None
        return (
            self.texts.number(sent.step.kind.value),
            tuple(sorted(sent.step.axes)),
            sent.bytes,
            sent.times,
            self.texts.number(self._label(value)),
            self._type(value),
            self._layout(value, sent.step.layout),
            PHASES.index(place.phase if place else "program"),
            self._module(operation),
            self.texts.number(operation.source if operation else "result of the step"),
            round(sent_seconds(self.prices, sent) * NANOSECONDS),
            int(value in hidden),
        )

    # ---- memory

    def _memory(self) -> dict[str, Any]:
        """Buffers by their start, and the tensors in them, with the operation at each schedule position.

        A tensor has its category, group (texts), label, type, layout, bytes per device, source line, and the number of
        equal ones. A buffer has the distance of its start to that of the one before, its length, its tensor, and its
        maker."""
        lifetimes = lifetimes_of(self.schedule, self.donated)
        choices = self.problem.encode(self.assignment)
        tensors, counts = Rows(), dict[int, int]()
        columns: dict[str, list[int]] = {"start": [], "length": [], "tensor": [], "maker": []}
        before = 0
        for buffer in sorted(lifetimes.buffers, key=lambda one: one.start):
            size = buffer.size(choices)
            if not size:
                continue
            row = tensors.number(self._tensor(buffer, size))
            counts[row] = counts.get(row, 0) + 1
            columns["start"].append(buffer.start - before)
            columns["length"].append(buffer.end - buffer.start)
            columns["tensor"].append(row)
            columns["maker"].append(self._maker(buffer.value))
            before = buffer.start
        for value in self.program.inputs:
            own = self.program.values[value]
            if own.memory_kind:
                row = tensors.number(self._host_tensor(value))
                counts[row] = counts.get(row, 0) + 1
        at = [-1] * (lifetimes.positions + 1)
        for index, position in lifetimes.place.items():
            at[position] = max(at[position], index)
        rows = [[*row, counts[number]] for number, row in enumerate(tensors)]
        return {"tensors": rows, "buffers": columns, "at": at}

    def _maker(self, value: int | None) -> int:
        """The operation that makes a value. Inputs are numbers below 0, from -1 on. Others: a number above all."""
        maker = self.program.makers.get(value) if value is not None else None
        if maker is not None:
            return maker.index
        return len(self.program.operations) if value not in self.inputs else -1 - self.inputs[value]

    def _tensor(self, buffer: Buffer, size: float) -> tuple[Any, ...]:
        value, category = buffer.value, category_of(buffer, self.categories)
        maker = self.program.makers.get(value) if value is not None else None
        group, label = self._group_and_label(value, maker)
        return (
            CATEGORIES.index(category),
            tuple(self.texts.number(name) for name in group),
            self.texts.number(label),
            -1 if value is None else self._type(value),
            self._stored(buffer),
            round(size),
            self.texts.number(maker.source if maker is not None else ""),
        )

    def _host_tensor(self, value: int) -> tuple[Any, ...]:
        layout = self.assignment.values[value]
        group, label = self._group_and_label(value, None)
        size = self.program.values[value].stored_bytes / self.mesh.degree([axis for axes in layout for axis in axes])
        return (
            CATEGORIES.index("host memory"),
            tuple(self.texts.number(name) for name in group),
            self.texts.number(label),
            self._type(value),
            self._layout(value, layout),
            round(size),
            self.texts.number(""),
        )

    def _group_and_label(self, value: int | None, maker: Operation | None) -> tuple[tuple[str, ...], str]:
        """The folders of a tensor in the tree, and its name there: an argument's path, or modules and primitive."""
        if value is not None and self.program.values[value].name:
            *folders, last = path_with_stars(self.program.values[value].name or "").split("/")
            return tuple(folders), last
        place = self.places[maker.index] if maker is not None else None
        return ((place.phase, *place.modules) if place else ()), self._label(value)

    def _stored(self, buffer: Buffer) -> int:
        """The layout of a buffer that holds a stored value. -1 for copies and workspaces."""
        if buffer.value is None or buffer.form not in ("value", "result"):
            return -1
        return self._layout(buffer.value, self.assignment.values.get(buffer.value))

    # ---- timeline

    def _timeline(self) -> dict[str, Any]:
        """Lanes of events: the distance of each start to the end before it, and durations, in nanoseconds."""
        ran = simulate_tasks(tasks_of(self.schedule), {}, Link(1.0, 0.0))
        lanes: dict[tuple[str, ...], dict[str, list[int]]] = {}
        ends: dict[tuple[str, ...], int] = {}
        for event in sorted(ran.events, key=lambda one: one.start):
            lane = lanes.setdefault(event.axes, {"gap": [], "length": [], "operation": [], "name": []})
            start, end = (round(at * NANOSECONDS) for at in (event.start, event.end))
            if end == start:
                continue
            lane["gap"].append(start - ends.get(event.axes, 0))
            lane["length"].append(end - start)
            lane["operation"].append(-1 if event.operation is None else event.operation)
            lane["name"].append(self.texts.number(event.name.split(" ")[0]) if event.kind != "compute" else -1)
            ends[event.axes] = end
        ordered = sorted(lanes.items(), key=lambda lane: (len(lane[0]), lane[0]))
        return {
            "nanoseconds": round(ran.seconds * NANOSECONDS),
            "lanes": [{"axes": axes, **columns} for axes, columns in ordered],
        }
