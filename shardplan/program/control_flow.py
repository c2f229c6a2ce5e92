"""Control flow: the links between the values inside and outside of a loop or a branch.

A loop's body is one *region* of the program, with its trip count. A link says which value becomes which: operands enter
a region, carries pass to the next iteration, results leave. A link between a stacked tensor and one slice of it (a
scan's operand) leaves out the leading dimension.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax

from shardplan.errors import ArgumentError
from shardplan.layout.layout import Layout
from shardplan.program.program import Constant, Operation, Program, Region

_SCOPE = "shardplan_trips_"


@dataclass(frozen=True, slots=True)
class Link:
    """A value that becomes another one in that one's layout, ``times`` per step.

    ``stacked`` is "source" or "target" for the one that has an additional leading dimension. ``begins`` marks the link
    that gives a loop's carry its first value.
    """

    source: int | Constant
    target: int
    times: int
    stacked: str | None = None
    begins: bool = False


@dataclass(frozen=True, slots=True)
class Links:
    """The links of one control-flow operation. ``same`` maps values to those whose layout they share."""

    enter: tuple[Link, ...]
    inside: tuple[Link, ...]
    same: dict[int, int]


def slice_layout(layout: Layout, rank: int) -> Layout:
    """The layout of one slice of a stack of ``rank`` dimensions; pending axes of a partial stack stay in front.

    >>> slice_layout(((), (0,), ()), 3), slice_layout(((0,), (), (1,), ()), 3)
    (((0,), ()), ((0,), (1,), ()))
    """
    pending = len(layout) - rank
    return (*layout[:pending], *layout[pending + 1 :])


def stack_layout(layout: Layout, rank: int) -> Layout:
    """The layout of a stack whose slices, of ``rank`` dimensions, have a layout. The stacked dimension is not split.

    >>> stack_layout(((0,), ()), 2), stack_layout(((0,), (1,), ()), 2)
    (((), (0,), ()), ((0,), (), (1,), ()))
    """
    pending = len(layout) - rank
    return (*layout[:pending], (), *layout[pending:])


def layouts_read(link: Link, layouts: tuple[Layout, ...], rank: int) -> tuple[Layout, ...]:
    """For each layout of a link's target, of ``rank`` dimensions, the required layout of its source."""
    if link.stacked == "source":
        return tuple([stack_layout(layout, rank) for layout in layouts])
    return tuple([slice_layout(layout, rank) for layout in layouts]) if link.stacked == "target" else layouts


def links_of(program: Program, operation: Operation) -> Links:
    """The links of an operation with bodies."""
    regions = [program.regions[index] for index in operation.bodies]
    outside = program.regions[operation.region].times
    if operation.primitive.name == "scan":
        return _scan_links(operation, regions[0], outside)
    if operation.primitive.name == "while":
        return _while_links(operation, regions[0], regions[1], outside)
    return _branch_links(operation, regions, outside)


def _scan_links(operation: Operation, body: Region, outside: int) -> Links:
    constants, carries = operation.params["num_consts"], operation.params["num_carry"]
    stacked_from = constants + carries
    enter = [
        Link(
            operand,
            target,
            outside,
            "source" if position >= stacked_from else None,
            begins=constants <= position < stacked_from,
        )
        for position, (operand, target) in enumerate(zip(operation.operands, body.inputs, strict=True))
    ]
    carried = body.inputs[constants:stacked_from]
    inside = [Link(output, target, body.times) for output, target in zip(body.outputs, carried, strict=False)]
    stacks = zip(body.outputs[carries:], operation.results[carries:], strict=True)
    inside += [Link(output, result, body.times, "target") for output, result in stacks]
    return Links(tuple(enter), tuple(inside), dict(zip(operation.results[:carries], carried, strict=True)))


def _while_links(operation: Operation, condition: Region, body: Region, outside: int) -> Links:
    in_condition, in_body = operation.params["cond_nconsts"], operation.params["body_nconsts"]
    operands = operation.operands
    carried = body.inputs[in_body:]
    targets = (*condition.inputs[:in_condition], *body.inputs[:in_body], *carried)
    enter = [
        Link(operand, target, outside, begins=position >= in_condition + in_body)
        for position, (operand, target) in enumerate(zip(operands, targets, strict=True))
    ]
    inside = [Link(output, target, body.times) for output, target in zip(body.outputs, carried, strict=True)]
    same = dict(zip(operation.results, carried, strict=True))
    same |= dict(zip(condition.inputs[in_condition:], carried, strict=True))
    return Links(tuple(enter), tuple(inside), same)


def _branch_links(operation: Operation, branches: list[Region], outside: int) -> Links:
    operands = operation.operands[1:]
    enter = [
        Link(operand, target, outside)
        for branch in branches
        for operand, target in zip(operands, branch.inputs, strict=True)
    ]
    inside = [
        Link(output, result, outside)
        for branch in branches
        for output, result in zip(branch.outputs, operation.results, strict=True)
    ]
    return Links(tuple(enter), tuple(inside), {})


def trip_count(count: int) -> AbstractContextManager[Any]:
    """A scope that states the approximate trip count of each while loop directly in it. Plans multiply costs by it.

    Loops with a known number of iterations (``scan``, ``fori_loop`` over literal bounds) ignore it. The computation
    stays the same.

    >>> def steps(x):
    ...     with trip_count(100):
    ...         return jax.lax.while_loop(lambda v: v.sum() > 1, lambda v: v / 2, x)

    Raises ArgumentError for a count that is no integer above 0.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ArgumentError(f"a trip count is an integer above 0, got `{count!r}`")
    return scope_of_trips(count)


def scope_of_trips(count: int) -> AbstractContextManager[Any]:
    """The name of the scope for a trip count, 0 included. It connects a compiled loop to its count."""
    return jax.named_scope(f"{_SCOPE}{count}")


def stated_trip_count(scope: str) -> int | None:
    """The innermost count of ``trip_count`` in a path of scopes, None without any."""
    found = re.findall(rf"\b{_SCOPE}(\d+)", scope)
    return int(found[-1]) if found else None


def trips_stated_around(path: str) -> int | None:
    """The stated count of a loop with this path in a compiled program, None without any.

    >>> trips_stated_around("jit(f)/shardplan_trips_9/while"), trips_stated_around("shardplan_trips_9/while/body/while")
    (9, None)
    """
    return stated_trip_count(re.split(r"/(?:body|cond|branch_\d+_fun)/", path)[-1])


def while_trip_count(params: dict[str, Any], operands: tuple[int | Constant, ...]) -> int | None:
    """The trip count of a while loop that is a ``fori_loop`` over literal bounds, None for other loops.

    Such a loop compares one carry with another one or a literal, and its body adds one to it.
    """
    condition, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
    first = params["cond_nconsts"]
    carried = operands[first + params["body_nconsts"] :]
    if len(condition.eqns) != 1 or condition.eqns[0].primitive.name != "lt":
        return None
    bounds = [_literal(atom, condition.invars[first:], carried) for atom in condition.eqns[0].invars]
    places = [place for _, place in bounds]
    if None in [value for value, _ in bounds] or places[0] is None:
        return None
    counter = body.invars[params["body_nconsts"] + places[0]]
    after = body.outvars[places[0]]
    for equation in body.eqns:
        if after in equation.outvars and equation.primitive.name == "add" and counter in equation.invars:
            step = [getattr(atom, "val", None) for atom in equation.invars if atom is not counter]
            if step and step[0] is not None and int(step[0]) == 1:
                return max(0, int(bounds[1][0]) - int(bounds[0][0]))
    return None


def _literal(atom: Any, carries: Any, initial: tuple[int | Constant, ...]) -> tuple[Any, int | None]:
    """The literal value of a bound before the loop, None for others, and the number of its carry."""
    if hasattr(atom, "val"):
        return atom.val, None
    if atom not in carries:
        return None, None
    place = list(carries).index(atom)
    start = initial[place]
    return (start.value if isinstance(start, Constant) else None), place
