"""The lowest peak: schedules that hold ever less, whatever the memory limit is, and what is said where none fits.

What is tried depends on the program alone: the limit says only when it ends. So a limit that is at least the peak which
an error has reported is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from shardplan.common.tables import megabytes
from shardplan.errors import InfeasibleError
from shardplan.optimize.proposals import hold
from shardplan.optimize.solve_once import CLEARLY
from shardplan.optimize.state import BUDGET_PER_OPERATION, LEAST_WORK, TRIES, State, Task

ORDERS = 3
"""The orders in which a lower peak is looked for, each that of the leanest schedule so far, and the searches in each:
later ones find hardly a percent."""

AFTER = 0.5
"""Seconds after the time limit in which it is looked whether anything fits at all."""


def lowest_peak(task: Task, state: State) -> Iterator[State]:
    """Looks for ever lower peaks until one is within the limit, each half-way between the lowest that was found in an
    order and what is proven or was not reached there. Nothing is done where something fits."""
    if state.best is not None:
        return
    task.clock.deadline += AFTER
    work = LEAST_WORK + BUDGET_PER_OPERATION * len(task.problem.program.operations) / (TRIES + 1)
    state, least = state.count(task, task.begun)
    unreached = 0.0
    for number in range(ORDERS):
        now, start, here = least, least.solution.choices, least.peak_bytes
        for _ in range(ORDERS):
            target = 0.5 * (unreached + here)
            held = hold(task, state, now.lifetimes, target, start, work)
            state = held.state
            if held.infeasible or held.peak_bytes > target:
                unreached = max(held.bound, target)
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
        unreached = least.peak_bytes / CLEARLY


def refusal(task: Task, state: State) -> InfeasibleError:
    """The error with the lowest peak that was found, and the largest tensors there."""
    least, search, program = state.least or state.leanest, task.search, task.problem.program
    bound = min(state.bound, least.peak_bytes)
    late = task.clock.late and bound <= search.limit_bytes
    choices, makers, lines = least.solution.choices, program.makers, list[str]()
    moment = int(np.argmax(task.profile(least.lifetimes, choices)))
    for size, value in least.lifetimes.alive(moment, choices):
        if value is not None:
            tensor = program.values[value]
            where = tensor.name or (makers[value].source if value in makers else "captured array")
            lines.append(f"  {megabytes(size):>10} MB  {tensor.dtype}{list(tensor.shape)} of `{where}`\n")
    proven = f"; by the planner's count none is below {_size(bound)}" if bound else ""
    helps = ["more devices", "a smaller batch", "jax.checkpoint around layers"]
    helps += ["donate_argnums for the state"] * (not search.donated) + ["more time"] * late
    stopped = f" in the {search.seconds:g} seconds of its search (`time_limit`)" if late else ""
    return InfeasibleError(
        f"no layout was found{stopped} that keeps within {_size(search.limit_bytes)} per device; "
        f"the least peak found is {_size(least.peak_bytes)}{proven}. The largest tensors there, per device:\n"
        f"{''.join(lines[:5])}What helps: {', '.join(helps)}.",
        least.peak_bytes,
        float(state.free.solution.lower_bound),
    )


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{megabytes(count)} MB"
