"""The timeline of a schedule: what runs at each position, and the live range of every item.

Positions number what a device runs: kernels, and the starts and ends of collectives. A loop's body comes before the
loop. An item is live from the node that makes it, or from its first reader on where it is there before, to its last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardplan.memory.graph import Graph, Item, Node
from shardplan.memory.kernels import kernels_of
from shardplan.memory.merging import join, kernels_joined, merge_collectives, products_merged
from shardplan.memory.order import Nodes, placed_backwards
from shardplan.problem.schedule import Schedule
from shardplan.program.program import Operation


@dataclass(slots=True)
class Span:
    """A live range: the first and the last position, both included, and where the item is made (-1: it was there)."""

    start: int
    end: int
    made: int = -1


@dataclass(frozen=True, slots=True)
class Placed:
    """The nodes that are one at a position, and the first position of what is in its body, or its own."""

    nodes: list[Node]
    first: int


class Timeline:
    """The nodes of all regions in their order, with the live ranges of the items that they read and make."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.program, self.problem = schedule, schedule.program, schedule.problem
        self.kernels = kernels_of(schedule)
        self.placed: list[Placed] = []
        self.alias: dict[int, Item | None] = {}
        self._merged: list[list[Node]] = []
        self._append(0)
        self.end = len(self.placed)
        self.spans: dict[Item, Span] = {}
        self._find_spans()

    def nodes(self) -> Iterator[tuple[int, int, Node]]:
        """Every node with its position, and the first position of its body."""
        for position, placed in enumerate(self.placed):
            yield from ((position, placed.first, node) for node in placed.nodes)

    def computed(self) -> dict[int, tuple[int, int]]:
        """Per operation, by index, the first and the last position at which a kernel computes it."""
        found: dict[int, tuple[int, int]] = {}
        for position, _, node in self.nodes():
            if node.kind in ("kernel", "loop", "barrier"):
                for index in (*node.inside, node.place):
                    found[index] = found.get(index, (position, position))[0], position
        before = 0
        for operation in self.program.operations:  # what nothing computes is where the one before it is
            before = found.setdefault(operation.index, (before, before))[1]
        return found

    # ---- order

    def _append(self, region: int) -> None:
        """Appends a region's nodes in their order, those of a loop's body before the loop."""
        graph = Graph(self.schedule, self.kernels, region, self.alias)
        merged = products_merged(graph)
        owner = join(graph, merged, merge_collectives(graph))
        groups = [[n for n in group if owner[n] == n] for group in kernels_joined(graph)]
        owner = join(graph, [group for group in groups if len(group) > 1], owner)
        self._merged += [[graph.nodes[n] for n in group] for group in merged]
        members: dict[int, list[Node]] = {}
        needs: dict[int, set[int]] = {}
        for number, node in enumerate(graph.nodes):
            members.setdefault(owner[number], []).append(node)
            needs.setdefault(owner[number], set()).update(owner[need] for need in node.needs)
        for own, some in needs.items():
            some.discard(own)
        place = written_order(graph, owner)
        takes = {own: sum(node.takes for node in nodes) for own, nodes in members.items()}
        starts = {own: owner[graph.nodes[own].other] for own in members if graph.nodes[own].kind == "end"}
        for own in reversed(placed_backwards(Nodes(needs, takes, place, starts))):
            first = len(self.placed)
            for node in members[own]:
                for body in self.program.operations[node.place].bodies if node.kind == "loop" else ():
                    self._append(body)
            self.placed.append(Placed(members[own], first))

    # ---- live ranges

    def _find_spans(self) -> None:
        spans = self.spans
        for position, first, node in self.nodes():
            start = first if node.kind == "loop" else position
            spans |= {item: Span(start, position, position) for item in node.makes}
        for position, first, node in self.nodes():
            entering = self._becoming_carries(node) if node.kind == "loop" else ()
            for item in node.reads:
                until = first - 1 if item in entering else position
                span = spans.setdefault(item, Span(until, until))
                span.end = max(span.end, until)
                span.start = min(span.start, until) if span.made < 0 else span.start
        for value in (*self.program.inputs, *self.program.captured):
            spans[Item(value, "stored")] = Span(0, self.end)
        for group in self._merged:  # the result of merged products is one buffer
            parts = [spans[item] for node in group for item in node.makes]
            last = max(part.end for part in parts)
            for part in parts:
                part.end = last
        for position, first, node in self.nodes():
            if node.kind == "loop":
                self._leave_body(self.program.operations[node.place], first, position)
        self._leave_step()
        write_in_place(self)

    def _becoming_carries(self, node: Node) -> set[Item]:
        """What enters a loop as carries alone: the loop goes on in its memory."""
        links = self.problem.links[node.place]
        carried = {link.target for link in links.inside}
        sources = [(link.source, link.target in carried) for link in links.enter if isinstance(link.source, int)]
        others = {source for source, becomes in sources if not becomes}
        values = {source for source, becomes in sources if becomes} - others
        return {item for item in node.reads if item.value in values}

    def _leave_body(self, loop: Operation, first: int, last: int) -> None:
        """Ends what goes round, which is in the carry's memory once nothing reads that, and what is stacked or a
        branch's result, which is in the memory of the whole result."""
        for link in self.problem.links[loop.index].inside:
            if not isinstance(link.source, int):
                continue
            item = self.alias.get(link.source) or Item(link.source, "stored")
            span, carry = self.spans.get(item), Item(link.target, "stored")
            if span is None or not first <= span.made <= last:
                continue
            if loop.primitive.name == "cond":
                span.end = span.made - 1
            elif link.stacked is None:
                until = self.spans[carry].end if carry in self.spans else -1
                taken = until < span.made or (until == span.made and self.reads_by_element(until, carry))
                span.end = span.made - 1 if taken else until
            elif span.end <= span.made and self.is_made_by_kernel(item):
                span.end = span.made - 1

    def _leave_step(self) -> None:
        """Keeps results to the end."""
        for number, output in enumerate(self.program.outputs):
            if isinstance(output, int):
                layout, stored = self.schedule.layout_of_output(number), self.schedule.assignment.values.get(output)
                item = self.alias.get(output) or Item(output, "stored")
                if stored is not None and layout != stored:
                    item = Item(output, "copy", layout)
                if item in self.spans:
                    self.spans[item].end = self.end

    def is_written_over(self, value: int, result: int) -> bool:
        """Whether a value that is there before becomes a result by kernels that read it element by element, and loops
        that go on in its memory."""
        seen, waiting = set[Item](), [self.alias.get(result) or Item(result, "stored")]
        while waiting:
            item = waiting.pop()
            if item.value == value:
                return True
            made = self.spans[item].made if item in self.spans and item not in seen else -1
            seen.add(item)
            for node in self.placed[made].nodes if made >= 0 else ():
                if item in node.makes and node.kind == "loop":
                    waiting += self._becoming_carries(node)
                elif item in node.makes and self.is_made_by_kernel(item):
                    waiting += [read for read, by_element in node.reads.items() if by_element]
        return False

    def is_made_by_kernel(self, item: Item) -> bool:
        """Whether a kernel makes an item, neither a library nor a collective; False for what was there before."""
        made = self.spans[item].made
        makers = [node for node in self.placed[made].nodes if item in node.makes] if made >= 0 else []
        return any(not node.library and node.kind == "kernel" for node in makers)

    def reads_by_element(self, position: int, item: Item) -> bool:
        """Whether what runs at a position reads an item at the place of each element that it makes, and only there."""
        read = [node.reads[item] for node in self.placed[position].nodes if item in node.reads]
        return bool(read) and all(read)


def written_order(graph: Graph, owner: Sequence[int]) -> dict[int, int]:
    """Per node that others are part of, its position in the order in which XLA writes a computation: operands first,
    from the results on, which the scheduler keeps where nothing else decides.

    Merged collectives have their operands in the order in which each of them would be written alone.
    """
    before = [
        [*dict.fromkeys([*(graph.makers[item] for item in node.reads if item in graph.makers), *sorted(node.needs)])]
        for node in graph.nodes
    ]
    outputs = (graph.makers.get(Item(o, "stored")) for o in graph.outputs())
    roots = [number for number in outputs if number is not None]
    alone = operands_first(before, [*roots, *range(len(before))])
    members: dict[int, list[int]] = {}
    for number in sorted(range(len(before)), key=lambda number: (alone[number], number)):
        members.setdefault(owner[number], []).append(number)
    joined: list[list[int]] = [[] for _ in before]
    for own, numbers in members.items():
        joined[own] = [owner[need] for number in numbers for need in before[number] if owner[need] != own]
    order = operands_first(joined, [*(owner[root] for root in roots), *members])
    return {own: order[own] for own in members}


def operands_first(before: Sequence[Sequence[int]], roots: Iterable[int]) -> dict[int, int]:
    """The position of each node behind all that it needs, in depth-first order from some roots."""
    order: dict[int, int] = {}
    for root in roots:
        stack = [(root, iter(before[root]))]
        opened = {root}
        while stack:
            node, needs = stack[-1]
            need = next((one for one in needs if one not in order and one not in opened), None)
            if need is None:
                stack.pop()
                order.setdefault(node, len(order))
            else:
                opened.add(need)
                stack.append((need, iter(before[need])))
    return order


def write_in_place(timeline: Timeline) -> None:
    """Gives results the memory of what their kernels read last, element by element: that of kernels' results alone,
    since a library's is one buffer with its workspace."""
    values, spans = timeline.program.values, timeline.spans
    for position, placed in enumerate(timeline.placed):
        read = dict.fromkeys(item for node in placed.nodes for item in node.reads)
        ending = [item for item in read if spans[item].end == position > spans[item].start]
        free = [
            item for item in ending if timeline.reads_by_element(position, item) and timeline.is_made_by_kernel(item)
        ]
        for made in [item for node in placed.nodes for item in node.makes] if free else ():
            size = values[made.value].total_bytes
            taken = next((item for item in free if values[item.value].total_bytes == size), None)
            if taken is not None:
                free.remove(taken)
                spans[taken].end = position - 1
