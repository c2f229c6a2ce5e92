"""The cache entry of a plan, and the plan restored from it without rules, network or search.

Every planning traces the program, and so verifies that it is the same. Layouts and collectives come from the entry,
with the source lines of the present program. The schedule, for applying and explaining, is built from the saved choices
on its first use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypedDict

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardplan.common.entries import MalformedError, check, read
from shardplan.errors import PlanMismatchError
from shardplan.layout.mesh import mesh_axes
from shardplan.options import Options
from shardplan.plans.cache import VARIABLE
from shardplan.plans.file import Statistics, argument_entry, check_collectives, check_layouts, choices_of, plain
from shardplan.plans.pipeline import donated_places, rewritten, schedule_of
from shardplan.plans.plan_data import PlanData, PlannedArgument, PlannedCollective, Recipe, ScheduleToBe
from shardplan.problem.schedule import Schedule
from shardplan.program.blocks import Blocks
from shardplan.program.program import Program
from shardplan.program.recompute import Offloaded


class KeptEntries(TypedDict):
    """The content of an entry."""

    mesh: Mapping[str, int]
    choices: str
    network: str
    recomputed: tuple[int, ...] | None
    offloaded: tuple[Offloaded, ...]
    blocks: tuple[Blocks, ...]
    objective: float
    lower_bound: float | None
    peak_bytes: float
    host_bytes: float
    arguments: tuple[PlannedArgument, ...]
    collectives: tuple[tuple[PlannedCollective, int | None], ...]
    statistics: Statistics
    remarks: tuple[bool, bool]


def kept_entry(plan: PlanData, remarks: Sequence[bool]) -> dict[str, Any]:
    """A plan as plain data.

    ``remarks``: whether its operations, and its layouts, have warnings for each planning. Those of operations need the
    schedule."""
    operations = (sent.operation and sent.operation.index for sent in plan.schedule.collectives())
    return {
        "mesh": plan.mesh_axes,
        "choices": " ".join(map(str, plan.recipe.choices)),
        "network": plan.recipe.network,
        "recomputed": plain(plan.recipe.recomputed),
        "offloaded": [asdict(one) for one in plan.recipe.offloaded],
        "blocks": [asdict(one) for one in plan.recipe.blocks],
        "objective": plan.objective,
        "lower_bound": plan.lower_bound if np.isfinite(plan.lower_bound) else None,
        "peak_bytes": float(plan.peak_bytes),
        "host_bytes": float(plan.host_bytes),
        "arguments": [argument_entry(argument) for argument in plan.arguments],
        "collectives": [(asdict(sent), at) for sent, at in zip(plan.collectives, operations, strict=True)],
        "statistics": plain(plan.statistics),
        "remarks": list(remarks),
    }


def restored(
    program: Program, meshes: Sequence[Mesh | AbstractMesh], options: Options, content: Mapping[str, Any]
) -> tuple[PlanData, tuple[bool, bool]]:
    """The plan of an entry over the same program, traced again, on one of these meshes, with its remarks.

    Raises MalformedError for an entry that `kept_entry` has not written for this program.
    """
    entry: KeptEntries = read(KeptEntries, content, "entry")
    mesh = next((one for one in meshes if _sizes(one) == entry["mesh"]), None)
    if mesh is None:
        raise MalformedError(f"`entry.mesh` is `{entry['mesh']}`: no mesh that is planned for")
    inputs = [program.values[index] for index in program.inputs]
    planned = [(argument.path, argument.shape, argument.dtype) for argument in entry["arguments"]]
    same = planned == [(value.name or "", value.shape, str(value.dtype)) for value in inputs]
    check(same, "entry.arguments", content["arguments"], "the arguments of the program")
    changed = entry["recomputed"] is not None or bool(entry["blocks"]) or bool(options.blocks)
    own = program.fingerprint() if changed else None
    choices, network = choices_of(entry["choices"]), entry["network"]
    recipe = Recipe(options, choices, network, own, entry["recomputed"], entry["offloaded"], entry["blocks"])
    try:
        planned_program = rewritten(program, recipe, mesh)
    except PlanMismatchError as error:
        raise MalformedError(f"`entry`: {error}") from None
    figures = entry["objective"], entry["lower_bound"] or 0.0, entry["peak_bytes"], entry["host_bytes"]
    check(all(map(math.isfinite, figures)), "entry", figures, "finite numbers")
    check_layouts(entry["arguments"], entry["mesh"])
    check_collectives([sent for sent, _ in entry["collectives"]], entry["mesh"])
    places = {None, *range(len(planned_program.operations))}
    check(
        {at for _, at in entry["collectives"]} <= places, "entry.collectives", len(places), "operations of the program"
    )
    bound = entry["lower_bound"]
    plan = PlanData(
        mesh=mesh,
        objective=entry["objective"],
        lower_bound=-np.inf if bound is None else bound,
        peak_bytes=entry["peak_bytes"],
        collectives=tuple(_with_source(planned_program, sent, at) for sent, at in entry["collectives"]),
        statistics=content["statistics"],
        arguments=entry["arguments"],
        recipe=recipe,
        built=ScheduleToBe(planned_program, partial(_schedule, program, mesh, recipe)),
        donated=donated_places(options),
        host_bytes=entry["host_bytes"],
    )
    return plan, entry["remarks"]


def _schedule(program: Program, mesh: Mesh | AbstractMesh, recipe: Recipe) -> Schedule:
    try:
        return schedule_of(program, mesh, recipe)
    except PlanMismatchError as error:
        raise PlanMismatchError(f"a plan in the cache does not fit: empty its folder ({VARIABLE}). {error}") from None


def _sizes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    axes = mesh_axes(mesh)
    return dict(zip(axes.names, axes.sizes, strict=True))


def _with_source(program: Program, sent: PlannedCollective, operation: int | None) -> PlannedCollective:
    return replace(sent, source="" if operation is None else program.operations[operation].source)
