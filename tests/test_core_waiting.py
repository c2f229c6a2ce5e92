"""Sums that wait: what is added up later is sent once, through lookups, contractions and scatters too."""

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import shardplan
from shardplan import rules
from shardplan.audit import measure
from shardplan.early import reduced_before_added
from shardplan.schedule import Schedule
from shardplan.search import solve
from shardplan.target import gpu_mesh
from tests.core_programs import assert_equal_trees, mesh_of, run, with_schedule

TOKENS, INNER, WIDTH, CHOICES = 64, 32, 16, 4


def chosen_rows(x: Any, w: Any, ids: Any) -> Any:
    """Each token adds up some rows of a product."""
    return jnp.sum((x @ w)[ids], axis=1)


def weighted_rows(x: Any, w: Any, ids: Any) -> Any:
    """The same by weights, as experts do, with the gradients of all."""

    def loss(x: Any, w: Any) -> Any:
        weights = jax.nn.softmax(ids.astype(jnp.float32))
        return jnp.sum(jnp.einsum("tk,tkd->td", weights, (x @ w)[ids]) ** 2)

    return jax.value_and_grad(loss, (0, 1))(x, w)


def corners(**fill: Any) -> Any:
    """What a few rows of a table add up to, by weights, as in a grid of features; some lookups need no filling."""

    def added(x: Any, w: Any, ids: Any) -> Any:
        weights = jnp.cos(ids.astype(jnp.float32))
        return jnp.tanh(sum(jnp.take(x, ids[:, c], axis=0, **fill) * weights[:, c, None] for c in range(CHOICES)))

    return added


def added_at(x: Any, w: Any, ids: Any) -> Any:
    """Rows of a product added at few places."""
    return jax.ops.segment_sum(x @ w, ids[:, 0], num_segments=8)


def filled_with(value: Any) -> Any:
    return lambda x, w, ids: jnp.sum(jnp.take(x @ w, ids, axis=0, mode="fill", fill_value=value), axis=1)


def scanned_experts(x: Any, w: Any, ids: Any) -> Any:
    """Experts one after another in a loop, with the gradients of all: what each gives is stacked, and read in another
    loop for the gradients of the tokens' weights."""

    def loss(x: Any, w: Any, weights: Any) -> Any:
        def add(total: Any, expert: Any) -> Any:
            matrix, weight = expert
            return total + (x @ matrix) * weight[:, None], None

        experts = w * jnp.arange(1.0, CHOICES + 1)[:, None, None]
        return jnp.sum(jax.lax.scan(add, jnp.zeros((len(x), w.shape[1])), (experts, weights.T))[0] ** 2)

    return jax.value_and_grad(loss, (0, 1, 2))(x, w, jax.nn.softmax(ids.astype(jnp.float32)))


def gates(x: Any, w: Any, ids: Any) -> Any:
    """A step of a cell whose gates one product makes: its gradient is cut in each iteration."""

    def loss(up: Any, down: Any) -> Any:
        def cell(h: Any, _: Any) -> Any:
            one, other = jnp.split(h @ jnp.concatenate([up, down], 1), 2, 1)
            return jnp.tanh(one) * jax.nn.sigmoid(other), None

        return jnp.sum(jax.lax.scan(cell, x[:, :WIDTH], None, length=3)[0] ** 2)

    up, down = jax.grad(loss, (0, 1))(w[:WIDTH], w[WIDTH:])
    return w[:WIDTH] - up, w[WIDTH:] - down


def convolved(x: Any, w: Any, ids: Any) -> Any:
    """A convolution as long as what it reads, by transforms: its filters are made from features of the places."""

    def loss(w: Any) -> Any:
        rows, made = x.reshape(-1, WIDTH, INNER // WIDTH), w[:CHOICES, : INNER // WIDTH]
        filters = jnp.tanh(jnp.cos(ids[:WIDTH]) @ made)
        transformed = jnp.fft.rfft(rows, 2 * WIDTH, axis=1) * jnp.fft.rfft(filters, 2 * WIDTH, axis=0)
        return jnp.sum(jnp.fft.irfft(transformed, 2 * WIDTH, axis=1)[:, :WIDTH] ** 2)

    return w - jax.grad(loss)(w)


def tied(x: Any, w: Any, ids: Any) -> Any:
    """A table in which rows are looked up, and that is multiplied with: a gradient adds rows, another is a product."""

    def loss(table: Any, w: Any) -> Any:
        return jnp.sum(jax.nn.softmax(jnp.tanh(table[ids] @ w) @ (table @ w).T)[..., 0])

    return jax.tree.map(jnp.subtract, (x, w), jax.grad(loss, (0, 1))(x, w))


def bags(x: Any, w: Any, ids: Any) -> Any:
    """Rows that are added to one that is no zeros, in two ways; some lie outside."""
    rows = jnp.cos(ids.astype(jnp.float32))[..., None] * jnp.arange(1.0, INNER + 1)
    return jnp.tanh((x.at[ids].add(rows, mode="drop") + x.at[2 * ids].add(rows, mode="clip")) * jnp.mean(w))


PROGRAMS = {
    "lookup": chosen_rows, "weights": weighted_rows, "scatter": added_at, "scanned": scanned_experts, "gates": gates,
    "zeros": filled_with(0), "fives": filled_with(5.0), "transforms": convolved, "tied": tied, "bags": bags,
    "corners": corners(), "clipped": corners(mode="clip"), "filled corners": corners(mode="fill", fill_value=5.0),
}  # fmt: skip


def arguments() -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    ids = jax.random.randint(keys[2], (TOKENS, CHOICES), 0, TOKENS)
    return jax.random.normal(keys[0], (TOKENS, INNER)), jax.random.normal(keys[1], (INNER, WIDTH)), ids


def test_tables_and_updates_are_linear_where_nothing_but_zeros_and_no_numbers_are_filled_in():
    ids, table = jax.ShapeDtypeStruct((5, 1), jnp.int32), jax.ShapeDtypeStruct((16, 8), jnp.float32)
    numbers = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))
    for value, linear in ((None, True), (0.0, True), (float("nan"), True), (5.0, False)):
        rule = rules.rule_of(
            lambda t, i, value=value: jax.lax.gather(t, i, numbers, (1, 8), mode="fill", fill_value=value), table, ids
        )
        assert rule.linear == ((frozenset({0}),) if linear else ())


def result_of(program: Any, index: int) -> Any:
    return program.values[program.operations[index].results[0]]


def open_sums(plan: shardplan.Plan, seed: int, drawn: float = 1e9) -> shardplan.Plan:
    """The same program with drawn layouts, sums being left open wherever they may.

    drawn: what layouts cost besides, at most; with none the cheapest are taken.
    """
    problem, draw = plan.schedule.problem, np.random.default_rng(seed)
    costs = list(problem.network.costs)
    problem.network.costs[:] = [c + drawn * draw.random(c.shape) for c in costs]
    for value in problem.deferred.values:
        variable, domain = problem.variables.values.get(value), problem.domain(value)
        if variable is not None:
            partial = np.array([len(layout) > domain.rank for layout in domain.layouts])
            problem.network.costs[variable] = problem.network.costs[variable] - 3e9 * partial
    for index in problem.deferred.operands:
        variable, rank = problem.variable_of_operation(index), len(result_of(problem.program, index).shape)
        if variable is not None:
            waits = np.array([len(strategy.results[0]) > rank for strategy in problem.choices[index].strategies])
            problem.network.costs[variable] = problem.network.costs[variable] - 3e9 * waits
    choices = solve(problem.network, time_limit=5.0, gap=0.5).choices
    problem.network.costs[:] = costs
    return with_schedule(plan, Schedule(problem, problem.decode(choices)))


def waiting(schedule: Schedule) -> set[str]:
    """The operations that pass on parts of a sum."""
    strategies = schedule.assignment.strategies
    return {
        operation.primitive.name
        for operation in schedule.program.operations
        if operation.index in strategies
        and schedule.is_partial(operation.results[0], strategies[operation.index].results[0])
    }


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_open_sums_give_what_one_device_gives(program: str):
    mesh, function, (x, w, ids) = mesh_of((2, 4)), PROGRAMS[program], arguments()
    beyond = ids.at[3, 1].set(1000).at[5, 0].set(-2000)
    plan = shardplan.plan(function, mesh, x, w, ids)
    passed = set()
    for seed in range(3):
        drawn = open_sums(plan, seed)
        passed |= waiting(drawn.schedule)
        for places in (ids, beyond):
            assert_equal_trees(run(drawn, mesh, x, w, places), function(x, w, places))
    passing = {"gather", "scatter-add", "reduce_sum", "dot_general", "split", "fft", "mul", "add"}
    assert passed & passing
    assert program != "fives" or "gather" not in passed  # the sum of what is filled in is another number


def test_lookups_in_a_split_table_are_added_up_and_reduced_once_over_both_axes():
    table, weights = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2**16, WIDTH), (1, 1)))
    mesh, ids = AbstractMesh((2, 4), ("x", "y")), jax.ShapeDtypeStruct((TOKENS, CHOICES), jnp.int32)
    plan = shardplan.plan(corners(), mesh, table, weights, ids, pins={"0": PartitionSpec(("x", "y"))})
    assert {sent.kind for sent in plan.collectives} == {"reduce-scatter"}
    assert plan.communication_bytes == 7 / 8 * TOKENS * WIDTH * 4


def test_rows_are_added_up_before_they_are_sent():
    rows, matrix = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((TOKENS, 2048), (2048, WIDTH)))
    mesh, pins = AbstractMesh((8,), ("x",)), {"0": PartitionSpec(None, "x"), "1": PartitionSpec("x")}
    plan = shardplan.plan(added_at, mesh, rows, matrix, jax.ShapeDtypeStruct((TOKENS, CHOICES), jnp.int32), pins=pins)
    assert waiting(plan.schedule) == {"scatter-add"}
    assert plan.communication_bytes == 7 / 8 * 8 * WIDTH * 4


@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
def test_a_table_that_is_looked_up_and_multiplied_with_has_its_gradient_reduced_once(sizes: tuple[int, ...]):
    mesh, count = AbstractMesh(sizes, ("x", "y")[-len(sizes) :]), 1 << 20
    table, matrix = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64 * TOKENS, INNER), (INNER, INNER)))
    pins = {"2": PartitionSpec(mesh.axis_names)}
    plan = shardplan.plan(tied, mesh, table, matrix, jax.ShapeDtypeStruct((count, 1), jnp.int32), pins=pins)
    assert "add_any" in waiting(plan.schedule)
    assert plan.communication_bytes == 2 * 7 / 8 * (64 * TOKENS + INNER) * INNER * 4


def test_sums_wait_in_stacks_and_in_their_slices():
    """Forward, all experts' results are reduced once, not one each; backward, what each token's weight gets."""
    rows, matrix = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((TOKENS, 2048), (2048, WIDTH)))
    mesh, pins = AbstractMesh((8,), ("x",)), {"0": PartitionSpec(None, "x"), "1": PartitionSpec("x")}
    ids = jax.ShapeDtypeStruct((TOKENS, CHOICES), jnp.int32)
    plan = shardplan.plan(scanned_experts, mesh, rows, matrix, ids, pins=pins)
    schedule, stacks = plan.schedule, plan.schedule.problem.stacks
    layouts = schedule.assignment.values
    assert any(schedule.is_partial(stack, layouts[stack]) for stack in stacks)
    assert {sent.tensor.shape for sent in schedule.collectives()} == {(TOKENS, WIDTH), (TOKENS,)}
    assert plan.communication_bytes == 7 / 8 * TOKENS * (2 * WIDTH + CHOICES) * 4


def test_what_a_loop_cuts_off_a_sum_is_reduced_once():
    rows, matrix = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8192, INNER), (INNER, WIDTH)))
    mesh, ids = AbstractMesh((8,), ("x",)), jax.ShapeDtypeStruct((TOKENS, CHOICES), jnp.int32)
    plan = shardplan.plan(gates, mesh, rows, matrix, ids, pins={"0": PartitionSpec("x")})
    assert "split" in waiting(plan.schedule)
    assert [(sent.step.kind, sent.times) for sent in plan.schedule.collectives() if sent.bytes > 4] == (
        [("reduce-scatter", 1)] * 2
    )


def test_the_gradient_of_a_transformed_filter_is_reduced_where_it_is_small():
    rows, matrix = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64 * TOKENS, INNER), (INNER, WIDTH)))
    mesh, ids = AbstractMesh((8,), ("x",)), jax.ShapeDtypeStruct((TOKENS, CHOICES), jnp.int32)
    plan = shardplan.plan(convolved, mesh, rows, matrix, ids, pins={"0": PartitionSpec("x")})
    assert {"fft", "pad"} <= waiting(plan.schedule)
    assert plan.communication_bytes == 2 * 7 / 8 * CHOICES * (INNER // WIDTH) * 4


@pytest.mark.slow
def test_sums_of_a_loop_are_whole_where_the_caller_gets_them():
    mesh, pins = mesh_of((8,)), {"0": PartitionSpec(None, "x"), "1": PartitionSpec(None, "x")}
    x, w = jnp.ones((16, 512)), jnp.ones((4, 512, 256))

    def added(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda total, e: (total + x @ e, None), jnp.zeros((len(x), w.shape[2])), w)[0]

    plan = shardplan.plan(added, mesh, x, w, pins=pins)
    assert_equal_trees(run(plan, mesh, x, w), added(x, w))
    assert plan.communication_bytes == 7 / 8 * 16 * 256 * 4  # reduced once, behind the loop


def narrow_rows(x: Any, w: Any, ids: Any) -> Any:
    """Rows of a product in bfloat16: `jnp.sum` widens them to float32, and narrows what they add up to."""
    return jnp.tanh(jnp.sum((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))[ids], axis=1))


@pytest.mark.parametrize(("sizes", "rounded"), [((8,), 0), ((2, 4), 1)], ids=str)
def test_a_sum_that_is_widened_for_more_of_it_waits_until_it_is_narrow(sizes: tuple[int, ...], rounded: int):
    wide = 1024  # what they add up to is no small sum, which would travel in float32
    mesh, shapes = AbstractMesh(sizes, ("x", "y")[-len(sizes) :]), ((TOKENS, 2048), (2048, wide))
    matrices = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    pins = {"0": PartitionSpec(None, mesh.axis_names), "1": PartitionSpec(mesh.axis_names)}
    plan = shardplan.plan(narrow_rows, mesh, *matrices, jax.ShapeDtypeStruct((8, CHOICES), jnp.int32), pins=pins)
    assert "reduce_sum" in waiting(plan.schedule)
    assert plan.communication_bytes == 7 / 8 * 8 * wide * 2
    assert len(plan.schedule.problem.deferred.rounded) == rounded  # choices split over an axis are added up in float32


@pytest.mark.long
def test_widened_sums_give_what_one_device_gives():
    mesh, (x, w, ids) = mesh_of((2, 4)), arguments()
    w = w / 32
    plan = shardplan.plan(narrow_rows, mesh, x, w, ids)
    drawn = [open_sums(plan, seed) for seed in range(3)]
    assert any("reduce_sum" in waiting(one.schedule) for one in drawn)
    for one in drawn:
        found = run(one, mesh, x, w, ids).astype(jnp.float32)
        assert_equal_trees(found, narrow_rows(x, w, ids).astype(jnp.float32), tolerance=2e-2)


@pytest.mark.long
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize(
    ("program", "drawn", "seed"),
    # of the dozens of reshards that drawn layouts make, XLA merges some that are equal
    [
        ("lookup", 1e9, 0),
        ("weights", 1e9, 1),
        ("scatter", 1e9, 0),
        ("gates", 0.0, 0),
        ("corners", 0.0, 0),
        ("tied", 0.0, 0),
    ],
)
def test_waiting_sums_are_compiled_as_planned(program: str, drawn: float, seed: int):
    mesh, arrays = gpu_mesh("h100", (2, 4), ("x", "y")), arguments()
    plan = open_sums(shardplan.plan(PROGRAMS[program], mesh, *arrays), seed, drawn)
    assert waiting(plan.schedule)
    planned = sum(sent.bytes * sent.times for sent in plan.schedule.collectives())
    assert planned > 1000
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    assert measure(plan.jitted(mesh).lower(*shapes)).communication_bytes == pytest.approx(planned, rel=0.02, abs=64)


@pytest.mark.parametrize(("mode", "kind"), [("fill", "all-reduce"), ("clip", "reduce-scatter")])
def test_the_sum_of_single_elements_is_scattered_only_where_none_is_filled_in(mode: str, kind: str):
    mesh, pins = AbstractMesh((2, 4), ("x", "y")), {"0": PartitionSpec("x")}
    table, ids = jax.ShapeDtypeStruct((512,), jnp.float32), jax.ShapeDtypeStruct((TOKENS, CHOICES), jnp.int32)
    plan = shardplan.plan(lambda t, i: jnp.take(t, i, mode=mode), mesh, table, ids, pins=pins)
    assert [sent.kind for sent in plan.collectives] == [kind]


def residual(table: Any, w: Any, ids: Any) -> Any:
    """Looked up rows that a norm reads besides the addition, as in every transformer."""
    x = table[ids[:, 0]]
    return jnp.tanh(x + (x / jnp.linalg.norm(x)) @ w)


def test_what_is_reduced_in_any_case_for_another_reader_does_not_wait():
    shapes = [((TOKENS, WIDTH), jnp.float32), ((WIDTH, WIDTH), jnp.float32), ((TOKENS, CHOICES), jnp.int32)]
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    plan = shardplan.plan(residual, AbstractMesh((8,), ("data",)), *arguments)
    assert not plan.schedule.problem.deferred.values


def shared(x: Any, w: Any) -> Any:
    """A matrix that is read three times: its gradient is a sum of three products, all reduced over the tokens."""
    return w - jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w) @ w)))(w)


def reduced_early(plan: shardplan.Plan) -> shardplan.Plan:
    """The same program with no sum left open, as a plan may be that needs the memory."""
    problem = plan.schedule.problem
    for value in problem.deferred.values:
        variable, domain = problem.variables.values.get(value), problem.domain(value)
        if variable is not None:
            partial = np.array([len(layout) > domain.rank for layout in domain.layouts])
            problem.network.costs[variable] = problem.network.costs[variable] + np.where(partial, 1e12, 0.0)
    return with_schedule(plan, Schedule(problem, problem.decode(solve(problem.network).choices)))


def shared_matrix(mesh: Any) -> tuple[shardplan.Plan, shardplan.Plan]:
    """The plan of a step with a shared matrix, and one that reduces each gradient at once."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8192, 64), (64, 64)))
    plan = shardplan.plan(shared, mesh, x, w, pins={"0": PartitionSpec("x")})
    return plan, reduced_early(plan)


@pytest.mark.slow
def test_what_is_reduced_before_it_is_added_up_stands_behind_a_barrier():
    plan, early = shared_matrix(mesh_of((8,)))
    assert not reduced_before_added(plan.schedule)
    assert len(reduced_before_added(early.schedule)) == 2  # the third is added to what has been
    x, w = jax.random.normal(jax.random.key(0), (8192, 64)), jnp.eye(64)
    for one in (plan, early):
        assert_equal_trees(run(one, mesh_of((8,)), x, w), shared(x, w), tolerance=1e-3)


@pytest.mark.long
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
def test_what_is_reduced_early_is_compiled_so():
    mesh = gpu_mesh("h100", (8,), ("x",))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8192, 64), (64, 64))]
    for one in shared_matrix(mesh):
        planned = sum(sent.bytes * sent.times for sent in one.schedule.collectives())
        assert measure(one.jitted(mesh).lower(*shapes)).communication_bytes == pytest.approx(planned, rel=1e-6)


@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
def test_a_sum_that_is_scattered_over_an_axis_and_reduced_over_another_counts_both() -> None:
    mesh = gpu_mesh("h100", (2, 2, 2), ("a", "b", "c"))
    rows, split = jax.ShapeDtypeStruct((65536, 512), jnp.float32), jax.NamedSharding(mesh, PartitionSpec("b", "c"))
    pins = {str(n): PartitionSpec(("a", "b"), "c" if n % 2 else None) for n in range(4)}

    def step(x: Any, y: Any, z: Any, u: Any) -> Any:
        return jax.lax.with_sharding_constraint(x.T @ y + z.T @ u, split)

    plan = shardplan.plan(step, mesh, rows, rows, rows, rows, pins=pins)
    assert [(found.kind, found.axes) for found in plan.collectives] == [
        ("reduce-scatter", ("b",)),
        ("all-reduce", ("a",)),
    ]
    assert plan.communication_bytes == measure(plan.lower(mesh)).communication_bytes == 2 * 512 * 256 * 2
