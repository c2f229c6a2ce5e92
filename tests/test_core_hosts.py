"""Two hosts of devices: plans send little across a slow network, and what crosses it is counted right."""

from dataclasses import replace
from types import SimpleNamespace

import jax

import shardplan
from benchmarks.hosts import across_hosts, slower_between_hosts
from shardplan.hardware import load
from shardplan.models import mlp


def _collective(*axes):
    return SimpleNamespace(axes=axes, bytes=10.0, times=3)


def test_what_crosses_hosts_is_counted_per_device_and_per_host():
    mesh = {"host": 2, "device": 8}
    sizes = tuple(mesh.values())

    def across(*axes):
        return across_hosts(SimpleNamespace(mesh_axes=mesh, collectives=(_collective(*axes),)), sizes)

    assert across("device") == (0.0, 0.0)
    assert across("host") == (30.0, 240.0)
    assert across("host", "device") == (30.0, 30.0)


def test_a_slow_network_is_used_less_than_by_a_plan_for_devices_that_are_all_alike():
    training = mlp.training(mlp.BENCHMARK)

    def sent(sizes, names, **options):
        mesh = jax.sharding.AbstractMesh(sizes, names)
        plan = shardplan.plan(
            training.train_step, mesh, training.state, training.batch, donate_argnums=0, objective="time", **options
        )
        return across_hosts(plan, sizes)[0]

    flat = sent((16,), ("device",), hardware=replace(load("h100"), devices_per_host=16))
    apart = sent((2, 8), ("host", "device"), hardware=slower_between_hosts())
    assert flat > 0 and apart <= flat / 2
