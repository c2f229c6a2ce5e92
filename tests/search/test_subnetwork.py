"""Subnetworks: a few choices of each variable."""

import numpy as np
import pytest

from shardplan.search import Network, Part, solve


def _network(rng, variables=6, choices=5):
    net = Network()
    for _ in range(variables):
        net.add_variable(rng.uniform(0, 9, choices))
    for u in range(variables - 1):
        net.add_edge(u, u + 1, rng.uniform(0, 9, (choices, choices)))
    net.add_tie(0, variables - 1)
    return net


@pytest.mark.parametrize("seed", range(5))
def test_optimum_of_a_part(seed):
    """The optimum of a part is the best of its assignments in the whole network."""
    rng = np.random.default_rng(seed)
    net = _network(rng)
    masks = {v: np.arange(5) % 2 == v % 2 for v in range(1, len(net) - 1)}
    part = Part.of(net, masks)
    found = solve(part.network)
    best = part.outside(found.choices)
    assert net.cost(best) == pytest.approx(found.cost)
    assert all(masks[v][best[v]] for v in masks)
    assert part.inside(best).tolist() == found.choices.tolist()
    for v, mask in masks.items():  # the same choices excluded in the whole
        net.costs[v] = np.where(mask, net.costs[v], np.inf)
    assert solve(net).cost == pytest.approx(found.cost)


def test_part_of_given_assignments():
    """A part of given assignments has their choices only, and equal choices of tied variables."""
    net = _network(np.random.default_rng(0))
    first, second = np.array([0, 1, 2, 3, 4, 0]), np.array([2, 1, 1, 3, 0, 2])
    part = Part.holding(net, [first, second])
    assert [len(costs) for costs in part.network.costs] == [2, 1, 2, 1, 2, 2]
    assert part.network.cost(part.inside(second)) == pytest.approx(net.cost(second))
    other = np.array([1, 1, 2, 3, 4, 1])
    assert [part.holds(choices) for choices in (first, second, other)] == [True, True, False]
    assert not part.holds(np.array([0, 1, 2, 3, 4, 4]))  # a choice behind all that the part has
    with pytest.raises(ValueError, match="not in this part"):
        part.inside(other)


def test_a_whole_network_is_a_part_of_itself():
    net = _network(np.random.default_rng(1))
    choices = np.array([0, 1, 2, 3, 4, 0])
    assert Part(net).inside(choices) is choices
    assert Part(net).outside(np.append(choices, 7)).tolist() == choices.tolist()  # without a pair's variable behind
