"""Proposals: choices that keep within a limit in the order of a schedule, found by a search or made of what is known.

In one order what a network counts is what a schedule holds. So memory is limited at the few positions where it is
short, and where what is found exceeds the limit at others, those are added (cutting planes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardplan.memory import Lifetimes
from shardplan.optimize.solve_once import CLEARLY, ENOUGH, Choices, Found, find
from shardplan.optimize.state import TRIES, State, Task, highest
from shardplan.problem.canonical_axis_order import canonicalize_axis_order
from shardplan.search import Hint, Mixtures, Part, all_extended, descents, extended

Proposal = tuple[State, Choices | None]
"""A state with the work spent, and choices that keep within a limit in some order; None where there are none."""


@dataclass(frozen=True, slots=True)
class Held:
    """What is found within a limit in one order; the peak is infinite where hard layouts exclude the choices."""

    state: State
    choices: Choices
    peak_bytes: float
    bound: float  # what no peak is below there
    infeasible: bool  # whether nothing keeps within the limit there


def hold(task: Task, state: State, order: Lifetimes, limit: float, start: Choices, work: float) -> Held:
    """The cheapest choices within a limit in an order, by so much work; where none are, those of a low peak there."""
    until, problem, beyond = state.work + work, task.problem, task.beyond(order)
    places = {*highest(task.profile(order, start), limit / CLEARLY)}
    prices: Mapping[int, float] = {}
    known, lower, bound = list[Choices](), -np.inf, 0.0

    def fits(choices: Choices) -> bool:
        return bool(task.profile(order, choices).max() <= limit)

    while True:
        task.clock.seconds_left()
        network, moments = order.network(limit, places, beyond), sorted(places)
        priced = {moment: prices.get(place, 0.0) for moment, place in enumerate(moments)}
        known = all_extended(network, known)
        network.hint = Hint(extended(network, start), priced, lower, known, served=state.best is not None)
        seconds, left = task.clock.seconds_left(), max(until - state.work, work / 2)
        solution = find(problem, network, task.search, seconds, left, fits)
        known = [choices[: len(problem.network)] for choices in solution.known]
        state = state.spend(solution.work).learn([solution.choices, *known])
        profile, infeasible = task.profile(order, solution.choices), solution.status == "infeasible"
        valid, bound = np.isfinite(problem.network.cost(solution.choices)), max(bound, solution.least_peak_bound)
        if np.isfinite(solution.cost):
            lower = max(lower, min(solution.lower_bound, solution.cost))
            prices = {moments[moment]: price for moment, price in solution.prices.items()}
        above = {*highest(profile, limit)} - places
        if infeasible or not above or state.work >= until:
            peak = float(profile.max()) if valid else np.inf
            return Held(state, solution.choices, peak, bound, infeasible)
        places |= above


def searched(task: Task, base: Found, state: State, limit: float) -> Proposal:
    """The cheapest choices that a search finds within a limit."""
    held = hold(task, state, base.lifetimes, limit, base.solution.choices, task.budget / (TRIES + 1))
    return held.state, None if held.infeasible else held.choices


def mixture(task: Task, base: Found, state: State, limit: float) -> Proposal:
    """The cheapest mixture of a schedule and all others that are known (`shardplan.search.improve.mixtures`)."""
    whole, order, own = task.problem.network, base.lifetimes, base.solution.choices
    others = [one for key, one in state.known.items() if key != own.tobytes() and np.isfinite(whole.cost(one))]
    if not others:
        return state, None
    part, places = Part.holding(whole, [own, *others]), {*highest(task.profile(order, own), limit / CLEARLY)}
    while True:
        task.clock.seconds_left()
        network = order.network(limit, places, task.beyond(order), part)
        begun, *rest = all_extended(network, [part.inside(one) for one in (own, *others)])
        mixed, work = Mixtures(network, begun, rest).within(limit)
        state = state.spend(work)
        if mixed is None:
            return state, None
        choices = part.outside(mixed)
        above = {*highest(task.profile(order, choices), limit)} - places
        if not above:
            return state, _straight(task, base, choices, limit)
        places |= above


def descent(task: Task, base: Found, state: State, limit: float) -> Proposal:
    """A schedule with cheaper single choices (`shardplan.search.improve.coordinate_descent`), those that save most
    first, as they fit."""
    whole, order, own = task.problem.network, base.lifetimes, base.solution.choices
    changes = sorted(descents(whole, own), key=lambda change: -change.gain)
    choices, left = own, sum(change.gain for change in changes)
    for change in changes:
        if left < ENOUGH * base.solution.cost:  # of all that follow together
            break
        task.clock.seconds_left()
        tried, left = choices.copy(), left - change.gain
        tried[[*change.choices]] = [*change.choices.values()]
        if task.profile(order, tried).max() <= limit:
            choices = tried
    return state, None if choices is own else _straight(task, base, choices, limit)


def _straight(task: Task, base: Found, choices: Choices, limit: float) -> Choices:
    """The choices with mesh axes in the mesh's order, where that keeps within the limit too."""
    straight = canonicalize_axis_order(task.problem, choices)
    return straight if task.profile(base.lifetimes, straight).max() <= limit else choices
