"""A small training step for the tests of planning within a memory limit, and a plan of it."""

import jax
import jax.numpy as jnp

import shardplan

MESH = jax.sharding.AbstractMesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def training(width=512, layers=4, batch=2048):
    def step(params, x):
        def loss(params):
            y = x
            for w in params:
                y = jax.nn.relu(y @ w)
            return (y**2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    return (
        step,
        [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers,
        jax.ShapeDtypeStruct((batch, width), "f4"),
    )


def least_peak(step, mesh, *arguments, **options):
    """The least peak that the planner finds. A limit below the arguments alone is refused without a search, with their
    sum."""
    limit = 1.0
    for _ in range(2):
        try:
            return shardplan.plan(step, mesh, *arguments, memory_limit=limit, **{"fit": (), **options}).peak_bytes
        except shardplan.InfeasibleError as error:
            limit = error.least_peak_bytes
    return limit


def plan_within(mesh=MESH):
    """A plan within four fifths of the peak without a limit."""
    step, state, batch = training()
    free = shardplan.plan(step, mesh, state, batch, donate_argnums=0)
    return shardplan.plan(step, mesh, state, batch, donate_argnums=0, memory_limit=0.8 * free.peak_bytes, fit=())
