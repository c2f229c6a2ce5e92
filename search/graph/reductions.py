"""Exact reductions: smaller graphs with the same optimum, each with its inverse on `Graph.undo`.

| reduction | takes out | what it leaves |
|---|---|---|
| `eliminate` | variables of degree 0, 1 and 2 without usage | nothing; costs on the neighbour; a table on the two |
| `follow` | a variable whose choice another one's determines (one finite entry per row) | all it has, on that one |
| `drop_dominated` | choices that another one of the variable beats whatever the neighbours do | |

A variable whose usage could bind stays, as its cheapest choice alone does not say what is best; `follow` and
`drop_dominated` take usage into account.
"""

from __future__ import annotations

import heapq
import itertools

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph.graph import Best, Follow, Graph, Infeasible
from shardplan.search.graph.tables import beaten
from shardplan.search.graph.usage_profile import drop_safe_spans, feasible_choices

__all__ = ["drop_dominated", "eliminate", "follow", "reduce_graph", "settle_usage", "shrink"]

_LARGEST_JOIN = 3_000_000
_LARGEST_TABLE = 150_000
_LARGEST_GROWTH = 4


def reduce_graph(graph: Graph, dominance: bool = True) -> None:
    """Runs all the reductions until none finds anything cheap to do."""
    settle_usage(graph)
    while True:
        count = eliminate(graph)
        graph.make_consistent()
        count += follow(graph)
        settle_usage(graph)
        graph.make_consistent()
        if not count and not (dominance and drop_dominated(graph)):
            return


def shrink(graph: Graph, dominance: bool = True) -> None:
    """All reductions, with those that the usage limit allows, until they find nothing more.

    dominance: whether to look for dominated choices, which takes long where tables are not shared.
    """
    while True:
        if graph.usage_limit is not None:
            drop_safe_spans(graph)
        reduce_graph(graph, dominance)
        if graph.usage_limit is None:
            return
        masks = feasible_choices(graph)
        for v, keep in masks.items():
            if not keep.any():
                raise Infeasible(f"no choice of variable {v} fits under the usage limit")
            graph.restrict(v, keep)
        if not masks:
            return
        graph.make_consistent()


def settle_usage(graph: Graph) -> None:
    """Moves usages that are equal for all choices from the variables to `fixed_spans`."""
    for v in graph.live():
        spans = graph.spans[v]
        if not spans:
            continue
        rest = []
        for amounts, start, end in spans:
            if graph.tables.is_level(amounts):
                graph.fixed_spans.append((float(amounts[0]), start, end))
            else:
                rest.append((amounts, start, end))
        if len(rest) < len(spans):
            graph.spans[v] = rest
            graph.undominated.add(v)


def eliminate(graph: Graph) -> int:
    """Takes out variables of degree 0, 1 and 2 that use no memory; returns how many.

    The variable's cheapest choice, given its neighbours', is a cost (degree 1) or a table (degree 2) on them.
    """
    neighbours, costs, spans = graph.neighbours, graph.costs, graph.spans
    leaves: list[int] = []
    joins: list[int] = []

    def offer(v: int) -> None:
        degree = len(neighbours[v])
        if degree <= 2:
            (leaves if degree <= 1 else joins).append(v)

    for v in reversed(graph.live()):
        offer(v)
    count = 0
    while leaves or joins:
        # Joins wait: while leaves can be plucked, a join may yet turn out not to be needed.
        v = (leaves or joins).pop()
        if costs[v] is None or spans[v] or not _eliminate_one(graph, v):
            continue
        count += 1
        if count % 256 == 0:
            graph.tick()
        for w, _ in graph.undo[-1].neighbours:  # type: ignore[union-attr]
            offer(w)
    if not np.isfinite(graph.constant):
        raise Infeasible("the exclusions leave no assignment")
    return count


def _eliminate_one(graph: Graph, v: int) -> bool:
    tables, costs = graph.tables, graph.costs[v]
    assert costs is not None
    around = graph.neighbours[v]
    if len(around) > 2:
        return False
    if len(around) == 2:
        left, right = around.values()
        size = left.shape[1] * right.shape[1]
        if size > _LARGEST_TABLE or size * len(costs) > _LARGEST_JOIN:
            return False
    neighbours = graph.remove(v)
    graph.undo.append(Best(v, costs, neighbours))
    if not neighbours:
        graph.constant += float(costs.min())
    elif len(neighbours) == 1:
        w, table = neighbours[0]
        graph.costs[w] = tables.add(graph.costs[w], tables.project(costs, table))  # type: ignore[arg-type]
        graph.touch((w,))
    else:
        (a, left), (b, right) = neighbours
        if a > b:
            (a, left), (b, right) = neighbours[::-1]
        graph.add_edge(a, b, tables.join(costs, left, right))
    return True


def follow(graph: Graph) -> int:
    """Takes out variables whose choice is determined by a neighbour's; returns how many.

    Those with few edges go first: then a variable that many follow has lost them by the time that it goes itself. Where
    nothing has changed since it was looked at, it is not looked at again; what changes meanwhile is, in its turn.
    """
    neighbours, live = graph.neighbours, graph.live()
    degrees = {v: len(neighbours[v]) for v in live}
    queued = {v for v in live if (graph.exclusions and v in graph.unfollowed) or graph.size(v) == 1}
    heap = [(degrees[v], v) for v in queued]
    heapq.heapify(heap)
    count, reached = 0, (0, -1)
    for number in itertools.count():
        if not heap:
            break
        if number % 256 == 0:
            graph.tick()
        degree, v = heapq.heappop(heap)
        reached = max(reached, (degree, v))
        if graph.costs[v] is None:
            continue
        if degree != len(neighbours[v]):
            heapq.heappush(heap, (len(neighbours[v]), v))
            continue
        around = [*neighbours[v]]
        if graph.size(v) == 1:
            _fold_fixed(graph, v)
        else:
            leader = _leader(graph, v) if graph.exclusions and v in graph.unfollowed else None
            graph.unfollowed.discard(v)
            if leader is None:
                continue
            fold_follower(graph, v, *leader)
            heapq.heappush(heap, (len(neighbours[leader[0]]), leader[0]))
        count += 1
        for w in around if graph.exclusions else ():
            if w not in queued and (degrees[w], w) > reached:
                queued.add(w)
                heapq.heappush(heap, (degrees[w], w))
    return count


def _leader(graph: Graph, v: int) -> tuple[int, NDArray[np.intp]] | None:
    """The neighbour with the fewest choices that determines v's, with the mapping, where folding pays."""
    around = graph.neighbours[v]
    width = 0
    best: tuple[int, int, NDArray[np.intp]] | None = None
    for w, table in around.items():
        mapping = graph.tables.mapping(graph.neighbours[w][v])
        if mapping is None:
            continue
        size = table.shape[1]
        width = width or sum(table.shape[1] for table in around.values())
        if size * (width - size) > _LARGEST_GROWTH * graph.size(v) * width:
            continue
        if best is None or best[:2] > (size, w):
            best = (size, w, mapping)
    return None if best is None else best[1:]


def _fold_fixed(graph: Graph, v: int) -> None:
    """A variable with one choice: its tables are costs of its neighbours."""
    costs = graph.costs[v]
    assert costs is not None
    for w, table in graph.remove(v):
        graph.costs[w] = graph.tables.add(graph.costs[w], table[0])  # type: ignore[arg-type]
        graph.touch((w,))
    graph.constant += float(costs[0])
    graph.fixed_spans += [(float(amounts[0]), start, end) for amounts, start, end in graph.spans[v]]
    graph.spans[v] = []
    graph.undo.append(Best(v, np.zeros(1), ()))


def fold_follower(graph: Graph, v: int, leader: int, mapping: NDArray[np.intp]) -> None:
    """A variable that follows `leader`: everything it has goes to the leader."""
    costs = graph.costs[v]
    assert costs is not None
    for w, table in graph.remove(v):
        if w == leader:
            agreed = graph.tables.followed(costs, table, mapping)
            graph.costs[leader] = graph.tables.add(graph.costs[leader], agreed)  # type: ignore[arg-type]
            graph.touch((leader,))
        else:
            graph.add_edge(leader, w, graph.tables.rows(table, mapping))
    rows = graph.tables.rows
    graph.spans[leader] += [(rows(amounts, mapping), start, end) for amounts, start, end in graph.spans[v]]
    graph.spans[v] = []
    graph.undo.append(Follow(v, leader, mapping))


def drop_dominated(graph: Graph) -> int:
    """Drops choices that another choice beats whatever the neighbours do; returns how many.

    Choice k goes where some l has `costs[l] - costs[k] + sum over neighbours of max(table[l] - table[k]) <= 0`, and
    no usage above k's (Goldstein's criterion of dead-end elimination).
    """
    count = 0
    for number, v in enumerate(graph.live()):
        if number % 8 == 0:
            graph.tick()
        if v not in graph.undominated:
            continue
        graph.undominated.discard(v)
        costs = graph.costs[v]
        assert costs is not None
        size = len(costs)
        if size == 1 or size * sum(t.size for t in graph.neighbours[v].values()) > _LARGEST_JOIN:
            continue
        better = _dominance(graph, v, costs)
        keep = better < 0
        if not keep.all() and keep.any():
            if graph.hint is not None:
                # Whatever the others do, the hint is no worse with the choice that beats its own.
                for _ in range(size):
                    if not keep[graph.hint[v]]:
                        graph.hint[v] = int(better[graph.hint[v]])
            count += int((~keep).sum())
            graph.restrict(v, keep)
    return count


def _dominance(graph: Graph, v: int, costs: NDArray[np.float64]) -> NDArray[np.intp]:
    """Per choice one that beats it, or -1."""
    around = tuple(graph.neighbours[v].values())
    if not graph.spans[v]:
        return graph.tables.beaten(costs, around)
    worse = graph.tables.worse(costs, around)
    for amounts in {id(amounts): amounts for amounts, _, _ in graph.spans[v]}.values():
        worse[amounts[:, None] > amounts[None, :]] = np.inf
    return beaten(worse)
