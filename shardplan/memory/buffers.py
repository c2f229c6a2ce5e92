"""The buffers of a timeline, each with its bytes as a function of choices.

| memory | a function of |
|---|---|
| a materialised value | the value's layout |
| a resharded copy, shared or of one reader | both layouts |
| a partial result until it is reduced | the operation's strategy and the layout |
| the scratch of a library call: operand copies, partial sums, masked rows, halos, windows | the operation's strategy |
| results of the step outside of donated memory, from its start on | the layout |

A copy that the schedule does not make has the live range of its possible readers. So a search sees its bytes when it
chooses the copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from shardplan import _jax
from shardplan.layout.layout import Layout
from shardplan.memoize import memoize
from shardplan.memory.convolutions import halo_bytes, is_asymmetrically_padded
from shardplan.memory.graph import Item
from shardplan.memory.lifetimes import Buffer
from shardplan.memory.operations import computes_operand, fusible_operations, is_library_product
from shardplan.memory.products import masked_rows, partial_sums
from shardplan.memory.timeline import Span, Timeline
from shardplan.problem.cost_network import Problem
from shardplan.problem.device_bytes import layout_left
from shardplan.problem.ops.ragged_dot import RAGGED
from shardplan.program.control_flow import layouts_read
from shardplan.program.operation_kinds import CONVOLUTION, readers_in
from shardplan.program.program import Operation, Program

Array = NDArray[np.float64]

_WINDOW_BYTES = 4
"""Bytes of an index, or of a float32. The gradient of a pooling stores some of each window."""


def buffers_of(timeline: Timeline, donated: frozenset[int]) -> list[Buffer]:
    """All buffers. ``donated`` are the positions of inputs whose memory goes to the results that replace them."""
    found = _Buffers(timeline, donated)
    kinds = found.values, found.results, found.copies, found.resharded_copies, found.loop_inputs, found.library_scratch
    return [buffer for kind in kinds for buffer in kind() if buffer.start <= buffer.end]


class _Buffers:
    def __init__(self, timeline: Timeline, donated: frozenset[int]) -> None:
        self._timeline, self._donated = timeline, donated
        self._schedule, self._problem, self._program = timeline.schedule, timeline.problem, timeline.program
        self._variables, self._spans = timeline.problem.variables, timeline.spans
        self._computed, self._fusible = timeline.computed(), fusible_operations(timeline.problem)
        self._left = {item for item in timeline.spans if item.form in ("copy", "slice")}
        """The copies without a buffer so far."""

    def values(self) -> Iterator[Buffer]:
        """Materialised values. Carries are part of the loop's results, and kernels read slices of stacks in place."""
        links, program = self._problem.links.values(), self._program
        carried = {link.target for some in links for link in some.inside if not link.stacked}
        stacked = {link.target for some in links for link in some.enter if link.stacked}
        leaving = {o for o in program.outputs if isinstance(o, int)} & program.makers.keys()
        without = (stacked - self._timeline.kernels.stored) | (carried - program.makers.keys())
        without |= repeated_constants(program)
        for item, span in self._spans.items():
            value, variable = item.value, self._variables.values.get(item.value)
            leaves = value in leaving and span.end == self._timeline.end  # see `results`
            if item.form == "stored" and variable is not None and value not in without and not leaves:
                yield Buffer(value, span.start, span.end, (variable,), _sizes(self._problem, value))

    def results(self) -> Iterator[Buffer]:
        """Results in the caller's memory, live from the start. Results that replace donated inputs need none."""
        program, end = self._program, self._timeline.end
        taken = self._reused_inputs()
        for number, output in enumerate(program.outputs):
            if not isinstance(output, int) or program.ties.get(number) in self._donated:
                continue
            value = program.replaced.get(number, output)
            if value in self._variables.values and number in taken:
                ends = self._variables.values[taken[number]], self._variables.values[value]
                yield Buffer(
                    output, 0, end, ends, _sizes_where_shapes_differ(self._problem, taken[number], value), "result"
                )
            elif value in self._variables.values:
                yield Buffer(output, 0, end, (self._variables.values[value],), _sizes(self._problem, value), "result")
            else:  # a constant
                parts = self._problem.space.domain(program.values[output].shape).parts
                size = program.values[output].total_bytes / parts[self._schedule.layout_of_output(number)]
                yield Buffer(output, 0, end, (), np.array(size), "result")

    def _reused_inputs(self) -> dict[int, int]:
        """Per result, by number, the donated input whose memory it takes without replacing it in the next step.

        XLA gives a result the first donated input of its shape and element type. A result that is not computed in
        place is copied there.
        """
        program, variables = self._program, self._variables.values
        free = [program.inputs[position] for position in sorted(self._donated - {*program.ties.values()})]
        found: dict[int, int] = {}
        for number, output in enumerate(program.outputs):
            if isinstance(output, int) and number not in program.ties and output not in program.inputs:
                own = program.values[output]
                same_shape = [v for v in free if v in variables and program.values[v].shape == own.shape]
                value = next((v for v in same_shape if program.values[v].dtype == own.dtype), None)
                if value is not None:
                    free.remove(value)
                    if self._timeline.is_in_place(value, output):
                        found[number] = value
        return found

    def copies(self) -> Iterator[Buffer]:
        """The resharded copies that several readers share."""
        for value, variable in self._variables.copies.items():
            span = self._spans.get(Item(value, "copy", self._schedule.copy(value)))
            if span is None:
                read = [self._computed[reader.index] for reader in readers_in(self._program).get(value, ())]
                span = Span(min(first for first, _ in read), max(last for _, last in read)) if read else None
            if span is not None:
                ends = self._variables.values[value], variable
                yield Buffer(value, span.start, span.end, ends, _copy_sizes(self._problem, value), "copy")

    def resharded_copies(self) -> Iterator[Buffer]:
        """Resharded operands of one operation, and its results before they are reduced or resharded."""
        problem, assignment = self._problem, self._schedule.assignment
        for index, choices in problem.choices.items():
            operation, own = self._program.operations[index], own_variable(problem, self._program.operations[index])
            generates = bool(operation.results) and operation.results[0] in problem.generated
            if own is None or generates or {*operation.results} <= self._timeline.kernels.same.keys():
                continue
            strategy = assignment.strategies[index]
            for position, operand in enumerate(operation.operands):
                if not isinstance(operand, int) or operand not in self._variables.values:
                    continue
                amounts = _resharded(problem, operation, position)
                span = (
                    self._span_of_copy(operand, strategy.operands[position], operation) if amounts is not None else None
                )
                if amounts is not None and span is not None:
                    yield Buffer(
                        operand, span.start, span.end, (problem.source_of(operation, operand), own), amounts, "copy"
                    )
            for position, result in enumerate(operation.results if not choices.follows_result else ()):
                amounts = _unreduced(problem, operation, position)
                if amounts is not None:
                    item = Item(result, "left", layout_left(problem, operation, strategy, position))
                    span = self._spans.get(item) or Span(*self._computed[index])
                    yield Buffer(result, span.start, span.end, (own, self._variables.values[result]), amounts, "copy")
            if choices.follows_result and index not in self._fusible:
                amounts = _unreduced(problem, operation, 0)
                if amounts is not None and np.diag(amounts).any():
                    yield Buffer(operation.results[0], *self._computed[index], (own,), np.diag(amounts), "copy")

    def _span_of_copy(self, value: int, layout: Layout | None, reader: Operation) -> Span | None:
        """The live range of a value's copy for one reader. None where it is part of another reader's buffer."""
        span = Span(*self._computed[reader.index])
        if layout is None or layout in (self._schedule.assignment.values[value], self._schedule.copy(value)):
            return span
        own = [Item(value, form, layout, reader.index) for form in ("copy", "slice")]
        for item in (*own, Item(value, "copy", layout)):
            if item in self._spans:
                if item not in self._left:
                    return None
                self._left.discard(item)
                return self._spans[item]
        return span

    def loop_inputs(self) -> Iterator[Buffer]:
        """Resharded copies of the inputs of loops."""
        for index, links in self._problem.links.items():
            for link in links.enter:
                if isinstance(link.source, int) and link.source in self._variables.values:
                    rank = len(self._program.values[link.target].shape)
                    wanted = layouts_read(link, self._problem.domain(link.target).layouts, rank)
                    amounts = _missing_sizes(self._problem, link.source, wanted, sliced=False)
                    layout = self._schedule.link_layout(link)
                    span = self._span_of_copy(link.source, layout, self._program.operations[index])
                    if amounts.any() and span is not None:
                        ends = self._variables.read(link.source), self._variables.values[link.target]
                        yield Buffer(link.source, span.start, span.end, ends, amounts, "copy")

    def library_scratch(self) -> Iterator[Buffer]:
        """The operand copies of library calls, and their workspace."""
        for position, _, node in self._timeline.nodes():
            if node.kind == "kernel" and node.library:
                for index in {node.place, *node.inside}:
                    yield from self._scratch_during(self._program.operations[index], position)
        for item, span in self._spans.items():
            if item.form == "operand":
                makers = [node for node in self._timeline.placed[span.made].nodes if item in node.makes]
                operation = self._program.operations[makers[0].place]
                position = operation.operands.index(item.reader)
                yield from self._operand_scratch(operation, position, item.times, span)
            elif item.form == "windows":
                operation = self._program.makers[item.value]
                source = self._program.values[operation.operands[0]]  # type: ignore[index]
                times = (len(source.shape) + 1) * _WINDOW_BYTES / _jax.item_bytes(source.dtype)
                yield from self._operand_scratch(operation, 0, times, span)

    def _operand_scratch(self, operation: Operation, position: int, times: float, span: Span) -> Iterator[Buffer]:
        """A multiple of the bytes of an operand in the layout that an operation reads."""
        operand, own = operation.operands[position], own_variable(self._problem, operation)
        if isinstance(operand, int) and own is not None:
            strategies = self._problem.choices[operation.index].strategies
            amounts = times * _sizes_in(
                self._problem, operand, [strategy.operands[position] for strategy in strategies]
            )
            yield Buffer(operand, span.start, span.end, (own,), amounts, "scratch")

    def _scratch_during(self, operation: Operation, place: int) -> Iterator[Buffer]:
        """The scratch memory of an operation, in addition to operands and results."""
        own, index = own_variable(self._problem, operation), operation.index
        if own is None or index not in self._problem.choices:
            return
        strategies, amounts = self._problem.choices[index].strategies, list[Any]()
        if any(strategy.halos for strategy in strategies):
            amounts.append([halo_bytes(self._problem, operation, strategy) for strategy in strategies])
        if operation.primitive.name == "sort":  # it runs in a copy of the keys
            keys = [strategy.operands[0] for strategy in strategies]
            amounts.append(_sizes_in(self._problem, operation.operands[0], keys))  # type: ignore[arg-type]
        if operation.primitive.name == RAGGED:
            amounts.append([masked_rows(self._problem, operation, strategy) for strategy in strategies])
        if is_library_product(self._program, operation):
            amounts.append(partial_sums(self._problem, operation))
        if operation.primitive.name == CONVOLUTION and is_asymmetrically_padded(self._program, operation):
            made = [strategy.results[0] for strategy in strategies]
            amounts.append(_sizes_in(self._problem, operation.results[0], made))
        yield from (Buffer(None, place, place, (own,), np.array(some), "scratch") for some in amounts if np.any(some))


def own_variable(problem: Problem, operation: Operation) -> int | None:
    """The variable of an operation, which may be its result's."""
    own = problem.variables.operations.get(operation.index)
    return problem.variables.values.get(operation.results[0]) if own is None and operation.results else own


@memoize
def _sizes(problem: Problem, value: int) -> Array:
    """float [layouts]: bytes on one device."""
    return problem.program.values[value].total_bytes / problem.domain(value).degrees


def _sizes_in(problem: Problem, value: int, layouts: Sequence[Layout | None]) -> Array:
    """float [layouts]: bytes on one device in each of these layouts, and 0 for None."""
    position, sizes = problem.domain(value).position, _sizes(problem, value)
    return np.array([0.0 if layout is None else sizes[position[layout]] for layout in layouts])


def _copy_sizes(problem: Problem, value: int) -> Array:
    """float [layouts of the value, of the copy]: bytes of the copy where the two layouts differ."""
    sizes = _sizes(problem, value)
    return np.where(np.eye(len(sizes), dtype=bool), 0.0, sizes[None, :])


def _sizes_where_shapes_differ(problem: Problem, value: int, other: int) -> Array:
    """float [layouts of a value, of another one]: bytes of the other where the shapes of their blocks differ."""
    mesh = problem.space.mesh
    mine, theirs = (
        np.array([[mesh.degree(axes) for axes in layout] for layout in problem.domain(one).layouts])
        for one in (value, other)
    )
    same = (mine[:, None] == theirs[None, :]).all(-1)
    return np.where(same, 0.0, _sizes(problem, other)[None, :])


def _missing_sizes(problem: Problem, value: int, wanted: Sequence[Layout | None], sliced: bool) -> Array:
    """float [layouts, wanted]: bytes of each wanted layout that differs from the first one.

    ``sliced``: kernels read a part of the first one in place, so that such layouts have 0 bytes."""
    domain, sizes = problem.domain(value), _sizes(problem, value)
    places = np.array([-1 if layout is None else domain.position.get(layout, -1) for layout in wanted])
    there = np.arange(len(domain.layouts))
    free = (there[:, None] == places[None, :]) | (places[None, :] < 0)
    if sliced:
        free |= _parts(domain.layouts)[:, places]
    return np.where(free, 0.0, sizes[places][None, :])


def _resharded(problem: Problem, operation: Operation, position: int) -> Array | None:
    """float [layouts of an operand, strategies]: bytes of the copy that an operation reads. None without any copy.
    Operations with the same choices and equal operands share one table."""
    choices, operand = problem.choices[operation.index], operation.operands[position]
    assert isinstance(operand, int)
    computed = computes_operand(problem, operation, position)
    size, domain = problem.program.values[operand].total_bytes, problem.domain(operand)
    key = "resharded", id(choices), position, size, domain, computed
    if key not in problem.memo:
        wanted = [strategy.operands[position] for strategy in choices.strategies]
        found = _missing_sizes(problem, operand, wanted, sliced=computed)
        problem.memo[key] = found if found.any() else None
    known: Array | None = problem.memo[key]
    return known


def _unreduced(problem: Problem, operation: Operation, position: int) -> Array | None:
    """float [strategies, layouts of a result]: bytes of an operation's own result where it differs from the stored one.
    None where it never does. A kernel computes only the stored part of its result."""
    choices, result = problem.choices[operation.index], operation.results[position]
    size, domain = problem.program.values[result].total_bytes, problem.domain(result)
    computed = operation.index in fusible_operations(problem)
    key = "unreduced", id(choices), position, size, domain, computed
    if key not in problem.memo:
        left = [layout_left(problem, operation, strategy, position) for strategy in choices.strategies]
        places = np.array([domain.position[layout] for layout in left])
        free = places[:, None] == np.arange(len(domain.layouts))[None, :]
        if computed:
            free |= _parts(domain.layouts)[places, :]
        found = np.where(free, 0.0, _sizes(problem, result)[places][:, None])
        problem.memo[key] = found if found.any() else None
    known: Array | None = problem.memo[key]
    return known


@memoize
def repeated_constants(program: Program) -> frozenset[int]:
    """Closed-over arrays that equal another one: XLA keeps one constant."""
    seen, found = set[object](), set[int]()
    for value, held in program.captured.items():
        own = program.values[value]
        here = not isinstance(held, jax.core.Tracer | _jax.Ref) and getattr(held, "is_fully_addressable", True)
        if here and not jax.dtypes.issubdtype(own.dtype, jax.dtypes.extended):
            key = own.shape, str(own.dtype), hash(np.asarray(held).tobytes())
            found |= {value} if key in seen else set()
            seen.add(key)
    return frozenset(found)


@lru_cache(maxsize=1024)
def _parts(layouts: tuple[Layout, ...]) -> NDArray[np.bool_]:
    """bool [layouts, layouts]: whether each device's block of the second is in its block of the first."""
    return np.array([[_is_part(mine, theirs) for theirs in layouts] for mine in layouts], bool)


def _is_part(layout: Layout, other: Layout) -> bool:
    """Whether a layout splits each dimension over the axes of another one, and maybe more axes after these."""
    same = len(layout) == len(other)
    return same and all(theirs[: len(mine)] == mine for mine, theirs in zip(layout, other, strict=True))
