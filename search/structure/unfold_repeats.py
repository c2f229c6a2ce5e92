"""Choices of the dropped layers of a folded graph, by dynamic programming over the sequence of layers.

The best assignment of few layers may change from one layer to the next, at places where the change is free. The same
change may cost something between other layers. Each dropped layer takes the choices of one kept layer. The sequence is
a cheapest path: its steps cost what a layer costs next to the one before.

>>> import numpy as np
>>> steps = np.array([[5.0, 0.0], [0.0, 5.0]])  # equal states cost
>>> cheapest_path(np.zeros(2), steps, 3, (0, 0))
[1, 0, 1]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph.graph import Graph
from shardplan.search.structure.find_repeats import FoldedGraph, Repetition

__all__ = ["cheapest_path", "unfolded_choices"]

Array = NDArray[np.float64]


def unfolded_choices(graph: Graph, folded: FoldedGraph, choices: dict[int, int]) -> dict[int, int]:
    """An assignment of the whole graph, or a better one in which layers that were left out are like others that stayed
    than those that stand for them."""
    best = graph.cost(choices)
    for repetition, missing in folded.repetitions:
        other = choices | _filled(graph, repetition, missing, choices)
        cost = graph.cost(other)
        if cost < best:
            choices, best = other, cost
    return choices


def _filled(graph: Graph, found: Repetition, missing: range, choices: dict[int, int]) -> dict[int, int]:
    """Choices of the variables of layers that were left out, as dynamic programming over the layers has them best."""
    kept = [layer for layer in range(found.first, found.last + 1) if layer not in missing]
    at = {(found.orbit[v], layer): v for v, layer in found.layer.items()}
    of = {o: np.array([choices[at[o, layer]] for layer in kept]) for o in set(found.orbit.values())}
    first = missing.start
    own, steps = np.zeros(len(kept)), np.zeros((len(kept), len(kept)))
    for o, options in of.items():
        v = at[o, first]
        own += graph.costs[v][options]  # type: ignore[index]
        for w, table in graph.neighbours[v].items():
            if w not in found.layer:
                own += table[options, choices[w]]
            elif found.layer[w] == first and v < w:
                own += table[options, of[found.orbit[w]]]
            elif found.layer[w] == first + 1:
                steps += table[np.ix_(options, of[found.orbit[w]])]
    path = cheapest_path(own, steps, len(missing), (kept.index(first - 1), kept.index(missing.stop)))
    state = dict(zip(missing, path, strict=True))
    return {v: int(of[found.orbit[v]][state[layer]]) for v, layer in found.layer.items() if layer in missing}


def cheapest_path(own: Array, steps: Array, length: int, ends: tuple[int, int]) -> list[int]:
    """The states of `length` places between a first and a last one that cost the least.

    own: float [states], what each costs. steps: float [states, states], from one to the next.
    """
    cost, before = steps[ends[0]] + own, []
    for _ in range(length - 1):
        every = cost[:, None] + steps
        before.append(every.argmin(axis=0))
        cost = every.min(axis=0) + own
    path = [int((cost + steps[:, ends[1]]).argmin())]
    for back in reversed(before):
        path.append(int(back[path[-1]]))
    return path[::-1]
