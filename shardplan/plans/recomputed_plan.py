"""Plans of a program that computes some of its residuals again, and has others wait in host memory.

The plan without a limit says what the program holds over time. Residuals are chosen by that, and the rewritten program
keeps the layouts of that plan: its own peak says how far off the choice was, and it is counted in the time of a
fraction of a search. One of the rewritten programs is searched for better layouts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from shardplan import _jax
from shardplan.common.progress import set_stage
from shardplan.common.tables import size_text
from shardplan.errors import InfeasibleError
from shardplan.memory import lifetimes_of
from shardplan.optimize.carried_over import carried_over
from shardplan.optimize.checkpoint_policies import POLICIES
from shardplan.optimize.choose_recomputed import Fates, choose_recomputed
from shardplan.optimize.host_lane import Copied
from shardplan.optimize.least_seconds import least_seconds
from shardplan.optimize.residual_graph import ResidualGraph
from shardplan.optimize.solve_once import ACCEPTABLE_GAP, Choices, FoundSchedule, Search
from shardplan.optimize.step_time_objective import LEAST_SHARE
from shardplan.optimize.within_memory import search_within
from shardplan.options import Options
from shardplan.plans.pipeline import build_problem, donated_leaves, host_memory_of, pinned_rows, plan_of
from shardplan.plans.plan_data import PlanData
from shardplan.plans.report import glob_of
from shardplan.plans.stopwatch import Stopwatch
from shardplan.problem.cost_network import Problem
from shardplan.problem.schedule import Schedule
from shardplan.program.program import Program
from shardplan.program.recompute import Offloaded, kept_for_effects, origins, recomputable, recomputing, stackable
from shardplan.search import Solution, descents
from shardplan.timing.step_time import memory_traffic, step_time

_MOST_CHOICES = 6
"""Choices of fates for one limit. Each aims at what the one before has missed."""

_LEAST_CHOICES = 3
"""As many are made where none before has kept within the limit, also after the time limit."""

_LARGE = 1 / 2
"""The share of the largest residual from which on residuals are recomputed where the program runs in blocks."""

_NEAR = 0.97
"""The share of the limit from which on a plan that fits is not looked for with less recomputed."""

_FEW_SECONDS = 0.01
"""The share of a step below which it is not worth looking for a choice that adds less."""

_LEAST_SECONDS = 0.05
"""Of the search of layouts for a program that has not fitted by the time limit: it finds the least peak."""

_SUMS = ("count", "bytes", "flops", "seconds")
"""What a plan says of the values that it computes again."""


@dataclass(frozen=True, slots=True)
class _Rewritten:
    """A program with the chosen fates of residuals, with a schedule; ``seconds``: of what that adds, and of what is
    sent."""

    chosen: frozenset[int]
    found: FoundSchedule
    seconds: float = 0.0

    @property
    def peak_bytes(self) -> float:
        return self.found.peak_bytes


class RecomputedPlans:
    """Plans of one program that computes residuals again, or has them wait on the host, for one limit after another.

    ``free`` is the plan of the program without a limit."""

    def __init__(self, program: Program, free: PlanData, options: Options, watch: Stopwatch) -> None:
        self._program, self._free, self._options, self._mesh = program, free, options, free.mesh
        self._donated, self._seconds = donated_leaves(program, free.donated), step_time(free.schedule).seconds
        fates = Fates("recompute" in options.fit, max(0.0, host_memory_of(options) - free.host_bytes))
        self._fates = [fates] if not (fates.recompute and fates.host_bytes) else [Fates(), fates]
        self._tried: dict[frozenset[int], _Rewritten] = {}
        self._stackable = stackable(program)
        released = self._stated(self._stackable, watch)  # nothing is recomputed, gradients are released
        self._graph = ResidualGraph(released.schedule, released.lifetimes)
        if self._stackable:
            self._rewritten(frozenset(), watch)
        else:
            self._tried[frozenset()] = self._priced(frozenset(), released)

    def within(self, limit: float, watch: Stopwatch) -> PlanData:
        """The plan within a limit that adds the least work. Raises InfeasibleError where none is found.

        Where blocks may help, they come before the search for the lowest peak."""
        for fates in self._fates:
            self._choose_for(limit, fates, watch)
        best = self._best_of(self._tried, limit)  # also what was found for other limits
        if best is not None:
            return self._reported(self._improved(best, limit, watch), watch, limit)
        return self.leanest_within(limit, watch, thorough="blocks" not in self._options.fit)

    def leanest_within(self, limit: float, watch: Stopwatch, thorough: bool = True) -> PlanData:
        """The plan within a limit of the program with the lowest peak, in other layouts; the search for those of the
        lowest peak of all is to be ``thorough``. Raises InfeasibleError where none is found."""
        leanest = min(self._tried.values(), key=lambda one: one.peak_bytes)
        try:
            return self._reported(self._searched(leanest, limit, watch, thorough), watch, limit)
        except InfeasibleError as error:
            least = min(error.least_peak_bytes, leanest.peak_bytes)
            again, on_host = len(self._again(leanest.chosen)), sum(fate < 0 for fate in leanest.chosen)
            counts = [f"{again} values computed again"] if self._fates[0].recompute else []
            counts += [f"{on_host} values in host memory"] if on_host or not counts else []
            said = f"{error} That is with {' and '.join(counts)}, as many as save memory."
            raise InfeasibleError(said, least) from None

    def for_blocks(self, watch: Stopwatch) -> PlanData:
        """The plan that computes the largest residuals again, as those of attention: what is made of them late is then
        near to where it is read, and one loop can have both."""
        least = _LARGE * max(self._graph.sizes.values(), default=0.0)
        large = self._graph.useful([value for value, size in self._graph.sizes.items() if size >= least])
        return self._reported(self._rewritten(self._in_program(large), watch), watch)

    def by_policy(self, policy: str, watch: Stopwatch) -> PlanData:
        """The plan that computes again what a policy of `jax.checkpoint` around every layer does, within any limit."""
        return self._reported(self._rewritten(self._in_program(POLICIES[policy](self._graph)), watch), watch)

    # ---- what is recomputed

    def _choose_for(self, limit: float, fates: Fates, watch: Stopwatch) -> None:
        """Tries what is chosen for the limit, then for as much less or more as was missed."""
        target, seen, missed = limit, [frozenset[int]()], np.inf
        fits, exceeds, less = -np.inf, np.inf, 0.0  # targets that did, and the seconds of the latter
        for number in range(_MOST_CHOICES):
            best = self._best_of(seen, limit)
            near = best is not None and best.seconds - less <= _FEW_SECONDS * self._seconds
            if (exceeds < np.inf and near) or (watch.left <= 0 and (best is not None or number >= _LEAST_CHOICES)):
                break
            chosen = self._choice(target, fates)
            if chosen in seen:
                if best is not None:
                    break
                target *= _NEAR
                continue
            found = self._rewritten(chosen, watch)
            seen.append(chosen)
            excess = found.peak_bytes - limit
            if excess <= 0:
                if found.peak_bytes >= _NEAR * limit:
                    break
                fits, target = target, target - excess
            else:
                exceeds, less = target, found.seconds
                if excess > missed / 2:  # the estimate is off by more than it says: half-way to the most
                    excess = (target - self._graph.estimate(self._choice(0.0, fates))[0].max()) / 2
                missed, target = found.peak_bytes - limit, target - excess
            if fits > -np.inf and exceeds < np.inf:
                target = (fits + exceeds) / 2
        if self._best_of(seen, limit) is None:  # as many as save memory
            seen.append(self._choice(0.0, fates))
            self._rewritten(seen[-1], watch)

    def _choice(self, target: float, fates: Fates) -> frozenset[int]:
        """What is chosen for a limit, of what can be made again in the program as it is: barriers of the released
        program may move the border between its parts."""
        return self._in_program(choose_recomputed(self._graph, target, fates))

    def _in_program(self, chosen: frozenset[int]) -> frozenset[int]:
        """What the program recomputes, stacks in addition, and has wait on the host, for a choice in the graph, where
        it stacks all it could."""
        known = recomputable(self._program)
        found = frozenset(fate for fate in chosen if max(fate, ~fate) in known)
        return found ^ self._stackable

    def _in_graph(self, chosen: frozenset[int]) -> frozenset[int]:
        return chosen ^ self._stackable

    @staticmethod
    def _again(chosen: Collection[int]) -> frozenset[int]:
        return frozenset(fate for fate in chosen if fate >= 0)

    def _copies(self, chosen: frozenset[int]) -> Mapping[int, Copied]:
        """The copies of what waits in host memory, by value."""
        return self._graph.copies(self._in_graph(chosen)) if any(fate < 0 for fate in chosen) else {}

    def _offloaded(self, chosen: frozenset[int]) -> tuple[Offloaded, ...]:
        return tuple(one.offloaded for _, one in sorted(self._copies(chosen).items()))

    def _best_of(self, chosen: Collection[frozenset[int]], limit: float) -> _Rewritten | None:
        fitting = [one for one in map(self._tried.__getitem__, chosen) if one.peak_bytes <= limit]
        return min(fitting, key=lambda one: one.seconds, default=None)

    # ---- schedules of what is chosen

    def _rewritten(self, chosen: frozenset[int], watch: Stopwatch) -> _Rewritten:
        """The program with what is chosen, in the layouts of the plan without a limit."""
        if chosen not in self._tried:
            set_stage(f"planning with {len(chosen)} values recomputed or in host memory")
            self._tried[chosen] = self._priced(chosen, self._stated(chosen, watch))
        return self._tried[chosen]

    def _stated(self, chosen: frozenset[int], watch: Stopwatch) -> FoundSchedule:
        with watch.states():
            free = self._free.schedule.problem
            share = LEAST_SHARE if free.prices.share is None else free.prices.share
            fates = self._again(chosen), self._offloaded(chosen)
            rewritten = recomputing(self._program, *fates)
            problem = build_problem(rewritten, self._mesh, self._options, share, like=free)
            if free.traffic and not problem.traffic:
                problem.traffic = memory_traffic(problem)
        return self._counted(problem, carried_over(self._free.schedule, problem, origins(self._program, *fates)))

    def _counted(self, problem: Problem, choices: Choices) -> FoundSchedule:
        """Some choices with their peak; their cost is not known yet."""
        schedule = Schedule(problem, problem.decode(choices))
        lifetimes = lifetimes_of(schedule, self._donated)
        peak = float(lifetimes.profile(choices).max())
        return FoundSchedule(schedule, Solution(choices, np.inf, -np.inf, "feasible", "auto"), peak, lifetimes)

    def _priced(self, chosen: frozenset[int], found: FoundSchedule) -> _Rewritten:
        link = found.schedule.problem.prices.hardware.intra_host
        sent = sum(one.bytes * one.times for one in found.schedule.collectives())
        seconds = self._graph.estimate(self._in_graph(chosen))[1]
        return _Rewritten(chosen, found, seconds + sent / link.bytes_per_second)

    # ---- better layouts

    def _improved(self, begun: _Rewritten, limit: float, watch: Stopwatch) -> _Rewritten:
        """With layouts that cost less within the limit, where the time allows a search."""
        with watch.states():
            cost = begun.found.schedule.problem.network.cost(begun.found.solution.choices)
        if watch.left <= 0 or cost <= (1 + ACCEPTABLE_GAP) * self._free.lower_bound:
            return begun
        found = self._searched(begun, limit, watch)
        room = self._fates[-1].host_bytes  # other layouts may need more of it
        return found if sum(self._host_sizes(found).values()) <= room else begun

    def _host_sizes(self, one: _Rewritten) -> dict[int, float]:
        """The bytes of a device of what waits in host memory, by value."""
        layouts, problem = one.found.schedule.assignment.values, one.found.schedule.problem
        sizes = {value: self._graph.program.values[value].stored_bytes for value in self._copies(one.chosen)}
        return {value: size / problem.domain(value).parts[layouts[value]] for value, size in sizes.items()}

    def _searched(self, begun: _Rewritten, limit: float, watch: Stopwatch, thorough: bool = True) -> _Rewritten:
        """The result of a search within the limit. Raises InfeasibleError where nothing is found."""
        problem, choices = begun.found.schedule.problem, begun.found.solution.choices.copy()
        with watch.states():
            network = problem.network
        set_stage(f"searching {len(network):,} choices")
        known = [begun.found]
        for step in descents(network, choices):
            choices[[*step.choices]] = [*step.choices.values()]
        if (choices != begun.found.solution.choices).any():
            known.append(self._counted(problem, choices))
        known = [_with_cost(one) for one in known]
        seconds = max(watch.left, _LEAST_SECONDS)
        search = Search("auto", seconds, limit, self._donated, may_exceed=not thorough, known=known)
        found = search_within(problem, search)
        if found.peak_bytes > limit:
            raise InfeasibleError(f"No layouts within {size_text(limit)} were found.", found.peak_bytes)
        return self._priced(begun.chosen, found)

    # ---- what the plan says

    def _reported(self, chosen: _Rewritten, watch: Stopwatch, limit: float = np.inf) -> PlanData:
        """The plan with the bound of the program as it was, and the fates of its residuals, chosen for a limit."""
        found, free = _with_cost(chosen.found), self._free
        if found.schedule.problem.prices.counts_time:
            solution = replace(found.solution, cost=step_time(found.schedule).seconds)
            found = replace(found, solution=solution)
        bound = min(free.lower_bound, found.solution.cost)
        found = replace(found, solution=replace(found.solution, lower_bound=bound))
        seconds = {"build": watch.stating, "search": watch.spent}
        plan = plan_of(found, self._mesh, self._options, seconds)
        again, offloaded = self._again(chosen.chosen), self._offloaded(chosen.chosen)
        rewritten = recomputing(self._program, again, offloaded)
        if len(rewritten.operations) == len(self._program.operations):  # there is nothing to release either
            return plan
        fingerprint, recomputed = self._program.fingerprint(), tuple(sorted(again))
        recipe = replace(plan.recipe, fingerprint=fingerprint, recomputed=recomputed, offloaded=offloaded)
        sizes, copies = self._host_sizes(chosen), self._copies(chosen.chosen)
        waiting = {v: {"count": 1, "bytes": size, "seconds": copies[v].seconds} for v, size in sizes.items()}
        kept = len(kept_for_effects(self._program))
        work, bounds = self._work(again), dict[str, float]()
        if limit < np.inf:
            users = sum(self._graph.stacked(value)[3] for value in self._stackable)  # the program stacks none of it
            added = sum(one["seconds"] for one in (*work.values(), *waiting.values()))
            estimated = self._graph.estimate(self._in_graph(chosen.chosen))[0].max()
            least = users + least_seconds(self._graph, max(limit, estimated), self._fates[-1])
            bounds = {"least_added_seconds": min(least, added)}
        pinned = pinned_rows(found.schedule, self._options, sum(copies[v].seconds for v in sizes))
        on_host = [*self._rows(waiting), *pinned]
        rows = {"recomputed": self._rows(work), "offloaded": on_host, "kept_for_effects": kept}
        return replace(plan, recipe=recipe, statistics={**plan.statistics, **rows, **bounds})

    def _work(self, recomputed: frozenset[int]) -> dict[int, dict[str, float]]:
        """The figures of what is recomputed: bytes of a device that wait no longer, and work that is added. What is
        stacked for it has some too, with bytes below zero."""
        graph, chosen = self._graph, self._in_graph(recomputed)
        again = graph.effect(chosen).first
        figures = {v: graph.figures(v, chosen) for v in sorted(chosen) if v in again or v not in self._stackable}
        figures |= {value: graph.stacked(value) for value in sorted(self._stackable - chosen)}
        return {value: dict(zip(_SUMS, amounts, strict=True)) for value, amounts in figures.items()}

    def _rows(self, figures: Mapping[int, Mapping[str, float]]) -> list[dict[str, object]]:
        """Figures of values, summed by module and primitive."""
        rows: dict[tuple[str, str], dict[str, float]] = {}
        for value, amounts in figures.items():
            stack = self._graph.stacks.get(value)
            maker = self._graph.program.makers[value if stack is None else stack.made]
            place = glob_of("/".join(["", *_jax.module_path(maker.equation).split("/")])).lstrip("/")
            row = rows.setdefault((place or maker.source, maker.primitive.name), dict.fromkeys(amounts, 0.0))
            for name, amount in amounts.items():
                row[name] += amount
        return [{"module": m, "made_by": p, **row, "count": int(row["count"])} for (m, p), row in rows.items()]


def _with_cost(found: FoundSchedule) -> FoundSchedule:
    cost = found.schedule.problem.network.cost(found.solution.choices)
    return replace(found, solution=replace(found.solution, cost=cost))
