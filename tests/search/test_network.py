"""Networks: their costs and peaks, and the arguments that they refuse."""

import itertools

import numpy as np
import pytest

from shardplan.search import Network, NetworkError, solve


def test_cost_adds_up_variables_edges_and_multiplicities() -> None:
    net = Network()
    a = net.add_variable([1.0, 2.0], multiplicity=3)
    b = net.add_variable([10.0, 20.0])
    net.add_edge(a, b, np.array([[0.5, 0.25], [0.125, 0.0625]]))
    net.add_edge(b, a, np.array([[100.0, 200.0], [300.0, 400.0]]))
    assert net.cost([1, 0]) == 3 * 2.0 + 10.0 + 0.125 + 200.0


@pytest.mark.parametrize("value", [np.inf, 1e17, 1e18])
def test_excluded_costs_make_an_assignment_infinite(value: float) -> None:
    net = Network()
    net.add_variable([value, 1.0])
    assert net.cost([0]) == np.inf
    assert solve(net).choices.tolist() == [1]


def test_an_edge_of_a_variable_with_itself_counts_its_diagonal() -> None:
    net = Network()
    v = net.add_variable([0.0, 0.0])
    net.add_edge(v, v, np.array([[5.0, 0.0], [0.0, 3.0]]))
    assert net.cost([1]) == 3.0
    assert solve(net).cost == 3.0


def test_a_table_object_is_stored_once() -> None:
    net = Network()
    variables = [net.add_variable([0.0, 0.0]) for _ in range(10)]
    table = np.ones((2, 2))
    for u, v in itertools.pairwise(variables):
        net.add_edge(u, v, table)
    assert len(net.tables) == 1
    assert len(net.edges) == 9


def test_ties_make_choices_equal() -> None:
    net = Network()
    a, b = net.add_variable([0.0, 5.0]), net.add_variable([9.0, 1.0])
    net.add_tie(a, b)
    solution = solve(net)
    assert solution.choices.tolist() == [1, 1]
    assert solution.cost == 6.0
    assert net.cost([0, 1]) == np.inf


def test_profile_and_peak() -> None:
    net = Network(usage_limit=10)
    a, b = net.add_variable([0.0]), net.add_variable([0.0])
    net.add_usage(a, [3], 0, 4)
    net.add_usage(b, [5], 2, 6)
    net.add_usage(b, [1], 3, 3)
    times, usage = net.profile([0, 0])
    assert times.tolist() == [0, 2, 4, 6]
    assert usage.tolist() == [3, 8, 5, 0]
    assert net.peak([0, 0]) == (8.0, 2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda net: net.add_variable([], name="w"), "`w`"),
        (lambda net: net.add_variable([0.0, np.nan], name="w"), "`w`"),
        (lambda net: net.add_variable([[0.0]], name="w"), "`w`"),
        (lambda net: net.add_variable([-np.inf], name="w"), "`w`"),
        (lambda net: net.add_variable([1.0], name="w", multiplicity=0), "`w`"),
        (lambda net: net.add_edge(0, 1, np.zeros((3, 2))), "`a` and `b`"),
        (lambda net: net.add_edge(0, 1, np.full((2, 3), np.nan)), "0 and 1"),
        (lambda net: net.add_edge(0, 7, np.zeros((2, 3))), "2 variables"),
        (lambda net: net.add_tie(0, 1), "`a` and `b`"),
        (lambda net: net.add_usage(0, [1.0], 0, 1), "`a`"),
        (lambda net: net.add_usage(0, [1.0, -1.0], 0, 1), "`a`"),
        (lambda net: net.add_usage(0, [1.0, np.nan], 0, 1), "`a`"),
        (lambda net: net.annotate(1, 4.0, [(0,)]), "`b`"),
    ],
)
def test_malformed_input_is_refused_by_name(build, message: str) -> None:
    net = Network()
    net.add_variable([0.0, 1.0], name="a")
    net.add_variable([0.0, 1.0, 2.0], name="b")
    with pytest.raises(NetworkError, match=message):
        build(net)


def test_an_empty_network_has_a_solution() -> None:
    solution = solve(Network())
    assert (solution.status, solution.cost, len(solution.choices)) == ("optimal", 0.0, 0)
