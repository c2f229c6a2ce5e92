"""Two hosts of devices: plans send little across a slow network, and what crosses it is counted right."""

from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import shardplan
from benchmarks.hosts import across_hosts, slower_between_hosts
from shardplan.hardware import load
from shardplan.layout.mesh import axes_across_hosts
from shardplan.models import mlp


def _collective(*axes):
    return SimpleNamespace(axes=axes, bytes=10.0, times=3)


def test_bytes_across_hosts():
    """They are counted per device and per host."""
    mesh = {"host": 2, "device": 8}
    sizes = tuple(mesh.values())

    def across(*axes):
        return across_hosts(SimpleNamespace(mesh_axes=mesh, collectives=(_collective(*axes),)), sizes)

    assert across("device") == (0.0, 0.0)
    assert across("host") == (30.0, 240.0)
    assert across("host", "device") == (30.0, 30.0)


def test_a_slow_network():
    """It carries less than under a plan for equally fast links."""
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


def test_a_byte_between_hosts_counts_as_its_link_is_slower():
    """The plan sends less over the hosts than the plan of devices with equal links, and says how it counts."""
    training = mlp.training(mlp.BENCHMARK)

    def planned(**options):
        mesh = AbstractMesh((2, 8), ("host", "device"))
        return shardplan.plan(training.train_step, mesh, training.state, training.batch, donate_argnums=0, **options)

    weighed, plain = planned(), planned(hardware=replace(load("h100"), devices_per_host=16))
    assert across_hosts(weighed, (2, 8))[0] <= across_hosts(plain, (2, 8))[0]
    assert weighed.communication_bytes >= plain.communication_bytes
    assert weighed.objective > weighed.communication_bytes
    assert "over `host` 9 times" in str(weighed)
    assert "a byte counts" not in str(plain)


@pytest.mark.parametrize(("names", "crossing"), [(("a", "b"), {"a": True, "b": False}), (("c",), {"c": True})])
def test_axes_that_lead_to_another_host(names, crossing):
    """Those along which the host of a device changes."""
    devices = np.array([SimpleNamespace(process_index=n // 4) for n in range(8)])
    mesh = SimpleNamespace(devices=devices.reshape((2, 4)[: len(names)] if len(names) > 1 else (8,)), axis_names=names)
    assert axes_across_hosts(mesh) == crossing
    one = SimpleNamespace(devices=devices[:4], axis_names=("a",))
    assert axes_across_hosts(one) is None


def _hierarchical():
    """Data parallelism over two hosts of eight: the gradient of a whole weight from examples that are split."""

    def step(w, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * gradient, loss

    w, x = jax.ShapeDtypeStruct((2048, 2048), "float32"), jax.ShapeDtypeStruct((65536, 2048), "float32")
    pins = {"0": PartitionSpec(), "1": PartitionSpec(("host", "device"))}
    options = {"objective": "time", "hardware": slower_between_hosts(), "pins": pins, "donate_argnums": 0}
    return shardplan.plan(step, AbstractMesh((2, 8), ("host", "device")), w, x, **options)


def test_a_sum_over_all_devices():
    """It is reduced inside each host before it crosses the network."""
    plan, weight = _hierarchical(), 4 * 2048 * 2048
    sent = {c.axes: c.bytes * c.times for c in plan.collectives if c.kind != "all-gather" and c.bytes > 1e4}
    assert sent == {("device",): weight * 7 / 8, ("host",): weight / 8}


@pytest.mark.long
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
def test_compiled_bytes_across_hosts():
    """They are the planned ones."""
    audit = shardplan.audit(_hierarchical())
    assert audit.ok()
    across = [abs(difference) for (_, axes), difference in audit.differences().items() if "host" in axes]
    assert across and max(across) < 1000
