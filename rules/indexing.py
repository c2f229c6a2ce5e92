"""Reads and writes at positions that are data: gather, scatter, dynamic slices.

A row lookup is a contraction with a one-hot, ``out[b, d] = Sum(v) (ids[b] == v) * table[v, d]``. Adding to rows is its
transpose, ``out[v, d] = x[v, d] + Sum(b) (ids[b] == v) * updates[b, d]``. The splits of rows, ids and features
therefore follow from the analysis. A window over its whole dimension has one possible place, at which it is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import numpy as jnp
from jax.lax import GatherScatterMode

from shardplan.rules.equation import Equation, Semantics, Tensor, expression, letters, name_of, sizes_of
from shardplan.rules.expression import (
    ZERO,
    Affine,
    Apply,
    Compare,
    Expression,
    Guard,
    Position,
    Read,
    Reduce,
    Result,
    Term,
    index,
)

At = tuple[Affine, ...]


def lookup(dtype: Any, sums: tuple[str, ...], conditions: Sequence[Term], body: Term) -> Term:
    """The element for which all conditions hold: a sum over one-hots, which may be a partial sum.

    Booleans are combined by ``or``. Random keys cannot be added: their holder alone selects them.
    """
    if not sums:
        return body
    if jnp.issubdtype(dtype, jnp.number):
        for condition in reversed(conditions):
            body = Apply("*", (condition, body))
        return Reduce("sum", sums, body)
    for condition in reversed(conditions):
        body = Guard(condition, body)
    return Reduce("or" if dtype == jnp.bool_ else "last", sums, body)


def _equals(value: Term, offset: Affine, position: Affine) -> Compare:
    left = Apply("+", (value, Position(offset))) if offset != ZERO else value
    return Compare("==", left, Position(position))


def _moves(size: int, window: int) -> bool:
    return window != size


# dynamic_slice and dynamic_update_slice: the starts are scalar operands, clamped so that the window fits.


def _dynamic_slice(equation: Equation) -> Expression:
    source, out = equation.inputs[0], equation.outputs[0]
    at = letters("i", len(out.shape))
    read, conditions, sums = list(at), [], {}
    for dim, (size, window) in enumerate(zip(source.shape, out.shape, strict=True)):
        if _moves(size, window):
            read[dim] = index(f"v{dim}")
            sums[f"v{dim}"] = size
            start = Apply("clamp", (Read(1 + dim),))
            conditions.append(_equals(start, at[dim] if window > 1 else ZERO, read[dim]))
    body = lookup(out.dtype, tuple(sums), conditions, Read(0, tuple(read)))
    return expression(equation, sizes_of((at, out.shape)) | sums, [Result(at, body)], _starts(equation, "x"))


def _dynamic_update_slice(equation: Equation) -> Expression:
    out, update = equation.inputs[:2]
    at = letters("i", len(out.shape))
    read, conditions, places = list(at), [], {}
    for dim, (size, window) in enumerate(zip(out.shape, update.shape, strict=True)):
        if _moves(size, window):
            read[dim] = index(f"u{dim}") if window > 1 else ZERO
            if window > 1:
                places[f"u{dim}"] = window
            conditions.append(_equals(Apply("clamp", (Read(2 + dim),)), read[dim], at[dim]))
    new: Term = Read(1, tuple(read))
    for condition in reversed(conditions):
        new = Guard(condition, new)
    if conditions:
        new = Apply("overwrite", (Read(0, at), Reduce("last", tuple(places), new) if places else new))
    return expression(equation, sizes_of((at, out.shape)) | places, [Result(at, new)], _starts(equation, "x", "update"))


def _starts(equation: Equation, *names: str) -> tuple[str, ...]:
    return names + tuple(f"start{n}" for n in range(len(equation.inputs) - len(names)))


# gather and scatter: the last dimension of the indices holds one start per indexed dimension.


@dataclass(frozen=True, slots=True)
class _Layout:
    """The relation of the three tensors of a gather or a scatter, in one vocabulary for both.

    ``data``: the indexed operand. ``window``: the gathered result or the updates. Its dimensions ``window_dims`` are
    inside the window, and the others come from the indices. ``dropped``: dimensions of ``data`` that the window lacks.
    """

    data: Tensor
    indices: Tensor
    window: Tensor
    window_dims: tuple[int, ...]
    dropped: tuple[int, ...]
    indexed: tuple[int, ...]
    data_batch: tuple[int, ...]
    indices_batch: tuple[int, ...]
    mode: GatherScatterMode

    def window_at(self) -> tuple[At, At]:
        """Positions in the window tensor: per dimension; and those that come from the indices, in their order."""
        batch = letters("b", len(self.indices.shape) - 1)
        inside = iter(letters("o", len(self.window_dims)))
        outside = iter(batch)
        at = tuple(next(inside) if d in self.window_dims else next(outside) for d in range(len(self.window.shape)))
        return at, batch

    def dims(self, at: At, batch: At) -> list[tuple[int, Affine | None, int, int | None]]:
        """Per dimension of the data: its number, the place in the window, the window's size, which index moves it."""
        inside = iter((at[d], self.window.shape[d]) for d in self.window_dims)
        found: list[tuple[int, Affine | None, int, int | None]] = []
        for dim in range(len(self.data.shape)):
            if dim in self.data_batch or dim in self.dropped:
                place, size = None, 1
            else:
                place, size = next(inside)
            found.append((dim, place, size, self.indexed.index(dim) if dim in self.indexed else None))
        return found

    def start(self, operand: int, batch: At, number: int) -> Term:
        """Where a window starts along one indexed dimension."""
        value = Read(operand, (*batch, Affine((), number)))
        return Apply("clamp", (value,)) if self.mode == GatherScatterMode.CLIP else value


def _gather(equation: Equation) -> Expression:
    params, (data, indices), (out,) = equation.params, equation.inputs, equation.outputs
    numbers = params["dimension_numbers"]
    layout = _Layout(
        data, indices, out, numbers.offset_dims, numbers.collapsed_slice_dims, numbers.start_index_map,
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, params["mode"],
    )  # fmt: skip
    at, batch = layout.window_at()
    read, conditions, sums = [], [], {}
    for dim, place, window, moved_by in layout.dims(at, batch):
        size = data.shape[dim]
        if dim in layout.data_batch:
            read.append(batch[layout.indices_batch[layout.data_batch.index(dim)]])
        elif moved_by is None or not _moves(size, window):
            read.append(ZERO if place is None else place)
        else:
            read.append(index(f"v{dim}"))
            sums[f"v{dim}"] = size
            offset = place if place is not None and window > 1 else ZERO
            conditions.append(_equals(layout.start(1, batch, moved_by), offset, read[-1]))
    body = lookup(out.dtype, tuple(sums), conditions, Read(0, tuple(read)))
    if params["mode"] == GatherScatterMode.FILL_OR_DROP:
        body = Apply("+", (body, Apply(_filling(params["fill_value"], out.dtype), (Read(1, (*batch, None)),))))
    return expression(equation, sizes_of((at, out.shape)) | sums, [Result(at, body)], ("x", "indices"))


def _filling(value: Any, dtype: Any) -> str:
    """The fill of places outside of the data: NaN or 0, which have no effect on a sum, or another value."""
    if value is None:
        return "missing" if jnp.issubdtype(dtype, jnp.inexact) else "fill"
    return "missing" if value == 0 or value != value else "fill"


def _scatter_by(combine: str, reducer: str) -> Semantics:
    """A scatter. ``combine``: the function of the operand and the reduced updates."""

    def rule(equation: Equation) -> Expression:
        params, (data, indices, updates) = equation.params, equation.inputs
        numbers = params["dimension_numbers"]
        layout = _Layout(
            data, indices, updates, numbers.update_window_dims, numbers.inserted_window_dims,
            numbers.scatter_dims_to_operand_dims, numbers.operand_batching_dims,
            numbers.scatter_indices_batching_dims, params["mode"],
        )  # fmt: skip
        at, batch = layout.window_at()
        out = letters("i", len(data.shape))
        renamed: dict[Affine, Affine] = {}
        moves, padded = [], False
        for dim, place, window, moved_by in layout.dims(at, batch):
            size = data.shape[dim]
            if dim in layout.data_batch:
                renamed[batch[layout.indices_batch[layout.data_batch.index(dim)]]] = out[dim]
            elif moved_by is not None and _moves(size, window):
                moves.append((dim, moved_by, place if place is not None and window > 1 else ZERO))
            elif place is not None:
                renamed[place] = out[dim]
                padded |= window < size
        batch = tuple(renamed.get(p, p) for p in batch)
        conditions: list[Term] = [_equals(layout.start(1, batch, m), p, out[dim]) for dim, m, p in moves]
        only_points = len(moves) == len(layout.indexed) and all(p == ZERO for *_, p in moves)
        if params["mode"] == GatherScatterMode.FILL_OR_DROP and not only_points:  # dropped unless all of it is inside
            conditions.append(Apply("fits", (Read(1, (*batch, None)),)))
        sums = {
            name_of(p): size
            for p, size in zip(at, updates.shape, strict=True)
            if p not in renamed and (p in batch or any(p == moved for *_, moved in moves))
        }
        read = tuple(renamed.get(p, p if name_of(p) in sums else ZERO) for p in at)
        body = _collected(reducer, tuple(sums), conditions, Read(2, read, padded))
        applies = combine == "overwrite" and params["update_jaxpr"] is not None  # a function of the old value
        result = Result(out, Apply("apply" if applies else combine, (Read(0, out), body)))
        return expression(equation, sizes_of((out, data.shape)) | sums, [result], ("x", "indices", "updates"))

    return rule


def _collected(reducer: str, sums: tuple[str, ...], conditions: list[Term], body: Term) -> Term:
    for condition in reversed(conditions):
        body = Apply("*", (condition, body)) if reducer == "sum" else Guard(condition, body)
    return Reduce(reducer, sums, body) if sums else body


RULES: dict[str, Semantics] = {
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "scatter-add": _scatter_by("+", "sum"),
    "scatter-sub": _scatter_by("-", "sum"),
    "scatter-mul": _scatter_by("*", "prod"),
    "scatter-min": _scatter_by("minimum", "min"),
    "scatter-max": _scatter_by("maximum", "max"),
    "scatter": _scatter_by("overwrite", "last"),
}
