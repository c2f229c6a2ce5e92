"""Plans that compute again what they have no memory for.

Layouts come first: a step that some layout fits is planned as ever. Else residuals are chosen to be recomputed by what
the schedule without a limit holds, the rewritten program is planned, and its own peak says how far off the choice was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from jax.sharding import AbstractMesh, Mesh

from shardplan import _jax
from shardplan.common.progress import set_stage
from shardplan.common.tables import size_text
from shardplan.errors import InfeasibleError
from shardplan.memory import lifetimes_of
from shardplan.optimize.choose_recomputed import choose_recomputed
from shardplan.optimize.residual_graph import ResidualGraph
from shardplan.options import Options
from shardplan.plans.pipeline import donated_leaves, memory_limit_of, plan_program
from shardplan.plans.plan_data import PlanData
from shardplan.plans.report import glob_of
from shardplan.program.program import Program

_MOST_PLANS = 4
"""Plans of rewritten programs. Each aims at what the one before has missed."""

_MOST_CHOICES = 10
"""Choices of what is recomputed, of which some are known by then."""

_NEAR = 0.97
"""The share of the limit from which on a plan that fits is not looked for with less recomputed."""

_NO_LIMIT = 1e30
_NONE: Mapping[int, float] = MappingProxyType({})


def plan_to_fit(
    program: Program, mesh: Mesh | AbstractMesh, options: Options, excess: Mapping[int, float] = _NONE
) -> PlanData:
    """The plan of a program, which recomputes values where no layout fits and the options allow it.

    Raises InfeasibleError where nothing fits.
    """
    try:
        return plan_program(program, mesh, options, excess=excess, may_recompute=True)
    except InfeasibleError as refused:
        return plan_recomputing(program, mesh, options, refused)


def plan_recomputing(
    program: Program, mesh: Mesh | AbstractMesh, options: Options, refused: InfeasibleError
) -> PlanData:
    """The plan with the least work added that fits, where no layout did.

    Raises what was refused where the options do not allow it, or the state alone does not fit.
    """
    if "recompute" not in options.fit or refused.lower_bound is None:
        raise refused
    tries = _Tries(program, mesh, options)
    tries.search()
    return tries.reported(tries.best or tries.within_limit(refused), refused.lower_bound)


class _Tries:
    """Plans of the rewritten program, of which the best one fits and adds the least work."""

    def __init__(self, program: Program, mesh: Mesh | AbstractMesh, options: Options) -> None:
        self._program, self._mesh, self._options = program, mesh, options
        self._limit = memory_limit_of(options)
        self.best: PlanData | None = None
        self.leanest = self._plan(frozenset(), _NO_LIMIT)  # nothing is recomputed, gradients are released
        lifetimes = lifetimes_of(self.leanest.schedule, donated_leaves(program, self.leanest.donated))
        self._graph = ResidualGraph(self.leanest.schedule, lifetimes)
        self._take(self.leanest)

    def search(self) -> None:
        """Plans with what is chosen for the limit, then with what is chosen for as much less or more as was missed."""
        target, planned = self._limit, {frozenset[int]()}
        for _ in range(_MOST_CHOICES):
            chosen = choose_recomputed(self._graph, target)
            if chosen not in planned:
                planned.add(chosen)
                set_stage(f"planning with {len(chosen)} values recomputed")
                plan = self._plan(chosen, _NO_LIMIT)
                self._take(plan)
                target += self._limit - plan.peak_bytes
                if len(planned) > _MOST_PLANS or _NEAR * self._limit <= plan.peak_bytes <= self._limit:
                    return
            elif self.best is not None:
                return
            else:
                target *= _NEAR

    def within_limit(self, refused: InfeasibleError) -> PlanData:
        """The leanest program with layouts that hold less. Raises InfeasibleError with the least peak of all."""
        recomputed = frozenset(self.leanest.recipe.recomputed or ())
        try:
            return self._plan(recomputed, self._limit)
        except InfeasibleError as error:
            least = min(error.least_peak_bytes, self.leanest.peak_bytes, refused.least_peak_bytes)
            said = f"With {len(recomputed)} values recomputed, as many as save memory, it is {size_text(least)}."
            raise InfeasibleError(f"{error} {said}", least) from None

    def reported(self, plan: PlanData, lower_bound: float) -> PlanData:
        """A plan with the user's options, the bound of the program as it was, and what it recomputes."""
        statistics = {**plan.statistics, "recomputed": self._rows(plan.recipe.recomputed or ())}
        recipe = replace(plan.recipe, options=self._options)
        return replace(plan, recipe=recipe, statistics=statistics, lower_bound=min(lower_bound, plan.objective))

    def _plan(self, chosen: frozenset[int], limit: float) -> PlanData:
        options = replace(self._options, memory_limit=limit)
        return plan_program(self._program, self._mesh, options, recomputed=chosen)

    def _take(self, plan: PlanData) -> None:
        self.leanest = min(self.leanest, plan, key=lambda one: one.peak_bytes)
        if plan.peak_bytes <= self._limit and (self.best is None or self._seconds(plan) < self._seconds(self.best)):
            self.best = plan

    def _seconds(self, plan: PlanData) -> float:
        """The seconds of what is made again, and of what is sent, alone."""
        link = plan.schedule.problem.prices.hardware.intra_host
        return self._graph.estimate(plan.recipe.recomputed or ())[1] + plan.communication_bytes / link.bytes_per_second

    def _rows(self, recomputed: Collection[int]) -> list[dict[str, object]]:
        """What is recomputed by module and primitive: bytes of a device that wait no longer, and work that is added."""
        rows: dict[tuple[str, str], dict[str, float]] = {}
        for value in recomputed:
            maker = self._program.makers[value]
            place = glob_of("/".join(["", *_jax.module_path(maker.equation).split("/")])).lstrip("/")
            row = rows.setdefault((place or maker.source, maker.primitive.name), dict.fromkeys(_SUMS, 0.0))
            for name, amount in zip(_SUMS, self._graph.figures(value), strict=True):
                row[name] += amount
        return [{"module": m, "made_by": p, **row, "count": int(row["count"])} for (m, p), row in rows.items()]


_SUMS = ("count", "bytes", "flops", "seconds")
