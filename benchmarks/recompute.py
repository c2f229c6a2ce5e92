"""Steps that do not fit, made to fit, against checkpoints by hand: `python -m benchmarks.recompute`.

Every row is compiled for one H100 or more, which need not be there. `--steps gpt4 --meshes 1` measures a part.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

import shardplan
from benchmarks.documents import Document
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
Policies by hand are those of `jax.checkpoint` around every layer, with layouts by the planner."""
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
    "plans",
)
MESHES = {"1": (1,), "8": (8,), "2x4": (2, 4)}
STEPS = ("gpt4", "gpt12", "gpt12scan", "llama", "bert", "vit", "t5", "mamba", "moe", "resnet")
SHARES = (0.7, 0.5, 0.4)
POLICIES = ("nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")
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


def rows(name: str, mesh_name: str, shares: Sequence[float]) -> Iterator[tuple[str, ...]]:
    """The plan without a limit, those within limits, and the policies by hand."""
    sizes = MESHES[mesh_name]
    mesh, step = gpu_mesh("h100", sizes, ("data", "model")[: len(sizes)]), step_of(name, prod(sizes))
    free = _plan(step, mesh, 1e15)
    with only_described():
        peak = measure(free.lower(mesh), free.mesh_axes).memory.peak
    state = sum(bytes_on_device(one, free.mesh_axes) for one in free.arguments)
    yield _row(name, mesh_name, "plain", None, peak, free, free)
    for share in shares:
        limit = state + share * (peak - state)
        try:
            plan = _plan(step, mesh, limit, verify=True)
        except shardplan.InfeasibleError as error:
            least = f"{error.least_peak_bytes / 1e9:.2f} at least"
            yield name, mesh_name, f"at {share}", f"{limit / 1e9:.2f}", least, "", "", "", "", ""
        else:
            yield _row(name, mesh_name, f"at {share}", limit, _compiled_peak(plan, mesh), plan, free)
    if step.checkpoint is None:
        return
    for policy in POLICIES:
        plan = _plan(step.checkpoint(policy), mesh, 1e15)
        yield _row(name, mesh_name, policy, None, _compiled_peak(plan, mesh), plan, free)


def _plan(step: Step, mesh: jax.sharding.Mesh, limit: float, **options: Any) -> shardplan.Plan:
    return shardplan.plan(step.function, mesh, *step.arguments, donate_argnums=0, memory_limit=limit, **options)


def _compiled_peak(plan: shardplan.Plan, mesh: jax.sharding.Mesh) -> float:
    if plan.verified is not None:
        return float(plan.peak_bytes)
    with only_described():
        return float(measure(plan.lower(mesh), plan.mesh_axes).memory.peak)


def _row(
    name: str, mesh: str, way: str, limit: float | None, peak: float, plan: shardplan.Plan, free: shardplan.Plan
) -> tuple[str, ...]:
    whole, plain = products(free.program), _seconds(free)
    compiled = plan.verified["rounds"] if plan.verified is not None else ()
    predicted = compiled[0]["predicted_peak_bytes"] if compiled else plan.peak_bytes
    return (
        name,
        mesh,
        way,
        "" if limit is None else f"{limit / 1e9:.2f}",
        f"{peak / 1e9:.2f}",
        f"{predicted / 1e9:.2f}",
        f"{products(plan.program) / whole:.3f}",
        f"{1e3 * (_seconds(plan) - plain):.2f}",
        f"{plan.communication_bytes / 1e6:,.1f}",
        str(max(1, len(compiled))),
    )


def _seconds(plan: shardplan.Plan) -> float:
    return step_time(plan.schedule).seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", nargs="+", default=STEPS)
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=MESHES)
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    options = parser.parse_args()
    document = Document("recompute", "Steps that do not fit", INTRODUCTION, "recompute")
    table = document.table(HEADER)
    for name in options.steps:
        for mesh in options.meshes:
            for row in rows(name, mesh, options.shares):
                table.add(row)
                print(*row, sep="  ", flush=True)


if __name__ == "__main__":
    main()
