"""Kept plans: what the cache keeps of a plan, and the plan again, without its rules, network or search.

A program is traced anew each time, which says that it is the same. All else is read: its layouts and collectives, whose
source lines are those of the program as it is now. The schedule, which applying and explaining need, is made of the
kept choices when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardplan.cache import VARIABLE
from shardplan.errors import PlanMismatchError
from shardplan.options import Options
from shardplan.plan import Plan, PlannedCollective, Recipe, ScheduleToBe
from shardplan.plan_file import argument_entry, argument_of, plain
from shardplan.planning import donated_positions, schedule_of
from shardplan.program import Program
from shardplan.schedule import Schedule


def kept_entry(plan: Plan, remarks: Sequence[bool]) -> dict[str, Any]:
    """A plan as plain data; ``remarks`` tells whether there is something to say each time of its operations, for which
    the schedule is needed, and of its layouts."""
    operations = (sent.operation and sent.operation.index for sent in plan.schedule.collectives())
    return {
        "mesh": plan.mesh_axes,
        "choices": " ".join(map(str, plan.recipe.choices)),
        "network": plan.recipe.network,
        "running": plan.recipe.running,
        "objective": plan.objective,
        "lower_bound": plan.lower_bound if np.isfinite(plan.lower_bound) else None,
        "peak_bytes": float(plan.peak_bytes),
        "host_bytes": float(plan.host_bytes),
        "arguments": [argument_entry(argument) for argument in plan.arguments],
        "collectives": [(asdict(sent), at) for sent, at in zip(plan.collectives, operations, strict=True)],
        "statistics": plain(plan.statistics),
        "remarks": list(remarks),
    }


def restored(program: Program, mesh: Mesh | AbstractMesh, options: Options, entry: Mapping[str, Any]) -> Plan:
    """The plan of an entry over the same program, traced anew."""
    recipe = Recipe(options, tuple(map(int, entry["choices"].split())), entry["network"], entry["running"])
    bound = entry["lower_bound"]
    return Plan(
        mesh=mesh,
        objective=entry["objective"],
        lower_bound=-np.inf if bound is None else bound,
        peak_bytes=entry["peak_bytes"],
        collectives=tuple(_collective(program, sent, at) for sent, at in entry["collectives"]),
        statistics=entry["statistics"],
        arguments=tuple(argument_of(argument) for argument in entry["arguments"]),
        recipe=recipe,
        built=ScheduleToBe(program, partial(_schedule, program, mesh, recipe)),
        donated=donated_positions(options),
        host_bytes=entry["host_bytes"],
    )


def _schedule(program: Program, mesh: Mesh | AbstractMesh, recipe: Recipe) -> Schedule:
    try:
        return schedule_of(program, mesh, recipe)
    except PlanMismatchError as error:
        raise PlanMismatchError(f"a plan in the cache does not fit: empty its folder ({VARIABLE}). {error}") from None


def _collective(program: Program, sent: Mapping[str, Any], operation: int | None) -> PlannedCollective:
    source = "" if operation is None else program.operations[operation].source
    return PlannedCollective(**{**sent, "axes": tuple(sent["axes"]), "source": source})
