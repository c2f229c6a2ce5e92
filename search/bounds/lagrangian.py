"""Lagrangian relaxation of a graph: message passing with prices on the usage at critical times.

A price p on the usage at a time adds `p * (usage - limit)` to the cost. The term is never positive for an assignment
within the limit, so the bound of the priced network is a bound of the limited one. Prices rise where decoded
assignments use too much and fall where they use less. A step of the prices is a subgradient step of Polyak's length and
comes between sweeps. Sweeps and steps climb the same concave function. A time gets a price when a decoded assignment
has its peak there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from shardplan.search.bounds.message_order import Model
from shardplan.search.bounds.momentum import Momentum
from shardplan.search.bounds.trws import Sweeper
from shardplan.search.graph.graph import Graph
from shardplan.search.graph.usage_profile import Profile

__all__ = ["Messages", "Relaxation"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]
Messages = dict[tuple[int, int], Array]
_PATIENCE = 12
_MAX_TIMES = 250


class Relaxation:
    """Bounds and assignments of one graph, by sweeps.

    prices: per time (as in the graph's spans), to begin with.
    After `improve`: `bound` is the best lower bound of the graph's cost, `choices` (by place) the best assignment
    decoded within the limit, of cost `cost`.
    """

    def __init__(self, graph: Graph, prices: dict[int, float] | None = None) -> None:
        self.graph = graph
        self.live = graph.live()
        graph.tick()
        self.sweeper = Sweeper(_model(graph, self.live))
        graph.tick()
        self.order = [self.live[i] for i in np.argsort(self.sweeper.place)]
        self.base: Array = self.sweeper.costs.copy()
        self.bound, self.cost = -math.inf, math.inf
        self._bounds: list[float] = []  # after each time that it was improved
        self.choices: Index | None = None
        self.sweeps = 0
        self.extrapolation = Momentum(self.sweeper)
        self.profile: Profile | None = None
        self.instants: list[int] = []
        self.amounts = np.zeros((0, len(self.base)))
        self.prices = np.zeros(0)
        self.best_prices = self.prices
        self.peak = math.inf
        self.leanest: Index | None = None
        """The lowest peak of an assignment decoded so far, and the assignment."""
        self._length, self._since = 1.0, 0
        self._kept: dict[int, NDArray[np.bool_]] = {}
        if graph.usage_limit is not None:
            self.profile = Profile(graph, self.order, self.sweeper.offsets[:-1])
            for time, price in (prices or {}).items():
                self._watch(int(np.searchsorted(self.profile.instants, time, side="right")) - 1, price)
            self.best_prices = self.prices

    def improve(self, upper: float) -> None:
        """One sweep up and down, a decoded assignment, a step of the prices. upper: cost of the best known."""
        bound = self._sweep(self.prices) if self.profile is not None else self._sweep_on()
        gain = bound - self.bound
        if gain > 0:
            self.bound, self.best_prices = bound, self.prices
        self._bounds.append(self.bound)
        if self.profile is None:
            if self.sweeps % 10 == 5 or (self.sweeps == 1 and upper == math.inf):
                self.offer(self.sweeper.decode())
            return
        choices = self.sweeper.decode(2 if self.sweeps % 5 == 1 else 0)
        self.offer(choices)
        upper = min(upper, self.cost)
        target = upper - bound if upper < math.inf else 0.1 * abs(bound) + 1.0
        self._since = 0 if gain > 1e-3 * target else self._since + 1
        if self._since >= _PATIENCE:
            self._length *= 0.7
            self._since = 0
            self.prices = np.append(self.best_prices, np.zeros(len(self.prices) - len(self.best_prices)))
        self._step(choices, max(target, 1e-4 * abs(bound)))

    @property
    def seconds_per_sweep(self) -> float:
        """An estimate of how long `improve` takes on one core: 3 ns a table entry each way, 40 us a level."""
        return 6e-9 * self.sweeper.entries + 8e-5 * self.sweeper.levels + 3e-8 * self.amounts.size

    def bound_gain(self, sweeps: int) -> float:
        """The rise of the bound over this many last sweeps. Infinity where there were no more than that."""
        return self._bounds[-1] - self._bounds[-1 - sweeps] if len(self._bounds) > sweeps else math.inf

    @property
    def prices_settled(self) -> bool:
        """Whether the steps of the prices are small."""
        return not len(self.prices) or self._length < 0.02

    def _sweep_on(self) -> float:
        """A sweep with momentum, for graphs without prices."""
        self.sweeps += 1
        return self.graph.constant + self.extrapolation.sweep()

    def _sweep(self, prices: Array) -> float:
        sweeper, profile = self.sweeper, self.profile
        sweeper.costs = self.base + prices @ self.amounts if len(prices) else self.base
        sweeper.up()
        bound = self.graph.constant + sweeper.down()
        self.sweeps += 1
        if profile is None:
            return bound
        return bound - float(prices @ (profile.limit - profile.fixed[self.instants])) if len(prices) else bound

    def offer(self, choices: Index) -> None:
        """Takes an assignment (by place) into account, where it keeps the limit."""
        cost = self.price_free_cost(choices)
        if self.profile is not None and cost < math.inf:
            peak = float(self.profile.used(choices).max())
            if peak < self.peak:
                self.peak, self.leanest = peak, choices
            if peak > self.profile.limit:
                return
        if cost < self.cost:
            self.cost, self.choices = cost, choices

    def price_free_cost(self, choices: Index) -> float:
        """The graph's cost of an assignment (by place)."""
        priced, self.sweeper.costs = self.sweeper.costs, self.base
        cost = self.graph.constant + self.sweeper.cost(choices)
        self.sweeper.costs = priced
        return cost

    def _step(self, choices: Index, target: float) -> None:
        profile = self.profile
        assert profile is not None
        used = profile.used(choices)
        highest = int(used.argmax())
        if used[highest] > profile.limit and highest not in self.instants and len(self.instants) < _MAX_TIMES:
            self._watch(highest, 0.0)
        if not self.instants:
            return
        over = used[self.instants] - profile.limit
        over[(self.prices <= 0) & (over < 0)] = 0.0
        square = float(over @ over)
        if square > 0:
            self.prices = np.maximum(self.prices + self._length * target / square * over, 0.0)

    def _watch(self, instant: int, price: float) -> None:
        assert self.profile is not None
        if instant in self.instants:
            return
        self.instants.append(instant)
        self.amounts = np.vstack([self.amounts, self.profile.at(instant)[None]])
        self.prices = np.append(self.prices, price)
        self.best_prices = np.append(self.best_prices, 0.0)

    def by_variable(self, choices: Index) -> dict[int, int]:
        """An assignment by place, as one by variable."""
        return dict(zip(self.order, choices.tolist(), strict=True))

    def by_choice(self, fits: NDArray[np.bool_]) -> dict[int, NDArray[np.bool_]]:
        """Values of all choices (by place), per variable."""
        offsets = self.sweeper.offsets
        return {v: fits[offsets[place] : offsets[place + 1]] for place, v in enumerate(self.order)}

    def decoded_at(self, prices: Array, sweeps: int) -> dict[int, int]:
        """An assignment by variable, decoded after some sweeps at these prices of the watched times."""
        for _ in range(sweeps):
            self._sweep(prices)
        return self.by_variable(self.sweeper.decode())

    def promising_choices(self, count: int) -> dict[int, Index]:
        """Per variable its choices of the least min-marginals of the last sweep, ascending."""
        offsets, above = self.sweeper.offsets.tolist(), self.sweeper.beliefs
        found = {}
        for place, v in enumerate(self.order):
            lo, hi = offsets[place], offsets[place + 1]
            if hi - lo <= count:
                found[v] = np.arange(hi - lo)
            else:
                found[v] = np.sort(np.argpartition(above[lo:hi], count - 1)[:count])
        return found

    def priced_costs(self, scale: float = 1.0) -> dict[int, Array]:
        """Per variable the costs of its choices, with the best prices times `scale` on what they use."""
        prices = self.best_prices * scale
        costs = self.base + prices @ self.amounts[: len(prices)] if len(prices) else self.base
        offsets = self.sweeper.offsets
        return {v: costs[offsets[place] : offsets[place + 1]] for place, v in enumerate(self.order)}

    def price_by_time(self) -> dict[int, float]:
        """The best prices, for another relaxation of the same problem."""
        if self.profile is None:
            return {}
        times = self.profile.instants[self.instants[: len(self.best_prices)]].tolist()
        return {t: p for t, p in zip(times, self.best_prices.tolist(), strict=True) if p > 0}

    def sweep_at_best_prices(self) -> None:
        """One sweep, which may raise the bound; prices stay."""
        self.bound = max(self.bound, self._sweep(self.best_prices))

    def reduced_costs(self) -> tuple[float, Array]:
        """A bound, and per choice (by place) by how much it rises at least when that choice is taken."""
        prices = self.best_prices
        if len(prices) < len(self.instants):
            prices = np.append(prices, np.zeros(len(self.instants) - len(prices)))
        bound = self._sweep(prices)
        again = self._sweep(prices)
        self.bound = max(self.bound, bound, again)
        return bound, self.sweeper.beliefs

    def prunable_share(self, upper: float) -> float:
        """An estimate of the share of choices that `prune` would drop."""
        room = upper - self.bound
        return float(np.mean(self.sweeper.beliefs > room)) if room < math.inf else 0.0

    def entries_left(self, upper: float) -> int:
        """An estimate of the table entries that `prune` would leave."""
        fits = self.sweeper.beliefs <= upper - self.bound
        sizes = np.maximum(np.add.reduceat(fits, self.sweeper.offsets[:-1]), 1) if len(fits) else fits
        lows, highs = self.sweeper.ends
        return int((sizes[lows] * sizes[highs]).sum())

    def prune(self, upper: float) -> None:
        """Drops choices that no assignment below `upper` takes, from the graph, which this relaxation then describes
        no more; only `reparametrise` and `messages` may follow."""
        bound, above = self.reduced_costs()
        fits = above <= upper - bound + 1e-9 * max(abs(upper), abs(self.graph.constant), 1e-30)
        self._kept = self._keep(fits, self.graph)

    def pruned_copy(self, room: float) -> Graph:
        """A copy of the graph with only the choices whose min-marginals are within `room` of the least."""
        copy = self.graph.copy()
        self._keep(self.sweeper.beliefs <= room, copy)
        return copy

    def _keep(self, fits: NDArray[np.bool_], graph: Graph) -> dict[int, NDArray[np.bool_]]:
        """Drops the choices that do not fit; returns, per variable, which ones stay."""
        offsets = self.sweeper.offsets.tolist()
        masks = {}
        for place, v in enumerate(self.order):
            keep = fits[offsets[place] : offsets[place + 1]]
            masks[v] = keep if keep.any() else np.ones(len(keep), dtype=bool)
        graph.restrict_all(masks)
        return masks

    def pair_costs(self) -> Iterator[tuple[int, int, Array]]:
        """Per edge its ends, and by how much the bound rises at least where they take a pair of choices.

        After a sweep down, what an edge's message into its lower end left behind is the part of the cost that no
        message has carried on, and the lower end's min-marginal has all the others.
        """
        sweeper = self.sweeper
        for low, high, to_low, to_high in sweeper.message_pairs():
            v, w = self.order[low], self.order[high]
            below = sweeper.beliefs[sweeper.offsets[low] : sweeper.offsets[low + 1]]
            above = sweeper.beliefs[sweeper.offsets[high] : sweeper.offsets[high + 1]]
            left = self.graph.neighbours[v][w] + (sweeper.shares[high] * above - to_high)[None, :] - to_low[:, None]
            left += below[:, None] - left.min()
            yield v, w, left

    def above_bound(self) -> Graph:
        """The graph, without usage, where each assignment costs the same: the bound, and what is above it, in costs and
        tables without negative entries. Each choice must have some to go with it at each neighbour."""
        sweeper, offsets = self.sweeper, self.sweeper.offsets.tolist()
        above = self.graph.copy()
        above.constant = self._sweep(self.prices)
        left = sweeper.beliefs.copy()
        for low, high, to_low, to_high in sweeper.message_pairs():
            v, w = self.order[low], self.order[high]
            share = sweeper.shares[high] * sweeper.beliefs[offsets[high] : offsets[high + 1]]
            table = self.graph.neighbours[v][w] + (share - to_high)[None, :] - to_low[:, None]
            above.set_edge(v, w, table - table.min())
            left[offsets[high] : offsets[high + 1]] -= share
        for place, v in enumerate(self.order):
            above.costs[v] = left[offsets[place] : offsets[place + 1]]
        return above

    def messages(self) -> Messages:
        """Copies of the messages: `[v, w]` is the one into `v` from `w`, per choice that `v` had at the beginning."""
        found = {}
        for low, high, to_low, to_high in self.sweeper.message_pairs():
            v, w = self.order[low], self.order[high]
            found[v, w], found[w, v] = to_low.copy(), to_high.copy()
        return found

    def load(self, messages: Messages) -> None:
        """Starts from these messages; any messages give a valid bound."""
        for low, high, to_low, to_high in self.sweeper.message_pairs():
            v, w = self.order[low], self.order[high]
            if (v, w) in messages:
                to_low[:] = messages[v, w]
            if (w, v) in messages:
                to_high[:] = messages[w, v]

    def reparametrise(self) -> None:
        """Moves the messages into the graph's costs and tables. Every assignment keeps its cost, and the bound of
        another relaxation starts where this one's ended. Where `prune` came before, that takes less memory."""
        sweeper, graph, kept = self.sweeper, self.graph, self._kept
        graph.forget()  # hardly two tables are the same any more
        added = sweeper.message_sums()
        offsets = sweeper.offsets.tolist()
        for place, v in enumerate(self.order):
            share = added[offsets[place] : offsets[place + 1]]
            graph.costs[v] = graph.costs[v] + (share[kept[v]] if kept else share)
            graph.undominated.add(v)
        for low, high, to_low, to_high in sweeper.message_pairs():
            v, w = self.order[low], self.order[high]
            if kept:
                to_low, to_high = to_low[kept[v]], to_high[kept[w]]
            graph.set_edge(v, w, graph.neighbours[v][w] - to_low[:, None] - to_high[None, :])


def _model(graph: Graph, live: list[int]) -> Model:
    index = {v: i for i, v in enumerate(live)}
    edges, tables = [], []
    for v in live:
        for w, table in graph.neighbours[v].items():
            if v < w:
                edges.append((index[v], index[w]))
                tables.append(table)
    return Model([graph.costs[v] for v in live], edges, tables)  # type: ignore[misc]
