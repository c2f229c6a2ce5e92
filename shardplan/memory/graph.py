"""Kernels and collectives of a region, as XLA's last scheduler has them (`shardplan.memory.hiding`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from math import prod

from shardplan.anew import is_behind_barrier
from shardplan.memory.accumulation import waiting_for_sums
from shardplan.memory.barriers import put_barriers
from shardplan.memory.coalescing import bytes_apart
from shardplan.memory.combining import Collective, Gather, gather_for
from shardplan.memory.convolutions import CONVOLUTION
from shardplan.memory.cutting import cut_parts, last_sent, send_parts
from shardplan.memory.ending import Endings, moved_for
from shardplan.memory.fusion import REDUCTIONS
from shardplan.memory.gathering import waits_for
from shardplan.memory.measured_collectives import collective_microseconds
from shardplan.memory.narrower import bytes_brought
from shardplan.memory.nodes import Nodes
from shardplan.memory.outputs import copy_leaving, send_at_the_end
from shardplan.memory.pipelining import send_last_iterations
from shardplan.memory.placing import LATENCY
from shardplan.memory.products import is_multiplied, is_sum
from shardplan.memory.recomputing import Kernels
from shardplan.memory.sizes import bytes_in, layout_left
from shardplan.memory.times import UNKNOWN, is_timed, kernel_microseconds, waiting_in_columns
from shardplan.program import Operation
from shardplan.schedule import Route, Schedule
from shardplan.steps import Step


class Graph(Nodes):
    """The kernels of a region, by the index of the operation that ends them, and its collectives,
    each a start and an end, numbered after all operations: what each needs, and how long it takes."""

    def __init__(
        self,
        schedule: Schedule,
        kernels: Kernels,
        combined: Sequence[Sequence[Collective]],
        gathers: Sequence[Sequence[Collective]],
        region: int = 0,
        endings: Endings | None = None,
    ) -> None:
        """``endings``: those of this region, where they are known already."""
        layouts = schedule.assignment.values
        stored = cache(lambda value: bytes_in(schedule, value, layouts[value]))
        apart = cache(lambda value: bytes_apart(schedule, value, layouts[value]))
        super().__init__(
            lambda value: stored(value) if value in layouts else self.filled.get(value, 0),
            lambda value: apart(value) if value in layouts else 0.0,
        )
        self.schedule, self.program, self.region = schedule, schedule.program, region
        self.starts: dict[int, int] = {}  # per end of a collective, its start
        self.sends: dict[int, float] = {}  # per loop of which an iteration runs apart, how long that sends
        self.deepest = 0.0  # how long all collectives take that wait for one another, once nodes are placed
        self.joined: dict[int, list[int]] = {}
        self.several = list[tuple[int, ...]]()
        self.further: set[int] = set()  # kernels that end no operation, numbered after all collectives
        self.copied: dict[int, int] = {}  # per product that is added to a copy of something, what makes that
        self.filling: dict[int, int] = {}  # per scatter, that of these which makes the zeros it writes into
        self.filled: dict[int, float] = {}  # the bytes of these, and of slices
        self.begun: dict[int, int] = {}  # per stack that a loop fills, what makes what it begins with
        self.leaving: dict[Gather, tuple[int, int, float]] = {}  # of which copies leave: start, copying kernel, bytes
        self.finished: dict[int, int] = {}  # per value that is reduced in several steps, the kernel of the last one
        self.side_by_side: set[tuple[int, int]] = set()  # operands of merged products that have one copy together
        self.beside: dict[tuple[int, int], int] = {}  # per operand of merged products, or convolutions, what copies it
        self.endings = endings = endings or Endings(schedule, kernels, region)
        self.makers = endings.makers
        self._ends: dict[object, int] = {}
        self.merged: set[int] = set()  # ends of collectives that bring several values
        self._sent: dict[int, float] = {}  # per end, the bytes that its collective brings
        self.gathers: dict[Gather, int] = {}
        self._first: dict[Gather, int] = {}  # the start of the first of the collectives that bring each
        self.guarded: dict[Gather, tuple[set[int], set[int]]] = {}  # what those behind barriers need and read
        self.barriers: dict[int, int] = {}  # per barrier, the number that what comes out of it has as a value
        self.reduced: dict[int, int] = {}  # per operation whose results collectives bring to their layouts, their end
        self.sent: dict[int, int] = {}  # per value that collectives bring to its layout, their end
        self.cut = {value: -1 for value in endings.cut if self.makers[value].index not in endings.reads}  # with kernels
        self.reads = endings.reads
        self.computing = {**endings.computing}  # per kernel, how long what takes long in it does
        self.adding = kernels.adding
        self.parts = {o.index for o in self.makers.values() if self._is_part(o)}
        self.tiled, self.scattered = {*endings.tiled}, {*endings.scattered}
        self.by_rows, self.rows = endings.by_rows, endings.rows
        together = {one: number for number, group in enumerate(combined) for one in group}
        self._together: dict[Collective, object] = {one: n for one, n in together.items() if not isinstance(one, int)}
        self._together |= {gather: ("together", n) for n, group in enumerate(gathers) for gather in group}
        self._connect({one: number for one, number in together.items() if isinstance(one, int)})

    def _is_part(self, operation: Operation) -> bool:
        """Whether a library makes a result: together with the workspace, from which it is taken."""
        library = operation.primitive.name == CONVOLUTION or is_multiplied(self.program, operation)
        return library or operation.index in self.adding

    def elements(self, operation: Operation) -> int:
        """How many elements a kernel goes through."""
        if is_sum(self.program, operation):  # a matrix, by a vector
            return max(self.program.values[v].elements for v in operation.operands if isinstance(v, int))
        value = (operation.operands if operation.primitive.name in REDUCTIONS else operation.results)[:1]
        return sum(self.program.values[v].elements for v in value if isinstance(v, int))

    def _connect(self, merged: Mapping[int, int]) -> None:
        sent = self.sent
        for index in self.reads:
            operation = self.program.operations[index]
            strategy = self.schedule.assignment.strategies.get(index)
            self.needs[index], self.place[index], self.takes[index] = set(), index, self._time(operation)
            self.values[index] = set()
            library = index in self.adding or is_timed(self.program, operation)
            if index in self.by_rows and not library:
                self.takes[index] = UNKNOWN
            elif not library:
                self.moves[index] = {*self.reads[index]}, {*operation.results}
                self.slower[index] = waiting_in_columns(self.schedule, operation, self.reads[index])
                self.takes[index] = self.busy(self.computing.get(index, 0.0), index)
            for position, result in enumerate(operation.results if strategy is not None else ()):
                steps = self.schedule.result_steps(operation, position)
                if strategy is not None and any(step.kind != "slice" for step in steps):
                    left = layout_left(self.schedule.problem, operation, strategy, position)
                    key = merged.get(index, ("result", result))
                    start, end = self._bring(index, result, Route(left, steps), key, index)
                    self.needs[start].add(index)
                    self.values[start].add(result)
                    sent[result] = self.reduced[index] = end
        send_parts(self)
        send_last_iterations(self)
        for index in self.reads:
            moved = self._moved(index, sent)
            self.needs[index].update(end for _, end in moved)
            for value in self.reads[index].difference(value for value, _ in moved):
                need = sent.get(value, maker := self.maker(value))
                if need is not None:
                    self.needs[index].add(need)
                if need == maker:
                    self.values[index].add(value)

        for index, value in waiting_for_sums(self.schedule).items():
            if index in self.reads and (maker := self.maker(value)) is not None:
                self.needs[index].add(maker)
        if not self.region:
            send_at_the_end(self)
        put_barriers(self)
        cut_parts(self)
        copy_leaving(self)

    def add(self, place: float, needs: set[int], values: set[int], takes: float) -> int:
        """A further kernel: its number."""
        node = len(self.program.operations) + 2 * len(self._ends) + len(self.further)
        self.further.add(node)
        self.place[node], self.needs[node], self.values[node], self.takes[node] = place, needs, values, takes
        return node

    def runs(self, node: int) -> bool:
        """Whether a node is a kernel, not an end of a collective."""
        return node < len(self.program.operations) or node in self.further

    def sources(self, value: int) -> frozenset[int]:
        """What is in memory that a value is computed from on the way; itself, if it is in memory."""
        return self.endings.sources.get(value, frozenset((value,)))

    def read_from(self, node: int) -> list[int | Gather]:
        """What a kernel reads: values as they are made, and what collectives bring."""
        gathers = self.endings.moved_by.get(node, ())
        moved = {value for gather in gathers for value in self.sources(gather.value)}
        return [*sorted(self.reads[node] - moved), *gathers]

    def brought(self, value: int) -> tuple[Gather, ...]:
        """What is brought to other layouts for a value that is computed on the way."""
        return self.endings.brought.get(value, ())

    def maker(self, value: int) -> int | None:
        """The kernel of the region that makes a value, if one does."""
        if value >= len(self.program.values):  # what a scatter writes into
            return self.filling[value - len(self.program.values)]
        if value in self.finished:
            return self.finished[value]
        maker = self.makers.get(value)
        return maker.index if maker is not None and maker.index in self.reads else None

    def _moved(self, index: int, sent: dict[int, int]) -> list[tuple[int, int]]:
        """The values that an operation reads in another layout, with the ends of the collectives that bring them."""
        found = list[tuple[int, int]]()
        product = self.adding[index].product if index in self.adding else None
        brought = self.endings.moved_by.get(index, ())
        if product is not None:
            brought += tuple(moved_for(self.schedule, self.program.operations[product]))
        for gather in brought:
            end, start = self._gather(gather, index - 1), self.first_start(gather)
            needs, values = self.needs[start], self.values[start]
            if gather.alone is not None and is_behind_barrier(self.schedule, gather.alone, gather.value):
                needs, values = self.guarded.setdefault(gather, (set(), set()))
            needs |= self._awaited(gather, index)
            operand = gather.value
            for value in self.endings.sources.get(operand, frozenset((operand,))):
                maker = self.maker(value)
                if maker is not None:
                    needs.add(sent.get(value, maker))
                if value not in sent:
                    values.add(value)
                found.append((value, end))
        return found

    def made_by(self, value: int) -> set[int]:
        """The nodes that make, or bring to its layout, what a value is computed from."""
        makers = {source: self.maker(source) for source in self.sources(value)}
        return {self.sent.get(source, maker) for source, maker in makers.items() if maker is not None}

    def _awaited(self, gather: Gather, reader: int) -> set[int]:
        """What makes, or brings, the value that a gather for a reader waits for beside what it gathers."""
        found = set[int]()
        for other in waits_for(self.schedule, gather):
            found |= self.made_by(other.value)
            if any(step.kind != "slice" for step in self.schedule.route(*other).steps):
                found.add(self._gather(gather_for(self.schedule, self.program.operations[reader], *other), reader - 1))
        return found

    def _gather(self, gather: Gather, place: int) -> int:
        """The end of what brings a value to another layout, which what is gathered together has in common."""
        if gather not in self.gathers:
            key = self._together.get(gather, gather)
            place = min(place, int(self.place[self._ends[key]])) if key in self._ends else place
            route = self.schedule.route(gather.value, gather.layout)
            self._first[gather], self.gathers[gather] = self._bring(gather, gather.value, route, key, place)
        return self.gathers[gather]

    def _bring(self, sent: int | Gather, value: int, route: Route, key: object, place: int) -> tuple[int, int]:
        """Adds the collectives that bring a value somewhere, one after another, the last of which has a ``key``: the
        start of the first one, and the end of the last."""
        layouts, last = [route.source, *(step.layout for step in route.steps)], last_sent(route.steps)
        found = list[int]()
        for number, step in enumerate(route.steps):
            if step.kind != "slice":
                layout = layouts[number] if step.kind == "reduce-scatter" else step.layout
                size = bytes_brought(self.schedule, value, layout)
                own = key if step is last else self._together.get((sent, number), (sent, number))
                found.append(self.collective(own, (step, size), place))
        for before, end in pairwise(found):
            self.needs[self.starts[end]].add(before)
        return self.starts[found[0]], found[-1]

    def first_start(self, gather: Gather) -> int:
        """Where what brings a value begins: the start of the first collective, if it takes several."""
        return self._first[gather]

    def collective(self, key: object, sent: tuple[Step, float], place: int) -> int:
        """The end of a collective, which is made where there is none yet, or grows."""
        if key not in self._ends:
            start = len(self.program.operations) + 2 * len(self._ends)
            self._ends[key] = start + 1
            self.starts[start + 1], self.needs[start], self.needs[start + 1] = start, set(), {start}
            self.takes[start] = LATENCY if sent[0].kind == "all-to-all" else 0.0  # which reads a view
            self.values[start], self.values[start + 1] = set(), set()
        end = self._ends[key]
        if end in self._sent:
            self.merged.add(end)
        self._sent[end] = self._sent.get(end, 0.0) + sent[1]
        devices = prod(self.schedule.space.mesh.sizes[axis] for axis in sent[0].axes)
        self.takes[end] = collective_microseconds(sent[0].kind, self._sent[end], devices)
        self.place[end - 1], self.place[end] = place + 0.3, place + 0.6
        return end

    def _time(self, operation: Operation) -> float:
        """Microseconds that a kernel takes on one device."""
        reads, made = self.reads.get(operation.index, frozenset()), next(iter(operation.results), None)
        if operation.index in self.adding:  # as long as without what it is added to
            operation = self.program.operations[self.adding[operation.index].product]
            reads = frozenset(o for o in operation.operands if isinstance(o, int))
        return kernel_microseconds(self.schedule, operation, reads, made)
