"""Folded graphs: repeated layers are dropped and given back with the optimum and a true bound."""

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from shardplan.search import Network, solve
from shardplan.search.bounds.lagrangian import Relaxation
from shardplan.search.budget import Budget, Callbacks
from shardplan.search.graph.graph import Graph
from shardplan.search.graph.reductions import shrink
from shardplan.search.graph.usage_profile import Profile
from shardplan.search.limits.priced_graph import PricedGraph
from shardplan.search.solver.graph_solver import GraphSolver
from shardplan.search.structure import fold_repeats
from shardplan.search.structure.find_repeats import fold
from shardplan.search.structure.fold_repeats import folded_start
from shardplan.search.structure.shared_variables import weighted_graph
from shardplan.search.structure.unfold_repeats import unfolded_choices
from shardplan.search.testing import random_networks
from shardplan.search.testing.einsum_networks import gpt

WIDTH, CHOICES = 4, 3
Table = NDArray[np.float64]


class Layers:
    """Random layers: all variables of one joined with each other, and some with those of the next layer."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.costs = [rng.integers(0, 9, CHOICES).astype(float) for _ in range(WIDTH)]
        pairs = list(itertools.combinations(range(WIDTH), 2))
        across = [(a, b) for a in range(WIDTH) for b in range(WIDTH) if rng.random() < 0.4] or [(0, 1)]
        self.inside = {pair: self._table(rng) for pair in pairs}
        self.across = {pair: self._table(rng) for pair in across}

    def _table(self, rng: np.random.Generator) -> Table:
        table = rng.integers(0, 30, (CHOICES, CHOICES)).astype(float)
        table[rng.random(table.shape) < 0.1] = np.inf
        np.fill_diagonal(table, np.diagonal(np.where(np.isinf(table), 5.0, table)))  # something always fits
        return table

    def add(self, net: Network, previous: list[int] | None) -> list[int]:
        """One more layer; returns its variables."""
        layer = [net.add_variable(costs) for costs in self.costs]
        for (a, b), table in self.inside.items():
            net.add_edge(layer[a], layer[b], table)
        if previous is not None:
            for (a, b), table in self.across.items():
                net.add_edge(previous[a], layer[b], table)
        return layer


def stacked(*parts: tuple[Layers, int], ends: bool = True) -> tuple[Network, list[list[int]]]:
    """Stacks of layers one after another, with a cost of their own for the first and the last variable."""
    net, layers = Network(), []
    previous: list[int] | None = None
    for layer, count in parts:
        for _ in range(count):
            previous = layer.add(net, previous)
            layers.append(previous)
    if ends:
        for v, favourite in ((layers[0][0], 0), (layers[-1][0], 2)):
            end = net.add_variable(np.where(np.arange(CHOICES) == favourite, 0.0, 40.0))
            net.add_edge(end, v, 25.0 * (1 - np.eye(CHOICES)))
    return net, layers


def optimum(net: Network, layers: list[list[int]]) -> float:
    """By dynamic programming over whole layers."""
    states = np.array(list(itertools.product(range(CHOICES), repeat=WIDTH)))
    place = {v: (i, k) for i, layer in enumerate(layers) for k, v in enumerate(layer)}
    own = [sum(net.costs[v][states[:, k]] for k, v in enumerate(layer)) for layer in layers]
    step = [np.zeros((len(states), len(states))) for _ in layers]
    for u, v, index in net.edges:
        table = net.tables[index]
        if u not in place:
            own[place[v][0]] = own[place[v][0]] + (net.costs[u][:, None] + table).min(axis=0)[states[:, place[v][1]]]
            continue
        (i, a), (j, b) = place[u], place[v]
        if i == j:
            own[i] = own[i] + table[states[:, a], states[:, b]]
        else:
            step[j] = step[j] + table[states[:, a][:, None], states[:, b][None, :]]
    best = own[0]
    for costs, between in zip(own[1:], step[1:], strict=True):
        best = (best[:, None] + between).min(axis=0) + costs
    return float(best.min())


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_that_of_all_layers(seed: int) -> None:
    net, layers = stacked((Layers(seed), 11 + seed))
    solution = solve(net, gap=0.0, time_limit=30)
    assert solution.cost == pytest.approx(optimum(net, layers), rel=1e-12)
    assert solution.lower_bound <= optimum(net, layers) * (1 + 1e-9)
    assert net.cost(solution.choices) == solution.cost


@pytest.mark.slow
def test_what_is_lifted_is_an_assignment_and_a_bound() -> None:
    tight = folded = 0
    for seed in range(10):
        net, layers = stacked((Layers(seed), 30))
        graph = Graph.of(net)
        best = optimum(net, layers)
        start = folded_start(graph, Budget(), 1e-3, Callbacks(lambda: None, lambda: 60.0))
        if start is None:
            continue
        folded += 1
        relaxation = Relaxation(graph)
        relaxation.load(start.messages)
        relaxation.improve(math.inf)
        assert relaxation.bound <= best * (1 + 1e-9)
        assert start.choices is not None
        cost = graph.cost(start.choices)
        assert cost >= best * (1 - 1e-9)
        if np.isfinite(cost):
            assert net.cost(graph.expand(start.choices)) == pytest.approx(cost, rel=1e-12)
        plain = Relaxation(graph)
        plain.improve(math.inf)
        tight += best - relaxation.bound < 0.5 * (best - plain.bound)
    assert folded >= 7
    assert tight >= 0.6 * folded


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 3, 7])
def test_unfolded_messages_lose_at_the_ends_only(seed: int) -> None:
    """The loss of unfolded messages does not grow with the number of layers."""
    lost = []
    for count in (30, 90):
        graph = Graph.of(stacked((Layers(seed), count))[0])
        start = folded_start(graph, Budget(), 1e-3, Callbacks(lambda: None, lambda: 60.0))
        assert start is not None
        relaxation = Relaxation(graph)
        relaxation.load(start.messages)
        relaxation.improve(math.inf)
        lifted = relaxation.bound
        for _ in range(30):
            relaxation.improve(math.inf)
        lost.append(relaxation.bound - lifted)
    assert lost[1] < 1.1 * lost[0]


def test_sweeps_of_the_folded_graph_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sweeps of the folded graph take no longer than those of the whole graph would."""
    monkeypatch.setattr(GraphSolver, "_hardly_risen", lambda *_: False)  # it seems to help for ever
    graph = Graph.of(stacked((Layers(2), 20))[0])
    start = folded_start(graph, Budget(), 1e-9, Callbacks(lambda: None, lambda: 60.0))
    assert start is not None
    assert start.sweeps < 600


def test_end_choices_that_exclude_themselves() -> None:
    """Four layers are best as 0, 1, 3, 4, but 1 cannot follow itself: in the middle of forty stands 2."""
    follows = np.full((5, 5), 10.0)
    follows[1, 1] = follows[3, 3] = np.inf
    follows[0, 1] = follows[1, 3] = follows[3, 4] = 0.0
    follows[1, 2] = follows[2, 2] = follows[2, 3] = 1.0
    net = Network()
    chain = [net.add_variable(np.zeros(5)) for _ in range(40)]
    for v, w in itertools.pairwise(chain):
        net.add_edge(v, w, follows)
    for v, favourite in ((chain[0], 0), (chain[-1], 4)):
        end = net.add_variable(np.zeros(1))
        net.add_edge(end, v, np.where(np.arange(5) == favourite, 0.0, 90.0)[None])
    graph = Graph.of(net)
    start = folded_start(graph, Budget(), 1e-9, Callbacks(lambda: None, lambda: 60.0))
    assert start is not None and start.choices is not None
    assert graph.cost(start.choices) == 37.0


def test_several_stacks_fold_and_every_variable_is_stood_for() -> None:
    net, _ = stacked((Layers(1), 20), (Layers(2), 25))
    graph = Graph.of(net)
    folded = fold(graph)
    assert folded is not None
    left = len(folded.graph.live())
    assert left < 20 * WIDTH
    assert set(folded.variable) == set(graph.live())
    for v, stand_in in folded.variable.items():
        assert graph.costs[v] is folded.graph.costs[stand_in]
    for (v, w), (x, y) in folded.edge.items():
        assert graph.neighbours[v][w] is folded.graph.neighbours[x][y]


def test_shared_variable_is_best_for_all_layers() -> None:
    """One variable is read by all layers, and costs more with the choice that is a little cheaper for each of them."""
    net, table = Network(), np.array([[0.0, 2.0], [2.0, 0.0]])
    shared, chain = net.add_variable([0.0, 20.0]), [net.add_variable([3.0, 3.0]) for _ in range(60)]
    for u, v in itertools.pairwise(chain):
        net.add_edge(u, v, table)
    for v in chain:
        net.add_edge(shared, v, np.array([[1.0, 2.0], [1.0, 0.0]]))
    graph = Graph.of(net)
    folded = fold(graph)
    assert folded is not None
    dear = weighted_graph(graph, folded).graph
    assert sum(float(np.asarray(dear.costs[v])[0]) for v in dear.live()) == 60 * 3
    start = folded_start(graph, Budget(), 1e-4, Callbacks(lambda: None, lambda: 60.0))
    assert start is not None and start.choices is not None
    assert graph.cost(start.choices) == 60 * 3 + 20  # with the first choice: one for each layer
    relaxation = Relaxation(graph)
    relaxation.load(start.messages)
    relaxation.improve(math.inf)
    assert 60 * 3 + 18 <= relaxation.bound <= 60 * 3 + 20


def test_misleading_shared_variable_ends_the_search(monkeypatch) -> None:
    """Few layers that prefer another shared choice are not searched to the end."""
    net, layers = stacked((Layers(3), 60))
    shared = net.add_variable([0.0, 300.0])
    for layer in layers:
        net.add_edge(shared, layer[0], np.repeat([[20.0], [0.0]], CHOICES, axis=1))
    graph, found = Graph.of(net), []
    for misled in (math.inf, fold_repeats._MISLEADING_EXCESS):
        monkeypatch.setattr(fold_repeats, "_MISLEADING_EXCESS", misled)
        found.append(folded_start(graph, Budget(), 1e-6, Callbacks(lambda: None, lambda: 60.0)))
    [(whole, first), (asked, second)] = [(start.sweeps, graph.cost(start.choices or {})) for start in found if start]
    assert asked < whole
    assert second <= first + 1e-9


def test_dropped_layers_by_the_cost_between_layers() -> None:
    """Dropped layers get choices by the cost of a step from one layer to the next."""
    net, table = Network(), np.array([[5.0, 0.0], [0.0, 5.0]])  # to be like the layer before costs
    chain = [net.add_variable([0.0, 0.0]) for _ in range(41)]
    for u, v in itertools.pairwise(chain):
        net.add_edge(u, v, table)
    graph = Graph.of(net)
    folded = fold(graph)
    assert folded is not None
    found = {v: place % 2 for place, v in enumerate(folded.graph.live())}
    nearest = {v: found[stand_in] for v, stand_in in folded.variable.items()}
    assert graph.cost(nearest) >= 30 * 5 > 10 >= graph.cost(unfolded_choices(graph, folded, nearest))


def test_networks_without_repetition_are_left_alone() -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        assert fold(Graph.of(random_networks.random_grid(rng, 8, 8))) is None
        assert fold(Graph.of(random_networks.random_chain(rng, 40))) is None
    net, _ = stacked((Layers(0), 5))
    assert fold(Graph.of(net)) is None


def test_usage_that_binds_is_not_folded() -> None:
    net, layers = stacked((Layers(0), 30))
    for time, layer in enumerate(layers):
        net.add_usage(layer[0], [3.0, 2.0, 1.0], time, len(layers))
    net.usage_limit = 60.0
    assert folded_start(Graph.of(net), Budget(), 1e-3, Callbacks(lambda: None, lambda: 60.0)) is None


@pytest.mark.slow
def test_layers_fold_where_usage_has_a_price() -> None:
    net, layers = stacked((Layers(0), 30))
    for layer in layers:
        net.add_usage(layer[0], [3.0, 2.0, 1.0], 0, 1)
        follower = net.add_variable([0.0] * CHOICES)
        net.add_edge(layer[1], follower, np.where(np.eye(CHOICES) > 0, 0.0, np.inf))
        net.add_usage(follower, [4.0, 1.0, 2.0], 0, 1)
    net.usage_limit = 130.0
    graph = Graph.of(net)
    shrink(graph)
    profile = Profile(graph, graph.live(), np.cumsum([0, *(graph.size(v) for v in graph.live())])[:-1])
    priced = PricedGraph(graph, profile, profile.candidates()).at(np.array([1.5]))
    shrink(priced, dominance=False)
    folded = fold(priced)
    assert folded is not None and len(folded.graph.live()) < 0.4 * len(priced.live())
    solution = solve(net, gap=0.01, time_limit=30)
    assert net.peak(solution.choices)[0] <= 130.0 and solution.lower_bound <= solution.cost


@pytest.mark.parametrize("seed", range(20))
def test_what_prices_leave_out_is_in_nothing_better(seed: int) -> None:
    net = random_networks.random_memory_bound(np.random.default_rng(seed), 8, 0.5)
    best, cost = random_networks.brute_force(net)
    if best is None:
        return
    graph = Graph.of(net)
    places = np.cumsum([0, *(graph.size(v) for v in graph.live())])[:-1]
    profile = Profile(graph, graph.live(), places)
    instants = profile.candidates()
    if not len(instants):
        return
    prices = PricedGraph(graph, profile, instants)
    for price in (0.3, 1.0):
        priced = prices.at(np.full(len(instants), price))
        shrink(priced, dominance=False)
        if priced.live():
            relaxation = Relaxation(priced)
            relaxation.improve(math.inf)
            assert relaxation.bound <= cost + 1e-9
            relaxation.prune(cost)
        prices.narrow(priced, len(priced.undo))
    numbers = {v: np.flatnonzero(net.costs[v] < 1e17) for v in graph.live()}
    kept = {v: set(prices.kept[v].tolist()) for v in graph.live()}
    for v in graph.live():
        if len(numbers[v]) == graph.size(v):
            assert int(np.searchsorted(numbers[v], best[v])) in kept[v]


@pytest.mark.long
def test_the_folded_graph_does_not_grow_with_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, sweeps = [], []
    for layers in (12, 24):
        net = gpt(layers, batch=8, length=128, width=256, vocabulary=1024).network((2, 2))
        graph = Graph.of(net)
        shrink(graph)
        folded = fold(graph)
        assert folded is not None
        sizes.append(len(folded.graph.live()))
        found = folded_start(graph, Budget(), 1e-3, Callbacks(lambda: None, lambda: 60.0))
        assert found is not None
        sweeps.append(found.sweeps)
        whole = GraphSolver(graph, math.inf, Budget(sweeps=8), -1.0, Callbacks(lambda: None, lambda: 60.0))
        monkeypatch.setattr(whole, "_try_promising", None)  # which is not tried with an unfolded assignment
        whole.begin(found.messages, found.choices)
        whole.sweep_until_prunable()
        assert whole.upper - whole.lower <= 1e-3 * whole.upper
    assert max(sizes) <= min(sizes) + 2
    assert max(sweeps) <= 2 * min(sweeps)


@pytest.mark.long
def test_momentum_saves_sweeps() -> None:
    """A few sweeps with momentum reach the bound of many plain ones."""

    def sweeps(relaxation: Relaxation, goal: float, momentum: bool) -> int:
        count = 0
        while relaxation.bound < goal:
            relaxation.improve(math.inf) if momentum else relaxation.sweep_at_best_prices()
            count += 1
        return count

    quick = plain = 0
    for seed in range(8):
        graph = Graph.of(stacked((Layers(seed), 20))[0])
        best = Relaxation(graph)
        for _ in range(200):
            best.sweep_at_best_prices()
        goal = best.bound - 1e-4 * abs(best.bound)
        quick += sweeps(Relaxation(graph), goal, momentum=True)
        plain += sweeps(Relaxation(graph), goal, momentum=False)
    assert quick < 0.3 * plain


def test_a_sweep_that_lowers_the_bound_is_taken_back() -> None:
    taken_back = 0
    for seed in range(5):
        relaxation = Relaxation(Graph.of(stacked((Layers(seed), 20))[0]))
        for _ in range(40):
            before, messages = relaxation.bound, relaxation.sweeper.messages
            bound = relaxation.graph.constant + relaxation.extrapolation.sweep()
            relaxation.bound = max(before, bound)
            if bound < before - 1e-9:
                taken_back += 1
                assert relaxation.sweeper.messages is messages
    assert taken_back


def test_what_repeats_in_two_directions_is_folded_straight() -> None:
    """A recurrent net of several layers, unrolled: were each layer set off by one step, little would be left out."""
    rng, steps, depth = np.random.default_rng(3), 20, 8
    onward, upward, across = ([rng.integers(0, 30, (4, 4)).astype(float) for _ in range(depth)] for _ in range(3))
    net = Network()
    cells = [[net.add_variable(np.arange(4.0)) for _ in range(depth)] for _ in range(steps)]
    for cell, after in itertools.pairwise(cells):
        for layer in range(depth):
            net.add_edge(cell[layer], after[layer], onward[layer])
            if layer + 1 < depth:
                before, behind = (cell, after) if layer % 2 else (after, cell)
                net.add_edge(before[layer], behind[layer + 1], across[layer])
    for cell in cells:
        for layer in range(depth - 1):
            net.add_edge(cell[layer], cell[layer + 1], upward[layer])
    graph = Graph.of(net)
    folded = fold(graph)
    assert folded is not None and len(folded.graph.live()) <= 4 * depth
    both = [(v, w) for v in graph.live() for w in graph.neighbours[v]]
    for v, w in both:
        stand_in, other = folded.edge[v, w]
        assert (folded.graph.neighbours[stand_in][other] == graph.neighbours[v][w]).all()
