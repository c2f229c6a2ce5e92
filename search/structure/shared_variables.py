"""Variables that all repeated layers share, and their weight in a folded graph.

Each layer of a decoder attends to the result of the encoder, and all layers may add one bias. The best choice of such a
variable depends on the number of layers: four layers may prefer another choice than fifty. `weighted_graph` multiplies
the tables of the kept layers so that they count as much as all layers. The ends lose some of their freedom by that. The
folded graph is then searched again (`shardplan.search.structure.fold_repeats`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardplan.search.bounds.lagrangian import Messages
from shardplan.search.graph.graph import Graph
from shardplan.search.structure.find_repeats import FoldedGraph

__all__ = ["excess_of_shared", "means", "weighted_graph"]


def _reads(graph: Graph, folded: FoldedGraph) -> set[tuple[int, int]]:
    """Variables outside of the layers that dropped layers read, with the sequence of the readers."""
    return {
        (w, found.orbit[v])
        for found, missing in folded.repetitions
        for v, layer in found.layer.items()
        if layer in missing
        for w in graph.neighbours[v]
        if w not in found.layer
    }


def excess_of_shared(graph: Graph, folded: FoldedGraph, messages: Messages, choices: dict[int, int]) -> float:
    """The excess of the shared variables' choices above the best ones, by the messages of all layers."""
    total = 0.0
    for v in sorted({v for v, _ in _reads(graph, folded)}):
        belief = graph.costs[v]
        assert belief is not None
        for w in graph.neighbours[v]:
            if (v, w) in messages:
                belief = belief + messages[v, w]
        total += float(belief[choices[v]] - belief.min())
    return total


def weighted_graph(graph: Graph, folded: FoldedGraph) -> FoldedGraph:
    """The folded graph with the kept layers weighted as all layers."""
    factor: dict[int, float] = {}
    group: dict[int, int] = {}
    orbit: dict[int, int] = {}
    for number, (found, missing) in enumerate(folded.repetitions):
        gone = sum(layer in missing for layer in found.layer.values())
        factor |= dict.fromkeys(found.layer, len(found.layer) / (len(found.layer) - gone))
        group |= dict.fromkeys(found.layer, number)
        orbit |= found.orbit
    reads = _reads(graph, folded)
    made: dict[tuple[int, float], NDArray[np.float64]] = {}

    def times(table: NDArray[np.float64], count: float) -> NDArray[np.float64]:
        key = id(table), count
        if key not in made:
            made[key] = count * table
        return made[key]

    def of_edge(v: int, w: int) -> float:
        if group.get(v) == group.get(w) or (w, orbit.get(v)) in reads:
            return factor.get(v, 1.0)
        return factor[w] if (v, orbit.get(w)) in reads else 1.0

    small, weight = folded.graph.copy(), {}
    small.constant = graph.constant
    for v in small.live():
        small.costs[v] = times(folded.graph.costs[v], factor.get(v, 1.0))  # type: ignore[arg-type]
        for w, table in folded.graph.neighbours[v].items():
            if v < w and (count := of_edge(v, w)) != 1.0:
                weight[v, w] = weight[w, v] = count
                small.set_edge(v, w, times(table, count))
    return replace(folded, graph=small, weight=weight)


def means(graph: Graph, folded: FoldedGraph, messages: Messages) -> Messages:
    """Messages between dropped layers and shared variables: the mean of the kept layers' messages. Their sum is that of
    the folded graph."""
    result: Messages = {}
    for found, missing in folded.repetitions:
        edges_of: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for v, orbit in found.orbit.items():
            for w in graph.neighbours[v]:
                if w not in found.layer:
                    edges_of.setdefault((orbit, w), []).append((v, w))
        for edges in edges_of.values():
            gone = [(v, w) for v, w in edges if found.layer[v] in missing]
            known = [(v, w) for v, w in edges if (v, w) in messages and (w, v) in messages]
            if gone and known:
                out = np.mean([messages[edge] for edge in known], axis=0)
                back = np.mean([messages[w, v] for v, w in known], axis=0)
                for v, w in gone:
                    result[v, w], result[w, v] = out, back
    return result
