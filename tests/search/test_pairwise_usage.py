"""Usages of pairs of variables, and prices of usage, against brute force."""

import itertools

import numpy as np
import pytest

from shardplan.search import Hint, Network, PairUsage, all_extended, extended, solve, with_pairs
from shardplan.search.budget import Budget, Callbacks
from shardplan.search.graph import pairwise_usage
from shardplan.search.graph.graph import Graph
from shardplan.search.improve.branch_and_bound import BranchAndBound
from shardplan.search.limits.concave_planes import Plane, maximum_between
from shardplan.search.limits.usage_prices import Pricing
from shardplan.search.solver.graph_solver import GraphSolver
from shardplan.search.testing import random_networks


def usage_over_time(net: Network, pairs: list[PairUsage], choices: tuple[int, ...]) -> np.ndarray:
    used = np.zeros(8)
    for usage in net.usages:
        used[usage.start : usage.end] += usage.amounts[choices[usage.variable]]
    for pair in pairs:
        used[pair.start : pair.end] += pair.amounts[choices[pair.u], choices[pair.v]]
    return used


def random_pairs(seed: int) -> tuple[Network, list[PairUsage], list[tuple[int, ...]]]:
    """A network, usages of its pairs, and all its assignments. The limit is between the least and the highest peak."""
    rng = np.random.default_rng(seed)
    net = random_networks.random_chain(rng, 4, 3, 0.2)
    sizes = [costs.size for costs in net.costs]
    pairs = []
    for u, v, _ in net.edges:
        for _ in range(int(rng.integers(0, 3))):
            start = int(rng.integers(0, 4))
            amounts = rng.integers(0, 5, (sizes[u], sizes[v])).astype(np.float64)
            pairs.append(PairUsage(u, v, amounts, start, start + 3))
    net.add_usage(0, rng.integers(0, 5, sizes[0]), 1, 5)
    every = [c for c in itertools.product(*map(range, sizes)) if np.isfinite(net.cost(c))]
    peaks = [usage_over_time(net, pairs, choices).max() for choices in every]
    net.usage_limit = float(min(peaks) + rng.random() * np.ptp(peaks)) if peaks else 1.0
    return net, pairs, every


@pytest.mark.parametrize("seed", range(40))
def test_usages_of_pairs_equal_brute_force(seed: int) -> None:
    net, pairs, every = random_pairs(seed)
    assert net.usage_limit is not None
    fitting = [c for c in every if usage_over_time(net, pairs, c).max() <= net.usage_limit]
    solution = solve(with_pairs(net, pairs))
    assert solution.cost == pytest.approx(min(map(net.cost, fitting), default=np.inf))
    if fitting:
        own = tuple(solution.choices[: len(net)].tolist())
        assert own in fitting and net.cost(own) == pytest.approx(solution.cost)


def test_an_assignment_is_extended_by_what_its_pairs_use() -> None:
    for seed in range(20):
        net, pairs, every = random_pairs(seed)
        wide = with_pairs(net, pairs)
        for choices in every[::7]:
            full = extended(wide, np.array(choices))
            assert wide.cost(full) == pytest.approx(net.cost(choices))
            assert wide.peak(full)[0] == usage_over_time(net, pairs, choices).max()
        together = all_extended(wide, [np.array(choices) for choices in every[::7]])
        assert [list(one) for one in together] == [list(extended(wide, np.array(choices))) for choices in every[::7]]
        assert all_extended(wide, []) == []


def test_what_is_known_before_changes_no_optimum() -> None:
    for seed in range(20):
        net = random_networks.random_memory_bound(np.random.default_rng(seed), 6, 0.5, 0.1)
        limit, net.usage_limit = net.usage_limit, None
        free = solve(net)
        net.usage_limit = limit
        if np.isfinite(free.cost):
            some = np.random.default_rng(seed).integers(0, [len(costs) for costs in net.costs])
            net.hint = Hint(free.choices, {0: 1.0}, known=[free.choices, some])
        _, optimum = random_networks.brute_force(net)
        solution = solve(net)
        assert solution.cost == optimum and solution.lower_bound <= optimum


def test_prices_prove_what_a_limit_costs() -> None:
    net = Network(usage_limit=14.0)  # of ten variables, six must give up the choice that costs nothing
    for number in range(10):
        net.add_usage(net.add_variable([0.0, 10.0 + number]), [2.0, 1.0], 0, 1)
    solution = solve(net)
    assert solution.cost == 75.0 and solution.lower_bound == pytest.approx(75.0)
    assert solution.prices == {} or 15.0 <= solution.prices[0] <= 16.0


def test_what_fits_is_found_at_the_first_prices() -> None:
    net = Network(usage_limit=14.0)
    for number in range(10):
        net.add_usage(net.add_variable([5.0, 15.0 + number]), [2.0, 1.0], 0, 1)
    solver = GraphSolver(Graph.of(net), np.inf, Budget(), 1e-9, Callbacks(lambda: None, lambda: 60.0))
    pricing = Pricing(solver)
    pricing.take(dict.fromkeys(pricing.live, 0))  # what is cheapest takes 20
    pricing.raise_bound(0.0)
    assert solver.upper < np.inf


def test_prices_between_too_low_and_high_enough() -> None:
    """The next prices are where the planes cross."""
    none = np.zeros(0, dtype=np.intp)
    planes = [Plane(10.0, np.array([4.0, 4.0]), none), Plane(30.0, np.array([-1.0, -1.0]), none)]
    highest, prices = maximum_between(planes, np.zeros(2), np.array([8.0, 8.0]))
    assert highest == 26.0 and prices.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("seed", range(4))
def test_branches_with_prices_close_the_gap(seed: int) -> None:
    """Branches have prices of their own, and close the gap that prices leave."""
    rng = np.random.default_rng(seed)
    sizes, costs = rng.integers(1, 9, 8), rng.integers(1, 30, 8)
    limit = float(sizes.sum() // 2)
    net = Network(limit)
    for size, cost in zip(sizes.tolist(), costs.tolist(), strict=True):
        net.add_usage(net.add_variable([0.0, float(cost)]), [size, 0], 0, 1)
    for v in range(7):
        net.add_edge(v, v + 1, rng.integers(0, 6, (2, 2)).astype(np.float64))
    every = [c for c in itertools.product(range(2), repeat=8) if net.peak(np.array(c))[0] <= limit]
    best = min(net.cost(np.array(c)) for c in every)
    solver = GraphSolver(Graph.of(net), np.inf, Budget(), 1e-9, Callbacks(lambda: None, lambda: 60.0))
    solver.reduce()
    pricing = Pricing(solver)
    if pricing.has_few_times:
        pricing.raise_bound(60.0)
        assert solver.lower <= best + 1e-6
        pricing.prune()
        branching = BranchAndBound(solver, Budget(sweeps=60, cp_sat_work=0.0), pricing)
        while not solver.closed and branching.step():
            pass
    else:
        solver.solve()
    assert solver.upper == pytest.approx(best) == pytest.approx(solver.lower)


def test_a_bound_that_is_known_before_is_taken() -> None:
    net = Network(usage_limit=5)
    net.add_usage(net.add_variable([0.0, 7.0]), [9, 1], 0, 1)
    net.hint = Hint(np.array([1]), {0: 0.1}, lower_bound=7.0)
    assert solve(net).status == "optimal"


def test_states_of_a_pair_have_the_twins_of_their_choices():
    network = Network(usage_limit=10)
    tensor, copy = network.add_variable(np.zeros(3)), network.add_variable(np.zeros(3))
    network.add_edge(tensor, copy, np.array([[0.0, 2.0, 2.0], [2.0, 0.0, 3.0], [2.0, 3.0, 0.0]]))
    network.twins = {tensor: np.array([0, 1, 1]), copy: np.array([0, 1, 1])}
    sizes = np.array([8.0, 4.0, 4.0])
    usage = PairUsage(tensor, copy, np.where(np.eye(3, dtype=bool), 0.0, sizes), 0, 1)
    other = with_pairs(network, [usage])
    labels, pair = other.twins[2], other.usages[0]
    amounts = pair.amounts
    assert len(set(labels.tolist())) < len(labels)
    for label in set(labels.tolist()):  # twins use the same, and as many choices of the copy have each
        assert len(set(amounts[labels == label].tolist())) == 1


def test_a_search_ends_with_an_assignment_that_does_not_serve():
    rng = np.random.default_rng(3)
    network = Network()
    for _ in range(8):
        network.add_variable(10.0 + 0.1 * rng.random(50))
    for u, v in itertools.combinations(range(8), 2):
        network.add_edge(u, v, 0.1 * rng.random((50, 50)))
    asked = []
    solution = solve(network, is_feasible=lambda choices: bool(asked.append(choices.tolist())), work_limit=0.5)
    assert len(asked) == 1 and solution.choices.tolist() == asked[0]
    assert 1e-6 < solution.gap < 0.02


def test_a_search_within_a_limit_tells_what_it_found():
    net = Network(usage_limit=14.0)
    for number in range(10):
        net.add_usage(net.add_variable([1.0, 11.0 + number]), [2.0, 1.0], 0, 1)
    refused = solve(net, is_feasible=lambda choices: False)
    best = solve(net)
    assert len(refused.known) > 0 and refused.prices
    assert refused.priced_bound <= best.cost <= refused.cost
    net.hint = Hint(refused.choices, refused.prices, refused.priced_bound, refused.known)
    assert solve(net).cost == best.cost


def test_what_pairs_may_use_is_derived_once(monkeypatch):
    net = Network(usage_limit=5)
    u, v = net.add_variable([1.0, 0.0]), net.add_variable([0.0, 2.0])
    net.twins[v] = np.array([0, 0])
    net.add_edge(u, v, np.array([[0.0, 1.0], [1.0, 0.0]]))
    derived, states = [], pairwise_usage._states
    monkeypatch.setattr(pairwise_usage, "_states", lambda *given: (derived.append(1), states(*given))[1])
    amounts = np.array([[0.0, 4.0], [4.0, 0.0]])
    wide = [with_pairs(net, [PairUsage(u, v, amounts.copy(), 0, end)]) for end in (2, 3)]
    assert len(derived) == 1
    assert wide[0].costs[2].tolist() == wide[1].costs[2].tolist()
    assert wide[0].twins[2].tolist() == wide[1].twins[2].tolist()
    assert [usage.end for other in wide for usage in other.usages] == [2] * len(wide[0].usages) + [3] * len(
        wide[1].usages
    )
    with_pairs(net, [PairUsage(u, v, 2 * amounts, 0, 2)])
    assert len(derived) == 2
    assert len(net) == 2
    assert not net.usages
