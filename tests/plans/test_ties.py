"""Plans of equal cost: what people expect of the layouts among them (docs/search.md, "Ties")."""

import jax
import jax.numpy as jnp
import optax
import pytest

import shardplan

SHAPES = {(8,): ("x",), (2, 4): ("x", "y"), (2, 2, 2): ("x", "y", "z")}


def _loss(params, x, y):
    hidden = x
    for name in sorted(params):
        hidden = jnp.tanh(hidden @ params[name]["w"] + params[name]["b"])
    return jnp.mean((hidden - y) ** 2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [256, 65536])
def test_moments_have_their_parameters_layouts(shape, rows):
    optimizer = optax.adam(1e-3)
    params = {str(n): {"w": jnp.zeros((1024, 1024)), "b": jnp.zeros(1024)} for n in range(3)}
    state = optimizer.init(params)

    def step(params, state, x, y):
        updates, state = optimizer.update(jax.grad(_loss)(params, x, y), state)
        return optax.apply_updates(params, updates), state

    mesh = jax.sharding.AbstractMesh(shape, SHAPES[shape])
    batch = jax.ShapeDtypeStruct((rows, 1024), jnp.float32)
    layouts = shardplan.plan(step, mesh, params, state, batch, batch).layouts
    for path in [path for path in layouts if path.startswith("0/")]:
        same = [other for other in layouts if other.startswith("1/") and other.endswith(path[1:])]
        assert len(same) == 2 and all(layouts[other] == layouts[path] for other in same)
