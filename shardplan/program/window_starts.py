"""Windows that begin inside a tensor: a negative low padding becomes a shift of the tensor and high padding.

Convolutions, poolings and dilating pads may leave out rows in front of their first window. XLA 0.10.2 splits such
windows over dilated rows with wrong values or by a failed check. Its CPU backend reads past the end of an image, on one
device as well. A shift of the tensor to the front by these rows removes the negative padding. The tensor keeps its
size: the rows that the shift fills in at the end are padding, and the high padding shrinks by as many.

Windows of single elements that end inside a tensor (a negative high padding) lose the last rows by a shift as well. XLA
0.10.2 takes a pooling by them for an elementwise operation, and fails a check of its own on a negative padding.

>>> import jax.numpy as jnp
>>> from shardplan.program.tracing import trace_program
>>> def step(x):
...     return jax.lax.conv_general_dilated(x, jnp.ones((1, 1, 3)), (1,), [(-1, 2)])
>>> program = trace_program(step, (jnp.ones((1, 1, 16)),))
>>> [(o.params["padding_config"], p.params["padding"]) for o, p in [program.operations[-2:]]]
[(((0, 0, 0), (0, 0, 0), (-1, 1, 0)), ((0, 1),))]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardplan.program.program import Constant, Operation, Value

WINDOWED = frozenset(
    {"conv_general_dilated", "select_and_gather_add", "reduce_window"}
    | {"reduce_window_sum", "reduce_window_max", "reduce_window_min"}
)
"""Operations other than pads whose windows may begin inside of their operands."""

Padding = tuple[int, int]


@dataclass(frozen=True, slots=True)
class WindowShift:
    """The pad that shifts the operands of windows, its fill value by position of the operand, and the parameters of the
    operation on the shifted operands."""

    config: list[tuple[int, int, int]]
    fillings: dict[int, int | Constant]
    params: dict[str, Any]


def window_shift(operation: Operation, values: Sequence[Value]) -> WindowShift | None:
    """The shift after which an operation has no negative low padding, and single-element windows no negative high
    padding.

    None for an operation without such padding, and for a shift itself.
    """
    paddings, dilations = _paddings(operation)
    single = set(operation.params.get("window_dimensions", ())) == {1}
    config, begun = [], []
    for (low, high), dilation in zip(paddings, dilations, strict=True):
        front = max(0, -(low // dilation))
        behind = front - max(0, -(-(front * dilation - high) // dilation)) if single else front
        config.append((-front, behind, 0))
        begun.append((low + front * dilation, high - behind * dilation))
    if not any(front or behind for front, behind, _ in config):
        return None
    params = operation.params | _with_paddings(operation, begun)
    return WindowShift(config, _fillings(operation, values), params)


def _paddings(operation: Operation) -> tuple[list[Padding], list[int]]:
    """Per windowed dimension, the low and high padding, and the distance of rows after dilation."""
    name, params = operation.primitive.name, operation.params
    if name == "pad" and any(inner for *_, inner in params["padding_config"]):
        config = params["padding_config"]
        return [(int(low), int(high)) for low, high, _ in config], [int(inner) + 1 for *_, inner in config]
    if name not in WINDOWED:
        return [], []
    if name != "conv_general_dilated":
        return list(params["padding"]), list(params["base_dilation"])
    dims = params["dimension_numbers"].lhs_spec
    paddings, dilations = [(0, 0)] * len(dims), [1] * len(dims)
    for dim, padding, dilation in zip(dims[2:], params["padding"], params["lhs_dilation"], strict=True):
        paddings[dim], dilations[dim] = padding, dilation
    return paddings, dilations


def _with_paddings(operation: Operation, paddings: Sequence[Padding]) -> dict[str, Any]:
    """The parameter of an operation that has its padding, with a new value."""
    name, params = operation.primitive.name, operation.params
    if name == "pad":
        inner = [own for *_, own in params["padding_config"]]
        return {"padding_config": tuple((*own, between) for own, between in zip(paddings, inner, strict=True))}
    dims = params["dimension_numbers"].lhs_spec[2:] if name == "conv_general_dilated" else range(len(paddings))
    return {"padding": tuple(paddings[dim] for dim in dims)}


def _fillings(operation: Operation, values: Sequence[Value]) -> dict[int, int | Constant]:
    """The fill value of an operation's padding, by position of each windowed operand."""
    name, count = operation.primitive.name, len(operation.results)
    if name in ("pad", "reduce_window"):
        return {position: operation.operands[count + position] for position in range(count)}
    read = operation.operands[: 2 if name == "select_and_gather_add" else 1]
    fillings = [np.zeros((), values[value].dtype) for value in read if isinstance(value, int)]
    if name in ("reduce_window_max", "reduce_window_min", "select_and_gather_add"):
        least = name == "reduce_window_max" or str(operation.params.get("select_prim")) == "ge"
        fillings[-1] = extreme_element(fillings[-1].dtype, least)
    return {n: Constant(one, jax.ShapeDtypeStruct((), one.dtype)) for n, one in enumerate(fillings)}


def extreme_element(dtype: Any, least: bool) -> np.ndarray:
    """The least or the greatest element of a type."""
    if dtype == np.bool_:
        return np.asarray(not least)
    limits: Any = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype)
    if jnp.issubdtype(dtype, jnp.inexact) and np.isinf(infinite := np.asarray(-np.inf if least else np.inf, dtype)):
        return infinite
    return np.asarray(limits.min if least else limits.max, dtype)
