"""Kernels that XLA:GPU makes one, with several results: those that go through as many elements on a device.

It goes through what is in memory from the program's end. Of what reads a value, kernels become one that do not need
each other (two gradients that read the same activations); a kernel that computes element by element becomes part of one
that reads its result, where others read that as well, or it leaves (a sum for a bias is part of the kernel that makes
what it adds up; an optimizer's new moments come with the update that reads them). Two reductions are one where they
reduce the same dimensions of as many: a loss, added up over everything, is not computed with a bias' gradient, and
waits. Each of several results is taken from them. Those that read parts of a value which do not overlap (a layer's
weights, of all layers' stacked ones) stay apart.

A kernel that goes through rows which it has reduced is written in tiles (`shardplan.memory.rows`), and has one result;
what reads that stays apart, unless it reads something else in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from shardplan.memory.combining import Gather, Joined, reducing
from shardplan.memory.copies import multiplies_apart
from shardplan.memory.fusion import (
    REDUCTIONS,
    fused_operations,
    is_scatter,
    merged_scatters,
    pointwise_operations,
    scatters_as_one,
)
from shardplan.memory.order import read_in_order
from shardplan.memory.placing import LATENCY
from shardplan.memory.products import is_sum
from shardplan.memory.recomputing import Kernels
from shardplan.memory.sizes import layout_left
from shardplan.memory.sums import adds_few, reduced_in
from shardplan.problem import Problem
from shardplan.program import Operation
from shardplan.schedule import Schedule

if TYPE_CHECKING:
    from shardplan.memory.graph import Graph

_MOST_SUMS, _MOST_VALUES = 8, 96
"""Reductions in one kernel, and values that it reads and makes, as XLA counts."""

_WHOLE_BYTES = 1024
"""Of less, XLA lets one kernel read parts that do not overlap."""

_MOST_BETWEEN = 256
"""Nodes between two kernels that are looked at to tell whether one needs the other."""


class Joining(NamedTuple):
    """Which kernels of a region become one, and how long these compute."""

    owner: dict[int, int]
    """Per kernel that is part of another one, that one."""
    computing: dict[int, float]


def join_kernels(graph: Graph, kernels: Kernels) -> Joining:
    """Makes kernels of a graph one as XLA does, what is in memory last first."""
    joining = _Joining(graph, kernels)
    for made in joining.in_memory():
        joining.join_readers(made)
        joining.join_producer(made)
    found = Joining({node: joining.last(node) for node in joining.into}, joining.computing)
    join_as(graph, found)
    return found


def join_as(graph: Graph, joining: Joining) -> None:
    """Makes kernels of a graph one as found in another one of the same kernels."""
    owner = joining.owner
    graph.needs = graph.joining(owner)
    graph.take_in(owner)
    for node, other in owner.items():
        graph.joined.setdefault(other, []).append(node)
    graph.several = [(node, *graph.joined[node]) for node in dict.fromkeys(owner.values())]
    graph.parts.update(owner.values())
    for node in {*owner.values()} & graph.moves.keys():
        graph.computing[node] = joining.computing[node]
        graph.takes[node] = graph.busy(joining.computing[node], node)


def joined_in(graph: Graph) -> Iterator[Joined]:
    """The kernels of a graph that are one, with what each reads from memory."""
    operations, inside = graph.program.operations, read_in_order(graph.program)
    for together in graph.several:
        read, seen = dict[int, None](), {result for node in together for result in operations[node].results}
        for node in together:
            stack = [iter(inside[node])]
            while stack:
                operand = next(stack[-1], None)
                if operand is None:
                    stack.pop()
                elif operand not in seen:
                    seen.add(operand)
                    if operand in graph.makers and graph.sources(operand) != {operand}:
                        stack.append(iter(inside[graph.makers[operand].index]))
                    else:
                        read[operand] = None
        yield Joined(together, tuple(read))


class _Joining:
    """The kernels of a graph that may become one."""

    def __init__(self, graph: Graph, kernels: Kernels) -> None:
        self._graph, program = graph, graph.program
        self.into: dict[int, int] = {}
        """Per node that is part of another one, that one, or another one on the way there."""
        self._known_reading: dict[tuple[int, int], set[int]] = {}
        self._sums: dict[int, object] = {}  # per kernel that reduces, what it does
        self.computing: dict[int, float] = {}
        """Per kernel, how long it computes: for each of its results, all that this is computed from."""
        self._parts: dict[int, list[int]] = {}  # per kernel, those that it was
        self._read: dict[int, set[int]] = {}  # per kernel, the values that it reads
        self._counts: dict[int, int] = {}  # per kernel that may be joined, its reductions
        self._elements: dict[int, tuple[int, float]] = {}  # and into how many parts these are split
        self._plain = set[int]()  # kernels of one operation, to which no other kernel is joined
        self._joined = set[int]()  # kernels with several results
        ended = fused_operations(graph.schedule.problem) & reducing(graph.schedule) - kernels.adding.keys()
        computing = kernels.fused | {index for index in ended if not is_scatter(program, program.operations[index])}
        self._written = _written_into(graph.schedule.problem)
        computing |= self._written
        for node in graph.reads.keys() - graph.by_rows:
            operation = program.operations[node]
            sums = is_sum(program, operation) and not multiplies_apart(graph.schedule, operation)
            reduces = operation.primitive.name in REDUCTIONS or sums
            if not reduces and node not in computing:
                continue
            together = reduces and not adds_few(program, operation)
            if together:
                self._sums[node] = reduced_in(program, operation)
            self._counts[node], self._parts[node], self._read[node] = int(together), [node], {*graph.reads[node]}
            self.computing[node] = graph.computing.get(node, 0.0)
            result = next((program.values[v].elements for v in operation.results), 0)
            elements = graph.elements(operation) if together else result
            self._elements[node] = elements, _degree(graph.schedule, operation, reads=together)
            if not together and graph.reads[node].issuperset(o for o in operation.operands if isinstance(o, int)):
                self._plain.add(node)
        self._place = {node: number for number, node in enumerate(graph.in_order())}
        self._needs = {node: {*needs} for node, needs in graph.needs.items()}
        self._readers: dict[int, set[int]] = {node: set() for node in graph.needs}
        for node, needs in graph.needs.items():
            for need in needs:
                self._readers[need].add(node)
        self._reading = self._all_reading()
        self._leaving = {o for region in program.regions for o in region.outputs if isinstance(o, int)}

    def _all_reading(self) -> dict[int | Gather, list[int]]:
        """Per value, and what a collective brings, the kernels that read it, in their order."""
        found: dict[int | Gather, list[int]] = {}
        for node in sorted(self._graph.reads.keys() & self._place.keys(), key=self._place.__getitem__):
            for source in self._graph.read_from(node):
                found.setdefault(source, []).append(node)
        return found

    def in_memory(self) -> list[int | Gather]:
        """What is in memory, what is made last first; arguments before the first kernel that reads them."""
        places = dict[int | Gather, float]()
        for made, nodes in self._reading.items():
            maker = self._graph.maker(made) if isinstance(made, int) else self._graph.gathers[made]
            places[made] = self._place[nodes[0]] - 0.5 if maker is None else self._place.get(maker, 0)
        return sorted(places, key=lambda made: -places[made])

    def join_readers(self, made: int | Gather) -> None:
        """Makes kernels one that read something larger than a number, and do not need each other."""
        values, value = self._graph.program.values, made if isinstance(made, int) else made.value
        by_rows = isinstance(made, int) and self._graph.maker(made) in self._graph.by_rows
        if by_rows or (value < len(values) and values[value].elements == 1):
            return
        nodes = [*dict.fromkeys(self.last(node) for node in reversed(self._reading[made]) if node in self._counts)]
        nodes.sort(key=lambda node: (node not in self._joined, node in self._plain))
        while nodes:
            node, *nodes = nodes
            if node in self._plain:
                continue
            for other in nodes:
                first, last = sorted((node, other), key=self._place.__getitem__)
                fit = self._fit(node, other) and not self._read_apart(node, other, value)
                behind = self._behind(first, last) if fit else None
                if behind is not None:
                    self._join(other, node, behind)
            nodes = [other for other in nodes if other not in self.into]

    def join_producer(self, made: int | Gather) -> None:
        """Makes what computes a value element by element part of one of several kernels that read it."""
        graph, maker = self._graph, self._graph.maker(made) if isinstance(made, int) else None
        if not isinstance(made, int) or maker is None or maker not in self._counts or maker in self._sums:
            return
        single = len(graph.program.operations[maker].results) == 1
        if not single or maker in graph.reduced or maker in graph.tiled or maker in self.into or maker in self._written:
            return
        users = {self.last(node) for node in self._readers[maker]}
        if len(users) + (made in self._leaving) < 2 and users.isdisjoint(self._joined):
            return
        nodes = [*dict.fromkeys(self.last(node) for node in self._reading[made] if node in self._counts)]
        nodes.sort(key=lambda node: (node not in self._joined, node in self._plain))
        for node in nodes:
            times = self._times(maker, node, made) if self._fit(maker, node) else 0
            behind = self._behind(maker, node, directly=True) if times else None
            if behind is not None:
                self.computing[node] += times * self.computing[maker]
                self._join(maker, node, behind)
                return

    def _times(self, maker: int, node: int, made: int) -> int:
        """How often a kernel computes another one's result of which it becomes part: for each of its own, and once more
        for each of these that is computed from one of the others; 0 where that takes longer than both take one after
        another."""
        graph, computed, parts = self._graph, {made: 1}, sorted(self._parts[node])
        for part in parts:
            places = self._places(part, computed)
            computed |= dict.fromkeys(graph.program.operations[part].results, places) if places else {}
        results = [graph.program.operations[part].results[0] for part in parts]
        times = sum(computed.get(result, 0) for result in results)
        if not graph.moves.keys() >= {maker, *parts}:
            return times
        apart = graph.busy(self.computing[maker], maker) + graph.busy(self.computing[node], *parts) + LATENCY
        computing = self.computing[node] + times * self.computing[maker]
        again = (times - 1) * (graph.read_by(maker) - graph.size_of(made))
        return times if graph.busy(computing, maker, *parts, again=again) <= apart else 0

    def _places(self, part: int, times: Mapping[int, int]) -> int:
        """How often a kernel's result goes through some values, each of them so many ``times``: for its own elements,
        and once more for each operation on the way that takes them from elsewhere."""
        graph, found = self._graph, set[tuple[int, tuple[int, ...]]]()
        operations, pointwise = graph.program.operations, pointwise_operations(graph.schedule.problem)
        stack: list[tuple[int, tuple[int, ...]]] = [(part, ())]
        seen = {*stack}
        while stack and len(seen) < _MOST_BETWEEN:
            index, place = stack.pop()
            there = place if index in pointwise else (*place, index)
            for operand in operations[index].operands:
                if not isinstance(operand, int):
                    continue
                if operand in times:
                    found.add((operand, there))
                elif operand in graph.makers and graph.sources(operand) != {operand}:
                    on_the_way = graph.makers[operand].index, there
                    stack += [] if on_the_way in seen else [on_the_way]
                    seen.add(on_the_way)
        return sum(times[value] for value, _ in found)

    def _fit(self, node: int, other: int) -> bool:
        """Whether two kernels can be one, as far as what they compute goes."""
        sums = self._sums.get(node), self._sums.get(other)
        return (
            self._elements[node] == self._elements[other]
            and (None in sums or sums[0] == sums[1])
            and (self._written.isdisjoint(self._parts[node]) or self._written.isdisjoint(self._parts[other]))
            and self._counts[node] + self._counts[other] <= _MOST_SUMS
            and len(self._read[node] | self._read[other]) + len(self._parts[node] + self._parts[other]) <= _MOST_VALUES
            and not _turns(self._graph, node, other)
        )

    def _read_apart(self, node: int, other: int, value: int) -> bool:
        """Whether each of two kernels reads one part of a value, and these do not overlap."""
        if self._graph.program.values[value].total_bytes < _WHOLE_BYTES:
            return False
        one = self._part_read(node, value)
        two = self._part_read(other, value) if one is not None else None
        return one is not None and two is not None and not all(map(_overlap, one, two))

    def _part_read(self, node: int, value: int) -> list[tuple[int, int]] | None:
        """Where the part of a value begins and ends along each dimension that alone a kernel reads, if it does."""
        operations, found = self._graph.program.operations, set[int]()
        for part in self._parts[node]:
            found |= self._reading_in(part, value)
            if len(found) > 1 or any(operations[one].primitive.name != "slice" for one in found):
                return None
        if not found:
            return None
        params = operations[found.pop()].params
        return [*zip(params["start_indices"], params["limit_indices"], strict=True)]

    def _reading_in(self, part: int, value: int) -> set[int]:
        """The operations that read a value, of those that a kernel's result is computed by."""
        known, graph = self._known_reading, self._graph
        if (part, value) not in known:
            stack, seen, found = [part], {part}, known.setdefault((part, value), set())
            while stack:
                index = stack.pop()
                for operand in graph.program.operations[index].operands:
                    if not isinstance(operand, int):
                        continue
                    if operand == value:
                        found.add(index)
                    elif operand in graph.makers and graph.sources(operand) != {operand}:
                        maker = graph.makers[operand].index
                        if maker not in seen:
                            seen.add(maker)
                            stack.append(maker)
        return known[part, value]

    def last(self, node: int) -> int:
        """The node of which another one is part by now."""
        while node in self.into:
            self.into[node] = self.into.get(self.into[node], self.into[node])
            node = self.into[node]
        return node

    def _near(self, near: dict[int, set[int]], node: int) -> Iterator[int]:
        return (self.last(other) for other in near[node])

    def _behind(self, first: int, last: int, directly: bool = False) -> set[int] | None:
        """What needs a node and stands before another one; None where that is much, or where the other one needs it,
        if not but ``directly``."""
        place, into, readers = self._place, self.into, self._readers
        seen, stack, until = {first}, [first], place[last]
        while stack:
            node = stack.pop()
            for other in readers[node]:
                reader = self.last(other) if other in into else other
                if reader == last and not (directly and node == first):
                    return None
                if place[reader] < until and reader not in seen:
                    seen.add(reader)
                    stack.append(reader)
            if len(seen) > _MOST_BETWEEN:
                return None
        return seen - {first}

    def _join(self, gone: int, kept: int, behind: set[int]) -> None:
        """Makes a node part of another one, both where the later one of them stands but for what is ``behind``."""
        place, into, needs = self._place, self.into, self._needs
        first, last = sorted((gone, kept), key=place.__getitem__)
        before, stack, since = {last}, [last], place[first]
        while stack:
            for other in needs[stack.pop()]:
                need = self.last(other) if other in into else other
                if place[need] > since and need not in before:
                    before.add(need)
                    stack.append(need)
        before.discard(last)
        order = [*sorted(before, key=place.__getitem__), kept, *sorted(behind, key=place.__getitem__)]
        places = sorted(place[node] for node in {*before, *behind, gone, kept})
        place.update(zip(order, places, strict=False))
        self.into[gone] = kept
        for near in (self._needs, self._readers):
            near[kept] = {*self._near(near, gone), *self._near(near, kept)} - {kept}
        self._counts[kept] += self._counts[gone]
        self._parts[kept] += self._parts[gone]
        self._read[kept] |= self._read[gone]
        self.computing[kept] += self.computing[gone]
        if gone in self._sums:
            self._sums.setdefault(kept, self._sums[gone])
        self._plain.discard(kept)
        self._joined.add(kept)


def _written_into(problem: Problem) -> set[int]:
    """The sums, by index, of which a kernel makes one part, to which a scatter then adds the other."""
    return {*merged_scatters(problem).values()} - scatters_as_one(problem).keys()


def _degree(schedule: Schedule, operation: Operation, *, reads: bool) -> float:
    """Into how many parts what a kernel goes through is split: what it ``reads``, or leaves."""
    strategy, problem = schedule.assignment.strategies.get(operation.index), schedule.problem
    if strategy is None or not operation.results:
        return 1
    value, layout = operation.results[0], layout_left(problem, operation, strategy, 0)
    read = next(
        ((o, own) for o, own in zip(operation.operands, strategy.operands, strict=True) if own is not None), None
    )
    if reads and read is not None and isinstance(read[0], int):
        value, layout = read[0], read[1]
    return problem.domain(value).parts[layout]


def _overlap(one: tuple[int, int], two: tuple[int, int]) -> bool:
    return one[0] < two[1] and two[0] < one[1]


def _turns(graph: Graph, node: int, other: int) -> bool:
    """Whether two kernels stay apart since one turns what it reads: in tiles, or each element by itself, where one of
    them makes what the other reads, and that takes longer for all that they read."""
    if not graph.tiled.isdisjoint({node, other}):
        return True
    if graph.scattered.isdisjoint({node, other}) or not graph.moves.keys() >= {node, other}:
        return False
    leads = any(not graph.moves[a][1].isdisjoint(graph.moves[b][0]) for a, b in ((node, other), (other, node)))
    return leads and graph.moving(node, other) > graph.moving(node) + graph.moving(other)
