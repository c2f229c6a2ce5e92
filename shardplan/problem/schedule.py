"""The schedule: the program with the layouts and collectives of a solution, in order.

One walk gives both the report of a plan's collectives and the constraints for XLA. Predictions and constraints
therefore agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardplan.layout.collectives import CollectiveKind, Step
from shardplan.layout.layout import Layout, replicated
from shardplan.problem.cost_network import Assignment, Problem
from shardplan.problem.loop_carry_sums import initial_layouts
from shardplan.problem.strategy import Strategy
from shardplan.problem.xla_limits import may_be_island, needs_island, scatters
from shardplan.program.control_flow import Link, layouts_read
from shardplan.program.program import Operation, Value

_MIN_SPLIT_BYTES = 2**16
"""The least bytes of a tensor for which a free split pays."""

"""The kinds of steps that reduce partial results."""


@dataclass(frozen=True, slots=True)
class Route:
    """The steps that change a value from the layout ``source``, which it already has at some reader, to another one."""

    source: Layout
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective: its step, its tensor, its operation, its bytes per device each time, its times per step, its
    region.

    The operation makes or reads the tensor, and is None for an output.
    """

    step: Step
    tensor: Value
    operation: Operation | None
    bytes: float
    times: int
    region: int


class Schedule:
    """An assignment over a program, as routes."""

    def __init__(self, problem: Problem, assignment: Assignment) -> None:
        self.program = problem.program
        self.space = problem.space
        self.choices = problem.choices
        self.assignment = assignment
        self.problem = problem
        self._routes: dict[tuple[int, Layout], Route] = {}
        self._steps: dict[tuple[int, int], tuple[Step, ...]] = {}
        self._sent: tuple[Sent, ...] | None = None
        self.memo: dict[Any, Any] = {}  # memoised results, see `shardplan.memoize`

    def copy(self, value: int) -> Layout:
        """The layout that most readers of a value read."""
        return self.assignment.copies.get(value, self.assignment.values[value])

    def route(self, value: int, target: Layout) -> Route:
        """The way to a layout ``target`` for a reader: the stored value, the shared copy, or steps from either."""
        stored, copy = self.assignment.values[value], self.copy(value)
        if target == stored:
            return Route(stored, ())
        key = (value, target)
        if key not in self._routes:
            source = stored if target == copy else self._nearer(value, target)
            domain = self.problem.domain(value)
            self._routes[key] = Route(source, self.problem.transitions_of(value).path(domain, source, target))
        return self._routes[key]

    def _nearer(self, value: int, target: Layout) -> Layout:
        """The copy, or the value in its own layout if the transition from there is cheaper."""
        domain, stored, copy = self.problem.domain(value), self.assignment.values[value], self.copy(value)
        if not domain.padded or stored == copy:
            return copy
        prices = self.problem.transitions_of(value).table(domain, (target,), self.problem.sent_bytes[value])
        return min(copy, stored, key=lambda layout: float(prices[domain.position[layout], 0]))

    def is_regathered(self, value: int, target: Layout) -> bool:
        """Whether each operation that needs ``target`` has a transition of its own, and no copy is stored.

        A solution without a shared copy means this. A search within a memory limit pays twice the bytes for less
        memory.
        """
        stored = self.assignment.values[value]
        if self.copy(value) != stored or self.is_partial(value, stored):
            return False
        return any(step.fraction > 0 for step in self.route(value, target).steps)

    def layout_of_output(self, number: int) -> Layout:
        """The layout of a result for the caller: that of the input which it replaces, or its own."""
        output, replaced = self.program.outputs[number], self.program.replaced
        if number in replaced:
            return self.assignment.values[replaced[number]]
        if not isinstance(output, int):
            return ()
        if output in self.assignment.generated:
            return self._layout_of_generated(output)
        layout = self.assignment.values[output]
        if not self.is_partial(output, layout):
            return layout
        domain = self.problem.domain(output)
        return domain.layouts[int(self.problem.whole_prices(output)[domain.position[layout]].argmin())]

    def _layout_of_generated(self, output: int) -> Layout:
        """The layout of a result that is computed from no tensor, at no cost in any layout.

        A large one has the layout of a result of the same shape, as a moment has that of its parameter. Otherwise it
        has the layout that splits it most.
        """
        value = self.program.values[output]
        if value.total_bytes < _MIN_SPLIT_BYTES:
            return replicated(len(value.shape))
        domain = self.space.domain(value.shape)
        for number, other in enumerate(self.program.outputs):
            made = isinstance(other, int) and other not in self.assignment.generated
            if made and self.program.values[other].shape == value.shape:  # type: ignore[index]
                return self.layout_of_output(number)
        even = [
            all(size % self.space.mesh.degree(axes) == 0 for size, axes in zip(value.shape, layout, strict=True))
            for layout in domain.layouts
        ]
        return domain.layouts[int(np.where(even, domain.degrees, 0).argmax())]

    def link_layout(self, link: Link) -> Layout:
        """The layout that the source of a link must have. A deferred sum may begin with a whole tensor."""
        rank = len(self.program.values[link.target].shape)
        target = layouts_read(link, (self.assignment.values[link.target],), rank)[0]
        if not (link.begins and isinstance(link.source, int) and self.is_partial(link.source, target)):
            return target
        found = initial_layouts(self.space.domain(self.program.values[link.source].shape), target)
        if link.source in self.assignment.generated:
            return target if self.problem.deferred.is_zero(link.source) else found[0]
        held, size = self.copy(link.source), self.problem.sent_bytes[link.source]
        if held == target or not found:
            return target
        domain = self.problem.domain(link.source)
        prices = self.problem.transitions_of(link.source).table(domain, found, size)
        return found[int(prices[domain.position[held]].argmin())]

    def generating(self, operation: Operation, layout: Layout) -> Strategy:
        """The strategy of an operation without operands that makes a value in ``layout``."""
        domain = self.space.domain(self.program.values[operation.results[0]].shape)
        return self.choices[operation.index].strategies[domain.position[layout]]

    def is_partial(self, value: int, layout: Layout) -> bool:
        """Whether a layout is one of partial sums over mesh axes."""
        return len(layout) > len(self.program.values[value].shape)

    def result_steps(self, operation: Operation, position: int) -> tuple[Step, ...]:
        """The steps from the layout (and partial state) of an operation's result to the planned one."""
        key = operation.index, position
        if key not in self._steps:
            self._steps[key] = self._result_steps(operation, position)
        return self._steps[key]

    def _result_steps(self, operation: Operation, position: int) -> tuple[Step, ...]:
        value = operation.results[position]
        strategy, target = self.assignment.strategies[operation.index], self.assignment.values[value]
        if not strategy.pending[position] and strategy.results[position] == target:
            return ()
        domain, moving = self.problem.domain(value), self.problem.transitions_of(value)
        partial = self.problem.partial(operation, strategy, position)
        if partial.pending:
            return () if target == partial.kept else moving.reductions.path(domain.whole or domain, partial, target)
        return moving.path(domain, partial.layout, target)

    def island_dtype(self, operation: Operation) -> Any:
        """The element type in which an operation's partial results must be reduced inside an island.

        None if XLA alone runs and reduces them as planned.
        """
        strategy = self.assignment.strategies[operation.index]
        if not (self.problem.islands and may_be_island(operation, strategy)):
            return None
        dtype = self.program.values[operation.results[0]].dtype
        if not strategy.pending[0]:
            return dtype if needs_island(operation, strategy) else None
        sum_dtype = self.problem.reduced_in(operation, strategy, 0, self.problem.reduce_dtype)
        steps = self.result_steps(operation, 0)
        reducing = [step for step in steps if step.kind.reduces]
        if not reducing:
            return sum_dtype  # the result stays partial, which only an island can express
        followed_by_slice = len(steps) > len(reducing) and steps[len(reducing)].kind == CollectiveKind.SLICE
        needed = len(reducing) > 1 or needs_island(operation, strategy)
        if reducing[0].kind == CollectiveKind.REDUCE_SCATTER:
            # XLA scatters in the order in which the axes split a contracted dimension, and onto no further split
            axes, among = reducing[0].axes, len(self.space.mesh.names)
            alone = len(axes) < 2 or (axes == strategy.pending[0] and scatters(operation, strategy, axes, among))
            needed = needed or followed_by_slice or not alone or self.scatters_inner_dimension(operation)
        return sum_dtype if needed or sum_dtype != dtype else None

    def scatters_inner_dimension(self, operation: Operation) -> bool:
        """Whether a sum over the last dimensions of a tensor is scattered along another dimension than its first.

        XLA:GPU needs the scattered dimension of a collective outermost in memory, and stores all terms of the sum in
        this dimension order. A sum that is pinned to its dimension order gets the summed dimensions innermost. If these
        are not the last ones, the sum has no pin.
        """
        read = operation.operands[0] if operation.primitive.name == "reduce_sum" else None
        if not isinstance(read, int):
            return False
        axes, rank = operation.params["axes"], len(self.program.values[read].shape)
        if {*axes} != {*range(rank - len(axes), rank)}:
            return False
        layout = self.assignment.strategies[operation.index].results[0]
        shape = self.program.values[operation.results[0]].shape
        for step in self.result_steps(operation, 0):
            if step.kind == CollectiveKind.REDUCE_SCATTER:
                dim = next(dim for dim, split in enumerate(step.layout) if split != layout[dim])
                return any(size > 1 for size in shape[:dim])
        return False

    def collectives(self) -> tuple[Sent, ...]:
        """Every collective of the step, in the order of the program. Of branches, those of the one that sends most."""
        if self._sent is None:
            self._sent = tuple(self._collectives())
        return self._sent

    def _collectives(self) -> list[Sent]:
        found: list[Sent] = []
        done: set[tuple[int, Layout, frozenset[int], int | None]] = set()

        def read(value: int, target: Layout, reader: Operation | None, region: int) -> None:
            route = self.route(value, target)
            by = reader.index if reader and not reader.bodies and self.is_regathered(value, target) else None
            if route.steps and route.source != self.assignment.values[value]:
                read(value, route.source, reader, region)
            tensor = self.program.values[value]
            pending = frozenset(route.source[0] if len(route.source) > len(tensor.shape) else ())
            for step in route.steps:
                pending -= frozenset(step.axes if step.kind.reduces else ())
                if step.fraction > 0 and (value, step.layout, pending, by) not in done:
                    width = self.problem.domain(value).width if step.kind.reduces else 1.0
                    size = step.fraction * self.problem.sent_bytes[value] * width
                    found.append(Sent(step, tensor, reader, size, self.problem.times_of_value(value), region))
                done.add((value, step.layout, pending, by))

        for operation in self.program.operations:
            for link, region in self._links_with_regions(operation):
                if isinstance(link.source, int) and link.source not in self.assignment.generated:
                    read(link.source, self.link_layout(link), operation, region)
            strategy = self.assignment.strategies.get(operation.index)
            if strategy is None:
                continue
            for operand, layout in zip(operation.operands, strategy.operands, strict=True):
                if isinstance(operand, int) and operand not in self.assignment.generated and layout is not None:
                    read(operand, layout, operation, operation.region)
            found += self._sent_by(operation, strategy)
        for number, output in enumerate(self.program.outputs):
            if isinstance(output, int) and output not in self.assignment.generated:
                read(output, self.layout_of_output(number), None, 0)
        sent_in: dict[int, float] = {}
        for one in found:
            sent_in[one.region] = sent_in.get(one.region, 0.0) + one.bytes * one.times
        left_out = self.program.regions_left_out(sent_in)
        return [sent for sent in found if sent.region not in left_out]

    def _sent_by(self, operation: Operation, strategy: Strategy) -> Iterator[Sent]:
        """The collectives of one operation: halo exchanges, those of a region, and those of its results."""
        times, region = self.problem.times(operation), operation.region
        for step, tensor in self.problem.exchanges(operation, strategy):
            yield Sent(step, tensor, operation, step.fraction * self.problem.sent_bytes[tensor.index], times, region)
        for position, result in enumerate(operation.results):
            tensor = self.program.values[result]
            waits = self.is_partial(result, strategy.results[position])
            width = (
                self.problem.domain(result) if waits else self.problem.partial(operation, strategy, position)
            ).width
            for step in self.result_steps(operation, position):
                if step.fraction > 0:
                    size = step.fraction * self.problem.sent_bytes[result] * (width if step.kind.reduces else 1.0)
                    yield Sent(step, tensor, operation, size, times, region)

    def _links_with_regions(self, operation: Operation) -> Iterator[tuple[Link, int]]:
        """The links of an operation with bodies, each with the region of its source's transition."""
        links = self.problem.links.get(operation.index)
        if links is None:
            return
        yield from ((link, operation.region) for link in links.enter)
        ends = len(operation.results) if operation.primitive.name == "cond" else len(links.inside)
        for number, link in enumerate(links.inside):
            # branches come one after another, and the last region of a loop is its body
            yield link, operation.bodies[number // ends] if operation.primitive.name == "cond" else operation.bodies[-1]
