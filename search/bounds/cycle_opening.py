"""Cycle tightening: short contradictory cycles are found and opened at one variable.

A contraction of tensors and the two that compute its gradients make a cycle of six variables: each reads two of three
tensors. On a mesh with equal axes, each pair of tensors has a split that suits one contraction, with either axis in
either place. Hardly one split of all three tensors suits all contractions. Messages see edges only, so their bound is
that of two half splits. With many layers, such cycles are most of the gap that messages leave.

The contradiction of a cycle is a minimum over its assignments: the largest rise of the bound that one of the pairs
causes. Every assignment of the graph pays it. Most cycles have none. Products of 0/1 matrices show that, over the
choices whose pairs hardly raise the bound. Only the other cycles are measured.

A contradictory cycle is opened at its variable of fewest choices. That choice becomes part of the choices of all other
variables, and neighbours have to agree on it. The cycle is a path then, on which messages are exact.

>>> import numpy as np
>>> from shardplan.search.graph.graph import Graph
>>> from shardplan.search.network import Network
>>> net = Network()
>>> a, b, c = (net.add_variable([0.0, 0.0]) for _ in range(3))
>>> for u, v in ((a, b), (b, c), (a, c)):
...     net.add_edge(u, v, np.array([[3.0, 0.0], [0.0, 4.0]]))
>>> graph = Graph.of(net)
>>> open_cycles(graph, Relaxation(graph), 3.0, 1000).cycles
1
>>> relaxation = Relaxation(graph)
>>> relaxation.improve(3.0)
>>> graph.live(), relaxation.bound
([1, 2], 3.0)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.search.bounds.lagrangian import Relaxation
from shardplan.search.graph.graph import Graph, Keep
from shardplan.search.graph.reductions import fold_follower

__all__ = ["OpenedCycles", "open_cycles"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]
Cycle = list[int]
PairBounds = dict[tuple[int, int], Array]
PairMasks = dict[tuple[int, int], NDArray[np.float32]]
"""Per edge, 1 for pairs that hardly raise the bound and 0 for others. Choices without such pairs are left out."""
_MAX_LENGTH = 8
"""The largest number of edges of a cycle."""
_MAX_CYCLES = 20_000
"""The largest number of cycles that are measured."""
_MAX_ENTRIES_OF_CYCLE, _MAX_ENTRIES = 2e7, 2e9
"""Table entries that the measurement of contradictions reads, of one cycle and of all. Each entry counts once per
choice of the variable that is opened."""
_SECONDS_PER_CYCLE, _SECONDS_PER_ENTRY = 3e-5, 1e-9
"""The estimated time per cycle and per such entry."""
_NOISE_RATIO = 1e-4
"""The share of the gap up to which a contradiction is noise of messages that have not converged."""
_LEAST_GAIN = 0.02
"""The share of the gap that the contradictions of all opened cycles must reach together."""
_LEAST_RATIO_TO_GREATEST = 0.1
"""The share of the greatest contradiction from which on a cycle is opened."""


@dataclass(frozen=True, slots=True)
class OpenedCycles:
    """The number of opened cycles, and the estimated seconds, equal on all machines."""

    cycles: int
    seconds: float


def open_cycles(graph: Graph, relaxation: Relaxation, upper: float, room: int) -> OpenedCycles:
    """Opens the cycles of greatest contradiction, no two with a variable in common.

    relaxation: of the graph as it is, which gets its messages. upper: cost of the best known assignment. room: by how
    many table entries the graph may grow.
    """
    bound, _ = relaxation.reduced_costs()
    gap = upper - bound
    allowed = gap + 1e-9 * max(abs(upper), abs(graph.constant), 1e-30)
    rises: PairBounds = {}
    for v, w, rise in relaxation.pair_costs():
        rises[v, w], rises[w, v] = rise, rise.T
    found, seconds = _contradictory_cycles(graph, rises, _NOISE_RATIO * gap)
    chosen: list[tuple[Cycle, list[tuple[Index, Index]]]] = []
    used: set[int] = set()
    total = 0.0
    for by, cycle in found:
        if by < _LEAST_RATIO_TO_GREATEST * found[0][0] or not used.isdisjoint(cycle):
            continue
        pairs = _pairs(graph, rises, cycle, allowed)
        growth = _growth(graph, cycle, pairs)
        if all(len(first) for first, _ in pairs) and growth <= room:
            chosen.append((cycle, pairs))
            used.update(cycle)
            room -= max(0, growth)
            total += by
    if total < _LEAST_GAIN * gap:
        return OpenedCycles(0, seconds)
    relaxation.reparametrise()
    for cycle, pairs in chosen:
        _open(graph, cycle, pairs)
    graph.forget()
    return OpenedCycles(len(chosen), seconds)


def _contradictory_cycles(graph: Graph, rises: PairBounds, least: float) -> tuple[list[tuple[float, Cycle]], float]:
    """Cycles of a contradiction above `least`, the greatest first, with the contradiction, and the estimated
    seconds."""
    fitting = _pair_masks(graph, rises, least)
    found: list[tuple[float, Cycle]] = []
    count = entries = 0
    for cycle in itertools.islice(_cycles(graph), _MAX_CYCLES):
        edges = _edges(cycle)
        count += 1
        if _fits(fitting, edges):
            continue
        own = graph.size(cycle[0]) * sum(rises[edge].size for edge in edges)
        if own > _MAX_ENTRIES_OF_CYCLE:
            continue
        entries += own
        if entries > _MAX_ENTRIES:
            break
        by = _contradiction(rises, edges)
        if by > 0:
            found.append((by, cycle))
    found.sort(key=lambda pair: (-pair[0], pair[1]))
    return found, count * _SECONDS_PER_CYCLE + entries * _SECONDS_PER_ENTRY


def _pair_masks(graph: Graph, rises: PairBounds, least: float) -> PairMasks:
    """The pairs that raise the bound by up to `least`. A cycle has two edges at each variable, so it takes none of the
    choices that have such a pair at fewer: few are left, of many."""
    pairs = {(v, w): rise <= least for (v, w), rise in rises.items() if v < w}
    edges = {v: np.zeros(graph.size(v), dtype=np.intp) for v in graph.live()}
    for (v, w), fits in pairs.items():
        edges[v] += fits.any(axis=1)
        edges[w] += fits.any(axis=0)
    left = {v: np.flatnonzero(count > 1) for v, count in edges.items()}
    fitting: PairMasks = {}
    for (v, w), fits in pairs.items():
        fitting[v, w] = fits[left[v][:, None], left[w]].astype(np.float32)
        fitting[w, v] = fitting[v, w].T
    return fitting


def _cycles(graph: Graph) -> Iterator[Cycle]:
    """All cycles that are short enough, each once, from its variable of fewest choices on."""
    for v in graph.live():
        for cycle in _cycles_from(graph, v, _distances(graph, v)):
            first = min(range(len(cycle)), key=lambda i: (graph.size(cycle[i]), cycle[i]))
            yield cycle[first:] + cycle[:first]


def _distances(graph: Graph, v: int) -> dict[int, int]:
    """How far from `v` the variables of higher ids are that a cycle through both can have, on ways through such."""
    distances, front = {v: 0}, [v]
    for distance in range(1, _MAX_LENGTH // 2 + 1):
        reached = {y for x in front for y in graph.neighbours[x] if y > v and y not in distances}
        front = sorted(reached)
        distances.update(dict.fromkeys(front, distance))
    return distances


def _cycles_from(graph: Graph, v: int, distances: dict[int, int]) -> Iterator[Cycle]:
    """The cycles of `v` and variables at these distances, each in one of its two directions."""
    waiting = [[v]]
    while waiting:
        path = waiting.pop()
        for y in graph.neighbours[path[-1]]:
            if y == v and len(path) > 2 and path[1] < path[-1]:
                yield path
            elif y in distances and y not in path and len(path) + distances[y] <= _MAX_LENGTH:
                waiting.append([*path, y])


def _edges(cycle: Cycle) -> list[tuple[int, int]]:
    return list(itertools.pairwise([*cycle, cycle[0]]))


def _fits(fitting: PairMasks, edges: list[tuple[int, int]]) -> bool:
    """Whether some assignment of a cycle has no pair that raises the bound."""
    fits = fitting[edges[0]]
    for edge in edges[1:-1]:
        fits = np.minimum(fits @ fitting[edge], np.float32(1.0))
    return bool((fits * fitting[edges[-1]].T).any())


def _contradiction(rises: PairBounds, edges: list[tuple[int, int]]) -> float:
    """The contradiction of a cycle: the least rise of the bound over its assignments."""
    found = math.inf
    for choice in np.argsort(rises[edges[0]].min(axis=1), kind="stable").tolist():
        reached = rises[edges[0]][choice]
        for edge in edges[1:]:
            low = np.flatnonzero(reached < found)  # others come out no lower
            reached = np.maximum(reached[low, None], rises[edge][low]).min(axis=0, initial=np.inf)
        found = min(found, float(reached[choice]))
    return found


def _along(rises: PairBounds, edges: list[tuple[int, int]], choice: int, most: float) -> list[Array]:
    """Per edge of a path from a choice on, and choice of its far end, the least rise of the pairs on the way there; or
    infinity, where it is above `most`."""
    reached = [rises[edges[0]][choice]]
    for edge in edges[1:]:
        low = np.flatnonzero(reached[-1] <= most)
        reached.append(np.maximum(reached[-1][low, None], rises[edge][low]).min(axis=0, initial=np.inf))
    return reached


def _pairs(graph: Graph, rises: PairBounds, cycle: Cycle, allowed: float) -> list[tuple[Index, Index]]:
    """Per variable but the first: the choices of the first one and of its own that may go together in a better one."""
    there, back = _edges(cycle), _edges([cycle[0], *cycle[:0:-1]])
    hint = graph.hint
    ways = [[_along(rises, edges, k, allowed) for edges in (there, back)] for k in range(graph.size(cycle[0]))]
    pairs = []
    for i, u in enumerate(cycle[1:]):
        fits = np.stack([np.maximum(ahead[i], behind[-2 - i]) <= allowed for ahead, behind in ways])
        if hint is not None:
            fits[hint[cycle[0]], hint[u]] = True
        pairs.append(np.nonzero(fits))
    return pairs  # type: ignore[return-value]


def _growth(graph: Graph, cycle: Cycle, pairs: list[tuple[Index, Index]]) -> int:
    """By how many table entries the graph grows where the cycle is opened."""
    sizes = {u: len(first) for u, (first, _) in zip(cycle[1:], pairs, strict=True)}
    within = {frozenset(edge) for edge in _edges(cycle)}
    growth = sum(sizes[u] * sizes[w] for u, w in itertools.pairwise(cycle[1:]))
    growth -= sum(graph.neighbours[u][w].size for u, w in _edges(cycle))
    for place, u in enumerate(cycle):
        more = sizes[u] - graph.size(u) if place else sizes[cycle[1]] - graph.size(u)
        growth += more * sum(graph.size(x) for x in graph.neighbours[u] if frozenset((u, x)) not in within)
    return growth


def _open(graph: Graph, cycle: Cycle, pairs: list[tuple[Index, Index]]) -> None:
    """Lets every variable of a cycle but the first stand for itself and the first: its choice k is the pair of choices
    `first[k]` of the first one and `second[k]` of its own."""
    opened, path = cycle[0], cycle[1:]
    neighbours, hint = graph.neighbours, graph.hint
    closing = neighbours[path[-1]][opened]
    tables = [neighbours[u][w] for u, w in itertools.pairwise(path)]
    for u, w in [(opened, path[-1]), *itertools.pairwise(path)]:
        del neighbours[u][w], neighbours[w][u]
    for u, (first, second) in zip(path, pairs, strict=True):
        graph.undo.append(Keep(u, second))
        costs = graph.costs[u]
        assert costs is not None
        graph.costs[u] = costs[second] + closing[second, first] if u == path[-1] else costs[second]
        for w, table in list(neighbours[u].items()):
            graph.set_edge(u, w, table[second])
        graph.spans[u] = [(amounts[second], start, end) for amounts, start, end in graph.spans[u]]
        graph.twins.pop(u, None)
        if hint is not None:
            hint = {**hint, u: int(np.flatnonzero((first == hint[opened]) & (second == hint[u]))[0])}
    graph.exclusions = True
    for (u, w), table, (first, second), (other, third) in zip(
        itertools.pairwise(path), tables, pairs, pairs[1:], strict=False
    ):
        agree = first[:, None] == other[None, :]
        graph.set_edge(u, w, np.where(agree, table[second[:, None], third[None, :]], np.inf))
    graph.hint = hint
    graph.touch(path)
    fold_follower(graph, opened, path[0], pairs[0][0])
