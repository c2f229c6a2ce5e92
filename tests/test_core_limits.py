"""Planning within a memory limit: what a search takes, and how much of the limit its plan uses."""

import jax
import jax.numpy as jnp

import shardplan
from shardplan import finding

MESH = jax.sharding.AbstractMesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def _training(width=512, layers=4, batch=2048):
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


def test_what_a_schedule_holds_is_counted_once_in_its_own_order(monkeypatch):
    seen, count = [], finding._counted

    def watched(problem, best, search):
        seen.append(best[1].choices.tobytes())
        return count(problem, best, search)

    monkeypatch.setattr(finding, "_counted", watched)
    step, state, batch = _training()
    free = shardplan.plan(step, MESH, state, batch, donate_argnums=0)
    seen.clear()
    shardplan.plan(step, MESH, state, batch, donate_argnums=0, memory_limit=0.8 * free.peak_bytes)
    assert len(seen) > 1
    assert len(seen) == len(set(seen))
