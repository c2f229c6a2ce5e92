"""Periodic messages of a repeated layer: the fixed point on a ring of a few layers.

Messages change from layer to layer. They describe the cost of the layers before near the first layers, and the cost of
the layers behind near the last ones. In a graph with few layers (`shardplan.search.structure.find_repeats`) they change
within these. A layer between two of them gets messages that do not belong together, and the loss recurs in every copy.
In a ring of a few equal layers no layer is near an end. The mean of their messages, as those of one layer, fits its own
copies. It bounds a layer by no less than the mean over the ring, since bounds are concave in the messages. A loss is
left only where the ends of the whole graph begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from shardplan.search.bounds.lagrangian import Messages, Relaxation
from shardplan.search.graph.graph import Graph
from shardplan.search.solution import relative_gap
from shardplan.search.structure.find_repeats import Repetition

__all__ = ["Ring"]

_LAYERS = 3
"""The fewest where the layer before one and the layer after it are two."""
_SWEEPS = 20
_SWEEP_ON_SHARE = 0.05
"""The part of what is open that so many sweeps must close."""
_MAX_WORK_IN_SWEEPS = 16
"""The work of sweeping a ring is held to that of so many sweeps of the whole graph, which it saves more of."""

EdgeKind = tuple[int, int, int]
"""What edges have in common that join the same sequences of layers at the same distance."""


class Ring:
    """A ring of layers from the middle of a repetition.

    choices: an assignment of the whole graph. messages: of the whole graph, to start from. What they say into a layer
    from outside of all layers becomes a cost.
    After `sweep`: `sweeps`, and `estimate`, the seconds that they should have taken.
    """

    def __init__(self, whole: Graph, found: Repetition, messages: Messages, choices: dict[int, int]) -> None:
        self.whole, self.found = whole, found
        self.sweeps, self.estimate = 0, 0.0
        self._kinds: dict[tuple[int, int], EdgeKind] = {}
        start: Messages = {}
        first = (3 * found.first + found.last) // 4  # all in one half, whose layers have the same choices and messages
        place = {(found.orbit[v], layer): v for v, layer in found.layer.items() if 0 <= layer - first < _LAYERS}
        graph = self.graph = Graph(len(whole.costs))
        graph.tables, graph.exclusions, graph.tick = whole.tables, whole.exclusions, whole.tick
        for v in place.values():
            graph.costs[v] = whole.costs[v]
        for (orbit, layer), v in place.items():
            for w, table in whole.neighbours[v].items():
                step = found.layer[w] - layer if w in found.layer else _LAYERS
                if abs(step) < _LAYERS - 1:
                    end = place[found.orbit[w], first + (layer + step - first) % _LAYERS]
                    graph.set_edge(v, end, table)
                    self._kinds[v, end] = orbit, found.orbit[w], step
                    if (v, w) in messages:
                        start[v, end] = messages[v, w]
                elif (v, w) in messages:
                    graph.costs[v] = graph.costs[v] + messages[v, w]  # type: ignore[operator]
        self._relaxation = Relaxation(graph)
        self._relaxation.load(start)
        self._upper = graph.cost({v: choices[v] for v in place.values()})

    def sweep(self, gap: float, may_go_on: Callable[[], bool]) -> None:
        """Sweeps until the ring's gap is that, or while it helps. may_go_on: asked before each sweep."""
        relaxation = self._relaxation
        most = _MAX_WORK_IN_SWEEPS * self.whole.entries() / max(self.graph.entries(), 1)
        left = math.inf
        while self.sweeps < most and may_go_on():
            relaxation.improve(self._upper)
            self.sweeps += 1
            self._upper = min(self._upper, relaxation.cost)
            if relative_gap(self._upper, relaxation.bound) <= gap:
                break
            if self.sweeps % _SWEEPS == 0:
                before, left = left, self._upper - relaxation.bound
                if left > (1 - _SWEEP_ON_SHARE) * before:
                    break
        self.estimate = self.sweeps * relaxation.seconds_per_sweep

    def messages(self, layers: range) -> Messages:
        """For edges of the whole graph between two of these layers: the mean message of the ring's edges like it."""
        found, messages = self.found, self._relaxation.messages()
        by_kind: dict[EdgeKind, list[np.ndarray]] = {}
        for edge, kind in self._kinds.items():
            by_kind.setdefault(kind, []).append(messages[edge])
        mean = {kind: np.mean(several, axis=0) for kind, several in by_kind.items()}
        result: Messages = {}
        for v, layer in found.layer.items():
            if layer in layers:
                for w in self.whole.neighbours[v]:
                    other = found.layer.get(w, -1)
                    kind = found.orbit[v], found.orbit.get(w, -1), other - layer
                    if other in layers and kind in mean:
                        result[v, w] = mean[kind]
        return result
