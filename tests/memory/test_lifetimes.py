"""Live ranges and their bytes: by hand, against networks that a search solves, and against compiled programs."""

from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import shardplan
from shardplan.memory.model import lifetimes_of
from shardplan.search import extended
from tests.helpers.memory_programs import MESH, planned, profile, shape, training

BLOCK = 4 * 512 * 512


def test_the_peak_of_a_chain_of_products_by_hand():
    """Both arguments, an operand and a result of the product that runs."""
    plan = planned(lambda x, w: jnp.sum(((x @ w) @ w) @ w), shape(4096, 1024), shape(1024, 1024))
    assert profile(plan).max() == pytest.approx(4 * (3 * 4096 * 1024 + 1024**2), rel=1e-3)


def test_a_kernel_is_in_place_of_its_last_operand():
    """The second result of a kernel takes the memory of the first, not that of a product."""
    square = shape(512, 512)
    kernels = planned(lambda x: jnp.sort(jnp.tanh(jnp.sort(x, 0)), 1), square)
    products = planned(lambda x: jnp.cos(x @ x) @ x, square)
    assert profile(kernels).max() == 4 * BLOCK  # the argument, the result, and a sort's operand and result
    assert profile(products).max() == 4 * BLOCK


def test_results_in_donated_memory():
    """Without donation old and new state are both live."""
    step, state, batch = training()
    plan = planned(step, state, batch)
    assert profile(plan).max() == pytest.approx(profile(plan, donated=4).max() + 4 * BLOCK)


ROW = np.ones((1, 512), np.float32)


@pytest.mark.parametrize(
    ("step", "blocks"),
    [
        (lambda x: jnp.tanh(x) * 2, 1),
        (lambda x: jax.lax.dynamic_update_slice(x, ROW, (7, 0)), 1),
        (
            lambda x: jax.lax.fori_loop(0, 4, lambda i, x: jax.lax.dynamic_update_slice(x, ROW, (i, 0)), x),
            1,
        ),
        (lambda x: x + x.T, 2),
        (lambda x: x @ x, 2),
    ],
)
def test_a_donated_argument_that_is_no_state(step, blocks):
    """A result computed in place of it takes its memory."""
    plan = planned(step, shape(512, 512), mesh=jax.sharding.AbstractMesh((1,), ("x",)))
    assert profile(plan, donated=1).max() == pytest.approx(blocks * BLOCK, rel=0.01)


def test_carries_and_stacks_of_loops():
    """A carry is one buffer, and slices are computed into their stack."""

    def step(x, ws):
        def body(x, w):
            x = jnp.tanh(x @ w)
            return x, jnp.sin(x)

        return jax.lax.scan(body, x, ws)

    plan = planned(step, shape(512, 512), shape(8, 512, 512))
    # the arguments, both results, a slice for the product, its result, and the next carry
    assert 18 * BLOCK <= profile(plan).max() <= 21 * BLOCK


def test_gathered_weights_are_live_from_the_gather_on():
    """A copy in another layout is a buffer of its own, until its last reader."""
    step, state, batch = training()
    pins = {"0/*": jax.P(None, "x"), "1": jax.P("x", None)}
    plan = planned(step, state, batch, mesh=MESH, pins=pins, donate_argnums=0)
    sharded = 4 * BLOCK / 8
    assert profile(plan, donated=4).max() >= sharded + 4 * BLOCK


@pytest.mark.parametrize("mesh", [(8,), (2, 4)])
def test_usages_of_networks_and_profiles(mesh):
    """Both count the same bytes, for the plan's choices and for others."""
    step, state, batch = training()
    mesh = jax.sharding.AbstractMesh(mesh, ("x", "y")[: len(mesh)])
    schedule = planned(step, state, batch, mesh=mesh).schedule
    lifetimes = lifetimes_of(schedule, frozenset())
    places = range(0, lifetimes.positions, 3)
    network = lifetimes.network(1e9, places, {0: 5e6})
    own = schedule.problem.encode(schedule.assignment)
    for choices in (own, np.zeros_like(own)):  # all of them whole on every device
        profile = lifetimes.profile(choices)[list(places)]
        profile[0] += 5e6
        every = extended(network, choices)
        counted = [
            sum(u.amounts[every[u.variable]] for u in network.usages if u.start <= time < u.end)
            for time in range(len(places))
        ]
        assert counted == pytest.approx(profile.tolist(), rel=1e-3)


@pytest.mark.parametrize(
    ("layout", "step", "most"),
    [
        (("x", None), lambda x: jnp.sort(x, -1), 3 / 8),
        ((None, "x"), lambda x: jnp.sort(x, 0), 3 / 8),
        (("x", None), lambda x: jnp.sort(x.reshape(-1)), 3 + 2 / 8),
    ],
)
def test_a_sort_works_in_a_copy_of_its_keys(layout, step, most):
    """Behind its operand and its result, which are whole where it sorts over devices."""
    plan = planned(step, shape(512, 512), mesh=MESH, pins={"0": jax.P(*layout)})
    assert profile(plan).max() == pytest.approx(most * BLOCK)


def test_equal_constants_are_one():
    """Arrays that several layers close over."""
    table = np.arange(512.0 * 512).reshape(512, 512).astype("float32")
    copies = [table, table.copy()]
    plan = planned(lambda x: jnp.sort(x @ copies[0], 0) @ copies[1], shape(512, 512))
    assert profile(plan).max() <= 6 * BLOCK


def _attention(params, x):
    q, k, v, o = params
    heads = lambda w: (x @ w).reshape(*x.shape[:2], 8, 64)  # noqa: E731
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", heads(q), heads(k)))
    return x + jnp.einsum("bhqk,bkhd->bqhd", scores, heads(v)).reshape(x.shape) @ o


def _convolved(params, x):
    for kernel in params:
        x = jax.nn.relu(
            jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )
    return x


STEPS = {
    "attention": (_attention, [shape(512, 512)] * 4, shape(32, 256, 512)),
    "convolutions": (_convolved, [shape(3, 3, 64, 64)] * 3, shape(32, 32, 32, 64)),
}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the compiler for GPUs")
@pytest.mark.parametrize("name", STEPS)
def test_predicted_peaks_are_near_compiled_ones(name):
    """On steps that no figure was fitted to; the reserve of a limit is meant for what is left."""
    forward, params, x = STEPS[name]

    def step(params, x):
        gradients = jax.grad(lambda params: jnp.mean(forward(params, x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    plan = shardplan.plan(step, MESH, params, x, donate_argnums=0)
    assert plan.peak_bytes == pytest.approx(shardplan.audit(plan, "h100").compiled.memory.peak, rel=0.2)


def test_residuals_in_host_memory():
    """Residuals that a policy offloads take host memory, and none of a device between the two parts."""
    names = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": ["h"]}
    policies, places = jax.checkpoint_policies, {"offload_src": "device", "offload_dst": "pinned_host"}

    def step(policy, weights, x):
        layer = jax.checkpoint(lambda x, w: jnp.tanh(checkpoint_name(x @ w, "h")), policy=policy)
        return jax.grad(lambda ws: jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0].sum())(weights)

    arguments = shape(8, 256, 256), shape(8192, 256)
    kept = planned(partial(step, policies.save_only_these_names("h")), *arguments)
    offloaded = planned(partial(step, policies.save_and_offload_only_these_names(**names, **places)), *arguments)
    freed = 8 * 8192 * 256 * 4
    assert (kept.host_bytes, offloaded.host_bytes) == (0, freed)
    assert kept.peak_bytes - offloaded.peak_bytes > 0.4 * freed
