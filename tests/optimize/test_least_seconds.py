"""The lower bound of what recomputation adds within a limit, against drawn choices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardplan
from shardplan.memory import lifetimes_of
from shardplan.optimize.choose_recomputed import Fates, choose_recomputed
from shardplan.optimize.least_seconds import least_seconds
from shardplan.optimize.residual_graph import ResidualGraph
from tests.plans.test_recompute import ARGUMENTS, SCANNED, WIDTH, scanned, train


def biased(weights, x):
    """A step with a mask of gathered weights, which devices share: kernels keep it, and nothing makes it again."""
    order, mask = jnp.arange(WIDTH)[::-1], jnp.tril(jnp.ones((WIDTH, WIDTH), bool))

    def layer(y, w):
        bias = jnp.where(mask, w[order], -1e9)
        scores = (y @ w).reshape(-1, WIDTH, WIDTH) + bias
        return y + jax.nn.softmax(scores).reshape(y.shape) @ (w * jnp.sin(bias))

    return train(weights, x, layer)


STEPS = {"unrolled": (train, ARGUMENTS), "scanned": (scanned, SCANNED), "biased": (biased, ARGUMENTS)}


@pytest.fixture(scope="module", params=STEPS)
def graph(request):
    step, arguments = STEPS[request.param]
    plan = shardplan.plan(step, "x=2", *arguments, memory_limit="80GB")
    return ResidualGraph(plan.schedule, lifetimes_of(plan.schedule, frozenset()))


@given(data=st.data())
def test_no_drawn_choice_adds_less(graph, data):
    """Of any residuals that are computed again, those that fit take at least the bound."""
    chosen = graph.useful(data.draw(st.sets(st.sampled_from(graph.residuals))))
    profile, seconds = graph.estimate(chosen)
    assert least_seconds(graph, profile.max(), Fates()) <= seconds + 1e-12


@pytest.mark.parametrize("graph", ["unrolled", "scanned"], indirect=True)  # little is saved in the other one
@pytest.mark.parametrize("share", [0.9, 0.6, 0.3])
def test_the_choice_is_near_to_the_bound(graph, share):
    """The chosen residuals take at most a third more than the bound, of what all of them would add."""
    most = graph.estimate(graph.useful(choose_recomputed(graph, 0.0, Fates())))
    nothing = graph.estimate(graph.useful(()))
    limit = most[0].max() + share * (nothing[0].max() - most[0].max())
    profile, seconds = graph.estimate(choose_recomputed(graph, limit, Fates()))
    least = least_seconds(graph, limit, Fates())
    assert profile.max() <= limit
    assert least > nothing[1] or graph.stacks  # what is not stacked saves time
    assert least <= seconds <= least + (most[1] - nothing[1]) / 3


def test_a_limit_that_no_choice_keeps(graph):
    """Where all residuals together are not enough, no number of seconds is."""
    assert np.isinf(least_seconds(graph, 0.0, Fates()))
