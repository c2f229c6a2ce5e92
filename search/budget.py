"""The budget of a graph solver, and its callbacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Budget", "Callbacks"]


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits on the work of a graph solver. They count work instead of seconds, so that results repeat.

    sweeps: the number of message sweeps. seconds: the estimated time of the sweeps, by the sizes of tables.
    promising_choices: choices per variable for dynamic programming between sweeps.
    largest_table, table_entries: the largest table of dynamic programming, and the entries of all its tables.
    cp_sat_work: CP-SAT's deterministic time. cp_sat_entries: the largest graph that CP-SAT gets, in table entries.
    dives: whether the solver dives on the choices of the least min-marginals.
    contraction_entries: the largest graph that contraction may make, in table entries.
    near_optimal_dp: whether dynamic programming on near-optimal choices follows where messages stall, raise the bound
    slowly, or have used their sweeps.
    acceptable_gap: the gap at which the solution with symmetric choices grouped ends the search.
    """

    sweeps: int = 3000
    seconds: float = 60.0
    promising_choices: int = 4
    largest_table: float = 2e5
    table_entries: float = 3e7
    cp_sat_work: float = 30.0
    cp_sat_entries: int = 60_000
    dives: bool = True
    contraction_entries: int = 4_000_000
    near_optimal_dp: bool = False
    acceptable_gap: float = 0.0


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The functions that a graph solver calls.

    report: after each step that may have changed a bound. It may raise to end the search.
    seconds_left: the time until the search must end.
    on_plateau: when the best assignment will not improve for a while. It may raise to end the search.
    on_infeasible_hint: when no assignment within the limit seems to exist. It may raise to end the search.
    on_stall: when messages stop to raise the bound. It may accept a better assignment.
    """

    report: Callable[[], None]
    seconds_left: Callable[[], float]
    on_plateau: Callable[[], None] = lambda: None
    on_infeasible_hint: Callable[[], None] = lambda: None
    on_stall: Callable[[], None] = lambda: None
