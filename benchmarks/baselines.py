"""The usual ways to split a training step by hand, to hold plans against.

Each says where the state and the batch lie and leaves the rest to XLA; all devices of the mesh take part:

    report = measure(lower(DATA_PARALLEL, train_step, state, batch, mesh))
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TrainStep = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A way to split a step: `state_spec(leaf, mesh)` per leaf of the state, the batch on its first dimension."""

    name: str
    state_spec: Callable[[jax.ShapeDtypeStruct, Mesh], PartitionSpec]


def _whole(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> PartitionSpec:
    return PartitionSpec()


def _largest_dimension(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> PartitionSpec:
    """The largest dimension that the number of devices divides, over all axes; the first one of several."""
    dividing = [dim for dim, size in enumerate(leaf.shape) if size and size % mesh.size == 0]
    if not dividing:
        return PartitionSpec()
    split = max(dividing, key=lambda dim: (leaf.shape[dim], -dim))
    return PartitionSpec(*[None] * split, mesh.axis_names)


DATA_PARALLEL = Baseline("data parallelism", _whole)
FSDP = Baseline("FSDP by in_shardings", _largest_dimension)


def lower(baseline: Baseline, train_step: TrainStep, state: Any, batch: Any, mesh: Mesh) -> jax.stages.Lowered:
    """`train_step(state, batch) -> (state, loss)` under a baseline, the state donated, for the devices of `mesh`."""
    state_shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, baseline.state_spec(leaf, mesh)), state)
    batch_sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    step = jax.jit(
        train_step,
        in_shardings=(state_shardings, jax.tree.map(lambda _: batch_sharding, batch)),
        out_shardings=(state_shardings, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=0,
    )
    return step.lower(state, batch)
