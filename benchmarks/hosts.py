"""Bytes between two hosts of eight GPUs, with equal links and with a slower network: `python -m benchmarks.hosts`.

The network between the hosts has a tenth of the bandwidth inside of one. Plans are predictions here, without a
compilation.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["SHARDPLAN_CACHE_DIR"] = ""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
import numpy as np

import shardplan
from benchmarks.documents import Document, progress
from shardplan.common.tables import megabytes
from shardplan.hardware import HardwareProfile, Link, load
from shardplan.models import load as load_model

MODELS = ("gpt", "llama", "mlp", "resnet")
HOSTS, PER_HOST = 2, 8
TIMES_SLOWER = 10

INTRODUCTION = (
    "A training step on 16 H100, two hosts of eight, whose network has a tenth of the bandwidth inside of a host, "
    'planned for `objective="time"` three times: as one axis of 16 devices with equal links, as a mesh of '
    "hosts by devices with equal links, and as that mesh with the links as they are. *MB across* is what "
    "each device sends per step in collectives that span both hosts. *MB out of a host* is what leaves one host in "
    "all, where every such collective is a ring in the order of the devices: a ring over all 16 leaves a host once, "
    "eight rings over one device of each host leave it eight times. *Part* is what the last plan sends of that. *ms* "
    "is the step simulated on the links as they are."
)
HEADER = ("step", "planned for", "MB across", "part", "MB out of a host", "part", "ms")


def slower_between_hosts() -> HardwareProfile:
    """An H100 machine whose network is ten times slower than its NVLink."""
    profile = load("h100")
    link = Link(profile.intra_host.bytes_per_second / TIMES_SLOWER, profile.inter_host.latency_seconds)
    return replace(profile, name="h100 with a slow network", inter_host=link)


def across_hosts(plan: Any, sizes: tuple[int, ...]) -> tuple[float, float]:
    """Bytes that one device sends in collectives that span hosts, and bytes that leave a host, per step.

    `sizes` are those of the plan's mesh axes, devices numbered in row-major order, host by host.
    """
    names = tuple(plan.mesh_axes)
    devices = np.arange(prod(sizes)).reshape(sizes)
    sent, leaving = 0.0, 0.0
    for collective in plan.collectives:
        over = [names.index(axis) for axis in collective.axes]
        others = [axis for axis in range(len(sizes)) if axis not in over]
        groups = devices.transpose(others + over).reshape(-1, prod(sizes[axis] for axis in over)) // PER_HOST
        steps_out = int(((groups == 0) & (np.roll(groups, -1, axis=1) != 0)).sum())
        amount = collective.bytes * collective.times
        sent += amount if steps_out else 0.0
        leaving += amount * steps_out
    return sent, leaving


def rows(model: str) -> list[tuple[str, ...]]:
    """The figures of a model's step in its benchmark configuration, a row for each plan."""
    module = load_model(model)
    training = module.training(module.BENCHMARK)
    equal_links = replace(load("h100"), devices_per_host=HOSTS * PER_HOST)
    found = []
    for name, axes, hardware in (
        ("16, equal links", {"device": HOSTS * PER_HOST}, equal_links),
        ("2 x 8, equal links", {"host": HOSTS, "device": PER_HOST}, equal_links),
        ("2 x 8 as they are", {"host": HOSTS, "device": PER_HOST}, slower_between_hosts()),
    ):
        sizes = tuple(axes.values())
        mesh = jax.sharding.AbstractMesh(sizes, tuple(axes))
        options: dict[str, Any] = {"objective": "time", "hardware": hardware, "donate_argnums": 0}
        plan = shardplan.plan(training.train_step, mesh, training.state, training.batch, **options)
        seconds = shardplan.simulate(plan, slower_between_hosts()).seconds
        found.append((name, *across_hosts(plan, sizes), seconds))
    _, sent, out, _ = found[-1]
    return [
        (model, name, *_compared(one_sent, sent), *_compared(one_out, out), f"{1e3 * seconds:,.2f}")
        for name, one_sent, one_out, seconds in found
    ]


def _compared(other: float, found: float) -> tuple[str, str]:
    return megabytes(other), f"{found / other:.2f}" if other else "-"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MODELS, help="these models; the document is left as it is")
    options = parser.parse_args(arguments)
    document = Document("hosts", "Two hosts of eight GPUs", INTRODUCTION, "hosts", writes=not options.only)
    table = document.table(HEADER)
    with progress() as shown:
        for model in shown.track(options.only or MODELS, description="hosts"):
            for row in rows(model):
                table.add(row)
    document.print()


if __name__ == "__main__":
    main()
