"""Tiles: one operation on a block, with the parameters that its shapes there ask for.

Most operations are the same on a block, since the index is a whole dimension of theirs. Windows read beyond a block:
what is beyond the tensor itself counts as their padding does, and their own padding makes up for the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardplan import _jax
from shardplan.program.program import Operation
from shardplan.rules import Along, Refusal, Span

_WINDOWS = frozenset({"reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"})
_GRADIENT_OF_WINDOWS = "select_and_scatter_add"
RANDOM_BITS = "random_bits"
_MOVED = frozenset({"conv_general_dilated", "reshape", "slice", "pad", _GRADIENT_OF_WINDOWS}) | _WINDOWS
"""What has a form on tiles although an index is no whole dimension by itself."""


@dataclass(frozen=True, slots=True)
class Part:
    """An operation along one index: the span of the index, and the span that it reads of each operand.

    ``given``: the rows that an operand contributes, None where it is read as it is. Other rows count as zeros."""

    along: Along
    span: Span
    operands: tuple[Span | None, ...]
    given: tuple[Span | None, ...]


def runs_on_tiles(operation: Operation, along: Along) -> None:
    """Raises Refusal where an operation has no form on a part of an index."""
    name = operation.primitive.name
    if name == RANDOM_BITS:
        _numbers_bits(operation)
    elif along.placed and name != "iota":
        raise Refusal("it depends on the value of the index")
    if not along.plain and name not in _MOVED:
        raise Refusal("the index is no whole dimension by itself")
    if name == "pad" and not along.plain and any(inner for _, _, inner in operation.params["padding_config"]):
        raise Refusal("it spreads the rows of its operand")
    if name == "conv_general_dilated" and not along.plain:
        numbers = operation.params["dimension_numbers"]
        if along.operands[0] not in numbers.lhs_spec[2:]:
            raise Refusal("its groups are counted by the whole index")
    if name == "reduce_window" and not along.plain and any(map(any, operation.params["padding"])):
        raise Refusal("what pads its windows is a function of the user")


def _numbers_bits(operation: Operation) -> None:
    """Raises Refusal where random bits are not those of one threefry key and the numbers of elements, in 32 bits."""
    (key,), (result,) = operation.equation.invars, operation.equation.outvars
    if key.aval.shape or not _jax.bits_follow_from_numbers():  # type: ignore[attr-defined]
        raise Refusal("random bits of several keys, or of a whole tensor, are made together")
    if operation.params["bit_width"] == 64 or prod(result.aval.shape) >= 2**32:  # type: ignore[attr-defined]
        raise Refusal("its elements, or their bits, are numbered by 64 bits")


def params_on_tile(operation: Operation, parts: Sequence[Part], shape: tuple[int, ...]) -> dict[str, Any]:
    """The parameters of an operation for one block. ``shape`` is that of its first result there."""
    params, name = dict(operation.params), operation.primitive.name
    if name in ("broadcast_in_dim", "iota"):
        params["shape"] = shape
    elif name == "reshape":
        params["new_sizes"] = shape
    elif name in ("gather", "dynamic_slice"):
        params["slice_sizes"] = _sized(params["slice_sizes"], parts)
    elif name == "slice":
        params |= _slice_params(params, parts)
    elif name == "pad":
        params["padding_config"] = _with_dims(params["padding_config"], {_dim(p): (0, 0, 0) for p in _uneven(parts)})
    elif name == "conv_general_dilated":
        params["padding"] = _convolution_padding(operation, parts)
    elif name in _WINDOWS or name == _GRADIENT_OF_WINDOWS:
        params["padding"] = _window_padding(params, parts, name == _GRADIENT_OF_WINDOWS)
    if "sharding" in params and name in ("broadcast_in_dim", "iota", "reshape"):
        params["sharding"] = None
    return params


def results_on_tile(operation: Operation, parts: Sequence[Part], results: Sequence[Any]) -> Sequence[Any]:
    """The rows of results that a block has: gradients of windows give those of the whole operand that they read."""
    if operation.primitive.name != _GRADIENT_OF_WINDOWS:
        return results
    (found,) = results
    for part in _uneven(parts):
        read, dim = part.operands[1], part.along.results[0]
        assert read is not None and dim is not None
        found = jax.lax.slice_in_dim(found, part.span.low - read.low, part.span.high - read.low, axis=dim)
    return [found]


def beyond(operation: Operation, operand: int, dtype: Any) -> Any:
    """What a row beyond the ends of an operand counts as, None where it counts for nothing that is used."""
    name = operation.primitive.name
    if name == "conv_general_dilated" or (name == _GRADIENT_OF_WINDOWS and operand == 0):
        return jnp.zeros((), dtype)
    if name == "reduce_window_sum":
        return jnp.zeros((), dtype)
    if name == _GRADIENT_OF_WINDOWS:
        return identity("max" if operation.params["select_prim"].name == "ge" else "min", dtype)
    if name in _WINDOWS and name != "reduce_window":
        return identity(name.rsplit("_", 1)[1], dtype)
    return None


def identity(reducer: str, dtype: Any) -> Any:
    """What a reducer ignores."""
    if reducer in ("sum", "or"):
        return jnp.zeros((), dtype)
    if reducer in ("prod", "and"):
        return jnp.full((), True if np.dtype(dtype) == np.bool_ else 1 if reducer == "prod" else -1, dtype)
    if np.dtype(dtype) == np.bool_:
        return jnp.full((), reducer == "min", dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.full((), -jnp.inf if reducer == "max" else jnp.inf, dtype)
    limits = jnp.iinfo(dtype)
    return jnp.full((), limits.min if reducer == "max" else limits.max, dtype)


COMBINE: Mapping[str, Callable[[Any, Any], Any]] = {
    "sum": jnp.add,
    "prod": jnp.multiply,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
}
"""What combines the partial results of two blocks."""


def widened(params: dict[str, Any], dtype: Any, reducer: str | None) -> tuple[dict[str, Any], Any]:
    """The parameters with which a sum of a type over one block is made in float32, and the type that it is to have."""
    if (
        reducer != "sum"
        or not jnp.issubdtype(dtype, jnp.floating)
        or jnp.finfo(dtype).bits >= jnp.finfo("float32").bits
    ):
        return params, dtype
    if "preferred_element_type" in params:
        params = {**params, "preferred_element_type": jnp.dtype("float32")}
    return params, jnp.dtype("float32")


def as_widened(operation: Operation, dtype: Any, operands: Sequence[Any]) -> list[Any]:
    """The operands of a sum in a wider type, where no parameter of the operation asks for that."""
    return [operand.astype(dtype) for operand in operands] if operation.primitive.name == "reduce_sum" else [*operands]


def run_on_tile(operation: Operation, params: dict[str, Any], operands: Sequence[Any]) -> tuple[Any, ...]:
    """Runs an operation on blocks, under its own name and source."""
    return _jax.bind_as_traced(operation.equation, operation.primitive, params, operands)


def _dim(part: Part) -> int:
    dim = part.along.operands[0]
    assert dim is not None
    return dim


def _uneven(parts: Sequence[Part]) -> list[Part]:
    return [part for part in parts if not part.along.plain]


def _with_dims(given: Sequence[Any], new: Mapping[int, Any]) -> tuple[Any, ...]:
    return tuple(new.get(dim, old) for dim, old in enumerate(given))


def _sized(sizes: Sequence[int], parts: Sequence[Part]) -> tuple[int, ...]:
    """Slices that are as long as their dimension are as long as the block; others stay, as those along batches do."""
    first = [part for part in parts if part.along.operands[0] is not None]
    whole = [part for part in first if sizes[_dim(part)] == part.along.size]
    return _with_dims(sizes, {_dim(part): part.span.length for part in whole})


def _slice_params(params: Mapping[str, Any], parts: Sequence[Part]) -> dict[str, Any]:
    read = {_dim(part): part.operands[0] for part in parts}
    starts = _with_dims(params["start_indices"], dict.fromkeys(read, 0))
    limits = _with_dims(params["limit_indices"], {dim: span.length for dim, span in read.items() if span})
    return {"start_indices": starts, "limit_indices": limits}


def _convolution_padding(operation: Operation, parts: Sequence[Part]) -> tuple[tuple[int, int], ...]:
    """The padding that puts the first output of a block onto the rows that the whole operation reads for it."""
    params, numbers = operation.params, operation.params["dimension_numbers"]
    data, filters = (var.aval.shape for var in operation.equation.invars)  # type: ignore[attr-defined]
    found = list(params["padding"])
    for part in _uneven(parts):
        place = numbers.lhs_spec.index(part.along.operands[0]) - 2
        stride, spread = params["window_strides"][place], params["lhs_dilation"][place]
        wide, (low, high) = params["rhs_dilation"][place], params["padding"][place]
        read, window = part.operands
        assert read is not None
        size = filters[numbers.rhs_spec[place + 2]]
        rows = (data[numbers.lhs_spec[place + 2]] - 1) * spread + 1 + low + high
        outputs = (rows - ((size - 1) * wide + 1)) // stride + 1
        first = 0
        if window is None:
            first, outputs = part.span.low * stride, part.span.length
        else:
            first, size = window.low * wide, window.length
        before = read.low * spread - (first - low)
        needed = (outputs - 1) * stride + (size - 1) * wide + 1
        found[place] = (before, needed - before - ((read.length - 1) * spread + 1))
    return tuple(found)


def _window_padding(params: Mapping[str, Any], parts: Sequence[Part], gradient: bool) -> tuple[tuple[int, int], ...]:
    found, ones = list(params["padding"]), (1,) * len(params["padding"])
    for part in _uneven(parts):
        dim, read, windows = _dim(part), part.operands[0], part.span
        if gradient:
            dim, read, windows = part.along.operands[1] or 0, part.operands[1], part.operands[0] or part.span
        assert read is not None
        spread, wide = params.get("base_dilation", ones)[dim], params.get("window_dilation", ones)[dim]
        stride, size = params["window_strides"][dim], params["window_dimensions"][dim]
        before = read.low * spread - (windows.low * stride - params["padding"][dim][0])
        needed = (windows.length - 1) * stride + (size - 1) * wide + 1
        after = needed - before - ((read.length - 1) * spread + 1)
        if gradient and min(before, after) < 0:
            raise Refusal("its windows leave rows out")
        found[dim] = (before, after)
    return tuple(found)
