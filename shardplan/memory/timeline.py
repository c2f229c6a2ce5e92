"""The timeline of a schedule: the nodes at each position, and the live range of every item.

Positions number kernels, and the starts and ends of collectives. A loop's body comes before the loop. The live range of
an item begins at the node that makes it, or at its first reader for an item from outside. It ends at its last reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardplan.memory.graph import Graph, Item, Node
from shardplan.memory.kernels import kernels_of
from shardplan.memory.merging import join, joined_kernels, merge_collectives, merged_products
from shardplan.memory.order import Nodes, backward_schedule
from shardplan.problem.schedule import Schedule
from shardplan.program.operation_kinds import moves_between_memories
from shardplan.program.program import Operation


@dataclass(slots=True)
class Span:
    """A live range: the first and the last position, both included, and the position of its maker. -1: from outside."""

    start: int
    end: int
    made: int = -1


@dataclass(frozen=True, slots=True)
class Placed:
    """The merged nodes of a position, and the first position of their body, or their own."""

    nodes: list[Node]
    first: int


class Timeline:
    """The nodes of all regions in their order, with the live ranges of their items."""

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
        for operation in self.program.operations:  # without a kernel: the position of the operation before
            before = found.setdefault(operation.index, (before, before))[1]
        return found

    # ---- order

    def _append(self, region: int) -> None:
        """Appends a region's nodes in their order, those of a loop's body before the loop."""
        graph = Graph(self.schedule, self.kernels, region, self.alias)
        merged = merged_products(graph)
        owner = join(graph, merged, merge_collectives(graph))
        groups = [[n for n in group if owner[n] == n] for group in joined_kernels(graph)]
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
        for own in reversed(backward_schedule(Nodes(needs, takes, place, starts))):
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
            entering = self._carries_in_place(node) if node.kind == "loop" else ()
            for item in node.reads:
                until = first - 1 if item in entering else position
                span = spans.setdefault(item, Span(until, until))
                span.end = max(span.end, until)
                span.start = min(span.start, until) if span.made < 0 else span.start
        for value in (*self.program.inputs, *self.program.captured):
            spans[Item(value, "stored")] = Span(0, self.end)
        for group in self._merged:  # merged products have one result buffer
            parts = [spans[item] for node in group for item in node.makes]
            last = max(part.end for part in parts)
            for part in parts:
                part.end = last
        for position, first, node in self.nodes():
            if node.kind == "loop":
                self._end_body(self.program.operations[node.place], first, position)
        self._end_step()
        self._begin_copies()
        write_in_place(self)

    def _carries_in_place(self, node: Node) -> set[Item]:
        """The items that enter a loop only as carries. The loop updates them in place."""
        links = self.problem.links[node.place]
        carried = {link.target for link in links.inside}
        sources = [(link.source, link.target in carried) for link in links.enter if isinstance(link.source, int)]
        others = {source for source, becomes in sources if not becomes}
        values = {source for source, becomes in sources if becomes} - others
        return {item for item in node.reads if item.value in values}

    def _end_body(self, loop: Operation, first: int, last: int) -> None:
        """Ends the live ranges of a body's outputs.

        A new carry is in place after the last reader of the old one. Stacked outputs and results of branches are in the
        memory of the whole result."""
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

    def _begin_copies(self) -> None:
        """Has copies from the host begin where a barrier lets them: XLA runs them as early as it can."""
        barriers = {node.place: position for position, _, node in self.nodes() if node.kind == "barrier"}
        for operation in self.program.operations:
            if moves_between_memories(self.program, operation):
                [operand, result] = [*operation.read, *operation.results]
                maker, span = self.program.makers.get(operand), self.spans.get(Item(result, "stored"))
                if span is not None and maker is not None and maker.index in barriers:
                    span.start = min(span.start, barriers[maker.index])

    def _end_step(self) -> None:
        """Extends the live ranges of results to the end."""
        for number, output in enumerate(self.program.outputs):
            if isinstance(output, int):
                layout, stored = self.schedule.layout_of_output(number), self.schedule.assignment.values.get(output)
                item = self.alias.get(output) or Item(output, "stored")
                if stored is not None and layout != stored:
                    item = Item(output, "copy", layout)
                if item in self.spans:
                    self.spans[item].end = self.end

    def is_in_place(self, value: int, result: int) -> bool:
        """Whether a result is computed in place of an earlier value, by elementwise kernels and carries of loops."""
        seen, waiting = set[Item](), [self.alias.get(result) or Item(result, "stored")]
        while waiting:
            item = waiting.pop()
            if item.value == value:
                return True
            made = self.spans[item].made if item in self.spans and item not in seen else -1
            seen.add(item)
            for node in self.placed[made].nodes if made >= 0 else ():
                if item in node.makes and node.kind == "loop":
                    waiting += self._carries_in_place(node)
                elif item in node.makes and self.is_made_by_kernel(item):
                    waiting += [read for read, by_element in node.reads.items() if by_element]
        return False

    def is_made_by_kernel(self, item: Item) -> bool:
        """Whether a kernel makes an item. False for library calls, collectives, copies from the host, and items from
        outside."""
        made, operations = self.spans[item].made, self.program.operations
        makers = [node for node in self.placed[made].nodes if item in node.makes] if made >= 0 else []
        kernels = [node for node in makers if not node.library and node.kind == "kernel"]
        return any(not moves_between_memories(self.program, operations[node.place]) for node in kernels)

    def reads_by_element(self, position: int, item: Item) -> bool:
        """Whether the node at a position reads an item only elementwise."""
        read = [node.reads[item] for node in self.placed[position].nodes if item in node.reads]
        return bool(read) and all(read)


def written_order(graph: Graph, owner: Sequence[int]) -> dict[int, int]:
    """Per owner, its position in the order in which XLA writes a computation: operands first, from the results on. It
    is the scheduler's last criterion.

    Merged collectives have their operands in the order of the unmerged ones.
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
    """The position of each node in depth-first order from some roots, dependencies first."""
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
    """Computes results in place of the items that their kernels read last and elementwise.

    These are results of kernels only. The result of a library call shares its buffer with the workspace."""
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
