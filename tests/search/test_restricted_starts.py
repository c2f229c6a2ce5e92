"""Warm starts from restricted networks, and their solutions in the whole network."""

import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import shardplan
from shardplan.options import Options
from shardplan.plans.pipeline import build_problem
from shardplan.program.tracing import trace_program
from shardplan.search import Network, Solution, solve
from shardplan.search.budget import Budget, Callbacks
from shardplan.search.exact import take_restricted_solutions
from shardplan.search.graph.graph import Graph
from shardplan.search.run import Run
from shardplan.search.solver.graph_solver import GraphSolver
from shardplan.search.structure.restricted_starts import reduced_choices, solve_restricted
from shardplan.search.testing import random_networks

MESHES = AbstractMesh((2, 2, 2), ("a", "b", "c")), AbstractMesh((2, 4), ("a", "b"))
CALLBACKS = Callbacks(lambda: None, lambda: math.inf)


def drawn(seed: int) -> tuple[Network, dict[int, np.ndarray]]:
    """A random network, and some of the choices of each variable."""
    rng = np.random.default_rng(seed)
    pairs = [(u, v) for u in range(7) for v in range(u + 1, 7) if rng.random() < 0.7]
    net = random_networks.random_graph(rng, [*pairs, (0, 1), (5, 6)], 5, 0.1)
    kept = {v: rng.random(len(costs)) < 0.7 for v, costs in enumerate(net.costs)}
    for mask in kept.values():
        mask[0] = True
    return net, kept


def test_restricted_optimum_in_the_reduced_network() -> None:
    """The optimum of a restricted network is found, and costs as much in the reduced network."""
    found = 0
    for seed in range(30):
        net, kept = drawn(seed)
        answer = solve_restricted(net, kept, Budget(), 0.0, CALLBACKS)
        small = Network()
        for v, costs in enumerate(net.costs):
            small.add_variable(np.where(kept[v], costs, np.inf))
        for u, v, table in net.edges:
            small.add_edge(u, v, net.tables[table])
        _, best = random_networks.brute_force(small)
        assert (answer is None) == (best == math.inf)
        if answer is None:
            continue
        assert net.cost(answer.choices) == best and all(kept[v][k] for v, k in enumerate(answer.choices))
        graph = Graph.of(net)
        GraphSolver(graph, math.inf, Budget(), 0.0, CALLBACKS).reduce()
        choices = reduced_choices(graph, answer.choices)
        assert choices is not None and graph.cost(choices) <= best
        found += bool(graph.live())
    assert found > 10


def test_the_answer_is_taken_once() -> None:
    net, kept = drawn(10)
    answer = solve_restricted(net, kept, Budget(), 0.0, CALLBACKS)
    assert answer is not None
    net.restrictions = [kept]
    solver = GraphSolver(Graph.of(net), math.inf, Budget(), 0.0, CALLBACKS)
    solver.reduce()
    run = Run(net, time_limit=60.0)
    assert take_restricted_solutions(run, solver) and solver.upper <= net.cost(answer.choices)
    assert solver.graph.hint is not None and solver.graph.cost(solver.graph.hint) == solver.upper
    assert not take_restricted_solutions(run, solver), "nothing is better than what there is"


def test_what_is_no_better_is_no_answer() -> None:
    net, kept = drawn(10)
    answer = solve_restricted(net, kept, Budget(), 0.0, CALLBACKS)
    assert answer is not None
    best = net.cost(answer.choices)
    above, equal = (solve_restricted(net, kept, Budget(), 0.0, CALLBACKS, upper) for upper in (best + 1.0, best))
    assert above is not None and net.cost(above.choices) == best
    assert equal is None


def test_joined_axes() -> None:
    """Of a matrix on (2, 2, 2): all axes on one dimension or none, as on (8,); each of two axes, as on (2, 4)."""
    program = trace_program(lambda x: x @ x, (np.ones((16, 16), np.float32),))
    fine, coarse = (build_problem(program, mesh, Options()) for mesh in MESHES)
    (value,) = program.inputs
    variable, degrees = fine.variables.values[value], fine.domain(value).degrees
    as_one, *pairs = fine.network.restrictions
    assert as_one[variable].sum() == 3 and len(pairs) == 3
    assert len(coarse.network.restrictions) == 1, "of two axes, only all as one"
    for masks in pairs:
        assert len(masks[variable]) == 27 and masks[variable].sum() == 9  # (2, 4) has both orders on a dimension
        assert masks.keys() == set(range(len(fine.network)))
    kept = pairs[0][variable]
    assert set(degrees[kept]) == set(coarse.domain(value).degrees)


@pytest.mark.slow
def test_counted_work_on_a_slow_machine() -> None:
    """A search without a usage limit ends by its work on a slow machine too."""
    rng = np.random.default_rng(0)
    pairs = [(u, v) for u in range(60) for v in range(u + 1, 60) if rng.random() < 0.2]
    net = random_networks.random_graph(rng, pairs, 8)

    def solved(pause: float) -> Solution:
        return solve(net, time_limit=2000, work_limit=0.05, progress=lambda _: time.sleep(pause))

    quick, slow = solved(0.0), solved(0.005)
    assert quick.status == "feasible", "the work was too little to close the gap"
    assert (quick.choices == slow.choices).all()
    assert (quick.work, quick.lower_bound, quick.iterations) == (slow.work, slow.lower_bound, slow.iterations)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:no mesh axis .* divides dimension 0")
def test_a_mesh_of_three_axes_is_no_worse_than_one_of_fewer() -> None:
    """Products over triangles of a square of features: many dimensions, none of which is split by nature."""

    def step(params, z):
        def loss(params):
            a, b = z @ params["a"], z @ params["b"]
            out = jnp.einsum("bikc,bjkc->bijc", a, b) + jnp.einsum("bkic,bkjc->bijc", a, b)
            return jnp.mean((out @ params["c"]) ** 2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    params = {name: jax.ShapeDtypeStruct((128, 128), jnp.float32) for name in "abc"}
    z = jax.ShapeDtypeStruct((2, 256, 256, 128), jnp.float32)
    fine, *coarse = (shardplan.plan(step, mesh, params, z) for mesh in (*MESHES, AbstractMesh((8,), ("a",))))
    assert all(fine.objective <= plan.objective * (1 + 1e-5) for plan in coarse)
