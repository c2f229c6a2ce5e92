"""Recombination and diversification of assignments under a usage limit."""

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from shardplan.search import Hint, solve
from shardplan.search.budget import Budget, Callbacks
from shardplan.search.graph.graph import Graph
from shardplan.search.graph.usage_profile import Profile
from shardplan.search.improve.diversify import diversify
from shardplan.search.improve.mixtures import Mixtures
from shardplan.search.limits.recombination import Recombination
from shardplan.search.limits.usage_prices import Pricing
from shardplan.search.network import Network
from shardplan.search.solver.graph_solver import GraphSolver


def items(sizes: list[int], ways: list[float], limit: float) -> Network:
    """Tensors that are stored whole or by parts, each with a reader that has to read what is stored, and something
    that all readers look at. What is not stored is sent: at one price of usage, all ways are equally good."""
    network = Network(usage_limit=limit)
    hub = network.add_variable([0.0, 1.0])
    for size in sizes:
        stored = network.add_variable([size * (2 - way) for way in ways])
        network.add_usage(stored, [size * way for way in ways], 0, 1)
        reader = network.add_variable([0.0] * len(ways))
        network.add_edge(stored, reader, np.where(np.eye(len(ways)) == 1, 0.0, 1000.0))
        network.add_edge(hub, reader, np.eye(2, len(ways)))
    return network


def least(network: Network, limit: float) -> float:
    """The least cost within the limit, of all assignments whose readers read what is stored."""
    ways = len(network.costs[1])
    best = math.inf
    for hub, *stored in itertools.product(range(2), *[range(ways)] * (len(network) // 2)):
        choices = np.array([hub, *np.repeat(stored, 2)])
        if network.peak(choices)[0] <= limit:
            best = min(best, network.cost(choices))
    return best


def priced(network: Network, gap: float = 1e-4) -> Pricing:
    graph = Graph.of(network)
    solver = GraphSolver(graph, math.inf, Budget(), gap, Callbacks(graph.tick, lambda: 60.0))
    return Pricing(solver)


def test_parts_that_no_edge_joins_are_exchanged_one_by_one() -> None:
    network = Network(usage_limit=10)
    for size in (7, 6, 4, 3):
        network.add_usage(network.add_variable([float(size), 0.0]), [0, size], 0, 1)
    graph = Graph.of(network)
    offsets = np.arange(0, 10, 2)
    profile = Profile(graph, graph.live(), offsets[:-1])
    recombination = Recombination(graph, graph.live(), profile, profile.candidates(), offsets)
    zeros, ones = np.zeros(4, dtype=np.intp), np.ones(4, dtype=np.intp)
    mixed = recombination.best(zeros, [ones], work=1.0, tolerance=0.0).choices
    assert mixed is not None
    assert profile.used(mixed).max() == 10  # all of what may be used, by two of the four
    assert recombination.best(zeros, [zeros], work=1.0, tolerance=0.0).choices is None


def test_many_parts_with_little_work() -> None:
    """One knapsack combines many parts however little work is left."""
    rng = np.random.default_rng(3)
    network = Network(usage_limit=1e9)
    for _ in range(400):
        v = network.add_variable([rng.integers(50, 100) * 1e6, 0.0])
        network.add_usage(v, [0.0, rng.integers(50, 100) * 1e5 + 0.5], 0, 1 + v % 3)
    zeros, ones = np.zeros(400, dtype=np.int64), np.ones(400, dtype=np.int64)
    mixed, _ = Mixtures(network, zeros, [ones]).within(1e9)
    assert mixed is not None
    assert network.peak(mixed)[0] <= 1e9
    # all cost per use, least first, up to the limit: nothing costs less
    costs, uses = np.array([c[0] for c in network.costs]), np.array([u.amounts[1] for u in network.usages])
    order = np.argsort(-costs / uses)
    saved = costs[order][np.cumsum(uses[order]) <= 1e9].sum()
    assert costs.sum() - network.cost(mixed) >= 0.99 * saved


def test_assignments_of_new_choices_close_what_prices_leave() -> None:
    network = items([97, 89, 61, 53, 31], [0.125, 0.25, 0.5, 1.0], limit=222.0)
    pricing = priced(network)
    pricing.raise_bound(math.inf)
    best = least(network, 222.0)
    assert pricing.bound <= best
    assert pricing.solver.upper > 1.005 * best  # what is best at some price is stored whole or as little as may be
    diversify(pricing, math.inf)
    assert pricing.solver.upper == pytest.approx(best, rel=1e-9)
    assert {int(k) for plane in pricing.planes for k in plane.choices[1::2]} == {0, 1, 2, 3}


@pytest.mark.parametrize("seed", range(5))
def test_mixtures_within_rising_limits(seed):
    """Mixtures keep any limit, and cost no more within a higher one."""
    rng = np.random.default_rng(seed)
    network = Network(usage_limit=100)
    for _ in range(12):
        v = network.add_variable(rng.integers(0, 50, 3).astype(float))
        network.add_usage(v, rng.integers(0, 20, 3), 0, 1 + v % 2)
    for v in range(0, 12, 3):
        network.add_edge(v, v + 1, rng.integers(0, 30, (3, 3)).astype(float))
    assignments = rng.integers(0, 3, (4, 12))
    mixtures = Mixtures(network, assignments[0], list(assignments[1:]))
    costs = [network.cost(assignments[0])]
    least = network.peak(assignments[0])[0]
    for limit in (least, 1.1 * least, 1.3 * least, 2 * least):
        found, _ = mixtures.within(limit)
        if found is not None:
            assert network.peak(found)[0] <= limit
            costs.append(network.cost(found))
    assert len(costs) > 1
    assert costs == sorted(costs, reverse=True)


def test_near_optimal_cost_with_and_without_work_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A near-optimal cost is proven only without a work limit."""
    monkeypatch.setattr("shardplan.search.limits.usage_prices._LEAST_WORK", 0.0)
    evaluated: list[Pricing] = []
    evaluate = Pricing._evaluate

    def counted(pricing: Pricing, prices: NDArray[np.float64]) -> None:
        evaluated.append(pricing)
        evaluate(pricing, prices)

    monkeypatch.setattr(Pricing, "_evaluate", counted)
    rng = np.random.default_rng(5)
    network, tensors = Network(usage_limit=math.inf), []
    for _ in range(40):
        tensors.append(network.add_variable([0.0, float(rng.integers(1, 9)), float(rng.integers(9, 20))]))
        size, time = int(rng.integers(4, 20)), int(rng.integers(0, 4))
        network.add_usage(tensors[-1], [4 * size, 2 * size, size], time, time + 3)
    for one, other in itertools.pairwise(tensors):
        network.add_edge(one, other, rng.integers(0, 3, (3, 3)).astype(float))
    network.add_variable([5000.0])  # the cost of every way to store something is small against it
    free = solve(network)
    network.usage_limit = float(int(0.9 * network.peak(free.choices)[0]))
    network.hint = Hint(free.choices, {}, lower_bound=free.lower_bound)
    proven, found = solve(network, gap=1e-6), len(evaluated)
    assert proven.status == "optimal"
    evaluated.clear()
    near = solve(network, gap=1e-6, work_limit=60.0)
    assert len(evaluated) < found
    assert near.lower_bound <= proven.cost <= near.cost <= 1.001 * proven.cost
