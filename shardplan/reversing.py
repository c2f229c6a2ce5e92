"""Filters in reverse, with which convolutions compute the gradients of their images.

XLA:GPU lets cuDNN compute such a gradient as one where the convolution reads what is reversed there. Where filters are
reversed first and gathered then, it sees a convolution like any other, and writes the zeros between the elements that a
strided convolution asks for: four times as much for each image, eight times for each video. So what is gathered is
turned back before and reversed behind: XLA takes the first two for nothing, but for the barrier between, without which
it would gather the filters once for the forward and the backward pass, where the plan says twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from shardplan.layout import Layout
from shardplan.memory.convolutions import unreversed
from shardplan.once import once
from shardplan.program import Program
from shardplan.schedule import Schedule


@once
def _turned(program: Program) -> dict[int, tuple[int, ...]]:
    """Per reverse of filters the dimensions that are reversed."""
    filters = unreversed(program)
    reversing = (operation for operation in program.operations if operation.primitive.name == "rev")
    return {o.results[0]: tuple(o.params["dimensions"]) for o in reversing if o.results[0] in filters}


def bring(
    schedule: Schedule, value: int, array: Any, layouts: tuple[Layout, Layout], constrain: Callable[[Any, Layout], Any]
) -> Any:
    """A value that is held in the first of two layouts in the second one; the reverse of filters reversed there, where
    neither layout splits what is reversed."""
    before, after = layouts
    dims = _turned(schedule.program).get(value, ())
    if not dims or schedule.is_partial(value, before) or any(layout[dim] for layout in layouts for dim in dims):
        return constrain(array, after)
    turned = constrain(jax.lax.rev(jax.lax.optimization_barrier(array), dims), before)
    return constrain(jax.lax.rev(constrain(turned, after), dims), after)
