"""The loop: a region runs block by block, in a scan over the numbers of the blocks.

Inputs with the index are sliced inside the body, so that no copy of them is divided into blocks. Results with the index
are written into a buffer that the scan carries, in place. Sums over the index are carried, in float32 at least.

Blocks are contiguous, or *strided*: block ``k`` of ``n`` then has the positions ``k``, ``k + n``, ``k + 2n``, ... Where
mesh axes split the dimension, every device has an equal part of each strided block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardplan import _jax
from shardplan.program.blocks.deep_halos import DeepHalos, combined, over_windows, summed_convolution
from shardplan.program.blocks.places import Growth, is_barrier
from shardplan.program.blocks.regions import Region
from shardplan.program.blocks.scans import ScanPart, dtype_before
from shardplan.program.blocks.tiles import (
    COMBINE,
    RANDOM_BITS,
    Part,
    as_widened,
    beyond,
    identity,
    params_on_tile,
    results_on_tile,
    run_on_tile,
    widened,
)
from shardplan.program.blocks.tiling import Tiling
from shardplan.program.program import Constant, Operation, Program, operand_type
from shardplan.rules import Refusal, Span

_FIRST = np.int32(0)
"""A start of the type of blocks' numbers."""

_SUM = "sum_over_blocks"
"""The scope of the conversion of a sum over all blocks to its own type."""


def ends_sum(operation: Operation) -> bool:
    """Whether an operation converts a sum over all blocks to its own type: one that the step without blocks reduces
    over devices in that type."""
    return operation.primitive.name == "convert_element_type" and _SUM in _jax.module_path(operation.equation)


class Refused(Exception):
    """An operation has no form on blocks."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index, self.reason = index, reason


class Loop:
    """The loop over the blocks of one region. ``strided`` says per index how blocks are taken.

    With ``halos`` each turn runs a block of every device's window."""

    def __init__(
        self,
        program: Program,
        growth: Growth,
        region: Region,
        tiles: Tiling,
        strided: Sequence[bool],
        halos: DeepHalos,
    ) -> None:
        self._program, self._growth, self._region = program, growth, region
        self._tiles, self._strided, self._halos = tiles, strided, halos
        self._axes = range(len(tiles.counts))
        operations = [program.operations[index] for index in region.operations]
        made = {result for operation in operations for result in operation.results}
        read = dict.fromkeys(operand for operation in operations for operand in operation.read)
        self._read = tuple(value for value in read if value in tiles.spans[0] and value not in made)

    def run(self, values: Mapping[int, Any]) -> dict[int, Any]:
        """The results of the region that leave it, from the values that it reads."""
        with _jax.traced_as(self._largest().equation):
            return self._run(values)

    def _largest(self) -> Operation:
        """The operation of the region with the largest result of those with a place in the source: it stands for the
        loop."""
        program = self._program
        own = [program.operations[index] for index in self._region.operations if index not in self._region.own]
        known = [operation for operation in own if _jax.source_line(operation.equation)] or own
        return max(known, key=lambda operation: max(program.values[r].total_bytes for r in operation.results))

    def _run(self, values: Mapping[int, Any]) -> dict[int, Any]:
        leaving, halos, counts = self._tiles.leaving, self._halos, self._tiles.counts
        whole = {value: array for value, array in values.items() if value not in self._read}
        firsts = halos.firsts(counts) if halos else []
        read = [self._windows(value, values[value]) if halos else values[value] for value in self._read]

        def body(carry: tuple[Any, ...], number: Any) -> tuple[tuple[Any, ...], None]:
            numbers = self._numbers(number)
            blocks = [self._sliced(value, array, numbers) for value, array in zip(self._read, read, strict=True)]
            if halos:
                own = [first + number for first, number in zip(firsts, numbers, strict=True)]
                axes = [None if value in self._tiles.reduced else 0 for value in leaving]
                stacked = [0 if first.ndim else None for first in own], [0] * len(blocks)
                found = over_windows(partial(self._block, whole), stacked, axes)(own, blocks)
            else:
                found = self._block(whole, numbers, blocks)
            given = zip(leaving, carry, found, strict=True)
            return tuple(self._added(value, held, part, numbers) for value, held, part in given), None

        start = tuple(self._start(value, values) for value in leaving)
        ends, _ = jax.lax.scan(body, start, jnp.arange(prod(counts), dtype=jnp.int32))
        return {value: self._end(value, end) for value, end in zip(leaving, ends, strict=True)}

    def _block(self, whole: Mapping[int, Any], numbers: Sequence[Any], blocks: Sequence[Any]) -> list[Any]:
        """What one block gives of the values that leave the loop."""
        tile = _Tile(self, whole, numbers, dict(zip(self._read, blocks, strict=True)))
        tile.run(self._region.operations)
        return [tile.given(value) for value in self._tiles.leaving]

    def _added(self, value: int, held: Any, part: Any, numbers: Sequence[Any]) -> Any:
        """What the loop carries of a value, with one block."""
        if value in self._tiles.reduced:
            return COMBINE[self._tiles.reduced[value]](held, part.astype(held.dtype))
        stack = self._stack
        part = part.reshape((*stack, *self.block_shape(value)))
        return jax.lax.dynamic_update_slice(held, part, [*(_FIRST for _ in stack), *self.starts(value, numbers)])

    def run_on_tile(
        self, operation: Operation, params: dict[str, Any], operands: Sequence[Any], reducer: str | None
    ) -> Sequence[Any]:
        """The results of an operation for one block. Those that are reduced over an index are so over all windows."""
        if reducer is None or not self._halos:
            return run_on_tile(operation, params, operands)
        if operation.primitive.name == "conv_general_dilated":
            run = summed_convolution(operation, lambda *operands: run_on_tile(operation, params, operands)[0])
            return [run(*operands)]
        return [combined(reducer, part) for part in run_on_tile(operation, params, operands)]

    @property
    def _stack(self) -> tuple[int, ...]:
        """The number of windows, where there are some."""
        return (prod(self._tiles.devices),) if self._halos else ()

    def _windows(self, value: int, array: Any) -> Any:
        """A value from outside, in windows."""
        dims = [self._growth.places[axis][value].dim for axis in self._axes]
        return self._halos.windows(array, dims, [spans[value] for spans in self._tiles.spans], self._tiles.counts)

    def _sliced(self, value: int, found: Any, numbers: Sequence[Any]) -> Any:
        """A block of a value from outside, or of all its windows."""
        if any(self._strided):
            starts = self.starts(value, numbers)
            found = jax.lax.dynamic_slice(found.reshape(self.buffer_shape(value)), starts, self.block_shape(value))
            shape = list(self._program.values[value].shape)
            for axis in self._axes:
                shape[self._growth.places[axis][value].dim] = self._tiles.spans[axis][value].step
            return found.reshape(shape)
        for axis in self._axes:
            span, dim = self._tiles.spans[axis][value], self._growth.places[axis][value].dim + len(self._stack)
            if self._tiles.devices[axis] > 1:  # a window begins with the rows of its first block
                found = jax.lax.dynamic_slice_in_dim(found, numbers[axis] * span.step, span.length, axis=dim)
                continue
            start = numbers[axis] * span.step + span.low
            if self.exceeds(axis, value, span):
                found = jnp.take(found, start + jnp.arange(span.length, dtype=jnp.int32), axis=dim, mode="clip")
            else:
                found = jax.lax.dynamic_slice_in_dim(found, start, span.length, axis=dim)
        return found

    def _numbers(self, number: Any) -> list[Any]:
        """The number of the block per index. The last index runs fastest."""
        found = []
        for count in self._tiles.counts[:0:-1]:
            found.append(jax.lax.rem(number, jnp.int32(count)))
            number = jax.lax.div(number, jnp.int32(count))
        return [number, *reversed(found)]

    def _start(self, value: int, values: Mapping[int, Any]) -> Any:
        own = self._program.values[value]
        if value in self._tiles.reduced:
            reducer = self._tiles.reduced[value]
            operation = self._program.makers[self._origin(value)]
            dtype = widened({}, own.dtype, reducer)[1]
            once = self._tiles.parts[operation.index][0].along.once
            if once is None:
                return jnp.full(own.shape, identity(reducer, dtype), dtype)
            operand = operation.operands[once]
            return jnp.asarray(operand.value if isinstance(operand, Constant) else values[operand], dtype)
        return jnp.zeros((*self._stack, *self.buffer_shape(value)), own.dtype)

    def _origin(self, value: int) -> int:
        """The sum that barriers of the region have passed on."""
        maker = self._program.makers[value]
        while is_barrier(maker):
            operand = maker.operands[maker.results.index(value)]
            assert isinstance(operand, int)
            value, maker = operand, self._program.makers[operand]
        return value

    def _end(self, value: int, end: Any) -> Any:
        own = self._program.values[value]
        if value in self._tiles.reduced:
            with jax.named_scope(_SUM):
                narrow = end.astype(dtype_before(self._program, value))
            return narrow.astype(own.dtype)
        rows = list(own.shape)
        dims = [self._growth.places[axis][value].dim for axis in self._axes]
        if self._halos:
            end = self._halos.whole(end, dims)
        for axis, dim in enumerate(dims):
            rows[dim] = self._tiles.total(axis) * self._tiles.spans[axis][value].step
        end = end.reshape(rows)
        return end if tuple(rows) == own.shape else jax.lax.slice(end, (0,) * len(rows), own.shape)

    def buffer_shape(self, value: int) -> tuple[int, ...]:
        """The shape of the buffer for a value: the rows of all blocks, by block where blocks are strided."""
        return tuple(size for sizes in self._by_dim(value, whole=True) for size in sizes)

    def block_shape(self, value: int) -> tuple[int, ...]:
        """The shape of one block in that buffer."""
        return tuple(size for sizes in self._by_dim(value, whole=False) for size in sizes)

    def _by_dim(self, value: int, whole: bool) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = [(size,) for size in self._program.values[value].shape]
        for axis in self._axes:
            step = self._tiles.spans[axis][value].step
            count, dim = self._tiles.counts[axis], self._growth.places[axis][value].dim
            if self._strided[axis]:
                group = self._tiles.group(axis)
                found[dim] = (group, count if whole else 1, step // group)
            else:
                found[dim] = (count * step if whole else step,)
        return found

    def starts(self, value: int, numbers: Sequence[Any]) -> list[Any]:
        """Where the block begins in the buffer."""
        found: list[tuple[Any, ...]] = [(_FIRST,) for _ in self._program.values[value].shape]
        for axis in self._axes:
            step, dim = self._tiles.spans[axis][value].step, self._growth.places[axis][value].dim
            found[dim] = (_FIRST, numbers[axis], _FIRST) if self._strided[axis] else (numbers[axis] * step,)
        return [start for starts in found for start in starts]

    def exceeds(self, axis: int, value: int, span: Span) -> bool:
        """Whether some block of a span has rows beyond the ends of the value."""
        extent = self._program.values[value].shape[self._growth.places[axis][value].dim]
        return span.low < 0 or (self._tiles.total(axis) - 1) * span.step + span.high > extent


class _Tile:
    """The values of one block. ``whole`` are those from outside without the indices, ``read`` are blocks of others."""

    def __init__(self, loop: Loop, whole: Mapping[int, Any], numbers: Sequence[Any], read: Mapping[int, Any]) -> None:
        self._loop, self._outside, self._numbers = loop, whole, numbers
        self._program, self._growth, self._tiles = loop._program, loop._growth, loop._tiles
        self._held = dict(read)

    def run(self, operations: Iterable[int]) -> None:
        """Runs operations of the region, or of the body of a scan: there, those without the indices as well."""
        for index in operations:
            operation = self._program.operations[index]
            if is_barrier(operation):
                pairs = zip(operation.operands, operation.results, strict=True)
                operands = [self._passed(operand, result) for operand, result in pairs]
                self._hold(operation, run_on_tile(operation, operation.params, operands))
            elif operation.bodies and (index in self._tiles.parts or operation.region):
                self._scan(operation)
            elif index in self._tiles.parts:
                self._run(operation)
            elif operation.region:
                self._hold(operation, self._run_whole(operation))

    def given(self, value: int) -> Any:
        """The rows of a value that are of this block alone, or the part of a sum."""
        found = self._held[value]
        for axis in self._loop._axes if value not in self._tiles.reduced else ():
            own, dim = self._tiles.spans[axis][value], self._growth.places[axis][value].dim
            found = jax.lax.slice_in_dim(found, -own.low, own.step - own.low, axis=dim)
        return found

    def _scan(self, operation: Operation) -> None:
        """A loop of the program, on this block: the results that have the index or are parts of sums, of one in
        another loop all. What the program stacks without the index is sliced."""
        outputs, parted = self._program.regions[operation.bodies[0]].outputs, self._tiles.parts
        ends = [*zip(outputs, operation.results, strict=True)]
        stacks = {o: r for o, r in ends[operation.params["num_carry"] :] if isinstance(o, int) and r in self._outside}
        of = [n for n, (_, r) in enumerate(ends) if operation.region or self._is_of_block(r)]
        part = ScanPart.of(self._program, operation, of, stacks)
        read = [
            self._operand(operation, n) if operation.index in parted else self._any(operation.operands[n])
            for n in part.read
        ]
        read += [self._outside[stacks[value]] for value in part.known]

        def turn(entering: dict[int, Any], operations: Sequence[int]) -> Mapping[int, Any]:
            inner = _Tile(self._loop, {}, self._numbers, entering)
            inner.run(operations)
            return inner._held

        self._held |= zip((operation.results[n] for n in part.results), part.run(read, turn), strict=True)

    def _is_of_block(self, value: int) -> bool:
        return self._growth.blocked(value) or value in self._tiles.reduced

    def _run_whole(self, operation: Operation) -> Sequence[Any]:
        """An operation without the indices in the body of a scan."""
        return run_on_tile(operation, operation.params, [self._any(operand) for operand in operation.operands])

    def _run(self, operation: Operation) -> None:
        parts = self._tiles.parts[operation.index]
        operands = [self._operand(operation, number) for number in range(len(operation.operands))]
        shape = list(self._program.values[operation.results[0]].shape)
        for part in parts:
            dim = part.along.results[0]
            if dim is not None:
                shape[dim] = part.span.length
        if operation.primitive.name == RANDOM_BITS:
            self._hold(operation, [self._random_bits(operation, operands[0], shape)])
            return
        reducer = self._tiles.reduced.get(operation.results[0])
        try:
            params = params_on_tile(operation, parts, tuple(shape))
            once = None if operation.region else reducer  # each turn of a loop makes its part in the type of the step
            params, dtype = widened(params, self._program.values[operation.results[0]].dtype, once)
            operands = as_widened(operation, dtype, operands)
            results = results_on_tile(operation, parts, self._loop.run_on_tile(operation, params, operands, reducer))
        except (Refusal, TypeError, ValueError) as error:
            raise Refused(operation.index, f"it has no form on blocks: {error}") from error
        if results[0].shape != tuple(shape):
            raise Refused(operation.index, "it has no form on blocks")
        if operation.primitive.name == "iota":
            results = [self._numbered(operation, results[0])]
        if reducer is not None:
            results = [result.astype(dtype) for result in results]
        self._hold(operation, results)

    def _hold(self, operation: Operation, results: Sequence[Any]) -> None:
        self._held |= zip(operation.results, results, strict=True)

    def _passed(self, operand: int | Constant, result: int) -> Any:
        """The rows of a barrier's operand that its result has."""
        rows = self._any(operand)
        for axis, spans in enumerate(self._tiles.spans):
            if result in spans and isinstance(operand, int) and spans[operand] != spans[result]:
                own, span, dim = spans[operand], spans[result], self._growth.places[axis][result].dim
                rows = jax.lax.slice_in_dim(rows, span.low - own.low, span.high - own.low, axis=dim)
        return rows

    def _any(self, operand: int | Constant) -> Any:
        """An operand of a barrier: a block, a part of a sum, or a whole value."""
        if isinstance(operand, Constant):
            return operand.value
        return self._held[operand] if operand in self._held else self._outside[operand]

    def _operand(self, operation: Operation, number: int) -> Any:
        """The rows of an operand that the operation reads for this block."""
        operand, parts = operation.operands[number], self._tiles.parts[operation.index]
        if number == parts[0].along.once:
            own = operand_type(self._program, operand)
            reducer = self._tiles.reduced[operation.results[0]]
            return jnp.full(own.shape, identity(reducer, own.dtype), own.dtype)
        if isinstance(operand, Constant):
            return operand.value
        spans = [part.operands[number] for part in parts]
        if all(span is None for span in spans):
            return self._outside[operand] if operand in self._outside else self._held[operand]
        rows = self._held[operand]
        for axis, (part, span) in enumerate(zip(parts, spans, strict=True)):
            assert span is not None
            own, dim = self._tiles.spans[axis][operand], self._growth.places[axis][operand].dim
            given = part.given[number] or span
            if own != given:
                rows = jax.lax.slice_in_dim(rows, given.low - own.low, given.high - own.low, axis=dim)
            if given != span:
                config = [(0, 0, 0)] * rows.ndim
                config[dim] = (given.low - span.low, span.high - given.high, 0)
                rows = jax.lax.pad(rows, jnp.zeros((), rows.dtype), config)
            if self._loop.exceeds(axis, operand, span):
                fill = self._beyond(operation, part, number, rows.dtype)
                rows = rows if fill is None else jnp.where(self._exists(axis, operand, span, rows.ndim), rows, fill)
        return rows

    def _beyond(self, operation: Operation, part: Part, number: int, dtype: Any) -> Any:
        """What rows beyond the ends of an operand count as, None where they count for nothing that is used."""
        if operation.primitive.name == "pad" and not part.along.plain:
            return self._any(operation.operands[1])
        reducer = next((reducer for reducer in part.along.reducers if reducer is not None), None)
        return identity(reducer, dtype) if reducer else beyond(operation, number, dtype)

    def _exists(self, axis: int, value: int, span: Span, rank: int) -> Any:
        """Which rows of a block are rows of the value."""
        dim = self._growth.places[axis][value].dim
        rows = self._numbers[axis] * span.step + span.low + jnp.arange(span.length, dtype=jnp.int32)
        found = (rows >= 0) & (rows < self._program.values[value].shape[dim])
        return jax.lax.expand_dims(found, [other for other in range(rank) if other != dim])

    def _numbered(self, operation: Operation, local: Any) -> Any:
        """An iota of the whole value, on a block of it."""
        return self._place(operation, operation.params["dimension"], local)

    def _random_bits(self, operation: Operation, key: Any, shape: Sequence[int]) -> Any:
        """The random bits of a block: those of its elements' numbers in the whole value."""
        numbers, elements = jnp.zeros(shape, jnp.uint32), 1
        own = self._program.values[operation.results[0]].shape
        for dim in reversed(range(len(own))):
            local = jax.lax.broadcasted_iota(jnp.int32, shape, dim)
            numbers = numbers + self._place(operation, dim, local).astype(jnp.uint32) * jnp.uint32(elements)
            elements *= own[dim]
        return _jax.threefry_bits(key, numbers, operation.params["bit_width"])

    def _place(self, operation: Operation, dim: int, local: Any) -> Any:
        """The position in the whole result for a position in its block."""
        (result,) = operation.results
        for axis, part in enumerate(self._tiles.parts[operation.index]):
            if part.along.results[0] == dim:
                span, number = self._tiles.spans[axis][result], self._numbers[axis].astype(local.dtype)
                if self._loop._strided[axis]:
                    run, count = span.step // self._tiles.group(axis), self._tiles.counts[axis]
                    return (local // run) * (run * count) + number * run + local % run
                return local + (number * span.step + span.low)
        return local
