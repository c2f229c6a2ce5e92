"""The strategies that an operation has: per mesh axis, the index of its expression that the axis splits.

The rule of an operation has its splits over n blocks. Here they become splits over the axes of a mesh. An operation
whose indices all appear in its one result (elementwise, transposes, broadcasts) has no choice of its own: its strategy
follows from the layout of its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np

from shardplan import _jax, rules
from shardplan.layout.layout import Layout, LayoutSpace, replicated
from shardplan.problem.strategy import Choices, Halo, Strategy
from shardplan.problem.xla_limits import (
    ISLANDS,
    PASSING,
    passes_sums,
    runs,
    split_runs,
    usable_padded_splits,
    usable_splits,
    usable_uneven_splits,
)
from shardplan.program.program import Operation, Program, operand_type
from shardplan.program.regions.region import region_of


@dataclass(frozen=True, slots=True)
class _Sized:
    """A split, and the size of the index that it splits.

    uneven: whether some blocks, of the index or of a dimension, are padded. places: each split tensor, with operands
    and results numbered in a row, and its split dimension. reducers: partial results, each with its reducer. halos: of
    operands, the dimension and the rows of each exchange.
    """

    split: Any
    size: int
    uneven: bool
    places: tuple[tuple[int, int], ...]
    reducers: tuple[tuple[int, str], ...]
    halos: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(split: Any, size: int, uneven: bool) -> _Sized:
        slots = (*split.operands, *split.results)
        places = tuple((tensor, slot.dim) for tensor, slot in enumerate(slots) if slot.dim is not None)
        reducers = tuple((i, slot.reducer) for i, slot in enumerate(split.results) if slot.reducer is not None)
        halos = tuple((i, slot.dim, rows) for i, slot in enumerate(split.operands) for rows in slot.halo if rows)
        return _Sized(split, size, uneven, places, reducers, halos)


class StrategyMaker:
    """Derives the choices of operations, once for all equal ones."""

    def __init__(self, space: LayoutSpace) -> None:
        self.space = space
        self._by_rule: dict[int, Choices] = {}
        self._kept_rules: list[Any] = []  # keeps the ids of `_by_rule` alive

    def choices(self, program: Program, operation: Operation) -> tuple[Any, Choices]:
        """The rule of an operation and its strategies."""
        operands = [operand_type(program, operand) for operand in operation.operands]
        results = [program.values[result] for result in operation.results]
        rule = rules.derive(operation.primitive, operation.params, operands, results)
        key = id(rule)
        if key not in self._by_rule:
            self._by_rule[key] = self._derive(rule, operation, operands, results)
            self._kept_rules.append(rule)
        return rule, self._by_rule[key]

    def region_choices(self, program: Program, operation: Operation) -> Choices | None:
        """The only strategy of a ``shard_map``, by its specs. None for every other operation."""
        mesh = self.space.mesh
        region = region_of(mesh, operation)
        if region is None:
            return None
        first = (*operation.results, *operation.operands)[0]
        nothing, degree = ((),) * len(region.results), mesh.device_count / mesh.degree(region.left_out)
        strategy = Strategy(
            region.operands, region.results, nothing, (None,) * len(nothing), degree, calls=region.calls
        )
        return Choices((strategy,), False, False, (), False, 0, 0, operand_type(program, first).dtype)

    def _derive(self, rule: Any, operation: Operation, operands: Sequence[Any], results: Sequence[Any]) -> Choices:
        ranks = [len(operand.shape) for operand in operands], [len(result.shape) for result in results]
        shapes = [tensor.shape for tensor in (*operands, *results)]
        splits = {
            n: [
                s
                for s in self._splits(rule, shapes, n)
                if _reducible(s, results) and split_runs(operation, s.split, s.size, n)
            ]
            for n in self.space.mesh.degrees
        }
        tensors = (*operands, *results)  # none for the printing of a constant text
        work = rule.flops, sum(bytes_of(t) for t in tensors), tensors[0].dtype if tensors else np.dtype(np.float32)
        every = [sized.split for found in splits.values() for sized in found]
        axes = self.space.mesh.splitting
        if len(results) == 1 and _determined_by_result(splits):
            domain = self.space.domain(results[0].shape)
            sizes = results[0].shape
            along = {(n, s.split.results[0].dim): s for n, found in splits.items() for s in reversed(found)}
            followed = (self._following(layout, sizes, along, ranks) for layout in domain.layouts)
            strategies = [s if runs(operation, s, axes) else self._whole(ranks) for s in followed]
            linear = rule.linear if passes_sums(operation) else ()
            return Choices(tuple(strategies), True, _pointwise(rule, operands, results[0]), linear, False, *work)
        indices = list(dict.fromkeys(split.index for split in every))
        strategies = [s for s in self._free(indices, splits, ranks) if runs(operation, s, axes)]
        linear = rule.linear if operation.primitive.name in PASSING else ()
        return Choices(tuple(strategies), False, False, linear, operation.primitive.name in ISLANDS, *work)

    def _splits(self, rule: Any, shapes: Sequence[tuple[int, ...]], n: int) -> list[_Sized]:
        """The splits of an operation over n blocks, equal ones or padded."""
        found = usable_splits(rule, n)
        if self.space.padded:
            found += [s for s in usable_padded_splits(rule) if self.space.pads(rule.size(s.index), n)]
            split = {s.index for s in found}
            windows = [s for s in usable_uneven_splits(rule, n) if s.index not in split]
            found += [s for s in windows if self._divide_unevenly(split_sizes(s, shapes), n)]
        sizes = [(rule.size(split.index), split_sizes(split, shapes)) for split in found]
        uneven = [any(size % n for size in (own, *divided)) for own, divided in sizes]
        return [_Sized.of(split, own, padded) for split, (own, _), padded in zip(found, sizes, uneven, strict=True)]

    def _divide_unevenly(self, sizes: Sequence[int], n: int) -> bool:
        """Whether n blocks divide all sizes of a split, some with padding. Equal splits cover equal blocks."""
        uneven = [size for size in sizes if size % n]
        return bool(uneven) and all(self.space.pads(size, n) for size in uneven)

    def _following(
        self, layout: Layout, sizes: Sequence[int], along: Mapping[tuple[int, int | None], _Sized], ranks: Any
    ) -> Strategy:
        """The strategy of an operation for its result in ``layout``. Work that it cannot split is repeated.

        ``along`` are the splits by number of blocks and dimension of the result.
        """
        assigned = []
        for dim, axes in enumerate(layout):
            for kept in range(len(axes), 0, -1):
                found = along.get((self.space.mesh.degree(axes[:kept]), dim))
                even = sizes[dim] not in self.space.padded
                if found is not None and (even or self.space.blocks_nest(sizes[dim], axes[:kept], axes)):
                    assigned.append((found, axes[:kept]))
                    break
        strategy = self._combine(assigned, ranks)
        return strategy if strategy is not None else self._whole(ranks)

    def _whole(self, ranks: Any) -> Strategy:
        """The strategy without splits."""
        strategy = self._combine([], ranks)
        assert strategy is not None
        return strategy

    def _free(self, indices: list[str], splits: dict[int, list[_Sized]], ranks: Any) -> Iterator[Strategy]:
        """Every assignment of mesh axes to indices that divides and gives each tensor one layout."""
        axes = self.space.mesh.splitting
        by_index = {n: {sized.split.index: sized for sized in found} for n, found in splits.items()}
        for places in product(range(len(indices), -1, -1), repeat=len(axes)):
            groups: list[tuple[int, ...]] = [()] * len(indices)
            for axis, place in zip(axes, places, strict=True):
                if place < len(indices):
                    groups[place] = (*groups[place], axis)
            used = [(index, group) for index, group in zip(indices, groups, strict=True) if group]
            sized = [by_index[self.space.mesh.degree(group)].get(index) for index, group in used]
            if None in sized:
                continue
            for ordered in product(*(self.space.orders(group) for _, group in used)):
                strategy = self._combine(list(zip(sized, ordered, strict=True)), ranks)  # type: ignore[arg-type]
                if strategy is not None:
                    yield strategy

    def _combine(self, sized: list[tuple[_Sized, tuple[int, ...]]], ranks: Any) -> Strategy | None:
        """The strategy that splits each given index over its axes, None if two indices meet in one dimension."""
        layouts = [list(replicated(rank)) for rank in (*ranks[0], *ranks[1])]
        pending: list[tuple[int, ...]] = [()] * len(ranks[1])
        reducers: list[str | None] = [None] * len(ranks[1])
        for one, axes in sized:
            for tensor, dim in one.places:
                if layouts[tensor][dim]:
                    return None
                layouts[tensor][dim] = axes
            for position, reducer in one.reducers:
                if reducers[position] not in (None, reducer):
                    return None
                reducers[position] = reducer
                pending[position] = (*pending[position], *axes)
        halos = [Halo(position, dim, axes, rows) for one, axes in sized for position, dim, rows in one.halos]
        made = [tuple(layout) for layout in layouts]
        of_axes = [(one.size, self.space.mesh.degree(axes)) for one, axes in sized]
        return Strategy(
            tuple(made[: len(ranks[0])]),
            tuple(made[len(ranks[0]) :]),
            tuple(pending),
            tuple(reducers),
            prod(size / -(-size // n) if size % n else n for size, n in of_axes),
            tuple(halos),
            padded=any(one.uneven for one, _ in sized),
        )


def bytes_of(tensor: Any) -> int:
    """Bytes of a whole tensor with a shape and a dtype."""
    return prod(tensor.shape) * _jax.item_bytes(tensor.dtype)


def _pointwise(rule: Any, operands: Sequence[Any], result: Any) -> bool:
    for operand in operands:
        aligned = zip(operand.shape, result.shape, strict=False)
        if operand.shape and (len(operand.shape) != len(result.shape) or any(a not in (1, b) for a, b in aligned)):
            return False
    splits = (s for size in set(result.shape) if size > 1 for s in rule.splits(size) if _no_halo(s))
    split = {s.results[0].dim for s in splits if _splits_all_operands(s, operands)}
    return bool(operands) and all(dim in split for dim, size in enumerate(result.shape) if size > 1)


def _splits_all_operands(split: Any, operands: Sequence[Any]) -> bool:
    """Whether a split divides all operands along the dimension of the result, except operands with a single element
    there."""
    dim = split.results[0].dim
    sizes = (operand.shape[dim] if operand.shape and dim is not None else 1 for operand in operands)
    return all(slot.dim == dim or size == 1 for slot, size in zip(split.operands, sizes, strict=True))


def _no_halo(split: Any) -> bool:
    return all(slot.halo == (0, 0) for slot in split.operands)


def split_sizes(split: Any, shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """The sizes of the dimensions that a split divides, of tensors with these shapes: operands, then results."""
    slots = zip((*split.operands, *split.results), shapes, strict=True)
    return [shape[slot.dim] for slot, shape in slots if slot.dim is not None]


def _reducible(sized: _Sized, results: Sequence[Any]) -> bool:
    """Whether XLA has a collective for the partial results of a split. None combines the bits of integers."""
    slots = zip(sized.split.results, results, strict=True)
    return all(slot.reducer not in ("and", "or") or result.dtype == bool for slot, result in slots)


def _determined_by_result(splits: dict[int, list[_Sized]]) -> bool:
    for found in splits.values():
        dims = [sized.split.results[0].dim for sized in found]
        if None in dims or len(set(dims)) != len(dims):
            return False
    return True
