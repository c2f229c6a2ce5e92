"""The graph at given usage prices: usage is a cost instead of a limit.

`PricedGraph.at` gives the graph at some prices. `narrow` drops choices that no assignment within the limit and below
the best cost has. They are missing at all later prices, whose searches are faster.

>>> from shardplan.search.network import Network
>>> net = Network(usage_limit=3)
>>> a = net.add_variable([5.0, 0.0])
>>> net.add_usage(a, [1, 4], 0, 1)
>>> graph = Graph.of(net)
>>> profile = Profile(graph, [a], np.array([0]))
>>> priced = PricedGraph(graph, profile, profile.candidates()).at(np.array([2.0]))
>>> priced.costs[a].tolist(), priced.constant, priced.usage_limit
([7.0, 8.0], -6.0, None)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph.graph import Best, Follow, Graph, Keep
from shardplan.search.graph.usage_profile import Profile

__all__ = ["PricedGraph", "remaining_choices"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]


class PricedGraph:
    """The graph at prices on some instants of its profile."""

    def __init__(self, graph: Graph, profile: Profile, instants: Index) -> None:
        """profile: of all variables that are left, in ascending order."""
        self.graph = graph.copy()
        self.graph.tables = graph.tables  # what was computed of equal tables before is known
        self.graph.usage_limit, self.graph.fixed_spans = None, []
        self.graph.spans = [[] for _ in graph.spans]
        self.graph.undominated.update(v for v, spans in enumerate(graph.spans) if spans)
        self.room = profile.limit - profile.fixed[instants]
        self.kept = {v: np.arange(graph.size(v), dtype=np.intp) for v in graph.live()}
        """Per variable, its choices that are left, as the graph numbers them."""
        amounts = np.stack([profile.at(instant) for instant in instants])
        ends = np.cumsum([graph.size(v) for v in self.kept])
        shares = np.split(amounts, ends[:-1], axis=1)
        self.amounts = {v: share for v, share in zip(self.kept, shares, strict=True) if share.any()}
        """Per variable that uses anything: [instant, choice that is left]."""

    def at(self, prices: Array, rewards: Mapping[int, Array] | None = None) -> Graph:
        """The graph in which usage costs these prices, one per instant.

        rewards: per variable that has any, what is taken off the cost of each choice that is left.
        """
        priced = self.graph.copy()
        tables = priced.tables = self.graph.tables
        priced.constant -= float(prices @ self.room)
        for v, amounts in self.amounts.items():
            share = prices @ amounts
            if rewards and v in rewards:
                share = share - rewards[v]
            priced.costs[v] = tables.add(priced.costs[v], tables.unique(share))  # type: ignore[arg-type]
        priced.undominated.update(self.amounts)
        return priced

    def choices(self, priced: Graph) -> dict[int, int]:
        """The hint of a graph that `at` gave, as choices of the graph that was given. Nothing was left out between."""
        full = priced.expand(priced.hint or {})
        return {v: int(kept[full[v]]) for v, kept in self.kept.items()}

    def narrow(self, priced: Graph, until: int) -> None:
        """Leaves out, from now on, the choices that were dropped from a graph that `at` gave before its `undo` had so
        many steps: because nothing better has them."""
        masks = {v: np.ones(self.graph.size(v), dtype=bool) for v in self.kept}
        for v, left in remaining_choices(priced.undo[:until]).items():
            masks[v][:] = False
            masks[v][left] = True
        before = len(self.graph.undo)
        self.graph.restrict_all(masks)
        self.graph.make_consistent()
        for v, left in remaining_choices(self.graph.undo[before:]).items():
            self.kept[v] = self.kept[v][left]
            if v in self.amounts:
                self.amounts[v] = self.amounts[v][:, left]


def remaining_choices(steps: Sequence[Best | Follow | Keep]) -> dict[int, Index]:
    """Per variable that lost choices by these steps, which of those before are left."""
    left: dict[int, Index] = {}
    for step in steps:
        if isinstance(step, Keep):
            known = left.get(step.variable)
            left[step.variable] = step.kept if known is None else known[step.kept]
    return left
