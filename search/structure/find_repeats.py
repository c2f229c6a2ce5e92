"""Detection of repeated layers in the graph of an unrolled model.

Layers have equal costs and equal tables, as the same objects (see `shardplan.search.graph.tables`). The step from one
layer to the next is a map of variables that keeps costs and tables. The map grows from one pair. A few rounds of
Weisfeiler-Leman refinement colour the variables by their surroundings. Two variables of one colour that are near each
other start the map. Neighbours of mapped variables follow where only one of each fits.

>>> import numpy as np
>>> from shardplan.search.network import Network
>>> net, table = Network(), np.array([[0.0, 1.0], [2.0, 0.0]])
>>> chain = [net.add_variable([0.0, 1.0]) for _ in range(20)]
>>> for u, v in zip(chain, chain[1:]):
...     net.add_edge(u, v, table)
>>> found = find_repetition(Graph.of(net))
>>> len(found.following), found.layer[5] - found.layer[4] in (1, -1)
(19, True)
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Container, Hashable
from dataclasses import dataclass, field

from shardplan.search.graph.graph import Graph

__all__ = ["END_LAYERS", "MORE_END_LAYERS", "FoldedGraph", "Repetition", "find_repetition", "fold"]

_ROUNDS = 4
_MIN_LENGTH = 9
END_LAYERS, MORE_END_LAYERS = 2, 6
"""So many layers are kept at either end, and where what is best of them does not go together when it is lifted: choices
near the ends need not go with themselves in the middle."""
_SIZES_TRIED = 3
_FOLDING_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Repetition:
    """Variables that correspond to one another, layer by layer.

    following: per variable, the one at its place in the next layer. orbit: per variable, the first of its sequence.
    layer: per variable, the number of its layer. first, last: the layers that every sequence has.
    """

    following: dict[int, int]
    orbit: dict[int, int]
    layer: dict[int, int]
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class FoldedGraph:
    """A graph with most of its layers left out.

    graph: of the same variable ids; those of the layers left out are `None`. variable: per variable of the whole
    graph, the one of this graph that stands for it. edge: per edge (both ways round), the one that stands for it.
    repetitions: those that layers were left out of, and which. weight: per edge of the graph (both ways round) whose
    table is multiplied: by what (`shardplan.search.structure.shared_variables`).
    """

    graph: Graph
    variable: dict[int, int]
    edge: dict[tuple[int, int], tuple[int, int]]
    repetitions: list[tuple[Repetition, range]]
    weight: dict[tuple[int, int], float] = field(default_factory=dict)


def find_repetition(graph: Graph, known: Container[int] = ()) -> Repetition | None:
    """The longest repetition, or `None`, in time linear in the graph.

    known: variables that repeat already, from which no more is asked.
    """
    around = _numbered(graph)
    colours = _colours(graph, around)
    if colours is None:
        return None
    classes: dict[int, list[int]] = {}
    for v, colour in colours.items():
        if v not in known:
            classes.setdefault(colour, []).append(v)
    sizes = Counter(len(members) for members in classes.values() if len(members) >= _MIN_LENGTH)
    for size in sorted(sizes, key=lambda s: (-sizes[s] * s, s))[:_SIZES_TRIED]:
        seeds = next(members for members in classes.values() if len(members) == size)
        start = seeds[len(seeds) // 2]
        target = _nearest(start, colours, around)
        if target is None:
            continue
        found = _layers(_grow(graph, start, target, colours, around), around)
        if found is not None:
            return found
    return None


Surroundings = dict[int, list[tuple[int, int]]]


def _numbered(graph: Graph) -> Surroundings:
    """Per variable: its edges' tables, numbered as they are met, and the variables at their other ends."""
    numbers: dict[int, int] = {}
    return {
        v: [(numbers.setdefault(id(table), len(numbers)), w) for w, table in graph.neighbours[v].items()]
        for v in graph.live()
    }


def _colours(graph: Graph, around: Surroundings) -> dict[int, int] | None:
    """Equal numbers for variables whose surroundings are equal; `None` where hardly any are."""
    numbers: dict[Hashable, int] = {}
    colours = {v: numbers.setdefault(id(graph.costs[v]), len(numbers)) for v in around}
    for _ in range(_ROUNDS):
        if 2 * len(numbers) > len(colours):
            return None
        numbers = {}
        colours = {
            v: numbers.setdefault((colours[v], tuple(sorted((t, colours[w]) for t, w in edges))), len(numbers))
            for v, edges in around.items()
        }
    return colours


def _nearest(start: int, colours: dict[int, int], around: Surroundings) -> int | None:
    """The variable of the same colour that the fewest edges lie between."""
    seen, queue = {start}, deque([start])
    while queue:
        for _, w in around[queue.popleft()]:
            if w not in seen:
                if colours[w] == colours[start]:
                    return w
                seen.add(w)
                queue.append(w)
    return None


def _grow(graph: Graph, start: int, target: int, colours: dict[int, int], around: Surroundings) -> dict[int, int]:
    """The map that takes `start` to `target`: as far as it is determined, then, one by one, any way that fits.

    Twins (equal tensors with equal readers) leave a choice. Either is right, and decides the variables that
    depend on it.
    """
    following, taken = {start: target}, {target}
    queue, unclear = deque([start]), deque[int]()

    def open_pairs(v: int) -> list[tuple[list[int], list[int]]]:
        """Neighbours of `v` and of its image that may correspond: by their tables, and where several have one table, by
        their colours too."""
        ours, theirs = _by_table(around[v], following), _by_table(around[following[v]], taken)
        found = []
        for table, ends in ours.items():
            others = theirs.get(table, [])
            if len(ends) == len(others) == 1:
                found.append((ends, others))
            elif others:
                for colour in {colours[w]: None for w in ends}:
                    equal_edges = [[w for w in group if colours[w] == colour] for group in (ends, others)]
                    found.append((equal_edges[0], equal_edges[1]))
        return [pair for pair in found if pair[1]]

    def take(w: int, y: int) -> None:
        if w != y and graph.costs[w] is graph.costs[y]:
            following[w] = y
            taken.add(y)
            queue.append(w)

    while queue or unclear:
        if queue:
            v = queue.popleft()
            for ours, theirs in open_pairs(v):
                if len(ours) == len(theirs) == 1:
                    take(ours[0], theirs[0])
                else:
                    unclear.append(v)
        else:
            v = unclear.popleft()
            for ours, theirs in open_pairs(v)[:1]:
                take(min(ours), min(theirs))
                if queue:
                    unclear.append(v)
    return following


def _by_table(edges: list[tuple[int, int]], without: Container[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for table, w in edges:
        if w not in without:
            found.setdefault(table, []).append(w)
    return found


def _layers(following: dict[int, int], around: Surroundings) -> Repetition | None:
    """Numbers the layers, so that the edges between sequences lead from a layer to itself or one near it."""
    orbits: dict[int, list[int]] = {}
    for first in following.keys() - set(following.values()):
        sequence = [first]
        while sequence[-1] in following:
            sequence.append(following[sequence[-1]])
        orbits[first] = sequence
    longest = max(map(len, orbits.values()), default=0)
    orbits = {first: orbits[first] for first in sorted(orbits) if 4 * len(orbits[first]) >= 3 * longest}
    if longest < _MIN_LENGTH:
        return None
    place = {v: (first, i) for first, sequence in orbits.items() for i, v in enumerate(sequence)}
    offsets = _offsets(orbits, place, around)
    first = max(offsets[o] for o in orbits)
    last = min(offsets[o] + len(sequence) - 1 for o, sequence in orbits.items())
    if last - first + 1 < _MIN_LENGTH:
        return None
    return Repetition(
        following={v: w for v, w in following.items() if v in place},
        orbit={v: o for v, (o, _) in place.items()},
        layer={v: offsets[o] + i for v, (o, i) in place.items()},
        first=first,
        last=last,
    )


def _offsets(orbits: dict[int, list[int]], place: dict[int, tuple[int, int]], around: Surroundings) -> dict[int, int]:
    """The layer in which each sequence begins: those with most edges between them are set against each other first,
    by the step that most of these edges take. Otherwise layers run askew through what repeats in two directions."""
    steps: dict[int, dict[int, Counter[int]]] = {o: {} for o in orbits}
    for v, (o, i) in place.items():
        for _, w in around[v]:
            p, j = place.get(w, (o, 0))
            if p != o:
                steps[o].setdefault(p, Counter())[i - j] += 1
    offsets: dict[int, int] = {}
    for start in orbits:
        if start in offsets:
            continue
        heap = [(0, start, 0)]
        while heap:
            _, o, offset = heapq.heappop(heap)
            if o in offsets:
                continue
            offsets[o] = offset
            for p, counts in steps[o].items():
                if p not in offsets:
                    step, count = max(counts.items(), key=lambda item: (item[1], -abs(item[0]), item[0]))
                    heapq.heappush(heap, (-count, p, offset + step))
    return offsets


def fold(graph: Graph, ends: int = END_LAYERS) -> FoldedGraph | None:
    """The graph without most of its repeated layers, where that makes it much smaller; without its usages.

    ends: the layers that stay at either end. There may be several repetitions, such as the layers of an encoder and
    those of a decoder.
    """
    result: FoldedGraph | None = None
    known: set[int] = set()
    while True:
        small = graph if result is None else result.graph
        found = find_repetition(small, known)
        folded = None if found is None else _without_layers(small, found, ends)
        if found is None or folded is None:
            break
        known |= found.layer.keys()
        result = folded if result is None else _composed(result, folded)
    if result is None or len(result.graph.live()) > _FOLDING_SHARE * len(graph.live()):
        return None
    return result


def _composed(first: FoldedGraph, second: FoldedGraph) -> FoldedGraph:
    """Folding one way, and what comes out another way."""
    return FoldedGraph(
        second.graph,
        {v: second.variable[w] for v, w in first.variable.items()},
        {edge: second.edge[w] for edge, w in first.edge.items() if w in second.edge},
        first.repetitions + second.repetitions,
    )


def _without_layers(graph: Graph, found: Repetition, ends: int) -> FoldedGraph | None:
    """A few layers at either end stay, as the ends may be best with layouts of their own. What led from the last layer
    before those left out to the first of these leads to the first one after them.
    """
    start, stop = found.first + ends, found.last + 1 - ends
    if start >= stop:
        return None
    gone = {v for v, layer in found.layer.items() if start <= layer < stop}
    small = Graph(len(graph.costs))
    small.tables, small.exclusions, small.tick = graph.tables, graph.exclusions, graph.tick
    small.twins = dict(graph.twins)
    for v in graph.live():
        if v not in gone:
            small.costs[v] = graph.costs[v]
    for v in small.live():
        for w, table in graph.neighbours[v].items():
            if w in gone:
                if v not in found.layer or found.layer[v] >= start:
                    continue
                end = _ahead(found, w, stop - start)
                if end is None or end in gone:
                    return None
                small.set_edge(v, end, table)
            elif v < w:
                small.set_edge(v, w, table)
    stand_ins = _variables(graph, found, (start, stop)), _edges(graph, small, found, (start, stop))
    return FoldedGraph(small, *stand_ins, [(found, range(start, stop))])


def _ahead(found: Repetition, v: int, steps: int) -> int | None:
    """The variable this many layers ahead."""
    end: int | None = v
    for _ in range(steps):
        end = None if end is None else found.following.get(end)
    return end


def _variables(graph: Graph, found: Repetition, gap: tuple[int, int]) -> dict[int, int]:
    """The kept variable for each variable: dropped layers map to the nearest kept layer."""
    start, stop = gap
    at = {(found.orbit[v], layer): v for v, layer in found.layer.items() if layer in (start - 1, stop)}
    result = {}
    for v in graph.live():
        layer = found.layer.get(v, start - 1)
        if start <= layer < stop:
            result[v] = at[found.orbit[v], start - 1 if 2 * layer < start + stop else stop]
        else:
            result[v] = v
    return result


def _edges(
    graph: Graph, small: Graph, found: Repetition, gap: tuple[int, int]
) -> dict[tuple[int, int], tuple[int, int]]:
    """Edges correspond if they join the same sequences at the same distance. The one of the nearest layer is taken."""
    start, stop = gap
    missing = stop - start

    def moved(layer: int | None) -> int | None:
        return layer if layer is None or layer < start else layer - missing

    def kind(v: int, w: int, layers: tuple[int | None, int | None]) -> tuple[int, int, int | None]:
        one, other = layers
        distance = None if one is None or other is None else other - one
        return found.orbit.get(v, v), found.orbit.get(w, w), distance

    layer = found.layer.get
    known: dict[tuple[int, int, int | None], dict[int | None, tuple[int, int]]] = {}
    for v in small.live():
        for w in small.neighbours[v]:
            layers = moved(layer(v)), moved(layer(w))
            number = layers[1] if layers[0] is None else layers[0]
            known.setdefault(kind(v, w, layers), {})[number] = (v, w)
    result = {}
    for v in graph.live():
        for w in graph.neighbours[v]:
            equal_edges = known.get(kind(v, w, (layer(v), layer(w))))
            if equal_edges is None:
                continue
            number = layer(v, layer(w))
            if number is not None and number >= start:
                number = number - missing if number >= stop else start - 1 if 2 * number < start + stop else start
            if number is not None and number not in equal_edges:
                number = min(equal_edges, key=lambda n: abs(n - number))  # type: ignore[operator]
            result[v, w] = equal_edges[number]
    return result
