"""Shifted slices: a slice of a padded or concatenated tensor is read from the tensor before it, as a shift.

A stencil of ``jnp.pad`` and slices makes a tensor of 258 rows of one of 256, and reads 256 of them at a time. Eight
devices cannot share 258 rows. Each of these slices is the tensor itself, shifted by a row: a pad by one row in front
and minus one at the end, for which every device needs one row of its neighbour.

- Slices are pushed through pads, concatenations and cheap elementwise operations.
- The remaining concatenation of slices (``jnp.roll``, a pad that repeats the edge) becomes a choice, row by row, of
  shifted tensors.
- An update of all but the edges (``x.at[1:-1].set(...)``) is computed from shifted tensors, and selected where it
  belongs.

All tensors keep their size. Windows that begin inside a tensor read a shifted one, too
(`shardplan.program.window_starts`).

>>> from shardplan.program.tracing import trace_program
>>> def difference(x):
...     padded = jax.lax.pad(x, 0.0, [(1, 1, 0)])
...     return padded[2:] - padded[:-2]
>>> program = trace_program(difference, (jnp.ones(256),))
>>> [(o.primitive.name, o.params.get("padding_config")) for o in program.operations]
[('pad', ((-1, 1, 0),)), ('pad', ((1, -1, 0),)), ('sub', None)]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardplan import _jax
from shardplan.program.program import Constant, Operation, Program, Value
from shardplan.program.window_starts import WINDOWED, window_shift

Window = tuple[tuple[int, int], ...]
"""Per dimension, the start and the end of a part of a tensor."""

_CHEAP = frozenset(
    {"add", "add_any", "sub", "mul", "div", "neg", "max", "min", "square", "integer_pow"}
    | {"convert_element_type", "select_n", "copy", "copy_p"}
)
_SHIFTED = WINDOWED | {"slice", "pad", "concatenate"}
_MAX_OPERATIONS = 64
"""The most operations that one slice is pushed through. Each slice computes its operands again."""


def shift_slices(program: Program) -> Program:
    """The program with slices replaced by shifted reads. Operations that have lost all readers stay in the program."""
    if not any(o.primitive.name in _SHIFTED for o in program.operations):
        return program
    shifting = _Shifting(program)
    for operation in program.operations:
        shifting.take(operation)
    return replace(
        program,
        values=tuple(shifting.values),
        operations=tuple(shifting.operations),
        outputs=shifting.renamed(program.outputs),
        regions=tuple(replace(region, outputs=shifting.renamed(region.outputs)) for region in program.regions),
    )


class _Shifting:
    """The operations so far, with the maker of each value, and the values that replace others."""

    def __init__(self, program: Program) -> None:
        self.values: list[Value] = list(program.values)
        self.operations: list[Operation] = []
        self._makers: dict[int, Operation] = {}
        self._same: dict[int, int] = {}
        self._moves: dict[Any, int] = {}
        self._pushed = 0
        self._taken: Operation = program.operations[0]
        outputs = (*program.outputs, *(o for region in program.regions for o in region.outputs))
        self._read_whole = {output for output in outputs if isinstance(output, int)}
        for operation in reversed(program.operations):
            cheap = operation.primitive.name in _CHEAP and self._read_whole.isdisjoint(operation.results)
            if not cheap and _window(operation, program.values) is None:
                self._read_whole.update(o for o in operation.operands if isinstance(o, int))

    def renamed(self, operands: Sequence[int | Constant]) -> tuple[int | Constant, ...]:
        """Operands, with values in the place of those that they replace."""
        return tuple(self._same.get(o, o) if isinstance(o, int) else o for o in operands)

    def take(self, operation: Operation) -> None:
        """Adds an operation, or a shifted equivalent."""
        self._taken = replace(operation, operands=self.renamed(operation.operands))
        self._pushed, found, operation = 0, None, self._start_at_first_row(self._taken)
        window = _window(operation, self.values)
        if window is not None:
            found = self._push(operation.operands[0], window)
        elif operation.primitive.name == "concatenate":
            dim = operation.params["dimension"]  # a pad that repeats nothing joins empty parts
            parts = [(o, _whole(self._shape(o))) for o in operation.operands if self._shape(o)[dim]]
            found = self._cut(*parts[0]) if len(parts) == 1 else self._joined(parts, dim) if parts else None
        elif operation.primitive.name in ("scatter", "scatter-add"):
            found = self._inside_updated(operation)
        if found is None:
            self._add(operation)
        else:
            self._same[operation.results[0]] = found

    def _add(self, operation: Operation) -> None:
        self.operations.append(operation)
        self._makers.update(dict.fromkeys(operation.results, operation))

    def _shape(self, operand: int | Constant) -> tuple[int, ...]:
        return self.values[operand].shape if isinstance(operand, int) else ()

    def _emit(self, function: Callable[..., Any], *operands: int | Constant) -> int:
        """Adds the operations of a function of some operands, and gives its result."""
        avals = [
            _jax.shape_of(v) if isinstance(v, Value) else v.aval
            for v in (self.values[o] if isinstance(o, int) else o for o in operands)
        ]
        jaxpr = jax.make_jaxpr(function)(*avals).jaxpr
        known: dict[Any, int | Constant] = dict(zip(jaxpr.invars, operands, strict=True))
        for equation in jaxpr.eqns:
            read = [Constant(a.val, a.aval) if isinstance(a, _jax.Literal) else known[a] for a in equation.invars]
            (var,) = equation.outvars
            aval: Any = var.aval
            known[var] = made = len(self.values)
            kind = _jax.memory_kind(aval)
            self.values.append(Value(made, tuple(aval.shape), aval.dtype, None, bool(aval.weak_type), kind))
            primitive, params = equation.primitive, _jax.without_empty_shardings(equation.params)
            taken = self._taken
            one = Operation(0, primitive, params, tuple(read), (made,), taken.source, equation, taken.region)
            self._add(one)
        result = known[jaxpr.outvars[0]]
        assert isinstance(result, int)
        return result

    def _start_at_first_row(self, operation: Operation) -> Operation:
        """The operation on shifted operands, if its windows begin inside of these."""
        shift, operands = window_shift(operation, self.values), list(operation.operands)
        if shift is None:
            return operation
        for position, filling in shift.fillings.items():
            value = operands[position]
            assert isinstance(value, int)  # a literal has no dimensions
            operands[position] = self._moved(value, shift.config, filling)
        return replace(operation, operands=tuple(operands), params=shift.params)

    # ---- pushing

    def _push(self, value: int | Constant, window: Window) -> int | None:
        """The value that is a window of another one, without making that one. None without a gain."""
        if not isinstance(value, int):
            return None
        if window == _whole(self.values[value].shape):
            return value
        maker = self._makers.get(value)
        self._pushed += 1
        if maker is None or maker.region != self._taken.region or self._pushed > _MAX_OPERATIONS:
            return None
        inner = _window(maker, self.values)
        if inner is not None:
            composed = tuple((a + c, a + d) for (a, _), (c, d) in zip(inner, window, strict=True))
            return self._push(maker.operands[0], composed)
        if maker.primitive.name == "pad":
            return self._shifted(maker, window)
        if maker.primitive.name == "concatenate":
            return self._part(maker, window)
        if maker.primitive.name in _CHEAP and value not in self._read_whole:
            return self._computed(maker, window)
        return None

    def _cut(self, value: int | Constant, window: Window) -> int:
        """A window of a value, by a slice where no shifted read exists."""
        found = self._push(value, window)
        if found is not None:
            return found
        starts, limits = zip(*window, strict=True)
        return self._emit(lambda x: jax.lax.slice(x, starts, limits), value)

    def _shifted(self, pad: Operation, window: Window) -> int | None:
        """A window of a padded tensor that has the tensor's own size in every padded dimension."""
        shape, config, cut = self._shape(pad.operands[0]), [], []
        for size, (low, high, inner), (start, limit) in zip(shape, pad.params["padding_config"], window, strict=True):
            padded = bool(low or high or inner)
            if inner or (padded and limit - start != size):
                return None
            config.append((int(low) - start, start - int(low), 0) if padded else (0, 0, 0))
            cut.append((0, size) if padded else (start, limit))
        source = self._cut(pad.operands[0], tuple(cut))
        return self._moved(source, config, pad.operands[1])

    def _moved(self, value: int, config: list[tuple[int, int, int]], filling: int | Constant) -> int:
        """A padded or shifted value, the same one for all readers of the same rows: XLA would merge their transfers."""
        if not any(low or high for low, high, _ in config):
            return value
        key = (value, tuple(config), str(filling), self._taken.region)
        if key not in self._moves:
            self._moves[key] = self._emit(lambda x, v: jax.lax.pad(x, v, config), value, filling)
        return self._moves[key]

    def _part(self, concatenation: Operation, window: Window) -> int | None:
        """A window of a concatenation: of one part alone, or of several."""
        dim, begin, parts = concatenation.params["dimension"], 0, []
        start, limit = window[dim]
        for operand in concatenation.operands:
            size = self._shape(operand)[dim]
            own = max(start - begin, 0), min(limit - begin, size)
            if own[0] < own[1]:
                parts.append((operand, (*window[:dim], own, *window[dim + 1 :])))
            begin += size
        if len(parts) == 1:
            return self._cut(*parts[0])
        return self._joined(parts, dim)

    def _computed(self, operation: Operation, window: Window) -> int | None:
        """A window of an elementwise result, if windows of all its operands gain too."""
        shape, parts = self._shape(operation.results[0]), []
        for operand in operation.operands:
            found = operand if not self._shape(operand) else None
            if self._shape(operand) == shape:
                found = self._push(operand, window)
            if found is None:
                return None
            parts.append(found)
        bind = lambda *read: _jax.bind_again(operation.equation, operation.primitive, operation.params, read)[0]  # noqa: E731
        return self._emit(bind, *parts)

    # ---- concatenations

    def _joined(self, parts: Sequence[tuple[int | Constant, Window]], dim: int) -> int | None:
        """Windows one after another along a dimension, most of them a shifted tensor of the final size."""
        total, begin, moved = sum(window[dim][1] - window[dim][0] for _, window in parts), 0, []
        for value, window in parts:
            source, inner = self._source(value, window)
            size, across = window[dim][1] - window[dim][0], (*inner[:dim], (0, total), *inner[dim + 1 :])
            fits = self._shape(source)[dim] == total
            moved.append((begin, size, (value, window), (source, across, begin - inner[dim][0]) if fits else None))
            begin += size
        begin, size, _, main = max(moved, key=lambda part: part[1])
        if main is None or 2 * size <= total or jnp.issubdtype(self.values[main[0]].dtype, jax.dtypes.extended):
            return None
        rows = [self._row(part, dim, total) for part in moved]
        result = rows[-1]
        for row, (after, *_) in zip(reversed(rows[:-1]), reversed(moved[1:]), strict=True):
            result = self._emit(lambda x, y, after=after: _before(after, dim, x, y), row, result)
        return result

    def _row(self, part: Any, dim: int, total: int) -> int:
        """A tensor of the final size with one part in its position."""
        begin, size, (value, window), found = part
        rank = len(window)
        dtype = self.values[value].dtype
        zero = Constant(np.zeros((), dtype), jax.ShapeDtypeStruct((), dtype))
        if found is not None and 2 * abs(found[2]) <= total:
            source, across, shift = found
            return self._moved(self._cut(source, across), _along(rank, dim, shift, -shift), zero)
        return self._moved(self._cut(value, window), _along(rank, dim, begin, total - begin - size), zero)

    def _source(self, value: int | Constant, window: Window) -> tuple[int, Window]:
        """The tensor that a value is a window of, with the window: through slices, and through dimensions of size 1."""
        assert isinstance(value, int)
        maker = self._makers.get(value)
        if maker is None or maker.region != self._taken.region:
            return value, window
        inner = _window(maker, self.values)
        if inner is not None and isinstance(maker.operands[0], int):
            return self._source(
                maker.operands[0], tuple((a + c, a + d) for (a, _), (c, d) in zip(inner, window, strict=True))
            )
        same = value
        while maker is not None and maker.primitive.name in ("reshape", "broadcast_in_dim", "squeeze"):
            operand = maker.operands[0]
            if not isinstance(operand, int) or _bare(self._shape(operand)) != _bare(self._shape(same)):
                break
            same, maker = operand, self._makers.get(operand)
            if self._shape(same) == self._shape(value):
                return self._source(same, window)
        return value, window

    # ---- updates of all but the edges

    def _inside_updated(self, scatter: Operation) -> int | None:
        """The result of an update of all but the edges (``x.at[1:-1].set(...)``), computed for the edges as well."""
        data, indices, updates = scatter.operands
        window, shape, numbers = self._shape(updates), self._shape(data), scatter.params["dimension_numbers"]
        starts = self._constants(indices) if len(window) == len(shape) else None
        if (
            starts is None
            or len(self._shape(indices)) != 1
            or (scatter.primitive.name == "scatter" and scatter.params["update_jaxpr"] is not None)
        ):
            return None
        at = [0] * len(shape)
        for dim, start in zip(numbers.scatter_dims_to_operand_dims, starts, strict=True):
            at[dim] = start
        places = list(zip(at, window, shape, strict=True))
        if window == shape or any(start < 0 or start + part > size or 2 * part <= size for start, part, size in places):
            return None
        gains: list[int] = []
        whole = self._extended(updates, at, shape, gains)
        if whole is None or not gains:
            return None
        bounds = [(dim, start, start + part) for dim, (start, part, size) in enumerate(places) if part < size]
        adds = scatter.primitive.name == "scatter-add"
        return self._emit(lambda x, y: _inside(bounds, x, y, adds), data, whole)

    def _extended(self, value: int | Constant, at: list[int], shape: tuple[int, ...], gains: list[int]) -> int | None:
        """A tensor of a larger shape with a value at a position and any elements around it. ``gains`` are its shifted
        reads."""
        maker = self._makers.get(value) if isinstance(value, int) else None
        self._pushed += 1
        if maker is None or maker.region != self._taken.region or self._pushed > _MAX_OPERATIONS:
            return None
        window, source = _window(maker, self.values), maker.operands[0] if maker.operands else None
        zero = np.zeros((), self.values[maker.results[0]].dtype)
        filling = Constant(zero, jax.ShapeDtypeStruct((), zero.dtype))
        if window is not None and isinstance(source, int) and self._shape(source) == shape:
            gains.append(source)
            return self._moved(source, [(o - a, a - o, 0) for o, (a, _) in zip(at, window, strict=True)], filling)
        if maker.primitive.name == "broadcast_in_dim" and self._shape(source or 0) == ():
            return self._emit(lambda x: jax.lax.broadcast(x, shape), maker.operands[0])
        if maker.primitive.name not in _CHEAP:
            return None
        own, parts = self._shape(maker.results[0]), []
        for operand in maker.operands:
            part = self._extended(operand, at, shape, gains) if self._shape(operand) == own else operand
            if part is None or (part is operand and self._shape(operand)):
                return None
            parts.append(part)
        bind = lambda *read: _jax.bind_again(maker.equation, maker.primitive, maker.params, read)[0]  # noqa: E731
        return self._emit(bind, *parts)

    def _constants(self, indices: int | Constant) -> list[int] | None:
        """The elements of a vector that is a concatenation of literals."""
        if isinstance(indices, Constant):
            return [int(indices.value)] if np.ndim(indices.value) == 0 else None
        maker = self._makers.get(indices)
        if maker is None or maker.primitive.name not in ("broadcast_in_dim", "concatenate"):
            return None
        found = [self._constants(operand) for operand in maker.operands]
        flat = [place for places in found if places is not None for place in places]
        return flat if None not in found and self._shape(indices) == (len(flat),) else None


def _window(operation: Operation, values: Sequence[Value]) -> Window | None:
    """The window of a slice, or of a pad that only removes rows. None for all other operations."""
    operand = operation.operands[0] if operation.operands else None
    if operation.primitive.name == "slice":
        if any(stride != 1 for stride in operation.params["strides"] or ()):
            return None
        limits = zip(operation.params["start_indices"], operation.params["limit_indices"], strict=True)
        return tuple((int(start), int(limit)) for start, limit in limits)
    if operation.primitive.name == "pad" and isinstance(operand, int):
        config = operation.params["padding_config"]
        if all(low <= 0 and high <= 0 and not inner for low, high, inner in config):
            sizes = zip(values[operand].shape, config, strict=True)
            return tuple((-int(low), size + int(high)) for size, (low, high, _) in sizes)
    return None


def _whole(shape: tuple[int, ...]) -> Window:
    return tuple((0, size) for size in shape)


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _along(rank: int, dim: int, low: int, high: int) -> list[tuple[int, int, int]]:
    return [(low, high, 0) if d == dim else (0, 0, 0) for d in range(rank)]


def _before(after: int, dim: int, one: Any, other: Any) -> Any:
    """Rows of one tensor up to `after`, then rows of another one."""
    rows = jax.lax.broadcasted_iota(jnp.int32, one.shape, dim)
    return jax.lax.select(rows < after, one, other)


def _inside(bounds: Sequence[tuple[int, int, int]], old: Any, new: Any, adds: bool) -> Any:
    """A tensor with new elements, or these added, between the bounds of some dimensions."""
    inside: Any = None
    for dim, start, limit in bounds:
        rows = jax.lax.broadcasted_iota(jnp.int32, old.shape, dim)
        here = (rows >= start) & (rows < limit)
        inside = here if inside is None else inside & here
    return jax.lax.select(inside, old + new if adds else new, old)
