"""Mixtures of assignments within any usage limit: the best exchange of parts between known assignments.

>>> net = Network(usage_limit=9)
>>> variables = [net.add_variable([4.0 + n, 0.0]) for n in range(3)]
>>> for v in variables:
...     net.add_usage(v, [1, 4], 0, 1)
>>> mixtures = Mixtures(net, np.array([0, 0, 0]), [np.array([1, 1, 1])])
>>> [choices if choices is None else choices.tolist() for choices, _ in map(mixtures.within, (9, 6, 4))]
[[0, 1, 1], [0, 0, 1], None]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph.graph import Graph
from shardplan.search.graph.usage_profile import Profile
from shardplan.search.limits.recombination import Recombination
from shardplan.search.network import Network
from shardplan.search.structure.restricted_starts import originals

__all__ = ["Mixtures"]

_WORK = 0.006
"""Of CP-SAT for a mixture, in its deterministic time."""


class Mixtures:
    """Mixtures of an assignment of a network and others."""

    def __init__(self, network: Network, base: NDArray[np.int64], others: Sequence[NDArray[np.int64]]) -> None:
        """Others that the network excludes have no part in this."""
        self.graph = graph = Graph.of(network)
        self._live = live = graph.live()
        self._starts, self._places = _places(network, originals(graph), live)
        offsets = np.cumsum([0, *(graph.size(v) for v in live)]).astype(np.intp)
        profile = Profile(graph, live, offsets[:-1])
        self._limit = profile.limit
        self._recombination = Recombination(graph, live, profile, np.arange(len(profile.instants)), offsets)
        self._room = self._recombination.room
        self._base = self._reduced(base)
        self._others = [self._reduced(other) for other in others if np.isfinite(network.cost(other))]

    def within(self, limit: float) -> tuple[NDArray[np.int64] | None, float]:
        """The cheapest mixture whose usage keeps within a limit, or None where there is none but the base, and the
        seconds that finding it should have taken."""
        self._recombination.room = self._room + (limit - self._limit)
        mixture = self._recombination.best(self._base, self._others, _WORK, 0.0)
        if mixture.choices is None:
            return None, mixture.work
        return self.graph.expand(dict(zip(self._live, mixture.choices.tolist(), strict=True))), mixture.work

    def _reduced(self, choices: NDArray[np.int64]) -> NDArray[np.intp]:
        return self._places[self._starts + choices[self._live]]


def _places(
    network: Network, left: Mapping[int, NDArray[np.intp]], live: Sequence[int]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Where among all choices those of each variable start, and for each choice its place among those that are left
    of its variable: of those that are not, the next one's."""
    starts = np.cumsum([0, *(network.costs[v].size for v in live)]).astype(np.intp)
    kept = np.zeros(starts[-1], dtype=np.intp)
    for start, v in zip(starts.tolist(), live, strict=False):
        kept[start + left[v]] = 1
    before = np.cumsum(kept) - kept
    return starts[:-1], before - np.repeat(before[starts[:-1]], np.diff(starts))
