"""Large-neighbourhood search (LNS) under a usage limit: a part of the graph is solved again, the rest is fixed.

A part is a variable and its surroundings. The usage of the rest reduces the limit, and the tables to the rest become
costs. The graph solver solves the part. Parts are drawn where the best assignment is furthest above the bound. They
grow when no improvement is found.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardplan.search.bounds.lagrangian import Relaxation
from shardplan.search.budget import Budget, Callbacks
from shardplan.search.graph.graph import Graph
from shardplan.search.graph.usage_profile import Profile
from shardplan.search.solver.graph_solver import GraphSolver

__all__ = ["LargeNeighbourhoodSearch"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]
_SMALLEST, _LARGEST = 20, 400
_BUDGET = Budget(
    sweeps=80,
    promising_choices=3,
    largest_table=3e4,
    table_entries=1e6,
    cp_sat_work=0.3,
    cp_sat_entries=3000,
    dives=False,
    contraction_entries=0,
)


class LargeNeighbourhoodSearch:
    """Improves `graph.hint`, whose cost is `upper`, step by step."""

    def __init__(self, graph: Graph, upper: float, prices: dict[int, float], above: dict[int, float]) -> None:
        """above: per variable, by how much its choice's least cost is above the variable's least (see `excess`)."""
        assert graph.hint is not None
        self.graph, self.prices = graph, prices
        self.live = graph.live()
        self.rng = np.random.default_rng(1)
        self.size = 60.0
        self.steps = 0
        self.estimate = 0.0
        """Seconds that the parts' sweeps should have taken, the same on every machine."""
        sizes = np.array([graph.size(v) for v in self.live], dtype=np.intp)
        self.profile = Profile(graph, self.live, np.cumsum(sizes) - sizes)
        self.place = {v: i for i, v in enumerate(self.live)}
        owners = self.profile.owners
        self.span_bounds = np.searchsorted(owners, np.arange(len(self.live) + 1))
        self.restart(upper)
        weights = np.array([above[v] for v in self.live])
        self.weights = weights + 0.1 * max(float(weights.mean()), 1e-30)

    def restart(self, upper: float) -> None:
        """Restarts from the graph's hint after another method has improved it."""
        hint = self.graph.hint
        assert hint is not None
        self.upper = upper
        self.choices = np.array([hint[v] for v in self.live], dtype=np.intp)
        self.used = self.profile.used(self.choices)

    def step(self, callbacks: Callbacks) -> bool:
        """Solves one part again. True where the assignment improves."""
        self.steps += 1
        part = self._draw()
        small, spans = self._cut(part)
        before = small.cost(small.hint)  # type: ignore[arg-type]
        solver = GraphSolver(small, before, _BUDGET, 1e-9, callbacks)
        solver.prices = self.prices
        solver.solve()
        self.estimate += solver.estimate
        gain = before - solver.upper
        self.size = min(max(self.size * (1.01 if solver.closed else 0.98), _SMALLEST), _LARGEST)
        if gain <= 1e-12 * abs(self.upper):
            return False
        found = small.expand(small.hint or {})
        return self._adopt(part, found, spans)

    def _draw(self) -> list[int]:
        """A variable, drawn by its weight, and those nearest to it, in a random order at equal distance."""
        rng, neighbours = self.rng, self.graph.neighbours
        wanted = int(self.size * rng.uniform(0.5, 1.5))
        start = self.live[int(np.searchsorted(np.cumsum(self.weights), rng.random() * self.weights.sum()))]
        part, queue = {start: None}, [start]
        while queue and len(part) < wanted:
            v = queue.pop(0)
            around = [w for w in neighbours[v] if w not in part]
            if len(around) > wanted // 3:
                around = [around[i] for i in rng.permutation(len(around))[: wanted // 3]]
            part.update(dict.fromkeys(around))
            queue += [around[i] for i in rng.permutation(len(around))]
        return list(part)[:wanted]

    def _cut(self, part: list[int]) -> tuple[Graph, Index]:
        """The graph of the part alone, with a usage limit that leaves the rest its usage."""
        graph, hint = self.graph, self.graph.hint
        assert hint is not None
        inside = {v: i for i, v in enumerate(part)}
        small = Graph(len(part))
        small.tick, small.exclusions = graph.tick, graph.exclusions
        for v, i in inside.items():
            costs = graph.costs[v]
            assert costs is not None
            for w, table in graph.neighbours[v].items():
                if w not in inside:
                    costs = costs + table[:, hint[w]]
                elif v < w:
                    small.set_edge(i, inside[w], table)
            small.costs[i] = costs
            small.spans[i] = list(graph.spans[v])
        small.hint = {i: hint[v] for v, i in inside.items()}
        spans = self._spans(part)
        small.usage_limit = graph.usage_limit
        small.fixed_spans = self._rest(spans)
        return small, spans

    def _spans(self, part: list[int]) -> Index:
        bounds, place = self.span_bounds, self.place
        ranges = [np.arange(bounds[place[v]], bounds[place[v] + 1]) for v in part]
        return np.concatenate(ranges) if ranges else np.zeros(0, dtype=np.intp)

    def _usage(self, spans: Index) -> Array:
        """What these usages add up to, per instant, by the present choices."""
        profile = self.profile
        amounts = profile.amounts[profile.firsts[spans] + self.choices[profile.owners[spans]]]
        return profile.add_up(amounts, profile.starts[spans], profile.ends[spans])

    def _rest(self, spans: Index) -> list[tuple[float, int, int]]:
        """What all others use at most, between the times at which the part's usages start or end."""
        if not len(spans):
            return []
        profile = self.profile
        rest = self.used - self._usage(spans)
        cuts = np.unique(np.concatenate([profile.starts[spans], profile.ends[spans]]))
        most = np.maximum.reduceat(rest, cuts[:-1])[: len(cuts) - 1] if len(cuts) > 1 else rest[:0]
        times = profile.instants[cuts].tolist()
        # Reduceat's last piece runs to the end of the array, beyond the part's last time.
        if len(cuts) > 1:
            most[-1] = rest[cuts[-2] : cuts[-1]].max()
        return [(float(a), s, e) for a, s, e in zip(most, times[:-1], times[1:], strict=True) if a > 0]

    def _adopt(self, part: list[int], found: NDArray[np.int64], spans: Index) -> bool:
        """Takes over the part's new choices, where the whole keeps the limit and gets cheaper."""
        old = self.choices.copy()
        without = self.used - self._usage(spans)
        places = [self.place[v] for v in part]
        self.choices[places] = found
        used = without + self._usage(spans)
        hint = dict(zip(self.live, self.choices.tolist(), strict=True))
        cost = self.graph.cost(hint)
        if used.max() > self.profile.limit or cost >= self.upper:
            self.choices = old
            return False
        self.used, self.upper, self.graph.hint = used, cost, hint
        return True


def excess(relaxation: Relaxation, hint: dict[int, int]) -> dict[int, float]:
    """Per variable, by how much its choice's min-marginal of the last sweep is above the least."""
    offsets, above = relaxation.sweeper.offsets, relaxation.sweeper.beliefs
    return {v: float(above[offsets[place] + hint[v]]) for place, v in enumerate(relaxation.order)}
