"""Exact reductions: smaller graphs with the same optimum, each with its inverse on `Graph.undo`.

| reduction | takes out | what it leaves |
|---|---|---|
| `eliminate` | variables of degree 0, 1 and 2 without usage | nothing; costs on the neighbour; a table on the two |
| `follow` | a variable whose choice another one's determines (one finite entry per row) | all it has, on that one |
| `drop_dominated` | choices that another one of the variable beats wherever the neighbours are | |

A variable whose usage could bind stays, as its cheapest choice alone does not say what is best; `follow` and
`drop_dominated` take usage into account.
"""

from __future__ import annotations

import numpy as np

from shardplan.search.graph import Best, Follow, Graph, Infeasible

__all__ = ["drop_dominated", "eliminate", "follow", "reduce_graph", "settle_usage"]

_LARGEST_JOIN = 3_000_000
_LARGEST_TABLE = 150_000


def reduce_graph(graph: Graph) -> None:
    """Runs all the reductions until none finds anything cheap to do."""
    settle_usage(graph)
    while True:
        count = eliminate(graph)
        graph.make_consistent()
        count += follow(graph)
        settle_usage(graph)
        graph.make_consistent()
        if not count and not drop_dominated(graph):
            return


def settle_usage(graph: Graph) -> None:
    """Moves usages that are equal for all choices from the variables to `fixed_spans`."""
    for v in graph.live():
        spans = graph.spans[v]
        if not spans:
            continue
        rest = []
        for amounts, start, end in spans:
            if (amounts == amounts[0]).all():
                graph.fixed_spans.append((float(amounts[0]), start, end))
            else:
                rest.append((amounts, start, end))
        graph.spans[v] = rest


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
    else:
        (a, left), (b, right) = neighbours
        if a > b:
            (a, left), (b, right) = neighbours[::-1]
        graph.add_edge(a, b, tables.join(costs, left, right))
    return True


def follow(graph: Graph) -> int:
    """Takes out variables whose choice is determined by a neighbour's; returns how many."""
    count = 0
    for v in graph.live():
        if graph.costs[v] is None:
            continue
        if graph.size(v) == 1:
            _fold_fixed(graph, v)
            count += 1
            continue
        for leader in sorted(graph.neighbours[v]):
            where = graph.tables.finite(graph.neighbours[leader][v])
            if where is not None and (where.sum(axis=1) == 1).all():
                _fold_follower(graph, v, leader, where.argmax(axis=1))
                count += 1
                break
    return count


def _fold_fixed(graph: Graph, v: int) -> None:
    """A variable with one choice: its tables are costs of its neighbours."""
    costs = graph.costs[v]
    assert costs is not None
    for w, table in graph.remove(v):
        graph.costs[w] = graph.tables.add(graph.costs[w], table[0])  # type: ignore[arg-type]
    graph.constant += float(costs[0])
    graph.fixed_spans += [(float(amounts[0]), start, end) for amounts, start, end in graph.spans[v]]
    graph.spans[v] = []
    graph.undo.append(Best(v, np.zeros(1), ()))


def _fold_follower(graph: Graph, v: int, leader: int, mapping: np.ndarray) -> None:
    """A variable that follows `leader`: everything it has goes to the leader."""
    costs = graph.costs[v]
    assert costs is not None
    for w, table in graph.remove(v):
        if w == leader:
            agreed = table[mapping, np.arange(mapping.size)] + costs[mapping]
            graph.costs[leader] = graph.tables.add(graph.costs[leader], agreed)  # type: ignore[arg-type]
        else:
            graph.add_edge(leader, w, np.ascontiguousarray(table[mapping]))
    graph.spans[leader] += [(amounts[mapping], start, end) for amounts, start, end in graph.spans[v]]
    graph.spans[v] = []
    graph.undo.append(Follow(v, leader, mapping))


def drop_dominated(graph: Graph) -> int:
    """Drops choices that another choice beats whatever the neighbours do; returns how many.

    Choice k goes where some l has `costs[l] - costs[k] + sum over neighbours of max(table[l] - table[k]) <= 0`, and
    no usage above k's (Goldstein's criterion of dead-end elimination).
    """
    count = 0
    for v in graph.live():
        costs = graph.costs[v]
        assert costs is not None
        size = len(costs)
        if size == 1 or size * sum(t.size for t in graph.neighbours[v].values()) > _LARGEST_JOIN:
            continue
        keep = _undominated(graph, v, costs)
        if not keep.all():
            count += int((~keep).sum())
            graph.restrict(v, keep)
    return count


def _undominated(graph: Graph, v: int, costs: np.ndarray) -> np.ndarray:
    # worse[l, k]: at least by how much the total may rise when k is replaced by l.
    worse = costs[:, None] - costs[None, :]
    for table in graph.neighbours[v].values():
        with np.errstate(invalid="ignore"):
            rise = table[:, None, :] - table[None, :, :]
        # inf - inf: k is excluded there itself, so nothing is lost.
        np.copyto(rise, -np.inf, where=np.isnan(rise))
        worse = worse + rise.max(axis=2)
    for amounts, _, _ in graph.spans[v]:
        worse = np.where(amounts[:, None] > amounts[None, :], np.inf, worse)
    beats = worse <= 0
    # Of choices that beat each other, the first stays.
    mutual = beats & beats.T
    order = np.arange(len(costs))
    beats &= ~mutual | (order[:, None] < order[None, :])
    keep = ~beats.any(axis=0)
    return keep if keep.any() else np.ones_like(keep)
