"""Deep halos: blocks of an index that devices split, each with all the rows that its whole region needs of neighbours.

A value from outside becomes a stack of windows, one per device: its own rows, and those of its neighbours that the
tiling asks for. The windows are exchanged once, before the loop. The loop then has no index that devices split but the
number of the window, and runs mapped over it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from shardplan.program.program import Operation
from shardplan.rules import Refusal, Span

Mapped = TypeVar("Mapped", bound=Callable[..., Any])

_WINDOWS = "windows"
"""The name of the mapped dimension."""

_COLLECTIVES = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}


class DeepHalos:
    """The windows of devices. ``mesh``: name and size of each mesh axis, and the number of the index that it splits,
    -1 without one."""

    def __init__(self, mesh: Sequence[tuple[str, int, int]], indices: int) -> None:
        used = [(name, size, index) for name, size, index in mesh if index >= 0]
        sizes, names = tuple(size for _, size, _ in mesh), tuple(name for name, _, _ in mesh)
        self._mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
        self._used = used
        self._axes = [tuple(name for name, _, own in used if own == index) for index in range(indices)]
        self.devices = tuple(prod(size for _, size, own in used if own == index) for index in range(indices))

    def __bool__(self) -> bool:
        return bool(self._used)

    def firsts(self, counts: Sequence[int]) -> list[Any]:
        """Per index, the number of the first block of each window. Each has so many blocks."""
        window, found = jnp.arange(prod(self.devices), dtype=jnp.int32), [jnp.int32(0)] * len(counts)
        stride, strides = prod(self.devices), dict[str, int]()
        for name, size, _ in self._used:
            stride //= size
            strides[name] = stride
        for name, size, index in self._used:
            own = jax.lax.rem(jax.lax.div(window, jnp.int32(strides[name])), jnp.int32(size))
            found[index] = found[index] * size + own
        return [first * count for first, count in zip(found, counts, strict=True)]

    def windows(self, whole: Any, dims: Sequence[int], spans: Sequence[Span], counts: Sequence[int]) -> Any:
        """The windows of a value, stacked: each has the rows of its blocks along the dimensions of the indices."""
        config = [(0, 0, 0)] * whole.ndim
        for dim, span, count, devices, axes in zip(dims, spans, counts, self.devices, self._axes, strict=True):
            if axes:
                config[dim] = (0, devices * count * span.step - whole.shape[dim], 0)
        if any(map(any, config)):
            whole = jax.lax.pad(whole, jnp.zeros((), whole.dtype), config)

        def exchanged(local: Any) -> Any:
            for dim, span, count, axes in zip(dims, spans, counts, self._axes, strict=True):
                if axes:
                    window = _with_neighbours(local, dim, max(-span.low, 0), max(span.high - span.step, 0), axes)
                    first = max(span.low, 0)
                    rows = (count - 1) * span.step + span.length
                    local = jax.lax.slice_in_dim(window, first, first + rows, axis=dim)
            return local[None]

        return self._mapped(exchanged, self._spec(whole.ndim, dims), self._stacked)(whole)

    def whole(self, stack: Any, dims: Sequence[int]) -> Any:
        """The value whose windows, which do not overlap, are stacked."""
        return self._mapped(lambda local: local[0], self._stacked, self._spec(stack.ndim - 1, dims))(stack)

    def _spec(self, rank: int, dims: Sequence[int]) -> PartitionSpec:
        found: list[Any] = [None] * rank
        for dim, axes in zip(dims, self._axes, strict=True):
            found[dim] = axes or None
        return PartitionSpec(*found)

    @property
    def _stacked(self) -> PartitionSpec:
        return PartitionSpec(tuple(name for name, _, _ in self._used))

    def _mapped(self, run: Callable[..., Any], read: PartitionSpec, given: PartitionSpec) -> Callable[..., Any]:
        return jax.shard_map(run, mesh=self._mesh, in_specs=read, out_specs=given, check_vma=False)


def over_windows(run: Mapped, stacked: Any, given: Any) -> Mapped:
    """A function of one window, over stacked windows. ``stacked`` and ``given`` are the axes of operands and results
    as ``jax.vmap`` has them."""
    return jax.vmap(run, stacked, given, axis_name=_WINDOWS)


def combined(reducer: str, part: Any) -> Any:
    """The combination of the parts of all windows, inside of what runs on one."""
    if reducer not in _COLLECTIVES:
        raise Refusal(f"parts of devices are not combined by `{reducer}`")
    return _COLLECTIVES[reducer](part, _WINDOWS)


def summed_convolution(operation: Operation, run: Callable[..., Any]) -> Callable[..., Any]:
    """A convolution whose spatial index is summed, over all windows at once: these are features of its operands."""
    numbers, groups = operation.params["dimension_numbers"], operation.params["feature_group_count"]

    @custom_vmap
    def convolved(*operands: Any) -> Any:
        return run(*operands)

    @convolved.def_vmap
    def rule(size: int, mapped: Sequence[bool], data: Any, filters: Any) -> tuple[Any, bool]:
        pairs = [(data, numbers.lhs_spec[1], groups), (filters, numbers.rhs_spec[1], 1)]
        read = [
            _into_features(operand if is_mapped else jnp.broadcast_to(operand, (size, *operand.shape)), dim, parts)
            for is_mapped, (operand, dim, parts) in zip(mapped, pairs, strict=True)
        ]
        return run(*read), False

    return convolved


def _into_features(stack: Any, dim: int, groups: int) -> Any:
    """Stacked windows as features: those of a group of features stay together."""
    size, *shape = stack.shape
    split = stack.reshape(size, *shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :])
    moved = jnp.moveaxis(split, 0, dim + 1)
    return moved.reshape(*shape[:dim], size * shape[dim], *shape[dim + 1 :])


def _with_neighbours(local: Any, dim: int, before: int, after: int, axes: tuple[str, ...]) -> Any:
    """A device's rows between those of its neighbours: zeros beyond the ends."""
    rows, devices = local.shape[dim], jax.lax.axis_size(axes)
    parts = [local]
    for hop in range(1, ceil(before / rows) + 1):
        sent = jax.lax.slice_in_dim(local, rows - min(rows, before - (hop - 1) * rows), rows, axis=dim)
        parts.insert(0, jax.lax.ppermute(sent, axes, [(n, n + hop) for n in range(devices - hop)]))
    for hop in range(1, ceil(after / rows) + 1):
        sent = jax.lax.slice_in_dim(local, 0, min(rows, after - (hop - 1) * rows), axis=dim)
        parts.append(jax.lax.ppermute(sent, axes, [(n + hop, n) for n in range(devices - hop)]))
    return jnp.concatenate(parts, dim) if len(parts) > 1 else local
