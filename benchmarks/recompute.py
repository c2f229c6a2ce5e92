"""Steps that do not fit, made to fit, against checkpoints by hand: `python -m benchmarks.recompute`.

Every row is compiled for one H100 or more, which need not be there. `--steps gpt4 --meshes 1` measures a part. A curve
of each step is drawn into `docs/benchmarks/recompute_STEP_MESH.svg`.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib import rc_context
from matplotlib.figure import Figure

import shardplan
from benchmarks.documents import FOLDER, Document
from shardplan import rules
from shardplan.audits.audit import measure
from shardplan.compiled.target import gpu_mesh, only_described
from shardplan.models import gpt, load
from shardplan.plans.report import bytes_on_device
from shardplan.program.program import Program, operand_type
from shardplan.timing.step_time import step_time

INTRODUCTION = """Training steps within memory limits: the bytes of the state, and a share of what the compiled step
without a limit holds above it. Peaks are compiled for H100 with `verify=True`. Operations are those of products and
convolutions, as a share of those of the plain step. ms are the predicted time of the step above that of the plain one.
Policies by hand are those of `jax.checkpoint` around every layer, with layouts by the planner: those of JAX, and those
that MaxText makes of names (its `full` is `nothing_saveable`). The column "by" counts
the values that are computed again, and the loops of blocks."""
HEADER = (
    "step",
    "mesh",
    "way",
    "limit GB",
    "compiled GB",
    "predicted GB",
    "operations",
    "ms added",
    "MB sent",
    "by",
    "plans",
)
HOST_TITLE = "Values in host memory"
HOST_NOTE = """One device. ms added are by the rates of the profile, and waiting are those of them in which the device
waits for copies. Host GB are those of the compiled program. Compiled for H100 in either case."""
HOST_HEADER = (
    "step",
    "profile",
    "fit",
    "limit GB",
    "compiled GB",
    "host GB",
    "operations",
    "ms added",
    "waiting",
    "plans",
)
HOST_WAYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("h100", ("recompute",)),
    ("h100", ("host",)),
    ("h100", ("recompute", "host")),
    ("gh200", ("recompute",)),
    ("gh200", ("recompute", "host")),
)
HOST_SHARES = (0.5, 0.4, 0.25)
MESHES = {"1": (1,), "8": (8,), "2x4": (2, 4)}
STEPS = ("gpt4", "gpt12", "gpt12scan", "llama", "bert", "vit", "t5", "mamba", "moe", "resnet")
SHARES = (0.7, 0.5, 0.4)
POLICIES = ("nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")
BY_HAND = (*POLICIES, *gpt.SAVED_NAMES)
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


@dataclass(frozen=True, slots=True)
class Step:
    """A training step; ``checkpoint`` gives it with a policy of `jax.checkpoint` around every layer."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    checkpoint: Callable[[str], "Step"] | None = None


def step_of(name: str, devices: int) -> Step:
    """A step by its name: `gpt4` is a GPT of four layers in bfloat16 with 8 sequences on each device, `gpt4scan` one
    whose layers are a scan, others are the benchmarks' models as they are."""
    layers = name.removeprefix("gpt").removesuffix("scan")
    if layers.isdigit():
        return _gpt(int(layers), devices, name.endswith("scan"), None)
    module = load(name)
    training = module.training(module.BENCHMARK)
    return Step(training.train_step, (training.state, training.batch))


def _gpt(layers: int, devices: int, scanned: bool, policy: str | None) -> Step:
    sizes = gpt.Config(layers, vocabulary=8192, batch=8 * devices, compute_dtype=jnp.bfloat16)
    training = gpt.training(replace(sizes, scan_layers=scanned, checkpoint=policy))
    again = (lambda chosen: _gpt(layers, devices, scanned, chosen)) if policy is None else None
    return Step(training.train_step, (training.state, training.batch), again)


def products(program: Program) -> float:
    """The operations of all products and convolutions, loops as often as they run."""
    found = 0.0
    for operation in program.operations:
        if operation.primitive.name in _PRODUCTS:
            operands = [operand_type(program, operand) for operand in operation.operands]
            results = [program.values[result] for result in operation.results]
            flops = rules.derive(operation.primitive, operation.params, operands, results).flops
            found += program.regions[operation.region].times * flops
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """A way to run a step: bytes at the peak, and what it costs next to the plain step. A refusal has no plan."""

    step: str
    mesh: str
    way: str
    limit: float | None
    peak: float
    plan: shardplan.Plan | None = None
    operations: float = 0.0
    added_seconds: float = 0.0

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        first = (self.step, self.mesh, self.way, "" if self.limit is None else f"{self.limit / 1e9:.2f}")
        if self.plan is None:
            return (*first, f"{self.peak / 1e9:.2f} at least", *[""] * 6)
        compiled = self.plan.verified["rounds"] if self.plan.verified is not None else ()
        predicted = compiled[0]["predicted_peak_bytes"] if compiled else self.plan.peak_bytes
        again, loops = len(self.plan.recipe.recomputed or ()), len(self.plan.recipe.blocks)
        return (
            *first,
            f"{self.peak / 1e9:.2f}",
            f"{predicted / 1e9:.2f}",
            f"{self.operations:.3f}",
            f"{1e3 * self.added_seconds:.2f}",
            f"{self.plan.communication_bytes / 1e6:,.1f}",
            ", ".join([*([f"{again} again"] if again else []), *([f"{loops} loops"] if loops else [])]),
            str(max(1, len(compiled))),
        )


def rows(name: str, mesh_name: str, shares: Sequence[float]) -> Iterator[Row]:
    """The plan without a limit, those within limits, and the policies by hand."""
    sizes = MESHES[mesh_name]
    mesh, step = gpu_mesh("h100", sizes, ("data", "model")[: len(sizes)]), step_of(name, prod(sizes))
    free = _plan(step, mesh, 1e15)
    whole, plain = products(free.program), step_time(free.schedule).seconds

    def row(way: str, limit: float | None, plan: shardplan.Plan) -> Row:
        repeated, seconds = products(plan.program) / whole, step_time(plan.schedule).seconds - plain
        return Row(name, mesh_name, way, limit, _compiled_peak(plan, mesh), plan, repeated, seconds)

    first = row("plain", None, free)
    yield first
    state = sum(bytes_on_device(one, free.mesh_axes) for one in free.arguments)
    for share in shares:
        limit = state + share * (first.peak - state)
        try:
            yield row(f"at {share}", limit, _plan(step, mesh, limit, verify=True))
        except shardplan.InfeasibleError as error:
            yield Row(name, mesh_name, f"at {share}", limit, error.least_peak_bytes)
    if step.checkpoint is not None:
        for policy in BY_HAND:
            yield row(policy, None, _plan(step.checkpoint(policy), mesh, 1e15))


def draw(found: Sequence[Row], path: Path) -> None:
    """Writes peaks against the products' operations and against the predicted time, as two curves with JAX's policies
    as points."""
    measured = [row for row in found if row.plan is not None]
    ours = [row for row in measured if row.way not in BY_HAND]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "recompute"}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        for axes, label, value in zip(
            figure.subplots(1, 2),
            ("operations of products, of the plain step", "predicted ms above the plain step"),
            (lambda row: row.operations, lambda row: 1e3 * row.added_seconds),
            strict=True,
        ):
            axes.plot([row.peak / 1e9 for row in ours], [value(row) for row in ours], "o-", label="shardplan")
            for policy, marker in zip(POLICIES, "s^v", strict=True):
                hand = [row for row in measured if row.way == policy]
                axes.plot([row.peak / 1e9 for row in hand], [value(row) for row in hand], marker, label=policy)
            axes.set_xlabel("compiled peak, GB")
            axes.set_title(label, fontsize=10)
        axes.legend(fontsize=8)
        figure.savefig(path, metadata={"Date": None})


def host_rows(name: str, shares: Sequence[float]) -> Iterator[tuple[str, ...]]:
    """Plans of one device within limits, where values may wait in host memory, be computed again, or both."""
    mesh, step = gpu_mesh("h100", (1,), ("data",)), step_of(name, 1)
    free = {profile: _plan(step, mesh, 1e15, hardware=profile) for profile in dict(HOST_WAYS)}
    peak, plain = _compiled_peak(free["h100"], mesh), free["h100"]
    state = sum(bytes_on_device(one, plain.mesh_axes) for one in plain.arguments)
    for share in shares:
        limit = state + share * (peak - state)
        for profile, fit in HOST_WAYS:
            row = (name, profile, ", ".join(fit), f"{limit / 1e9:.2f}")
            try:
                plan = _plan(step, mesh, limit, verify=True, fit=fit, hardware=profile)
            except shardplan.InfeasibleError as error:
                yield (*row, f"{error.least_peak_bytes / 1e9:.2f} at least", "", "", "", "", "")
                continue
            with only_described():
                host = measure(plan.lower(mesh), plan.mesh_axes).memory.host if plan.offloaded else 0
            assert plan.verified is None or plan.peak_bytes <= limit
            added = step_time(plan.schedule).seconds - step_time(free[profile].schedule).seconds
            yield (
                *row,
                f"{_compiled_peak(plan, mesh) / 1e9:.2f}",
                f"{host / 1e9:.2f}",
                f"{products(plan.program) / products(plain.program):.3f}",
                f"{1e3 * added:.2f}",
                f"{1e3 * sum(one['seconds'] for one in plan.offloaded):.2f}",
                str(len(plan.verified["rounds"]) if plan.verified is not None else 1),
            )


def _plan(step: Step, mesh: jax.sharding.Mesh, limit: float, **options: Any) -> shardplan.Plan:
    return shardplan.plan(step.function, mesh, *step.arguments, donate_argnums=0, memory_limit=limit, **options)


def _compiled_peak(plan: shardplan.Plan, mesh: jax.sharding.Mesh) -> float:
    if plan.verified is not None:
        return float(plan.peak_bytes)
    with only_described():
        return float(measure(plan.lower(mesh), plan.mesh_axes).memory.peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", nargs="*", default=STEPS)
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=MESHES)
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--host-steps", nargs="*", default=["gpt4"], help="those with values in host memory")
    options = parser.parse_args()
    document = Document("recompute", "Steps that do not fit", INTRODUCTION, "recompute")
    table = document.table(HEADER)
    pictures = list[str]()
    for name in options.steps:
        for mesh in options.meshes:
            found = list[Row]()
            for row in rows(name, mesh, options.shares):
                found.append(row)
                table.add(row.cells())
                print(*row.cells(), sep="  ", flush=True)
            picture = f"recompute_{name}_{mesh}.svg"
            draw(found, FOLDER / picture)
            pictures.append(f"![{name} on {mesh}: peaks against operations and time]({picture})")
            table.say(["\n\n".join(pictures)])
    if options.host_steps:
        table = document.table(HOST_HEADER, HOST_TITLE)
        table.say([HOST_NOTE])
    for name in options.host_steps:
        for cells in host_rows(name, HOST_SHARES):
            table.add(cells)
            print(*cells, sep="  ", flush=True)


if __name__ == "__main__":
    main()
