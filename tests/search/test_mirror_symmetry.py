"""Mirror symmetry: one of each pair of images is enough for the optimum."""

from dataclasses import replace

import numpy as np
import pytest
from jax.sharding import AbstractMesh

from shardplan.hardware import load
from shardplan.models import gpt
from shardplan.options import Options
from shardplan.plans.pipeline import build_problem
from shardplan.plans.planned_call import trace_call
from shardplan.problem.cost_network import Problem
from shardplan.search import Network, solve
from shardplan.search.graph.mirror_symmetry import mirror_half
from shardplan.search.testing.random_networks import brute_force


def mirrored_network(seed: int) -> Network:
    """Five variables of four choices, of which the first is its own image, round a cycle with chords."""
    rng = np.random.default_rng(seed)
    image = np.array([0, 2, 1, 3])
    net = Network()
    for _ in range(5):
        costs = rng.integers(0, 6, 4).astype(float)
        net.mirror[net.add_variable(np.maximum(costs, costs[image]))] = image
    for u, v in ((0, 1), (1, 2), (2, 3), (3, 4), (0, 4), (0, 2), (1, 4)):
        table = rng.integers(0, 9, (4, 4)).astype(float)
        net.add_edge(u, v, table + table[image][:, image])
    return net


@pytest.mark.parametrize("seed", range(8))
def test_half_of_the_assignments_has_the_optimum(seed: int) -> None:
    net = mirrored_network(seed)
    kept = mirror_half(net)
    assert kept is not None and not kept[1].all()
    assert solve(net, gap=0.0).cost == pytest.approx(brute_force(net)[1])


def test_images_of_other_cost() -> None:
    """Networks whose images cost something else keep all choices."""
    for change in ("cost", "table", "limit", "missing"):
        net = mirrored_network(0)
        if change == "cost":
            net.costs[3] = net.costs[3] + np.array([0.0, 1.0, 0.0, 0.0])
        elif change == "table":
            net.tables[2] = net.tables[2] + np.eye(4)[1]
        elif change == "limit":
            net.usage_limit = 5.0
            net.add_usage(0, [1.0, 2.0, 1.0, 1.0], 0, 1)
        else:
            del net.mirror[4]
        assert mirror_half(net) is None, change
        assert mirror_half(mirrored_network(0)) is not None


def small_problem(sizes: tuple[int, ...]) -> Problem:
    training = gpt.training(gpt.Config(layers=1, width=256, heads=16, vocabulary=256, sequence=256, batch=64))
    hardware = replace(load("h100"), devices_per_host=16)  # equal links
    options = Options(donate_argnums=0, hardware=hardware)
    traced = trace_call(training.train_step, (training.state, training.batch), {}, options)
    return build_problem(traced, AbstractMesh(sizes, tuple("abc"[: len(sizes)])), options)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "equal"), [((4, 4), True), ((1, 4, 4), True), ((2, 8), False), ((2, 2, 2), False)])
def test_two_equal_axes_may_change_places(sizes: tuple[int, ...], equal: bool) -> None:
    network = small_problem(sizes).network
    assert bool(network.mirror) == equal == (mirror_half(network) is not None)
    if equal:
        choices = solve(network).choices
        images = [network.mirror[v][k] for v, k in enumerate(choices)]
        assert network.cost(images) == pytest.approx(network.cost(choices), rel=1e-9)
        assert any(image != k for image, k in zip(images, choices, strict=True))
