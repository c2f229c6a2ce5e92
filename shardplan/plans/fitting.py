"""Plans within a memory limit: by layouts, and where no layout fits by the other means that the options allow.

A step that fits is planned as if there were no other means. Else each of them plans within the limit, from the plan
without a limit, and the plan with the shortest step is taken. Layouts that fit and cost more than that plan are
compared with what the other means find, by the predicted time of the step. Where none of them is enough, the program
that computes its largest residuals again runs in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from jax.sharding import AbstractMesh, Mesh

from shardplan.errors import InfeasibleError
from shardplan.options import HOST, Options
from shardplan.plans.blocked_plan import BlockedPlans
from shardplan.plans.pipeline import check_arguments, memory_limit_of, plan_program
from shardplan.plans.plan_data import PlanData
from shardplan.plans.recomputed_plan import RecomputedPlans
from shardplan.plans.stopwatch import Stopwatch
from shardplan.program.program import Program
from shardplan.timing.step_time import step_time

_DEARER = 1.01
"""Layouts that fit and cost more than so many times the bound are compared with other means."""


class FittingPlans(Protocol):
    """Plans of one program by some means, within one limit after another."""

    def within(self, limit: float, watch: Stopwatch) -> PlanData:
        """The best plan within a limit. Raises InfeasibleError where none is found."""


MEANS: Mapping[str, Callable[[Program, PlanData, Options, Stopwatch], FittingPlans]] = MappingProxyType(
    {"recompute": RecomputedPlans, "blocks": BlockedPlans}
)
"""What may make a step fit where no layout does, by the word of the option ``fit``. Each is made of the plan without a
limit."""

_WORDS = MappingProxyType({"recompute": {"recompute", HOST}, "blocks": {"blocks"}})
"""The words that ask for each: what waits on the host is chosen with what is computed again."""

_BOTH = "blocks of what is recomputed"

_FEW_SECONDS = 0.02
"""The share of a step by which it may be longer before a second means is tried."""


class Fitting:
    """Plans of one program over one mesh, within one limit after another: lower limits are those of the compiler.

    What a limit has shown is kept: where no layout fits, none is searched for a lower limit."""

    def __init__(self, program: Program, mesh: Mesh | AbstractMesh) -> None:
        self._program, self._mesh = program, mesh
        self._free: PlanData | None = None  # the plan without a limit, where no layout fits
        self._refused = 0.0  # the largest limit that no layout keeps
        self._means: dict[tuple[str, bool], FittingPlans] = {}  # by the means, and whether values may wait on the host

    def plan(self, options: Options, excess: Mapping[int, float] = MappingProxyType({})) -> PlanData:
        """The plan within the limit of the options; ``excess`` as for `plan_program`.

        Raises InfeasibleError where nothing fits."""
        watch, limit = Stopwatch(options.time_limit), memory_limit_of(options)
        if self._free is not None and limit <= self._refused:
            return self.by_other_means(options, watch)
        plan = plan_program(self._program, self._mesh, options, excess=excess, may_exceed=bool(options.fit))
        watch.stating += plan.statistics["seconds"]["build"]
        if plan.peak_bytes > limit:
            self.take(plan, limit)
            return self.by_other_means(options, watch)
        free, plan = plan.unlimited, replace(plan, unlimited=None)
        if free is None or excess or plan.objective <= _DEARER * plan.lower_bound or watch.left <= 0:
            return plan
        self.take(free, 0.0)
        with suppress(InfeasibleError):
            other = self.by_other_means(options, watch)
            return min(plan, other, key=_seconds)
        return plan

    def take(self, free: PlanData, refused: float) -> None:
        """Takes the plan without a limit, where no layout keeps within one."""
        self._free, self._refused = free, max(refused, self._refused)

    def by_other_means(self, options: Options, watch: Stopwatch) -> PlanData:
        """The plan by what the options allow, with the shortest step of those that fit.

        Raises InfeasibleError with the least peak of all where none does."""
        assert self._free is not None
        limit, refused, found = memory_limit_of(options), dict[str, InfeasibleError](), list[PlanData]()
        check_arguments(self._free.schedule.problem, limit)
        shortest = (1 + _FEW_SECONDS) * _seconds(self._free)

        def attempt(word: str, within: Callable[[float, Stopwatch], PlanData]) -> None:
            try:
                found.append(within(limit, watch))
            except InfeasibleError as error:
                refused[word] = error

        for word in MEANS:
            enough = found and (watch.left <= 0 or _seconds(found[0]) <= shortest)
            if not _WORDS[word].isdisjoint(options.fit) and not enough:
                attempt(word, self._by(word, self._free, options, watch).within)
        recomputed = self._means.get(("recompute", HOST in options.fit))
        if isinstance(recomputed, RecomputedPlans) and "blocks" in options.fit:
            if not found:
                attempt("recompute", recomputed.leanest_within)
            if not found and watch.left > 0:
                attempt(_BOTH, self._by(_BOTH, recomputed.for_blocks(watch), options, watch).within)
        if found:
            return min(found, key=_seconds)
        least = min(error.least_peak_bytes for error in refused.values())
        raise InfeasibleError(". ".join(str(error).rstrip(".") for error in refused.values()), least)

    def _by(self, word: str, free: PlanData, options: Options, watch: Stopwatch) -> FittingPlans:
        key = word, HOST in options.fit
        if key not in self._means:
            self._means[key] = MEANS["blocks" if word == _BOTH else word](self._program, free, options, watch)
        return self._means[key]


def _seconds(plan: PlanData) -> float:
    """Of a step, with those that products in blocks take longer since they are small."""
    return step_time(plan.schedule).seconds + float(plan.statistics.get("slower_seconds", 0.0))
