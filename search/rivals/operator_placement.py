"""Operator placement: every operation whole on one device, the rival of splitting operations over all of them.

A `WorkGraph` is plain data: operations with their seconds and the bytes that they hold all the time, and the tensors
that pass between them. A method says on which device each operation runs. Operations that belong together (a weight,
what reads it, and its update) are never parted.

>>> graph = WorkGraph(seconds=(1.0, 1.0, 1.0, 1.0), held_bytes=(0.0,) * 4, layers=(0, 0, 1, 1),
...                   makers=(0, 1, 2), sizes=(8.0, 2.0, 8.0), reads=((), (0,), (1,), (2,)), seconds_per_byte=0.1)
>>> place(graph, 2, "min_cut").tolist(), place(graph, 2, "round_robin").tolist()
([0, 0, 1, 1], [0, 0, 1, 1])

- `depth_first`: paths through the graph, depth first. A path ends at a turn point: where no reader is left unvisited,
  or where it has a device's share of the work. A path goes to the device that costs least, by what the devices have to
  do already and what would be sent: one of those that hold its neighbours, or the one that least recently got a path.
  (In the manner of Dikbayir's thesis, chapter 4.)
- `min_cut`: recursive bisection into parts of equal load that send few bytes to each other; each bisection by maximum
  flows (OR-tools) whose smaller side grows until both weigh the same (Yang and Wong, ICCAD 1994).
- `round_robin`: layer after layer to one device after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph.union_find import leaders
from shardplan.search.or_tools import max_flow

__all__ = ["PLACEMENTS", "WorkGraph", "place"]

_TOLERANCE = 0.05
"""How far from its share the load of a part may be, as a part of what is parted."""
_GROWTHS = 16
"""In so many steps a side that is too small grows to its share."""


@dataclass(frozen=True, slots=True)
class WorkGraph:
    """Operations, each after those that make what it reads, and the tensors that pass between them.

    seconds, held_bytes: per operation, its time on one device, and what it holds during the whole step (weights).
    layers: per operation, its layer's number, -1 where it has none.
    makers, sizes: per tensor, the operation that makes it, and its bytes.
    reads: per operation, the tensors that it reads.
    seconds_per_byte: of a transfer between two devices.
    together: pairs of operations that must be on one device.

    Raises ValueError where the lengths differ or an operation reads what is made later.
    """

    seconds: Sequence[float]
    held_bytes: Sequence[float]
    layers: Sequence[int]
    makers: Sequence[int]
    sizes: Sequence[float]
    reads: Sequence[tuple[int, ...]]
    seconds_per_byte: float
    together: Sequence[tuple[int, int]] = field(default=())

    def __post_init__(self) -> None:
        lengths = {len(self.seconds), len(self.held_bytes), len(self.layers), len(self.reads)}
        if len(lengths) != 1 or len(self.makers) != len(self.sizes):
            raise ValueError(
                "`seconds`, `held_bytes`, `layers` and `reads` have an entry per operation, `makers` and "
                f"`sizes` per tensor; got {sorted(lengths)} and {len(self.makers)}, {len(self.sizes)}"
            )
        for operation, tensors in enumerate(self.reads):
            late = [tensor for tensor in tensors if self.makers[tensor] >= operation]
            if late:
                raise ValueError(f"operation {operation} reads tensor {late[0]}, which is made later")


def place(graph: WorkGraph, devices: int, method: str) -> NDArray[np.int64]:
    """int [operations]: the device of each, by a method of `PLACEMENTS`. Raises ValueError for unknown ones."""
    if method not in PLACEMENTS:
        raise ValueError(f"unknown placement `{method}`; there are {', '.join(PLACEMENTS)}")
    if devices < 1:
        raise ValueError(f"expected at least one device, got {devices}")
    clusters = _Clusters.of(graph)
    return PLACEMENTS[method](clusters, devices)[clusters.number]


@dataclass(frozen=True, slots=True)
class _Clusters:
    """The graph with what belongs together made one: loads, and the links between clusters with their bytes.

    `load` is the mean of the shares of time and of held bytes, so that it adds up to 1.
    """

    graph: WorkGraph
    number: NDArray[np.int64]
    seconds: NDArray[np.float64]
    load: NDArray[np.float64]
    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    sent: NDArray[np.float64]

    @staticmethod
    def of(graph: WorkGraph) -> _Clusters:
        leading, number = np.unique(leaders(len(graph.seconds), graph.together), return_inverse=True)
        links: dict[tuple[int, int], float] = {}
        for operation, tensors in enumerate(graph.reads):
            for tensor in tensors:
                link = int(number[graph.makers[tensor]]), int(number[operation])
                if link[0] != link[1]:
                    links[link] = links.get(link, 0.0) + graph.sizes[tensor]
        shares = []
        for weights in (graph.seconds, graph.held_bytes):
            total = np.bincount(number, weights=weights, minlength=len(leading))
            shares.append(total / total.sum() if total.sum() > 0 else np.zeros(len(leading)))
        given = [share for share in shares if share.any()] or [np.full(len(leading), 1 / max(1, len(leading)))]
        ends = np.array(list(links), dtype=np.int64).reshape(-1, 2)
        return _Clusters(
            graph,
            number,
            np.bincount(number, weights=graph.seconds, minlength=len(leading)).astype(np.float64),
            np.mean(given, axis=0),
            ends[:, 0],
            ends[:, 1],
            np.array(list(links.values()), dtype=np.float64),
        )

    def __len__(self) -> int:
        return len(self.seconds)

    def neighbours(self, forward: bool, backward: bool) -> list[list[tuple[int, float]]]:
        """Per cluster, those that it sends to, or gets from, with the bytes."""
        found: list[list[tuple[int, float]]] = [[] for _ in range(len(self))]
        for source, target, sent in zip(self.sources.tolist(), self.targets.tolist(), self.sent.tolist(), strict=True):
            if forward:
                found[source].append((target, sent))
            if backward:
                found[target].append((source, sent))
        return found


def _depth_first(clusters: _Clusters, devices: int) -> NDArray[np.int64]:
    around = clusters.neighbours(forward=True, backward=True)
    device = np.full(len(clusters), -1, dtype=np.int64)
    busy, load = np.zeros(devices), np.zeros(devices)
    last_got = [0] * devices
    for turn, path in enumerate(_paths(clusters, 1 / devices), start=1):
        inside = set(path)
        between: dict[int, float] = {}
        for cluster in path:
            for other, sent in around[cluster]:
                if other not in inside and device[other] >= 0:
                    between[int(device[other])] = between.get(int(device[other]), 0.0) + sent
        share = float(clusters.load[path].sum())
        idle = min(range(devices), key=lambda d: (last_got[d], d))
        # A device whose memory and time are taken already is no candidate, unless all are.
        candidates = sorted({*between, idle})
        free = [d for d in candidates if load[d] + share <= (1 + _TOLERANCE) / devices] or [int(load.argmin())]
        own, total = float(clusters.seconds[path].sum()), sum(between.values())
        costs = [busy[d] + own + (total - between.get(d, 0.0)) * clusters.graph.seconds_per_byte for d in free]
        chosen = free[int(np.argmin(costs))]
        device[path] = chosen
        busy[chosen] += own
        load[chosen] += share
        last_got[chosen] = turn
    return device


def _paths(clusters: _Clusters, share: float) -> list[list[int]]:
    """Every cluster once: paths of a depth-first walk, each ending at a turn point."""
    readers = clusters.neighbours(forward=True, backward=False)
    waiting = [iter(found) for found in readers]
    visited = [False] * len(clusters)
    paths: list[list[int]] = []
    for root in range(len(clusters)):
        if visited[root]:
            continue
        visited[root] = True
        stack, path, weight = [root], [root], float(clusters.load[root])
        while stack:
            following = next((reader for reader, _ in waiting[stack[-1]] if not visited[reader]), None)
            if following is None:  # a turn point: the walk goes back to where a reader is left
                stack.pop()
                if path:
                    paths.append(path)
                    path, weight = [], 0.0
                continue
            if path and weight + clusters.load[following] > share:
                paths.append(path)
                path, weight = [], 0.0
            visited[following] = True
            stack.append(following)
            path.append(following)
            weight += float(clusters.load[following])
    return paths


def _round_robin(clusters: _Clusters, devices: int) -> NDArray[np.int64]:
    """A cluster has the layer of most of its operations' time; what has none stays with the first device."""
    layers = np.asarray(clusters.graph.layers, dtype=np.int64)
    device = np.zeros(len(clusters), dtype=np.int64)
    heaviest = np.full(len(clusters), -1.0)
    for operation, layer in enumerate(layers.tolist()):
        cluster, seconds = clusters.number[operation], clusters.graph.seconds[operation]
        if layer >= 0 and seconds > heaviest[cluster]:
            heaviest[cluster] = seconds
            device[cluster] = layer % devices
    return device


def _min_cut(clusters: _Clusters, devices: int) -> NDArray[np.int64]:
    device = np.zeros(len(clusters), dtype=np.int64)
    parts = [(np.arange(len(clusters)), 0, devices)]
    while parts:
        members, first, count = parts.pop()
        if count > 1 and len(members) > 1:
            one = _bisect(clusters, members, (count // 2) / count)
            parts += [(members[one], first, count // 2), (members[~one], first + count // 2, count - count // 2)]
        else:
            device[members] = first
    return device


def _bisect(clusters: _Clusters, members: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """bool [members]: one side of a small cut with about `share` of the members' load; the best from some ends."""
    inside = np.full(len(clusters), -1, dtype=np.int64)
    inside[members] = np.arange(len(members))
    chosen = (inside[clusters.sources] >= 0) & (inside[clusters.targets] >= 0)
    sources, targets = inside[clusters.sources[chosen]], inside[clusters.targets[chosen]]
    cut = _Cut(len(members), sources, targets, np.maximum(1, clusters.sent[chosen].round()).astype(np.int64))
    load = clusters.load[members] / max(float(clusters.load[members].sum()), 1e-300)
    # What has little load hangs on the rest: the ends are where the work is.
    heavy = load >= load.mean()
    first = int(load.argmax())
    far = _farthest(cut, first, heavy)
    opposite = _farthest(cut, far, heavy)
    pairs = dict.fromkeys(((far, opposite), (opposite, far), (first, far)))
    side = min((_between(cut, load, share, *ends) for ends in pairs), key=lambda found: found[:2])[2]
    return side if side[0] or share != 0.5 else ~side


def _farthest(cut: _Cut, start: int, preferred: NDArray[np.bool_]) -> int:
    """The place farthest from another one. Preferred places come first where there are others."""
    others = np.arange(len(preferred)) != start
    among = others & preferred if (others & preferred).any() else others
    return int(np.where(among, cut.distances(start), -1.0).argmax())


def _between(
    cut: _Cut, load: NDArray[np.float64], share: float, one: int, other: int
) -> tuple[float, int, NDArray[np.bool_]]:
    """How far from its share the side of `one` is (within the tolerance: the tolerance), its cut, and the side.

    Maximum flow from one end to the other gives the smallest cut; the side that is too small then becomes the end,
    with some of what is next to it, and so on.
    """
    ends = {True: np.zeros(len(load), dtype=bool), False: np.zeros(len(load), dtype=bool)}
    ends[True][one], ends[False][other] = True, True
    best: tuple[float, int, NDArray[np.bool_]] | None = None
    while True:
        side, sent = cut.smallest(ends[True], ends[False])
        weight = float(load[side].sum())
        found = (max(abs(weight - share), _TOLERANCE), sent, side)
        if best is None or found[:2] < best[:2]:
            best = found
        small = weight < share
        wanted = share if small else 1 - share
        grown = side if small else ~side
        free = np.flatnonzero(~grown & ~ends[not small])
        if found[0] <= _TOLERANCE or not free.size:
            return best
        end = ends[small]
        end |= grown
        at_least = min(wanted, float(load[end].sum()) + wanted / _GROWTHS)
        for place in cut.outwards(end, free):
            end[place] = True
            if load[end].sum() >= at_least:
                break


class _Cut:
    """An undirected graph with capacities."""

    def __init__(
        self, places: int, sources: NDArray[np.int64], targets: NDArray[np.int64], capacity: NDArray[np.int64]
    ) -> None:
        self.places = places
        self.sources = np.concatenate([sources, targets])
        self.targets = np.concatenate([targets, sources])
        self.capacity = np.concatenate([capacity, capacity])

    def smallest(self, one: NDArray[np.bool_], other: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], int]:
        """The side of the smallest cut that `one` is on, with `other` on the other side, and the cut's capacity."""
        number = np.cumsum(~(one | other)) + 1
        number[one], number[other] = 0, 1
        sources, targets = number[self.sources], number[self.targets]
        kept = sources != targets
        flow = max_flow.SimpleMaxFlow()
        flow.add_arcs_with_capacity(sources[kept], targets[kept], self.capacity[kept])
        if not kept.any() or flow.solve(0, 1) != flow.OPTIMAL:
            return one.copy(), 0
        return np.isin(number, flow.get_source_side_min_cut()), flow.optimal_flow()

    def distances(self, start: int) -> NDArray[np.float64]:
        """From `start` to every place, where a link is the shorter the more it can carry; 1e300 without a way."""
        order = np.argsort(self.sources, kind="stable")
        first = np.searchsorted(self.sources[order], np.arange(self.places + 1)).tolist()
        targets, lengths = self.targets[order].tolist(), (1 / self.capacity[order]).tolist()
        found = [1e300] * self.places
        found[start] = 0.0
        queue = [(0.0, start)]
        while queue:
            distance, place = heappop(queue)
            if distance > found[place]:
                continue
            for link in range(first[place], first[place + 1]):
                further = distance + lengths[link]
                if further < found[targets[link]]:
                    found[targets[link]] = further
                    heappush(queue, (further, targets[link]))
        return np.array(found)

    def outwards(self, end: NDArray[np.bool_], free: NDArray[np.intp]) -> list[int]:
        """Free places, those most strongly linked to the end first."""
        pull = np.zeros(len(end))
        leaving = end[self.sources] & ~end[self.targets]
        np.add.at(pull, self.targets[leaving], self.capacity[leaving])
        return sorted(free.tolist(), key=lambda place: -pull[place])


PLACEMENTS: dict[str, Callable[[_Clusters, int], NDArray[np.int64]]] = {
    "depth_first": _depth_first,
    "min_cut": _min_cut,
    "round_robin": _round_robin,
}
"""The methods by name."""
