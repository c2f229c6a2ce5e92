"""Memory: the order of operations, limits that are kept, and what is said where nothing fits."""

import jax
import jax.numpy as jnp
import optax
import pytest

import shardplan
from shardplan.errors import InfeasibleError
from shardplan.memory.model import lifetimes_of
from shardplan.program.tracing import trace_program
from shardplan.timing.execution_order import execution_order

MESH = jax.sharding.AbstractMesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def _square(size):
    return jax.ShapeDtypeStruct((size, size), jnp.float32)


def test_execution_order_of_a_step():
    """Every operation runs once, after its operands."""

    def step(x, w):
        def body(carry, row):
            return jnp.tanh(carry @ w), carry.sum() + row

        carry, rows = jax.lax.scan(body, x, jnp.arange(4.0))
        return jnp.where(rows.sum() > 0, carry, x), carry.T @ x

    program = trace_program(step, (_square(8), _square(8)), {})
    order = execution_order(program)
    assert sorted(order) == list(range(len(program.operations)))
    made = set()
    for operation in (program.operations[index] for index in order):
        makers = {r for o in program.operations for r in o.results if o.region == operation.region}
        assert {o for o in operation.operands if isinstance(o, int) and o in makers} <= made
        made |= set(operation.results)


def test_execution_order_of_a_gradient_with_one_reader():
    """The gradient is computed shortly before its update."""

    def step(x, w):
        early = x.T @ x  # read by nothing but the result
        return jnp.sum((x @ w) @ w), early

    program = trace_program(step, (_square(8), _square(8)), {})
    assert program.operations[execution_order(program)[-1]].primitive.name == "dot_general"
    assert program.operations[execution_order(program)[-2]].primitive.name == "transpose"


def test_execution_order_of_updates():
    """The outputs of one kernel are computed before the next gradient."""

    def step(x, first, second):
        left, right = (x @ first).T @ x, (x @ second).T @ x
        return [first + left, second + right], [left * 2, right * 2]

    program = trace_program(step, (_square(8),) * 3, {})
    moves = {o.index for o in program.operations if o.primitive.name != "dot_general"}
    names = [program.operations[index].primitive.name for index in execution_order(program, moves)]
    assert [name for name in names if name != "transpose"] == [*["dot_general", "dot_general", "add", "mul"] * 2]


def _training(width=512, layers=4, batch=2048):
    optimizer = optax.adam(1e-3)

    def loss(params, x):
        for w in params:
            x = jax.nn.relu(x @ w)
        return jnp.mean(x**2)

    def step(state, x):
        params, moments = state
        gradients = jax.grad(loss)(params, x)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments

    params = [_square(width)] * layers
    return step, (params, jax.eval_shape(optimizer.init, params)), jax.ShapeDtypeStruct((batch, width), jnp.float32)


@pytest.mark.parametrize("share", [0.93, 0.79])
def test_a_limit_below_the_free_peak(share):
    """The plan keeps the limit in its own order, and sends more."""
    step, state, batch = _training()
    free = shardplan.plan(step, MESH, state, batch, donate_argnums=0)
    limit = share * free.peak_bytes
    bound = shardplan.plan(step, MESH, state, batch, donate_argnums=0, memory_limit=limit)
    assert bound.peak_bytes <= limit
    assert bound.objective >= free.objective
    assert bound.peak_bytes == pytest.approx(_peak_in_its_own_order(bound))


def _peak_in_its_own_order(plan):
    schedule = plan.schedule
    lifetimes = lifetimes_of(schedule, frozenset(plan.program.ties.values()))
    return float(lifetimes.profile(schedule.problem.encode(schedule.assignment)).max())


def test_a_limit_below_every_peak():
    """The error has the lowest peak, and the largest tensors there."""
    step, state, batch = _training()
    with pytest.raises(InfeasibleError) as caught:
        shardplan.plan(step, MESH, state, batch, memory_limit=2.2e6, fit=())
    message = str(caught.value)
    assert "within 2.2 MB per device" in message
    assert "by the planner's count none is below" in message
    assert "float32[2048, 512]" in message and "donate_argnums" in message
    assert f"{caught.value.least_peak_bytes / 1e6:.1f} MB" in message


@pytest.mark.long
def test_the_lowest_peak_on_a_finer_mesh():
    """It is near its bound, and not higher than on the coarser mesh."""
    step, state, batch = _training()
    least = []
    for mesh in (MESH, jax.sharding.AbstractMesh((2, 4), ("x", "y"))):
        with pytest.raises(InfeasibleError, match="none is below") as caught:
            shardplan.plan(step, mesh, state, batch, donate_argnums=0, memory_limit=2.2e6, fit=())
        least.append(caught.value.least_peak_bytes)
        assert least[-1] <= 1.13e6 * float(str(caught.value).split("none is below ")[1].split(" MB")[0])
    assert least[1] <= 1.02 * least[0]
    shardplan.plan(step, MESH, state, batch, donate_argnums=0, memory_limit=1.001 * least[0], fit=())
