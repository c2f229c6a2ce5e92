"""XLA:GPU's collective combiners, its dot merger, and multi-output fusion.

Each of them makes one node of several nodes of a graph (`shardplan.memory.graph`). The merged node has the dependencies
of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardplan.layout.collectives import CollectiveKind
from shardplan.memory.gpu import H100
from shardplan.memory.graph import Graph, Item, Node
from shardplan.memory.operations import is_library_product
from shardplan.problem.device_bytes import bytes_in
from shardplan.program.operation_kinds import PRODUCT
from shardplan.program.program import operand_type

_COMBINED_KINDS = frozenset({CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER})

_JOINED_FORMS = frozenset({"stored", "left"})

_MAX_CANDIDATES = 8
"""The most readers of the same value that a kernel is tried to be fused with."""

_MAX_PARAMETERS = 32
"""About the most items of a multi-output fusion: XLA limits the parameters of a kernel."""


def merge_collectives(graph: Graph) -> list[int]:
    """Merges independent collectives of a kind, in the order of the program, as XLA's combiners do.

    Returns the group of each node, by its first node. A node without a group is its own.
    """
    groups, behind = list[list[int]](), dict[int, int]()  # per group, the groups that it depends on, as bits
    last: dict[object, int] = {}
    filled: dict[int, float] = {}
    needs = [0] * len(graph.nodes)  # per node, the groups that it depends on

    def reaches(wanted: int, bits: int) -> bool:
        seen = bits
        while bits:
            if bits >> wanted & 1:
                return True
            number = bits.bit_length() - 1
            bits &= ~(1 << number)
            more = behind[number] & ~seen
            seen |= more
            bits |= more
        return False

    for number, node in enumerate(graph.nodes):
        for need in node.needs:
            needs[number] |= needs[need]
        if node.kind != "start" or node.sends[0] not in _COMBINED_KINDS:
            continue
        group = last.get(node.sends, -1)
        if group < 0 or filled[group] + node.bytes > H100.collectives.combined_bytes or reaches(group, needs[number]):
            group = last[node.sends] = len(groups)
            groups.append([])
            filled[group] = behind[group] = 0
        groups[group].append(number)
        filled[group] += node.bytes
        behind[group] |= needs[number] & ~(1 << group)
        needs[number] |= 1 << group
    owner = list(range(len(graph.nodes)))
    for group_members in groups:
        first, *others = group_members
        for other in others:
            owner[other] = first
            owner[graph.nodes[other].other] = graph.nodes[first].other
    return owner


def merged_products(graph: Graph) -> list[list[int]]:
    """The groups of products that XLA's dot merger merges, by node. They share an operand in one layout, are
    independent, and one of them is small."""
    found: dict[object, list[list[int]]] = {}
    schedule, program = graph.schedule, graph.program
    taken = set[int]()
    for number, node in enumerate(graph.nodes):
        if node.kind != "kernel" or not node.library or node.place >= len(program.operations):
            continue
        operation = program.operations[node.place]
        if operation.primitive.name != PRODUCT or not is_library_product(program, operation):
            continue
        strategy = schedule.assignment.strategies[operation.index]
        if schedule.island_dtype(operation) is not None:
            continue
        size = _bytes_moved(graph, node)
        contracted, batch = operation.params["dimension_numbers"]
        for position, operand in enumerate(operation.operands):
            other = operation.operands[1 - position]
            if not isinstance(operand, int) or not isinstance(other, int) or number in taken:
                continue
            kind = str(operand_type(program, other).dtype)
            key = operand, position, contracted[position], batch[position], strategy.operands[position], kind
            free = tuple(strategy.operands[1 - position] or ())
            for group in found.setdefault((*key, free), []):
                small = min(size, sum(_bytes_moved(graph, graph.nodes[n]) for n in group)) <= H100.fusion.merged_bytes
                if small and not any(graph.has_path(n, number) for n in group) and not taken.intersection(group):
                    group.append(number)
                    break
            else:
                found[*key, free].append([number])
    merged = list[list[int]]()
    for groups in found.values():
        for group in groups:
            alone = [n for n in group if n not in taken]
            if len(alone) > 1:
                merged.append(alone)
                taken.update(alone)
    return merged


def _bytes_moved(graph: Graph, node: Node) -> float:
    operation, schedule = graph.program.operations[node.place], graph.schedule
    strategy = schedule.assignment.strategies[operation.index]
    read = zip((*operation.operands, *operation.results), (*strategy.operands, *strategy.results), strict=True)
    return sum(
        bytes_in(schedule, value, layout)
        for value, layout in read
        if isinstance(value, int) and layout is not None and layout in schedule.problem.domain(value).parts
    )


def joined_kernels(graph: Graph) -> list[list[int]]:
    """The groups of kernels of multi-output fusions.

    Their kernels iterate over the same number of elements and are independent. One exception: a kernel may read the
    result of another one elementwise, as in a value for a library call and its sum.
    """
    readers: dict[Item, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        if node.kind == "kernel" and not node.library and all(item.form in _JOINED_FORMS for item in node.makes):
            for item in node.reads:
                readers.setdefault(item, []).append(number)
    groups = _Groups(graph)
    for item in reversed(readers):
        maker = graph.makers.get(item, -1)
        node = graph.nodes[maker]
        if maker >= 0 and node.kind == "kernel" and not node.library and item.form == "stored":
            for number in readers[item]:
                if graph.nodes[number].reads[item] and groups.add(maker, number, direct=True):
                    break
    for numbers in readers.values():
        for place, number in enumerate(numbers):
            if not any(groups.add(other, number) for other in numbers[:place][:_MAX_CANDIDATES]):
                continue
    return groups.found()


class _Groups:
    """The groups of kernels during multi-output fusion."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._members: dict[int, list[int]] = {}
        self._group: dict[int, int] = {}

    def add(self, first: int, second: int, direct: bool = False) -> bool:
        """Joins the groups of two kernels, if possible. ``direct``: the second reads the result of the first."""
        one, other = self._group.get(first, first), self._group.get(second, second)
        if one == other:
            return True
        mine, theirs = self._members.get(one, [one]), self._members.get(other, [other])
        if not self._fit(mine, theirs, direct):
            return False
        self._members[one] = [*mine, *theirs]
        self._members.pop(other, None)
        self._group |= dict.fromkeys(self._members[one], one)
        return True

    def found(self) -> list[list[int]]:
        return [group for group in self._members.values() if len(group) > 1]

    def _fit(self, mine: Sequence[int], theirs: Sequence[int], direct: bool) -> bool:
        graph, nodes = self._graph, self._graph.nodes
        if nodes[mine[0]].elements != nodes[theirs[0]].elements:
            return False
        if len({item for n in (*mine, *theirs) for item in nodes[n].reads}) > _MAX_PARAMETERS:
            return False
        if direct:
            needs = {need for n in theirs for need in nodes[n].needs}.difference(mine)
            return not any(graph.has_path(n, need) for n in mine for need in needs)
        return not any(graph.has_path(a, b) or graph.has_path(b, a) for a in mine for b in theirs)


def join(graph: Graph, groups: Sequence[Sequence[int]], owner: Sequence[int]) -> list[int]:
    """The owner of each node, where the first node of each group owns the group. Groups that would make a cycle stay
    unmerged."""
    found = list(owner)
    for group in groups:
        for number in group[1:]:
            found[number] = group[0]
    if is_ordered(graph, found):
        return found
    if len(groups) == 1:
        return list(owner)
    half = len(groups) // 2
    return join(graph, groups[half:], join(graph, groups[:half], owner))


def is_ordered(graph: Graph, owner: Sequence[int]) -> bool:
    """Whether the graph has no cycle after each node is merged into its owner."""
    return len(ordered(graph, owner)) == len({*owner})


def ordered(graph: Graph, owner: Sequence[int]) -> list[int]:
    """The owners in topological order, dependencies first."""
    needs: dict[int, set[int]] = {own: set() for own in owner}
    for number, node in enumerate(graph.nodes):
        needs[owner[number]].update(owner[need] for need in node.needs)
    readers: dict[int, list[int]] = {own: [] for own in needs}
    for own, some in needs.items():
        some.discard(own)
        for need in some:
            readers[need].append(own)
    missing = {own: len(some) for own, some in needs.items()}
    ready = [own for own in reversed(sorted(needs)) if not missing[own]]
    found = []
    while ready:
        own = ready.pop()
        found.append(own)
        for reader in readers[own]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return found
