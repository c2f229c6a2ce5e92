"""The large models of the benchmark, planned within the memory of their devices."""

import jax
import jax.numpy as jnp
import pytest

import shardplan

large = pytest.importorskip("benchmarks.large")


@pytest.mark.long
def test_a_model_slightly_above_the_memory_limit() -> None:
    """The plan of a model of 20 billion parameters fits the limit at nearly the cost without one.

    The first search finds a plan a thousandth above the limit. A second one without this start took half of the memory,
    and sent 6 % more. The bound is that without a limit, 5 % below.
    """
    config = large.CONFIGS[0]
    params = config.parameters
    state = {"params": params, "moments": jax.eval_shape(large.OPTIMIZER.init, params)}
    tokens = jax.ShapeDtypeStruct((config.batch, large.SEQUENCE), jnp.int32)
    mesh = jax.sharding.AbstractMesh(tuple(config.mesh.values()), tuple(config.mesh))
    batch = {"tokens": tokens, "labels": tokens}
    plan = shardplan.plan(large.train_step, mesh, state, batch, donate_argnums=0, hardware="h100")
    assert 60e9 < plan.peak_bytes < 80e9
    assert plan.communication_bytes < 53e9
