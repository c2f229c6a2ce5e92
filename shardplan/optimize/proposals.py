"""Proposals: choices within a memory limit in the order of a known schedule, by a search or from known choices.

In a fixed order the network's usage is exactly the memory of the schedule. So the network limits memory at the few
positions where it is short. Further positions at which a solution exceeds the limit are added (cutting planes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardplan.memory import Lifetimes
from shardplan.optimize.solve_once import ACCEPTABLE_GAP, CLEARLY_ABOVE_RATIO, Choices, FoundSchedule, solve_network
from shardplan.optimize.state import MAX_TRIES, State, Task, highest_positions
from shardplan.problem.canonical_axis_order import canonicalize_axis_order
from shardplan.search import Hint, Mixtures, Part, all_extended, descents, extended

Proposal = tuple[State, Choices | None]
"""A state with the work spent, and choices within a limit in some order. None where there are none."""


@dataclass(frozen=True, slots=True)
class OrderSolution:
    """The solution within a limit in one order. The peak is infinite where hard layouts exclude the choices."""

    state: State
    choices: Choices
    peak_bytes: float
    bound: float  # a lower bound of the peak in this order
    infeasible: bool  # whether no choices are within the limit in this order


def solve_in_order(
    task: Task, state: State, order: Lifetimes, limit: float, start: Choices, work: float
) -> OrderSolution:
    """The cheapest choices within a limit in an order, by so much work. Without any, the choices of a low peak."""
    until, problem, excess = state.work + work, task.problem, task.excess_in(order)
    places = {*highest_positions(task.profile(order, start), limit / CLEARLY_ABOVE_RATIO)}
    prices: Mapping[int, float] = {}
    known, lower, bound = list[Choices](), -np.inf, 0.0

    def fits(choices: Choices) -> bool:
        return bool(task.profile(order, choices).max() <= limit)

    while True:
        task.clock.seconds_left()
        network, moments = order.network(limit, places, excess), sorted(places)
        priced = {moment: prices.get(place, 0.0) for moment, place in enumerate(moments)}
        known = all_extended(network, known)
        network.hint = Hint(extended(network, start), priced, lower, known, served=state.best is not None)
        seconds, left = task.clock.seconds_left(), max(until - state.work, work / 2)
        solution = solve_network(problem, network, task.search, seconds, left, fits)
        known = [choices[: len(problem.network)] for choices in solution.known]
        state = state.spend(solution.work).learn([solution.choices, *known])
        profile, infeasible = task.profile(order, solution.choices), solution.status == "infeasible"
        valid, bound = np.isfinite(problem.network.cost(solution.choices)), max(bound, solution.least_peak_bound)
        if np.isfinite(solution.cost):
            lower = max(lower, min(solution.lower_bound, solution.cost))
            prices = {moments[moment]: price for moment, price in solution.prices.items()}
        above = {*highest_positions(profile, limit)} - places
        if infeasible or not above or state.work >= until:
            peak = float(profile.max()) if valid else np.inf
            return OrderSolution(state, solution.choices, peak, bound, infeasible)
        places |= above


def search_proposal(task: Task, base: FoundSchedule, state: State, limit: float) -> Proposal:
    """The cheapest choices of a search within a limit."""
    held = solve_in_order(task, state, base.lifetimes, limit, base.solution.choices, task.budget / (MAX_TRIES + 1))
    return held.state, None if held.infeasible else held.choices


def mixture_proposal(task: Task, base: FoundSchedule, state: State, limit: float) -> Proposal:
    """The cheapest mixture of a schedule and all other known choices (`shardplan.search.improve.mixtures`)."""
    whole, order, own = task.problem.network, base.lifetimes, base.solution.choices
    others = [one for key, one in state.known.items() if key != own.tobytes() and np.isfinite(whole.cost(one))]
    if not others:
        return state, None
    part = Part.holding(whole, [own, *others])
    places = {*highest_positions(task.profile(order, own), limit / CLEARLY_ABOVE_RATIO)}
    while True:
        task.clock.seconds_left()
        network = order.network(limit, places, task.excess_in(order), part)
        begun, *rest = all_extended(network, [part.inside(one) for one in (own, *others)])
        mixed, work = Mixtures(network, begun, rest).within(limit)
        state = state.spend(work)
        if mixed is None:
            return state, None
        choices = part.outside(mixed)
        above = {*highest_positions(task.profile(order, choices), limit)} - places
        if not above:
            return state, _straight(task, base, choices, limit)
        places |= above


def descent_proposal(task: Task, base: FoundSchedule, state: State, limit: float) -> Proposal:
    """A schedule with cheaper single choices (`shardplan.search.improve.coordinate_descent`): those that fit, the most
    saving ones first."""
    whole, order, own = task.problem.network, base.lifetimes, base.solution.choices
    changes = sorted(descents(whole, own), key=lambda change: -change.gain)
    choices, left = own, sum(change.gain for change in changes)
    for change in changes:
        if left < ACCEPTABLE_GAP * base.solution.cost:  # the gain of all further changes together
            break
        task.clock.seconds_left()
        tried, left = choices.copy(), left - change.gain
        tried[[*change.choices]] = [*change.choices.values()]
        if task.profile(order, tried).max() <= limit:
            choices = tried
    return state, None if choices is own else _straight(task, base, choices, limit)


def _straight(task: Task, base: FoundSchedule, choices: Choices, limit: float) -> Choices:
    """The choices with mesh axes in the mesh's order, where these are within the limit too."""
    straight = canonicalize_axis_order(task.problem, choices)
    return straight if task.profile(base.lifetimes, straight).max() <= limit else choices
