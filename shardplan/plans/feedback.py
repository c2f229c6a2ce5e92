"""Feedback: the compiled program judges a plan within a memory limit, and corrects the search.

Predicted peaks are some percent off. So a plan whose predicted peak comes near the limit is compiled, for the GPUs of
its mesh or, without any, for those of the hardware profile. Where the compiled peak exceeds the limit, the compiler has
said how many bytes are held at each operation of the plan. What exceeds the prediction there is a cutting plane: it is
added to whatever a schedule holds at that operation, so the same schedule exceeds the limit in the next search too.

`plan.verified` says what was compiled, and `plan.peak_bytes` is then the compiled peak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, TypeGuard

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardplan.common.progress import set_stage
from shardplan.common.tables import size_text
from shardplan.compiled.program import CompiledReport, bytes_by_operation, measure
from shardplan.compiled.target import TargetNotInstalledError, gpu_mesh, only_described, targets
from shardplan.errors import InfeasibleError, warn
from shardplan.hardware import load
from shardplan.layout.mesh import can_run, has_gpus
from shardplan.memory import lifetimes_of
from shardplan.options import HOST, Options
from shardplan.plans.pipeline import donated_leaves, donated_places, memory_limit_of
from shardplan.plans.plan_data import PlanData

NEAR_LIMIT = 0.65
"""A plan with a lower share of its limit is not compiled: no predicted peak of a recorded step is so far below the
compiled one (`tests/fidelity`; the lowest are 0.67 to 0.7)."""

LESS = 0.99
"""The share of the limit for which values are chosen again where what was compiled exceeds the limit."""

MOST_ROUNDS = 3
"""Searches after the first. Each is cut off from what was compiled before; a fourth hardly ever finds more."""

RESERVE = 0.16
"""Where there is no compiler, the share of the limit that is kept free: 95 % of predicted peaks on programs that
nothing was fitted to are nearer to the compiled ones (`python -m benchmarks.memory_ablation`)."""

Replan = Callable[[Options, Mapping[int, float]], PlanData]
"""Plans the same program over the same mesh with other options, and with excess bytes per operation."""


def verified(plan: PlanData, options: Options, replan: Replan) -> PlanData:
    """The plan, or one that is planned again, whose compiled peak keeps within the memory limit.

    A plan far below its limit is given back as it is. ``options.time_limit`` bounds the searches of all rounds
    together; compilations are reported in ``plan.statistics["verified"]`` and not bounded.

    Raises InfeasibleError where no compiled peak keeps within the limit.
    """
    limit = memory_limit_of(options)
    if not options.verify or plan.peak_bytes < NEAR_LIMIT * limit:
        return plan
    try:
        judge = _Judge.of(plan, options)
    except TargetNotInstalledError as error:
        warn(f"the plan is not verified, and keeps {RESERVE:.0%} of its memory limit free instead: {error}")
        return (
            plan if plan.peak_bytes <= (1 - RESERVE) * limit else replan(_limited(options, (1 - RESERVE) * limit), {})
        )
    rounds = _Rounds(judge, options, replan, limit)
    found = _first_within(rounds, plan)
    if found is None and (alone := rounds.without_host()) is not None:
        found = _first_within(rounds, alone)
    if found is not None:
        return rounds.judged(found)
    least = min(row["compiled_peak_bytes"] for row in rounds.rows)
    less = rounds.refused < least
    predicted = f", and without values on the host {size_text(rounds.refused)} are predicted" if less else ""
    raise InfeasibleError(
        f"no plan was found whose compiled peak keeps within {size_text(limit)} per device: of "
        f"{len(rounds.rows)} that were compiled for {judge.target}, the lowest takes {size_text(least)}{predicted}. "
        "What helps: more devices, a smaller batch, jax.checkpoint around layers",
        min(least, rounds.refused),
    )


def _first_within(rounds: _Rounds, plan: PlanData) -> PlanData | None:
    """The first plan of several rounds whose compiled peak keeps within the limit, the leanest one after them."""
    tried: PlanData | None = plan
    for _ in range(1 + MOST_ROUNDS):
        if tried is None:
            break
        if rounds.keeps_within(tried):
            return tried
        tried = rounds.plan_again(tried)
    leanest = rounds.leanest()
    return leanest if leanest is not None and rounds.keeps_within(leanest) else None


def target_of(mesh: Mesh | AbstractMesh, options: Options) -> str:
    """The GPU type that plans over a mesh are verified for."""
    if _compiles_here(mesh):
        return str(mesh.devices.flat[0].device_kind)
    name = load(options.hardware or "h100").name
    return name if name in targets() else "h100"


def _compiles_here(mesh: Mesh | AbstractMesh) -> TypeGuard[Mesh]:
    """Whether this process alone can compile for the devices of a mesh: GPUs of its own, or GPUs that are described."""
    if not isinstance(mesh, Mesh) or not has_gpus(mesh):
        return False
    first, *others = mesh.devices.flat
    return not can_run(first) or all(other.process_index == first.process_index for other in others)


@dataclass(frozen=True, slots=True)
class _Judge:
    """Compiles plans for the devices of a mesh; ``target`` is the name of their GPU type."""

    mesh: Mesh
    target: str

    @classmethod
    def of(cls, plan: PlanData, options: Options) -> _Judge:
        """That of the mesh's own GPUs, if one process has them all, or of the GPU type that the hardware profile is
        named after, else of an H100."""
        target = target_of(plan.mesh, options)
        if _compiles_here(plan.mesh):
            return cls(plan.mesh, target)
        return cls(gpu_mesh(target, tuple(plan.mesh_axes.values()), tuple(plan.mesh_axes)), target)

    @property
    def runs(self) -> bool:
        """Whether what is compiled can run here."""
        return can_run(self.mesh.devices.flat[0])

    def compile(self, plan: PlanData) -> CompiledReport:
        set_stage(f"compiling for {self.target}")
        with only_described():
            lowered = plan.lower(self.mesh)
        return measure(lowered, plan.mesh_axes, live_ranges=True, tuned=self.runs)


class _Rounds:
    """What was compiled so far, and what it says of the next search."""

    def __init__(self, judge: _Judge, options: Options, replan: Replan, limit: float) -> None:
        self._judge, self._options, self._replan, self._limit = judge, options, replan, limit
        self._asked, self._offloaded = options, False  # whether values waited on the host in any plan
        self.refused = np.inf  # the least peak that was predicted where none do
        self._excess: dict[int, float] = {}
        self._missed = 0.0  # bytes by which what computes values again exceeds its prediction
        self._left = options.time_limit
        self._report: CompiledReport | None = None
        self.rows: list[dict[str, Any]] = []

    def keeps_within(self, plan: PlanData) -> bool:
        """Compiles a plan, and says whether its compiled peak keeps within the limit."""
        self._left -= plan.statistics["seconds"]["search"]
        self._offloaded |= bool(plan.recipe.offloaded)
        self._report = self._judge.compile(plan)
        peak = self._report.memory.peak
        self.rows.append(
            {
                "predicted_peak_bytes": float(plan.peak_bytes),
                "compiled_peak_bytes": peak,
                "communication_bytes": plan.communication_bytes,
                "compile_seconds": self._report.compile_seconds,
            }
        )
        return peak <= self._limit

    def plan_again(self, plan: PlanData) -> PlanData | None:
        """The next plan, in which what was compiled exceeds the limit; None where there is none, or no time is left."""
        if self._left <= 0:
            return None
        if plan.recipe.recomputed is not None:  # the next program has other operations: less is asked for
            peak = self.rows[-1]["compiled_peak_bytes"]
            self._missed = max(self._missed, peak - plan.peak_bytes, (1 - LESS) * self._limit)
        else:
            for index, size in self._excess_of(plan).items():
                self._excess[index] = max(size, self._excess.get(index, 0.0))
        try:
            return self._with(self._limit - self._missed, self._excess)
        except InfeasibleError:
            return None

    def without_host(self) -> PlanData | None:
        """The plan in which no values wait on the host, where those before had some: more than predicted may be left of
        these. Further rounds have none. None where there is no such plan, or no time is left."""
        if self._left <= 0 or not self._offloaded or not {HOST, "recompute"}.issubset(self._options.fit):
            return None
        fit = tuple(word for word in self._options.fit if word != HOST)
        self._options, self._missed = replace(self._options, fit=fit, host_memory=None), 0.0
        try:
            return self._with(self._limit, self._excess)
        except InfeasibleError as error:
            self.refused = error.least_peak_bytes
            return None

    def leanest(self) -> PlanData | None:
        """The plan with the least predicted peak, with nothing cut off: what was cut off may be more than need be.

        None where there is none, or no time is left."""
        limit = 1.0
        if self._left <= 0:
            return None
        for _ in range(3):  # what is below the arguments is refused with their sum, and that with the least peak
            try:
                return self._with(limit, {})
            except InfeasibleError as error:
                limit = error.least_peak_bytes
            if not limit < np.inf:
                break
        return None

    def judged(self, plan: PlanData) -> PlanData:
        """The plan with its compiled peak, by which compiler, and what was compiled before it."""
        said = {"target": self._judge.target, "jaxlib": version("jaxlib"), "rounds": self.rows}
        statistics = {**plan.statistics, "verified": said}
        assert self._report is not None
        executable = self._report.executable if self._judge.runs else None
        peak = self.rows[-1]["compiled_peak_bytes"]
        held = bytes_by_operation(self._report)
        return replace(plan, peak_bytes=peak, statistics=statistics, executable=executable, held=held)

    def _with(self, limit: float, excess: Mapping[int, float]) -> PlanData:
        found = self._replan(replace(_limited(self._options, limit), time_limit=self._left), excess)
        return replace(found, recipe=replace(found.recipe, options=self._asked))

    def _excess_of(self, plan: PlanData) -> dict[int, float]:
        """Per operation, the bytes that the compiled program holds there above the prediction."""
        assert self._report is not None
        schedule = plan.schedule
        donated = donated_leaves(schedule.program, donated_places(self._options))
        lifetimes = lifetimes_of(schedule, donated)
        profile = lifetimes.profile(schedule.problem.encode(schedule.assignment))
        compiled = bytes_by_operation(self._report)
        if not compiled:  # the peak alone is known
            peak = int(profile.argmax())
            nearest = min(lifetimes.order, key=lambda o: abs(lifetimes.place[o.index] - peak))
            compiled = {nearest.index: float(self._report.memory.peak)}
        places = lifetimes.place
        above = {index: held - float(profile[places[index]]) for index, held in compiled.items() if index in places}
        return {index: excess for index, excess in above.items() if excess > 0}


def _limited(options: Options, limit: float) -> Options:
    return replace(options, memory_limit=limit)
