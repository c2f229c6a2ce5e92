"""The search for the lowest peak, and the error of a program that does not fit.

The sequence of tries depends on the program alone. The memory limit only ends it. So a limit of at least the peak that
an error has reported is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from shardplan.common.tables import megabytes
from shardplan.errors import InfeasibleError
from shardplan.optimize.proposals import solve_in_order
from shardplan.optimize.solve_once import CLEARLY_ABOVE_RATIO
from shardplan.optimize.state import BUDGET_PER_OPERATION, LEAST_WORK, MAX_TRIES, State, Task

MAX_ORDERS = 3
"""The most orders in which a lower peak is searched, and the most searches in each. Each order is that of the leanest
schedule so far. Later searches improve the peak by hardly a percent."""

EXTRA_SECONDS = 0.5
"""Seconds after the time limit for the search of a schedule that fits at all."""


def lowest_peak(task: Task, state: State) -> Iterator[State]:
    """Searches ever lower peaks by bisection until one is within the limit.

    Each target is half-way between the lowest peak found in an order and the highest one that is proven infeasible or
    was not reached there. The stage does nothing where a schedule fits already."""
    if state.best is not None:
        return
    task.clock.deadline += EXTRA_SECONDS
    work = LEAST_WORK + BUDGET_PER_OPERATION * len(task.problem.program.operations) / (MAX_TRIES + 1)
    state, least = state.count(task, task.begun)
    limit_floor = 0.0
    for number in range(MAX_ORDERS):
        now, start, here = least, least.solution.choices, least.peak_bytes
        for _ in range(MAX_ORDERS):
            target = 0.5 * (limit_floor + here)
            held = solve_in_order(task, state, now.lifetimes, target, start, work)
            state = held.state
            if held.infeasible or held.peak_bytes > target:
                limit_floor = max(held.bound, target)
            if held.peak_bytes < here:
                start, here = held.choices, held.peak_bytes
                state, own = state.count(task, held.choices)
                least = min(least, own, key=lambda found: found.peak_bytes)
            state = replace(state, least=least, bound=state.bound if number else max(state.bound, held.bound))
            yield state
            if least.peak_bytes <= task.limit:
                return
        if least is now:
            return
        limit_floor = least.peak_bytes / CLEARLY_ABOVE_RATIO


def infeasible_error(task: Task, state: State) -> InfeasibleError:
    """The error with the lowest peak found, and the largest tensors there."""
    least, search, program = state.least or state.leanest, task.search, task.problem.program
    bound = min(state.bound, least.peak_bytes)
    late = task.clock.late and bound <= search.limit_bytes
    choices, makers, lines = least.solution.choices, program.makers, list[str]()
    moment = int(np.argmax(task.profile(least.lifetimes, choices)))
    for size, value in least.lifetimes.live_values(moment, choices):
        if value is not None:
            tensor = program.values[value]
            where = tensor.name or (makers[value].source if value in makers else "captured array")
            lines.append(f"  {megabytes(size):>10} MB  {tensor.dtype}{list(tensor.shape)} of `{where}`\n")
    proven = f"; by the planner's count none is below {_size(bound)}" if bound else ""
    helps = ["more devices", "a smaller batch"]
    helps += ["jax.checkpoint around layers"] * (not search.known)  # else the plan has chosen what is computed again
    helps += ["donate_argnums for the state"] * (not search.donated) + ["more time"] * late
    stopped = " in the time of its search (`time_limit`)" if late else ""
    return InfeasibleError(
        f"no layout was found{stopped} that keeps within {_size(search.limit_bytes)} per device; "
        f"the least peak found is {_size(least.peak_bytes)}{proven}. The largest tensors there, per device:\n"
        f"{''.join(lines[:5])}What helps: {', '.join(helps)}.",
        least.peak_bytes,
    )


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{megabytes(count)} MB"
