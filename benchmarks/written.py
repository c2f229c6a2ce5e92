"""Bytes of plans as Python text: of the whole program written out, and of the layouts at the step's boundaries.

    python -m benchmarks.written [--only gpt]

Each small model is planned for slow devices, so that the plan splits it, and compiled for H100 without having one.
Bytes are shares of those that the plan says, for the text and for the applied plan.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jax.sharding import AbstractMesh

import shardplan
from shardplan.common.tables import markdown_table
from shardplan.models import NAMES, load
from shardplan.plans.to_python import boundary_text, compiled_bytes, whole_text
from tests.helpers.slow_devices import SLOW_DEVICES

MESHES = {"(8,)": ((8,), ("data",)), "(2, 4)": ((2, 4), ("data", "model"))}


def rows(names: list[str], hardware: Path) -> Iterator[tuple[str, ...]]:
    """A row for each model and mesh."""
    for name in names:
        for mesh, (sizes, axes) in MESHES.items():
            training = load(name).training(load(name).SMALL)
            given = training.train_step, AbstractMesh(sizes, axes), training.state, training.batch
            plan = shardplan.plan(*given, hardware=hardware)
            text = whole_text(plan, "")
            sent = [
                compiled_bytes(plan, text, "h100"),
                shardplan.audit(plan).compiled.communication_bytes,
                compiled_bytes(plan, boundary_text(plan, ""), "h100", training.train_step),
            ]
            shares = [f"{one / plan.communication_bytes:.3f}" for one in sent if one is not None]
            yield name, mesh, str(len(text.splitlines())), *shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=NAMES)
    chosen = parser.parse_args().only or list(NAMES)
    with tempfile.TemporaryDirectory() as folder:
        hardware = Path(folder, "slow.toml")
        hardware.write_text(SLOW_DEVICES)
        header = ("model", "mesh", "lines", "whole text", "applied plan", "boundaries")
        print(markdown_table(header, list(rows(chosen, hardware))))


if __name__ == "__main__":
    main()
