"""Layouts, strategies and the cost network: the choices, their costs, and the optimum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.layout.layout import LayoutSpace, MeshAxes, from_spec, replicated, to_spec
from shardplan.problem.cost_network import Problem
from shardplan.problem.strategies import StrategyMaker
from shardplan.program.tracing import trace_program
from shardplan.search import Network
from tests.helpers.random_programs import inputs_of, random_step

NAMES = ("x", "y", "z")
S = jax.ShapeDtypeStruct


def axes_of(*sizes: int) -> MeshAxes:
    return MeshAxes(NAMES[: len(sizes)], sizes)


def abstract_mesh(*sizes: int) -> AbstractMesh:
    return AbstractMesh(sizes, NAMES[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def floats(*shape: int) -> S:
    return S(shape, jnp.float32)


# ---- layouts


@pytest.mark.parametrize(
    ("sizes", "shape", "count"),
    [
        ((8,), (), 1),
        ((8,), (16,), 2),
        ((8,), (16, 16), 3),
        ((8,), (16, 12), 2),
        ((8,), (0, 8), 2),
        ((8,), (1, 1), 1),
        ((1,), (16, 16), 1),
        ((4, 1), (16, 16), 3),
        ((2, 4), (16, 16, 16), 16 + 3),  # both orders of the two axes on one dimension
        ((2, 4), (6, 4), 4 + 1),  # 6: x alone; 4: x, y
        ((2, 4), (3, 5), 1),
        ((2, 2, 2), (16, 16), 27),  # in the order of the mesh alone
    ],
)
def test_domains_hold_the_layouts_that_divide(sizes: tuple[int, ...], shape: tuple[int, ...], count: int) -> None:
    axes = axes_of(*sizes)
    domain = LayoutSpace(axes).domain(shape)
    assert domain.layouts[0] == replicated(len(shape))
    assert len(set(domain.layouts)) == len(domain) == count
    for layout, degree in zip(domain.layouts, domain.degrees, strict=True):
        assert all(size % axes.degree(group) == 0 for size, group in zip(shape, layout, strict=True))
        assert degree == axes.degree([axis for group in layout for axis in group])
        assert from_spec(axes, to_spec(axes, layout), len(shape)) == layout


def test_domains_of_equal_divisibility_are_shared() -> None:
    space = LayoutSpace(axes_of(2, 4))
    assert space.domain((16, 8)) is space.domain((32, 64))
    assert space.domain((16, 8)) is not space.domain((16, 6))


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (P(), ((), ())),
        (P("x"), ((0,), ())),
        (P(None, ("y", "x")), ((), (1, 0))),
        (P("z"), ((), ())),  # of size 1
        (P(P.UNCONSTRAINED, "y"), ((), (1,))),
    ],
    ids=str,
)
def test_specs(spec: P, layout: Any) -> None:
    assert from_spec(MeshAxes(NAMES, (2, 4, 1)), spec, 2) == layout


# ---- strategies


def strategies_of(fn: Any, args: Any, *sizes: int, primitive: str) -> set[tuple[Any, Any, Any]]:
    program = trace_program(fn, args)
    maker = StrategyMaker(LayoutSpace(axes_of(*sizes)))
    (operation,) = [o for o in program.operations if o.primitive.name == primitive]
    choices = maker.choices(program, operation)[1]
    return {(s.operands, s.results[0], s.pending[0]) for s in choices.strategies if s is not None}


WHOLE: Any = ((), ())
ROWS: Any = ((0,), ())
COLUMNS: Any = ((), (0,))


@pytest.mark.parametrize(
    ("fn", "shapes", "primitive", "expected"),
    [
        (
            jnp.matmul,
            ((16, 16), (16, 16)),
            "dot_general",
            {
                ((WHOLE, WHOLE), WHOLE, ()),
                ((ROWS, WHOLE), ROWS, ()),
                ((WHOLE, COLUMNS), COLUMNS, ()),
                ((COLUMNS, ROWS), WHOLE, (0,)),
            },
        ),
        (
            jnp.matmul,
            ((16, 12), (12, 6)),
            "dot_general",
            {((WHOLE, WHOLE), WHOLE, ()), ((ROWS, WHOLE), ROWS, ())},
        ),
        (
            jnp.transpose,
            ((16, 8),),
            "transpose",
            {((WHOLE,), WHOLE, ()), ((COLUMNS,), ROWS, ()), ((ROWS,), COLUMNS, ())},
        ),
        (
            lambda x: jnp.sum(x, 1),
            ((16, 8),),
            "reduce_sum",
            {((WHOLE,), ((),), ()), ((ROWS,), ((0,),), ()), ((COLUMNS,), ((),), (0,))},
        ),
        (jnp.linalg.cholesky, ((16, 16),), "cholesky", {((WHOLE,), WHOLE, ())}),
        (lambda x: jnp.sort(x, 1), ((16, 16),), "sort", {((WHOLE,), WHOLE, ()), ((ROWS,), ROWS, ())}),
    ],
    ids=["matmul", "matmul that little divides", "transpose", "sum", "cholesky", "sort"],
)
def test_strategies(fn: Any, shapes: Any, primitive: str, expected: Any) -> None:
    assert strategies_of(fn, [floats(*shape) for shape in shapes], 8, primitive=primitive) == expected


def test_strategies_over_two_axes() -> None:
    found = strategies_of(jnp.matmul, [floats(16, 16), floats(16, 16)], 2, 4, primitive="dot_general")
    # three indices and none for each axis, and both orders where the axes meet on one index
    assert len(found) == 16 + 3
    assert ((((0,), (1,)), ((1,), ())), ((0,), ()), (1,)) in found


# ---- the network


def brute_force(network: Network) -> float:
    """The least cost over all choices, by the sum of all tables over the whole product."""
    count = len(network)
    total = np.zeros([costs.size for costs in network.costs])
    for variable, costs in enumerate(network.costs):
        total += costs.reshape([-1 if v == variable else 1 for v in range(count)]) * network.multiplicities[variable]
    for u, v, index in network.edges:
        table = network.tables[index]
        if u == v:
            total += np.diag(table).reshape([-1 if w == u else 1 for w in range(count)])
            continue
        table = table if u < v else table.T
        shape = [table.shape[0] if w == min(u, v) else table.shape[1] if w == max(u, v) else 1 for w in range(count)]
        total += table.reshape(shape)
    assert not network.ties
    return float(total.min())


TINY: dict[str, tuple[Any, list[Any]]] = {
    "product": (jnp.matmul, [floats(64, 64), floats(64, 64)]),
    "two layers": (lambda x, v, w: jnp.tanh(x @ v) @ w, [floats(512, 64), floats(64, 512), floats(512, 64)]),
    "shared": (lambda x, v, w: (x @ v, x @ w, x.sum()), [floats(64, 1024), floats(1024, 64), floats(1024, 32)]),
    "norm": (lambda x, g: (x - x.mean(1, keepdims=True)) * g, [floats(64, 256), floats(256)]),
    "state": (lambda w, x: (w - x.T @ (x @ w), (x @ w).sum()), [floats(64, 128), floats(512, 64)]),
    "sort": (lambda x: jnp.sort(jnp.transpose(x) * 2, 0), [floats(64, 64)]),
}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [*((name, (2,)) for name in TINY), *((name, (8,)) for name in TINY), ("product", (2, 2)), ("sort", (2, 4))],
    ids=str,
)
def test_the_plan_is_the_best_of_all(name: str, sizes: tuple[int, ...]) -> None:
    fn, args = TINY[name]
    plan = shardplan.plan(fn, abstract_mesh(*sizes), *args)
    network = plan.schedule.problem.network
    assert plan.objective == pytest.approx(brute_force(network), rel=1e-5)
    assert plan.lower_bound <= plan.objective * (1 + 1e-9)
    assert plan.gap <= 1e-5


def priced_anew(plan: shardplan.Plan) -> float:
    """The objective of a plan, from its collectives, what is stored, and what work is repeated."""
    problem: Problem = plan.schedule.problem
    prices, assignment = problem.prices, plan.schedule.assignment
    total = plan.step_time.seconds if prices.counts_time else 0.0
    for sent in plan.schedule.collectives() if not prices.counts_time else ():
        each = sent.bytes * prices.per_byte(sent.step.axes) + prices.per_collective(sent.step.kind, sent.step.axes)
        total += each * sent.times
    for value, layout in assignment.values.items():
        domain = problem.domain(value)
        stored = plan.program.values[value].total_bytes / domain.degrees[domain.position[layout]]
        total += stored * prices.per_byte_stored()
    for operation in plan.program.operations:
        choices = problem.choices.get(operation.index)
        strategy = assignment.strategies.get(operation.index)
        if choices is not None and strategy is not None and not prices.counts_time:
            work = prices.work(choices.flops, problem.traffic.get(operation.index, 0), choices.dtype, strategy.degree)
            total += work * problem.times(operation)
    return total


@pytest.mark.parametrize("objective", ["bytes", "time"])
@pytest.mark.parametrize("sizes", [(8,), (2, 4), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", TINY)
def test_objective_of_a_plan(name: str, sizes: tuple[int, ...], objective: str) -> None:
    """The network's cost is that of the plan's schedule."""
    fn, args = TINY[name]
    plan = shardplan.plan(fn, abstract_mesh(*sizes), *args, objective=objective)
    assert plan.objective == pytest.approx(priced_anew(plan), rel=1e-4, abs=1e-9)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:no mesh axis")
@pytest.mark.parametrize("seed", range(30))
def test_objective_of_random_plans(seed: int) -> None:
    """Two readers that take one value on to a third layout: the network counts that twice, the plan sends it once."""
    params = inputs_of(seed)
    batch = params.pop("p0")
    sizes = ((8,), (2, 4), (2, 2, 2))[seed % 3]
    plan = shardplan.plan(random_step(seed), abstract_mesh(*sizes), params, batch, time_limit=10)
    assert priced_anew(plan) <= plan.objective * (1 + 1e-4)
    assert priced_anew(plan) >= plan.objective * 0.9


def test_a_step_that_is_data_parallel_by_nature() -> None:
    """Small weights and a large batch: the batch is split, the weights' gradients are reduced."""

    def step(p: Any, x: Any) -> Any:
        loss = lambda p: jnp.mean(jnp.tanh(jnp.tanh(x @ p["v"]) @ p["w"]) @ p["u"])  # noqa: E731
        return jax.tree.map(lambda p, g: p - g, p, jax.grad(loss)(p))

    weights = {name: floats(512, 512) for name in "uvw"}
    plan = shardplan.plan(step, abstract_mesh(8), weights, floats(65536, 512))
    assert plan.layouts["1"] == P("x")
    assert plan.communication_bytes <= 3 * 2 * 7 / 8 * 512 * 512 * 4 + 1000


def test_captured_arrays() -> None:
    """They are whole on every device."""
    table = jnp.ones((64, 64))
    plan = shardplan.plan(lambda x: x @ table, abstract_mesh(8), floats(64, 64))
    (value,) = plan.program.captured
    assert plan.schedule.assignment.values[value] == replicated(2)


def test_ties_give_a_state_one_layout() -> None:
    fn, args = TINY["state"]
    plan = shardplan.plan(fn, abstract_mesh(2, 4), *args)
    assert plan.program.ties == {0: 0}
    assert plan.out_shardings[0].spec == plan.in_shardings[0].spec
