"""Prices of a variable's other choices, against an enumeration of all assignments, and in a network of layers."""

import itertools

import numpy as np
import pytest

from shardplan.search import Marginals, Network, solve
from shardplan.search.marginals import Prices
from shardplan.search.testing.einsum_networks import gpt


def _random(generator: np.random.Generator, variables: int, edges: int) -> Network:
    """Few choices each; some pairs are excluded, and some choices determined by others."""
    network = Network()
    sizes = generator.integers(1, 4, variables)
    for size in sizes:
        network.add_variable(generator.integers(0, 9, size).astype(float), multiplicity=int(generator.integers(1, 3)))
    for _ in range(edges):
        u, v = generator.choice(variables, 2, replace=False)
        table = generator.integers(0, 9, (sizes[u], sizes[v])).astype(float)
        if generator.random() < 0.3:
            table[generator.random(table.shape) < 0.4] = np.inf
        network.add_edge(int(u), int(v), table)
    u, v = generator.choice(variables, 2, replace=False)
    if sizes[u] == sizes[v]:
        network.add_tie(int(u), int(v))
    return network


def _enumerated(network: Network) -> tuple[tuple[int, ...], list[np.ndarray]]:
    """The best assignment, and per variable and choice what it costs more."""
    costs = {choices: network.cost(choices) for choices in itertools.product(*(range(c.size) for c in network.costs))}
    best = min(costs, key=costs.__getitem__)
    prices = [np.full(c.size, np.inf) for c in network.costs]
    for choices, cost in costs.items():
        for own, choice in zip(prices, choices, strict=True):
            own[choice] = min(own[choice], cost - costs[best])
    return best, prices


def _check(found: Prices, prices: np.ndarray, own: int, exact: int) -> None:
    others = np.arange(prices.size) != own
    assert (found.at_least[others] <= prices[others] + 1e-9).all()
    assert (found.at_most[others] >= prices[others] - 1e-9).all()
    cheapest = sorted((price, k) for k, price in enumerate(prices) if k != own and np.isfinite(price))[:exact]
    assert sorted(found.at_most[others])[: len(cheapest)] == pytest.approx([price for price, _ in cheapest], abs=1e-3)


@pytest.mark.parametrize("edges", [6, 12, 24])
def test_prices_in_random_networks(edges: int) -> None:
    """Intervals hold the prices of all variables, also of those that reductions took out; the cheapest are exact."""
    generator, checked = np.random.default_rng(edges), 0
    while checked < 6:
        network = _random(generator, 8, edges)
        best, prices = _enumerated(network)
        if not np.isfinite(network.cost(best)):
            continue
        checked += 1
        marginals = Marginals(network, best)
        for variable, own in enumerate(best):
            _check(marginals.prices(variable, 2), prices[variable], own, 2)


@pytest.mark.slow
def test_prices_in_layers() -> None:
    """They are the costs of searches without the planned choice."""
    network = gpt(4, batch=8, length=64, width=64, vocabulary=256).network((2, 4))
    best = solve(network, gap=0.0)
    marginals = Marginals(network, best.choices.tolist())
    for variable in range(0, len(network), len(network) // 3):
        found = marginals.prices(variable, 1)
        others = [k for k in range(network.costs[variable].size) if k != best.choices[variable]]
        if not others:
            continue
        held = network.copy()
        held.costs[variable] = network.costs[variable].copy()
        held.costs[variable][best.choices[variable]] = np.inf
        price = solve(held, gap=0.0).cost - best.cost
        assert min(found.at_most[others]) == pytest.approx(price, rel=1e-3, abs=1e-9 * best.cost)
        assert min(found.at_least[others]) <= price + 1e-9 * best.cost
