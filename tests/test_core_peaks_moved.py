"""Predicted peaks: what collectives move and reduce together, and zeros that are made where that fills a wait."""

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.memory.combining import ending_at_reductions
from shardplan.memory.hiding import hiding_order
from shardplan.memory.liveness import WORKSPACE_BYTES, Lifetimes, memory_held, memory_profile
from shardplan.memory.merging import cut_for_reductions, side_by_side
from shardplan.memory.recomputing import adding_products, kernels_in
from shardplan.memory.reductions import combined_reductions
from shardplan.memory.usages import Usages
from shardplan.memory.zeros import fillings_of

MESH = jax.sharding.AbstractMesh((8,), ("x",))
ROWS, COLUMNS = jax.P("x", None), jax.P(None, "x")


def _shape(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_what_computes_with_zeros_behind_a_scatter_reads_them_from_the_kernel_that_makes_the_scatters():
    def step(table, ids, rows):
        added = jnp.zeros(table.shape).at[ids].add(rows)
        return table * jax.lax.select(added > 1, added, jnp.zeros(added.shape))

    schedule = shardplan.plan(step, 1, _shape(512, 512), _shape(4096, dtype="int32"), _shape(4096, 512)).schedule
    [filling] = fillings_of(schedule.problem)
    assert (len(filling.scatters), filling.readers) == (1, [])
    assert [operation.primitive.name for operation in filling.behind] == ["select_n"]
    _, sending = hiding_order(schedule, kernels_in(schedule))
    assert [*sending.filling] == [filling.scatters[0].index]


def _constrained(x, spec):
    return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(MESH, spec))


def test_what_collectives_move_is_stored_and_what_it_is_computed_from_is_not_held_for_its_readers():
    def step(x):
        return _constrained(jnp.tanh(x).astype("bfloat16"), ROWS) * 2

    schedule = shardplan.plan(step, MESH, _shape(4096, 4096), pins={"0": COLUMNS}).schedule
    kernels = kernels_in(schedule)
    [made] = [o.results[0] for o in schedule.program.operations if o.primitive.name == "convert_element_type"]
    assert made not in kernels.read and made in ending_at_reductions(schedule, kernels).read


def test_a_view_of_what_is_in_memory_is_not_stored_for_a_collective():
    def step(x, w):
        return _constrained(_constrained((x @ w).reshape(64, 64, 4096), jax.P(None, None, "x")), ROWS) * 2

    pins = {"0": jax.P(), "1": COLUMNS}
    schedule = shardplan.plan(step, MESH, _shape(4096, 4096), _shape(4096, 4096), pins=pins).schedule
    kernels = kernels_in(schedule)
    stored = ending_at_reductions(schedule, kernels).read - kernels.read
    assert stored == {schedule.program.operations[0].results[0]}  # which is in memory anyway


def test_all_reduces_over_the_same_axes_are_merged_in_whatever_order_they_are_named():
    def step(x, y):
        return jnp.sum(x), jnp.sum(y)

    mesh, square = jax.sharding.AbstractMesh((2, 4), ("x", "y")), _shape(512, 512)
    plan = shardplan.plan(step, mesh, square, square, pins={"0": jax.P("x", "y"), "1": jax.P("y", "x")})
    [group] = combined_reductions(plan.schedule)
    assert len(group) == 2


def test_what_is_gathered_alone_waits_where_other_collectives_end_before_it_is_read():
    def step(weights, x):
        for w in weights:
            x = x @ w
        return x

    pins = {f"0/{number}": (ROWS, COLUMNS)[number % 2] for number in range(4)} | {"1": ROWS}
    plan = shardplan.plan(step, MESH, [_shape(2048, 2048)] * 4, _shape(16384, 2048), pins=pins)
    _, sending = hiding_order(plan.schedule, kernels_in(plan.schedule))
    begins = {gather.value: index for gather, index in sending.begins.items()}
    first, second, third, _ = plan.program.inputs[:4]
    assert begins[first] == begins[second] == begins[third] == 0  # one product hides two of them


@pytest.mark.parametrize(("spec", "copied"), [(ROWS, False), (COLUMNS, True)])
def test_what_a_transposing_kernel_updates_lies_beside_the_old_state_until_the_end(spec, copied):
    def step(state, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(state["w"])
        return {"w": state["w"] - gradient}

    pins = {"0/w": spec, "1": ROWS}
    schedule = shardplan.plan(step, MESH, {"w": _shape(512, 512)}, _shape(8192, 512), pins=pins).schedule
    kernels = adding_products(schedule, ending_at_reductions(schedule, kernels_in(schedule)))
    order, sending = hiding_order(schedule, kernels)
    profile = memory_profile(Lifetimes(schedule.problem, order, kernels, sending), schedule, frozenset({0}), sending)
    [new] = schedule.program.outputs
    assert (new in kernels.leaving) == copied
    assert profile[-1] == (512 * 512 * (1 + copied) + 8192 * 512) * 4 / 8


def test_parts_of_merged_products_that_are_reduced_lie_beside_these_for_a_moment():
    def step(x, y, z):
        return x.T @ y, x.T @ z

    rows, pins = _shape(8192, 2048), dict.fromkeys("012", ROWS)
    schedule = shardplan.plan(step, MESH, rows, rows, rows, pins=pins).schedule
    lifetimes = Lifetimes(schedule.problem, range(len(schedule.program.operations)), kernels_in(schedule))
    [(size, first, last)] = cut_for_reductions(lifetimes, schedule)
    assert first == last == schedule.program.operations[-1].index
    beside = sum(size for size, *_ in side_by_side(lifetimes, schedule))
    assert size == 2 * 2048 * 2048 * 4 - beside - WORKSPACE_BYTES > 0


@pytest.mark.parametrize("donated", [(), (0,)])
def test_a_carry_that_is_gathered_for_a_loop_is_held_whole_while_that_runs(donated):
    def step(weight, rows):
        def body(carry, some):
            return 0.99 * carry, jnp.sum(some @ carry)

        return jax.lax.scan(body, weight, rows)

    pins = {"0": ROWS, "1": jax.P(None, "x", None)}
    plan = shardplan.plan(step, MESH, _shape(512, 512), _shape(8, 4096, 512), pins=pins, donate_argnums=donated)
    schedule, [loop] = plan.schedule, [o for o in plan.program.operations if o.bodies]
    assert [sent.step.kind for sent in schedule.collectives() if sent.operation is loop] == ["all-gather"]
    lifetimes = Lifetimes(schedule.problem, range(len(plan.program.operations)))
    held = memory_held(lifetimes, schedule, frozenset(donated))
    [carry] = [h for h in held if h.value == plan.program.outputs[0] and h.layout == ((), ())]
    assert carry.size == 4 * 512 * 512
    assert carry.lifetime.start <= lifetimes.start(loop) and carry.lifetime.end >= lifetimes.place[loop.index]
    # the network that a search within a limit solves counts it too
    usages = Usages(lifetimes, schedule.problem, frozenset(donated))
    [pair] = usages._leaving_copies()
    domain = schedule.problem.domain(plan.program.outputs[0])
    whole, split = (domain.position[layout] for layout in (((), ()), ((0,), ())))
    assert pair.amounts[whole, split] == 4 * 512 * 512 and pair.amounts[split, split] == 0
    assert pair.start == carry.lifetime.start


def test_reductions_that_would_wait_for_each_other_are_apart():
    def step(x):
        total, largest = jnp.sum(x), jnp.max(x)
        return total, largest, jnp.max(x * total), jnp.sum(x * largest)

    plan = shardplan.plan(step, MESH, jax.ShapeDtypeStruct((4096, 64), "float32"), pins={"0": jax.P("x", None)})
    order = hiding_order(plan.schedule, kernels_in(plan.schedule))[0]
    assert sorted(order) == list(range(len(plan.program.operations)))
