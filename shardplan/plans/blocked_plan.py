"""Plans of a program that runs a part of itself in blocks.

The plan without a limit says what is live where, and with that which index of which region to run in how many blocks.
Those that are estimated to fit are planned, the cheapest first. Where no one loop is enough, the next one is looked for
in the program that has the loop.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shardplan.common.progress import set_stage
from shardplan.common.tables import size_text
from shardplan.errors import InfeasibleError
from shardplan.memory import lifetimes_of
from shardplan.optimize.choose_blocks import BlockCandidates, Candidate
from shardplan.options import Options
from shardplan.plans.blocks_by_hand import rows_of
from shardplan.plans.pipeline import build_problem, donated_leaves, plan_problem
from shardplan.plans.plan_data import PlanData
from shardplan.plans.stopwatch import Stopwatch
from shardplan.program.blocks import Blocked, Blocks, in_blocks
from shardplan.program.program import Program
from shardplan.timing.step_time import step_time

_MOST_PLANS = 5
"""Plans for one limit in one program."""

_MOST_LOOPS = 3
"""Choices of loops, each in the program that has those before."""

_AS_EXPECTED = 1.1
"""The step of a plan that fits may be so much longer than estimated. Else it sends more in its blocks, and the next
candidate is planned too."""

_LEAST_SECONDS = 0.1
"""The time of a search that begins after the time limit, for a plan that fits at all."""

_NO_LIMIT = 1e30


@dataclass(frozen=True, slots=True)
class _Planned:
    """A program in blocks, and its plan without a limit. Small products take ``slower`` seconds longer."""

    blocks: tuple[Blocks, ...]
    rows: tuple[Mapping[str, Any], ...]
    program: Program
    plan: PlanData
    slower: float = 0.0

    @property
    def seconds(self) -> float:
        """Of a step."""
        return step_time(self.plan.schedule).seconds + self.slower


class BlockedPlans:
    """Plans of one program in blocks, for one limit after another.

    ``free`` is the plan without a limit of the program as it is, or of one that computes values again."""

    def __init__(self, program: Program, free: PlanData, options: Options, watch: Stopwatch) -> None:
        self._user, self._free, self._options = program, free, options
        self._begin = _Planned((), (), free.schedule.program, free)
        self._candidates: dict[tuple[Blocks, ...], BlockCandidates] = {}
        self._planned: dict[tuple[Blocks, ...], _Planned | None] = {}

    def within(self, limit: float, watch: Stopwatch) -> PlanData:
        """The plan within a limit whose step is shortest. Raises InfeasibleError where none is found."""
        begun, leanest = self._begin, self._begin
        for _ in range(_MOST_LOOPS):
            found = self._next(begun, limit, watch)
            fitting = [one for one in found if one.plan.peak_bytes <= limit]
            if fitting:
                return self._reported(min(fitting, key=lambda one: one.seconds))
            lowest = min(found, key=lambda one: one.plan.peak_bytes, default=begun)
            if lowest.plan.peak_bytes >= begun.plan.peak_bytes or watch.left <= 0:
                break
            begun = leanest = lowest
        least = leanest.plan.peak_bytes
        of = "" if self._free.recipe.recomputed is None else " of what computes its largest residuals again"
        said = f"In blocks{of} the least peak that was found is {size_text(least)}, and the limit {size_text(limit)}"
        raise InfeasibleError(said, least)

    def _next(self, begun: _Planned, limit: float, watch: Stopwatch) -> list[_Planned]:
        """Plans with one more choice of loops: those that are estimated to fit, or else the one that holds least."""
        target, found, tried = limit, list[_Planned](), set[Blocks]()
        while len(tried) < _MOST_PLANS and (watch.left > 0 or not found):
            options = [one for one in self._candidates_of(begun).within(target) if one.blocks not in tried]
            options = [one for one in options if one.peak <= target] or ([] if found else options)
            if not options:
                break
            tried.add(options[0].blocks)
            one = self._plan(begun, options[0], watch)
            if one is None:
                continue
            found.append(one)
            expected = begun.seconds + options[0].seconds
            if options[0].peak > target or (one.plan.peak_bytes <= limit and one.seconds <= _AS_EXPECTED * expected):
                break
            target *= min(1.0, limit / one.plan.peak_bytes)
        return found

    def _candidates_of(self, begun: _Planned) -> BlockCandidates:
        if begun.blocks not in self._candidates:
            set_stage("looking for what can run in blocks")
            lifetimes = lifetimes_of(begun.plan.schedule, donated_leaves(begun.program, self._free.donated))
            self._candidates[begun.blocks] = BlockCandidates(begun.plan.schedule, lifetimes)
        return self._candidates[begun.blocks]

    def _plan(self, begun: _Planned, candidate: Candidate, watch: Stopwatch) -> _Planned | None:
        """The plan of a candidate, None where its operations have no form in blocks after all."""
        blocks = (*begun.blocks, candidate.blocks)
        if blocks not in self._planned:
            set_stage(f"planning with {' x '.join(map(str, candidate.blocks.counts))} blocks")
            blocked = in_blocks(begun.program, candidate.blocks)
            options = replace(self._options, memory_limit=_NO_LIMIT, time_limit=max(watch.left, _LEAST_SECONDS))
            self._planned[blocks] = _planned(begun, blocked, candidate, self._free, options) if blocked.loops else None
        return self._planned[blocks]

    def _reported(self, chosen: _Planned) -> PlanData:
        """The plan with the user's options, the bound of the program as it was, and what it runs in blocks."""
        plan, own = chosen.plan, self._free.recipe
        recipe = replace(
            plan.recipe,
            options=self._options,
            fingerprint=self._user.fingerprint(),
            recomputed=own.recomputed,
            offloaded=own.offloaded,
            blocks=chosen.blocks,
        )
        statistics = {**plan.statistics, "blocks": list(chosen.rows), "slower_seconds": chosen.slower}
        if own.recomputed is not None:
            statistics["recomputed"] = self._free.statistics.get("recomputed", [])
        bound = min(self._free.lower_bound, plan.objective)
        return replace(plan, recipe=recipe, statistics=statistics, lower_bound=bound)


def _planned(begun: _Planned, blocked: Blocked, candidate: Candidate, free: PlanData, options: Options) -> _Planned:
    started, parts = time.perf_counter(), (blocked.program, free.mesh, options)
    problem = build_problem(*parts, like=free.schedule.problem)
    spent, again = time.perf_counter() - started, partial(build_problem, *parts, like=problem)
    plan = plan_problem(problem, free.mesh, options, spent, rebuild=again)
    rows = rows_of(begun.program, blocked, begun.plan.peak_bytes - plan.peak_bytes, candidate.seconds)
    slower = begun.slower + candidate.slower
    return _Planned((*begun.blocks, candidate.blocks), (*begun.rows, *rows), blocked.program, plan, slower)
