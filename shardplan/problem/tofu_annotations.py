"""Annotations of the cost network for Tofu's search and its rivals, which need more than costs.

Each choice of a variable has the dimension (of a tensor) or the index (of an operation) that every mesh axis splits.
Indices are numbered per operation, in the order in which its strategies first split them.
"""

from __future__ import annotations

from typing import Any

from shardplan.layout.layout import Layout
from shardplan.problem.cost_network import Problem
from shardplan.problem.strategy import Strategy


def annotate(problem: Problem) -> None:
    """Annotates every variable of a problem's network."""
    axes = problem.space.mesh.splitting
    for value in problem.program.values:
        domain = problem.domain(value.index)
        for variable in problem.variables_of(value.index):
            if variable is not None:
                layouts = [_dimensions(layout[len(layout) - domain.rank :], axes) for layout in domain.layouts]
                problem.network.annotate(variable, value.total_bytes, layouts)
    for operation in problem.program.operations:
        variable = problem.variable_of_operation(operation.index)
        if variable is not None:
            layouts = _indices(problem.choices[operation.index].strategies, axes)
            problem.network.annotate(variable, 0, layouts)


def _dimensions(layout: Layout, axes: tuple[int, ...]) -> tuple[int | None, ...]:
    by_axis = {axis: dim for dim, group in enumerate(layout) for axis in group}
    return tuple(by_axis.get(axis) for axis in axes)


def _indices(strategies: tuple[Strategy, ...], axes: tuple[int, ...]) -> list[tuple[int | None, ...]]:
    numbers: dict[Any, int] = {}

    def number(strategy: Strategy, axis: int) -> int | None:
        place = _place(strategy, axis)
        return None if place is None else numbers.setdefault(place, len(numbers))

    return [tuple(number(strategy, axis) for axis in axes) for strategy in strategies]


def _place(strategy: Strategy, axis: int) -> Any:
    """The place of an axis in a strategy, which identifies the index that it splits. None if it splits none."""
    tensors = (*strategy.operands, *strategy.results)
    dims = tuple(next((d for d, group in enumerate(t or ()) if axis in group), None) for t in tensors)
    pending = tuple(axis in axes for axes in strategy.pending)
    return (dims, pending) if any(pending) or any(dim is not None for dim in dims) else None
