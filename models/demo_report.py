"""The demo's report: tables of a plan's layouts and collectives, compared with compiled data parallelism and FSDP."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.markup import escape
from rich.table import Table

import shardplan
from shardplan.audits.audit import Audit, measure
from shardplan.compiled.target import gpu_mesh
from shardplan.plans.report import evidence, layout_groups, memory_text, planned_traffic

AXIS = "data"
PARAMETERS = "0/params/"
"""The start of the parameters' paths: the state is a step's first argument."""


def plan_summary(plan: shardplan.Plan, seconds: float) -> str:
    """Communication, optimality gap, memory, and planning time."""
    return f"planned in {seconds:.1f} s: {evidence(plan)};\n{memory_text(plan)}"


def layout_table(plan: shardplan.Plan) -> Table:
    """The layouts of the parameters and their moments: layers with the same layout are one row."""
    title = "Chosen layouts of the parameters and their moments (128/data: 128, split over the mesh axis `data`)"
    table = Table(title=title, title_justify="left")
    table.add_column("parameters", no_wrap=True)
    table.add_column("layout", no_wrap=True)
    table.add_column("tensors", justify="right")
    for group in layout_groups(plan):
        if group.pattern.startswith(PARAMETERS):
            name = group.pattern.removeprefix(PARAMETERS)
            table.add_row(escape(name), escape(group.tensor), str(len(group.paths)))
    return table


def collective_table(plan: shardplan.Plan) -> Table:
    """The planned collectives, added up by kind and mesh axes."""
    table = Table(title="Planned collectives, per device and step", title_justify="left")
    for heading in ("collective", "mesh axes"):
        table.add_column(heading, no_wrap=True)
    for heading in ("times", "kB sent"):
        table.add_column(heading, justify="right")
    for (kind, axes), (times, sent) in planned_traffic(plan).items():
        table.add_row(kind, ", ".join(axes), str(times), f"{sent / 1e3:,.1f}")
    return table


def data_parallel(leaf: jax.ShapeDtypeStruct, devices: int) -> PartitionSpec:
    """Data parallelism: the state is whole on every device."""
    return PartitionSpec()


def fully_sharded(leaf: jax.ShapeDtypeStruct, devices: int) -> PartitionSpec:
    """FSDP (ZeRO 3): every tensor of the state is split on its largest dimension that the devices divide.

    >>> tuple(fully_sharded(jax.ShapeDtypeStruct((3, 64), "float32"), 8))
    (None, 'data')
    """
    dividing = [number for number, size in enumerate(leaf.shape) if size % devices == 0 and size > 0]
    if not dividing:
        return PartitionSpec()
    largest = max(dividing, key=lambda number: leaf.shape[number])
    return PartitionSpec(*[AXIS if number == largest else None for number in range(largest + 1)])


def lower_by_hand(
    mesh: Mesh,
    layout: Callable[[jax.ShapeDtypeStruct, int], PartitionSpec],
    train_step: Callable,
    state: Any,
    batch: Any,
) -> jax.stages.Lowered:
    """A step with the usual layouts by hand: the batch over the devices, the state by `layout`, the rest left to
    XLA."""
    devices = mesh.devices.size
    state_layouts = jax.tree.map(lambda leaf: NamedSharding(mesh, layout(leaf, devices)), state)
    batch_layouts = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec(AXIS)), batch)
    loss_layout = NamedSharding(mesh, PartitionSpec())
    step = jax.jit(
        train_step,
        in_shardings=(state_layouts, batch_layouts),
        out_shardings=(state_layouts, loss_layout),
        donate_argnums=0,
    )
    return step.lower(state, batch)


def compiled_table(audit: Audit, train_step: Callable, state: Any, batch: Any) -> Table:
    """Bytes sent and memory of the compiled plan, of data parallelism and of FSDP, all for the same GPUs."""
    mesh_axes = dict(audit.compiled.mesh_axes)
    mesh = gpu_mesh(audit.target, tuple(mesh_axes.values()), tuple(mesh_axes))
    rows = {"shardplan": audit.compiled}
    for name, layout in (("data parallelism", data_parallel), ("FSDP", fully_sharded)):
        rows[name] = measure(lower_by_hand(mesh, layout, train_step, state, batch), mesh_axes)
    table = Table(title=f"Compiled for {mesh.devices.size} {audit.target.upper()}, per device", title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("MB sent per step", "shardplan sends", "peak MB", "compiled in"):
        table.add_column(heading, justify="right")
    own = audit.compiled.communication_bytes
    for name, report in rows.items():
        sent = report.communication_bytes
        table.add_row(
            name,
            f"{sent / 1e6:,.1f}",
            f"{own / sent:.2f} of it" if name != "shardplan" and sent else "",
            f"{report.memory.peak / 1e6:,.0f}",
            f"{report.compile_seconds:.1f} s",
        )
    return table
