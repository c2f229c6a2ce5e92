"""What windows read, padded: apart for readers that pad it with other values.

XLA 0.10.2 pads a tensor that it splits along windows once for all of their readers with equal windows, whatever each
pads it with: of a convolution and a maximum over windows of one image, the second gets the zeros of the first, or the
first infinities. So each reader that pads with another value than those before reads the tensor behind one barrier
more, which gives it a padded tensor of its own.

>>> import jax, jax.numpy as jnp, shardplan
>>> shape = jax.ShapeDtypeStruct((64, 64), "float32")
>>> plan = shardplan.plan(lambda x: (jax.lax.cumsum(x), jax.lax.cummax(x)), 1, shape)
>>> [(o.primitive.name, padded_windows(o)) for o in plan.program.operations]
[('cumsum', {0: (0, (64, 63, 0))}), ('cummax', {0: (0, (64, 63, 0))})]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardplan.layout.layout import Layout
from shardplan.memoize import memoize
from shardplan.problem.schedule import Schedule
from shardplan.program.program import Constant, Operation, Program

_PADDED_WITH = {
    "conv_general_dilated": 0,
    "cummax": "the least",
    "cummin": "the most",
    "cumprod": 1,
    "cumsum": 0,
    "reduce_window_max": "the least",
    "reduce_window_min": "the most",
    "reduce_window_sum": 0,
}
"""What operations pad with that say nothing of it."""

_SAME = frozenset({"copy", "copy_p", "sharding_constraint"})
"""Operations whose result may be to XLA what they read."""

Window = tuple[int, int, int]
"""The size of a window, and what is padded in front and behind."""


def padded_windows(operation: Operation) -> dict[int, tuple[int, Window]]:
    """Per dimension of the first operand that an operation pads for its windows, the result's dimension and the window.

    XLA makes windows of cumulative operations too. What pads by itself has windows of one element.
    """
    name, params = operation.primitive.name, operation.params
    if name.startswith("cum"):
        dim, before = params["axis"], operation.equation.invars[0].aval.shape[params["axis"]] - 1  # type: ignore[attr-defined]
        return {dim: (dim, (before + 1, 0, before) if params["reverse"] else (before + 1, before, 0))}
    if name == "conv_general_dilated":
        numbers, filters = params["dimension_numbers"], operation.equation.invars[1].aval.shape  # type: ignore[attr-defined]
        read, given = numbers.lhs_spec[2:], numbers.out_spec[2:]
        sizes, paddings = [filters[dim] for dim in numbers.rhs_spec[2:]], params["padding"]
    elif name == "pad":
        paddings = [(low, high) for low, high, _ in params["padding_config"]]
        read = given = range(len(paddings))
        sizes = [1] * len(paddings)
    elif "window_dimensions" in params:
        sizes, paddings = params["window_dimensions"], params["padding"]
        read = given = range(len(sizes))
    else:
        return {}
    every = zip(read, given, sizes, paddings, strict=True)
    return {dim: (to, (int(size), int(low), int(high))) for dim, to, size, (low, high) in every if low or high}


def padded_apart(
    schedule: Schedule, operation: Operation, operands: Sequence[Any], constrain: Callable[[Any, Layout], Any]
) -> list[Any]:
    """The operands of an operation, those that others pad with other values behind barriers."""
    found = list(operands)
    for position, layout in enumerate(schedule.assignment.strategies[operation.index].operands):
        for _ in range(_barriers(schedule).get((operation.index, position), 0)):
            found[position] = constrain(jax.lax.optimization_barrier(found[position]), layout or ())
    return found


@memoize
def _barriers(schedule: Schedule) -> Mapping[tuple[int, int], int]:
    """Per operation and place of an operand, the number of barriers that it is read behind."""
    before: dict[Any, list[Any]] = {}  # what readers of a tensor pad it with for some windows
    found: dict[tuple[int, int], int] = {}
    for operation in schedule.program.operations:
        strategy = schedule.assignment.strategies.get(operation.index)
        windows = padded_windows(operation) if strategy is not None else {}
        if strategy is None or not windows:
            continue
        own, result = _padded_with(operation), strategy.results[0]
        for position, (value, layout) in enumerate(zip(operation.operands, strategy.operands, strict=True)):
            if not isinstance(value, int) or not layout or not _has_windows(operation, position):
                continue
            if any(layout[dim] or result[to] for dim, (to, _) in windows.items()):
                read = (operation.region, _root(schedule.program, value), layout, tuple(windows.items()))
                others = before.setdefault(read, [])
                if own not in others:
                    others.append(own)
                if others.index(own):
                    found[operation.index, position] = others.index(own)
    return found


def _has_windows(operation: Operation, position: int) -> bool:
    """Whether the windows of an operation move over this operand, as over the first one."""
    ranks = [variable.aval.ndim for variable in operation.equation.invars]  # type: ignore[attr-defined]
    return position == 0 or (operation.primitive.name != "conv_general_dilated" and ranks[position] == ranks[0])


def _root(program: Program, value: int) -> int:
    """The value that another one is to XLA."""
    while value in program.makers and program.makers[value].primitive.name in _SAME:
        value = next(operand for operand in program.makers[value].operands if isinstance(operand, int))
    return value


def _padded_with(operation: Operation) -> Any:
    """What an operation pads with; itself where that is not known, and may be like that of no other."""
    if operation.primitive.name == "pad" and isinstance(operation.operands[1], Constant):
        return np.asarray(operation.operands[1].value).item()
    return _PADDED_WITH.get(operation.primitive.name, operation)
