"""Lower bounds hold at every moment; pruning and reparametrisation keep the optimum."""

import math

import numpy as np
import pytest

from shardplan.search import Hint, Network, solve
from shardplan.search import exact as search_exact
from shardplan.search.bounds.contraction import contract_neighbours
from shardplan.search.bounds.lagrangian import Relaxation
from shardplan.search.bounds.message_order import Model
from shardplan.search.bounds.momentum import Momentum
from shardplan.search.bounds.trws import Sweeper
from shardplan.search.budget import Budget, Callbacks
from shardplan.search.exact import lowest_peak
from shardplan.search.graph.dynamic_programming import Elimination, plan
from shardplan.search.graph.graph import Graph, Infeasible
from shardplan.search.improve.branch_and_bound import BranchAndBound
from shardplan.search.improve.crossover import Crossover
from shardplan.search.run import Run
from shardplan.search.solver.graph_solver import GraphSolver
from shardplan.search.testing import random_networks
from shardplan.search.testing.einsum_networks import gpt


def graphs(memory: bool, count: int) -> list[tuple[Network, Graph, float]]:
    """Graphs, not reduced, with their optimum."""
    found = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        net = (
            random_networks.random_memory_bound(rng, 7, rng.random())
            if memory
            else random_networks.random_grid(rng, 3, 3, 3, 0.1)
        )
        _, optimum = random_networks.brute_force(net)
        try:
            graph = Graph.of(net)
        except Infeasible:
            continue
        if np.isfinite(optimum):
            found.append((net, graph, optimum))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("memory", [False, True])
def test_bounds_never_exceed_the_optimum(memory: bool) -> None:
    tight = 0
    cases = graphs(memory, 60)
    for net, graph, optimum in cases:
        relaxation = Relaxation(graph)
        for _ in range(60):
            relaxation.improve(relaxation.cost)
            assert relaxation.bound <= optimum + 1e-9
            if relaxation.choices is not None:
                full = graph.expand(relaxation.by_variable(relaxation.choices))
                assert net.cost(full) == pytest.approx(relaxation.cost, abs=1e-9)
                assert net.usage_limit is None or net.peak(full)[0] <= net.usage_limit
        tight += relaxation.bound >= optimum - 1e-6
    # With a limit there often is a duality gap, on networks as small as these.
    assert tight > len(cases) / (6 if memory else 3)


@pytest.mark.parametrize("memory", [False, True])
def test_pruning_with_the_optimum_keeps_it(memory: bool) -> None:
    pruned = 0
    for net, graph, optimum in graphs(memory, 60):
        relaxation = Relaxation(graph)
        for _ in range(25):
            relaxation.improve(optimum)
        before = sum(graph.size(v) for v in graph.live())
        relaxation.reparametrise()
        relaxation.prune(optimum)
        pruned += before - sum(graph.size(v) for v in graph.live())
        assert _best(net, graph) == optimum
    assert pruned > 100


@pytest.mark.parametrize("sweeps", [0, 1, 4, 9, 30])
def test_no_choice_costs_less_than_it_raises_the_bound(sweeps: int) -> None:
    """Counted on all assignments, after sweeps with momentum, some of them taken back."""
    for _, graph, _ in graphs(False, 15):
        relaxation = Relaxation(graph)
        for _ in range(sweeps):
            relaxation.improve(math.inf)
        bound, above = relaxation.reduced_costs()
        live = graph.live()
        every = np.indices([graph.size(v) for v in live]).reshape(len(live), -1)
        costs = np.full(every.shape[1], graph.constant)
        for i, v in enumerate(live):
            own = graph.costs[v]
            assert own is not None
            costs += own[every[i]]
            for w, table in graph.neighbours[v].items():
                costs += table[every[i], every[live.index(w)]] if v < w else 0.0
        for v, rise in zip(relaxation.order, np.split(above, relaxation.sweeper.offsets[1:-1]), strict=True):
            least = np.array([costs[every[live.index(v)] == choice].min() for choice in range(graph.size(v))])
            assert (least >= bound + rise - 1e-9).all()


def test_reparametrised_costs_are_equal_for_every_assignment() -> None:
    for _, graph, _ in graphs(False, 20):
        rng = np.random.default_rng(0)
        live = graph.live()
        picks = [{v: int(rng.integers(graph.size(v))) for v in live} for _ in range(20)]
        before = [graph.cost(pick) for pick in picks]
        relaxation = Relaxation(graph)
        for _ in range(5):
            relaxation.improve(np.inf)
        bound = relaxation.bound
        relaxation.reparametrise()
        np.testing.assert_allclose([graph.cost(pick) for pick in picks], before, rtol=1e-12)
        again = Relaxation(graph)
        again.improve(np.inf)
        assert again.bound >= bound - 1e-9


def test_merging_neighbours_leaves_out_only_what_is_no_better() -> None:
    left_out = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        pairs = [(u, v) for u in range(5) for v in range(u + 1, 5) if rng.random() < 0.8]
        net = random_networks.random_graph(rng, [*pairs, (0, 1), (1, 2), (2, 3), (3, 4)], 3)
        graph = Graph.of(net)
        every = np.array([net.cost(index) for index in np.ndindex(*[len(costs) for costs in net.costs])])
        every = every.reshape([len(costs) for costs in net.costs])
        relaxation = Relaxation(graph)
        for _ in range(3):
            relaxation.improve(np.inf)
        bound, _ = relaxation.reduced_costs()
        for v, w, rise in relaxation.pair_costs():
            least = every.min(axis=tuple({0, 1, 2, 3, 4} - {v, w}))
            assert (bound + rise <= (least if v < w else least.T) + 1e-9).all()
        before = sum(table.size for v in graph.live() for table in graph.neighbours[v].values())
        assert contract_neighbours(graph, relaxation, float(every.min()), 10**6)
        left_out += before - sum(table.size for v in graph.live() for table in graph.neighbours[v].values())
        assert _best(net, graph) == every.min()
    assert left_out > 0


def test_merging_closes_cycles_that_messages_leave_open() -> None:
    rows = np.arange(3)
    net = Network()
    for _ in range(8):
        net.add_variable(np.zeros(3))
    for v in range(8):
        for w, turn in (((v + 1) % 8, int(v == 7)), ((v + 3) % 8, 0)):
            # Whoever fits its neighbours along the cycle does not fit the last one.
            net.add_edge(v, w, 1.0 - (rows[:, None] == (rows[None, :] + turn) % 3))
    bounds = []
    for merging in (0, 10**6):
        graph = Graph.of(net)
        solver = GraphSolver(
            graph, math.inf, Budget(table_entries=1, cp_sat_entries=0, contraction_entries=merging), 1e-9, _callbacks()
        )
        solver.solve()
        bounds.append(solver.lower)
        assert solver.upper == random_networks.brute_force(net)[1]
    assert bounds == [0.0, pytest.approx(solver.upper)]


def _callbacks() -> Callbacks:
    return Callbacks(lambda: None, lambda: 60.0)


def test_elimination_is_exact_and_within_its_limits() -> None:
    for net, graph, optimum in graphs(False, 40):
        live = graph.live()
        sizes = {v: graph.size(v) for v in live}
        order = plan(sizes, {v: set(graph.neighbours[v]) for v in live}, 1e6)
        assert order is not None and not order.fixed
        keep = {v: np.arange(size) for v, size in sizes.items()}
        costs = {v: np.asarray(graph.costs[v]) for v in live}
        found, cost = Elimination(graph, costs, keep).solve(order, {})
        assert cost == optimum == net.cost(graph.expand(found))
        # With tables this small, variables are fixed, and the hint bounds what comes out.
        narrow = plan(sizes, {v: set(graph.neighbours[v]) for v in live}, 5)
        assert narrow is not None
        found, cost = Elimination(graph, costs, keep).solve(narrow, found)
        assert cost == optimum
    assert plan({0: 3, 1: 3}, {0: {1}, 1: {0}}, 1e6, most=2) is None


def _best(net: Network, graph: Graph) -> float:
    """The least cost of what a graph still allows, counted on the network."""
    best = np.inf
    live = graph.live()
    for index in np.ndindex(*[graph.size(v) for v in live]):
        full = graph.expand(dict(zip(live, index, strict=True)))
        if net.usage_limit is None or net.peak(full)[0] <= net.usage_limit:
            best = min(best, net.cost(full))
    return best


def test_branching_proves_what_relaxations_leave_open() -> None:
    proven = 0
    for net, graph, optimum in graphs(True, 30):
        graph.hint = None
        no_closing = Budget(sweeps=20, cp_sat_entries=0, dives=False)
        solver = GraphSolver(graph, np.inf, no_closing, 0.0, Callbacks(lambda: None, lambda: 60.0))
        solver.solve()
        open_before = not solver.closed
        branching = BranchAndBound(solver, no_closing)
        for _ in range(200):
            assert solver.lower <= optimum + 1e-9
            if solver.closed or not branching.step():
                break
        assert solver.upper >= optimum - 1e-9
        if open_before and solver.closed:
            proven += 1
            assert solver.upper == pytest.approx(optimum)
            assert graph.hint is not None
            full = graph.expand(graph.hint)
            assert net.cost(full) == optimum
            assert net.usage_limit is not None and net.peak(full)[0] <= net.usage_limit
    assert proven > 3


@pytest.mark.slow
def test_crossings_mix_what_is_best_at_several_prices_of_memory():
    """A GPT's network at two thirds of its memory: messages and their decoding alone stay far above the bound."""
    net = gpt(2).network((2, 4), memory=True)
    free = solve(net, gap=1e-4)
    net.usage_limit = 0.65 * net.peak(free.choices)[0]
    graph = Graph.of(net)
    solver = GraphSolver(
        graph, math.inf, Budget(sweeps=60, cp_sat_work=0.0), 1e-6, Callbacks(lambda: None, lambda: 60.0)
    )
    solver.solve()
    before, lower = solver.upper, solver.lower
    crossing = Crossover(solver)
    while crossing.step(solver.callbacks):
        assert solver.upper < before
    assert solver.lower == lower <= solver.upper < before
    choices = graph.expand(graph.hint)
    assert net.cost(choices) == pytest.approx(solver.upper)
    assert net.peak(choices)[0] <= net.usage_limit
    assert crossing.estimate > 0


def test_what_cp_sat_does_within_a_limit_is_counted():
    counted = 0
    for net, graph, optimum in graphs(True, 12):
        solver = GraphSolver(graph, math.inf, Budget(cp_sat_work=10.0), 1e-9, Callbacks(lambda: None, lambda: 60.0))
        solver.reduce()
        left = any(graph.spans[v] for v in graph.live())  # usage that could bind, or dynamic programming would do
        solver.finish()
        assert (solver.estimate > 0) == left
        assert net.cost(graph.expand(graph.hint)) == pytest.approx(optimum, abs=1e-9)
        counted += left
    assert counted > 3


def test_model_larger_than_the_work_left():
    """CP-SAT's model is not built for an assignment within a limit where it takes longer than the work left."""
    _, graph, optimum = graphs(True, 1)[0]
    for seconds, found in ((1e-9, False), (60.0, True)):
        solver = GraphSolver(graph, math.inf, Budget(seconds=seconds), 1e-9, Callbacks(lambda: None, lambda: 60.0))
        solver.finish()
        assert (solver.upper == pytest.approx(optimum)) == found


def test_the_least_peak_is_looked_for_in_a_share_of_the_work() -> None:
    sweeps = []
    for work in (math.inf, 1e-9):
        net = random_networks.random_memory_bound(np.random.default_rng(6), 40, 0.5)
        net.usage_limit = 1e-3 * net.peak(np.zeros(len(net), dtype=np.int64))[0]
        run = Run(net, 60.0, work_limit=work)
        lowest_peak(run)
        sweeps.append(run.iterations)
    assert sweeps[1] < sweeps[0]


def test_longer_steps_keep_the_bound_true_and_raise_it_sooner() -> None:
    sooner = 0
    for seed in range(20):
        net = random_networks.random_grid(np.random.default_rng(seed), 3, 4, 3)
        _, best = random_networks.brute_force(net)
        graph = Graph.of(net)
        index = {v: i for i, v in enumerate(graph.live())}
        pairs = [(v, w) for v in index for w in graph.neighbours[v] if v < w]
        model = Model(
            [np.asarray(graph.costs[v]) for v in index],
            [(index[v], index[w]) for v, w in pairs],
            [graph.neighbours[v][w] for v, w in pairs],
        )
        fast, plain = Momentum(Sweeper(model)), Sweeper(model)
        bounds = [graph.constant + fast.sweep() for _ in range(16)]
        for _ in range(16):
            plain.up()
            slow = graph.constant + plain.down()
        assert max(bounds) <= best + 1e-9
        sooner += max(bounds) >= slow - 1e-9
    assert sooner >= 15


@pytest.mark.parametrize("served", [False, True])
def test_lowest_peak_with_a_served_hint(monkeypatch, served):
    """A known assignment within the limit makes the search for the lowest peak needless."""
    looked = []
    monkeypatch.setattr(search_exact, "lowest_peak", looked.append)
    monkeypatch.setattr(search_exact, "_price", lambda run, solver, begun: solver.callbacks.on_infeasible_hint())
    net = random_networks.random_memory_bound(np.random.default_rng(6), 40, 0.5)
    net.hint = Hint(np.zeros(len(net), dtype=np.int64), served=served)
    solve(net, work_limit=1e-3)
    assert len(looked) == (0 if served else 1)
