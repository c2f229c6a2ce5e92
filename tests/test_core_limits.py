"""Planning within a memory limit: what a search takes, and how much of the limit its plan uses."""

import math
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan import InfeasibleError, correcting, finding
from shardplan.correcting import Corrections
from shardplan.search import Mixtures, pricing
from shardplan.search.pricing import Pricing
from tests.core_limited import MESH, least_peak, plan_within, training


def test_what_a_schedule_holds_is_counted_once_in_its_own_order(monkeypatch):
    seen, count = [], finding.in_own_order

    def watched(schedule):
        seen.append(id(schedule))
        return count(schedule)

    monkeypatch.setattr(finding, "in_own_order", watched)
    step, state, batch = training()
    free = shardplan.plan(step, MESH, state, batch, donate_argnums=0)
    seen.clear()
    shardplan.plan(step, MESH, state, batch, donate_argnums=0, memory_limit=0.8 * free.peak_bytes)
    assert len(seen) > 1
    assert len(seen) == len(set(seen))


def test_a_lowered_limit_is_searched_though_memory_is_short_at_no_other_place():
    step, state, batch = training()
    free = shardplan.plan(step, MESH, state, batch, donate_argnums=0)
    problem, search = free.schedule.problem, finding.Search("auto", 60.0, 0.8 * free.peak_bytes, frozenset())
    counts = finding.Counts(problem, search)
    first = counts.own(finding.find(problem, problem.network, search, 60.0))
    corrections = Corrections(counts, search, first)
    assert corrections._exclude(first)
    found, _ = corrections._search_once(first)
    corrections.search = replace(search, limit_bytes=0.95 * found.peak_bytes)
    for _ in range(3):  # the first time at more places, perhaps
        assert corrections._exclude(found)
    corrections._search_once(found)
    assert corrections.lower <= found.solution.cost  # what was found keeps within the limit itself


@pytest.mark.long
def test_a_higher_limit_never_sends_more():
    """What the orders of the schedules found first leave of a limit would decide otherwise."""
    step, state, batch = training()
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    free = shardplan.plan(step, mesh, state, batch, donate_argnums=0)
    limits = [share * free.peak_bytes for share in (0.85, 0.92, 0.95, 0.98)]
    plans = [shardplan.plan(step, mesh, state, batch, donate_argnums=0, memory_limit=limit) for limit in limits]
    assert all(plan.peak_bytes <= limit for plan, limit in zip(plans, limits, strict=True))
    sent = [plan.communication_bytes for plan in plans]
    assert sent == sorted(sent, reverse=True)
    assert sent[1] < sent[0]  # what is left of the higher limit is used


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "times"), [((4,), 1.0), pytest.param((2, 4), 1.003, marks=pytest.mark.long)])
def test_the_least_peak_that_an_error_reports_is_kept_as_a_limit(sizes, times):
    step, state, batch = training()
    mesh = jax.sharding.AbstractMesh(sizes, ("x", "y")[: len(sizes)])
    limit = times * least_peak(step, mesh, state, batch, donate_argnums=0)
    assert shardplan.plan(step, mesh, state, batch, donate_argnums=0, memory_limit=limit).peak_bytes <= limit


@pytest.mark.parametrize(("share", "stopped"), [(0.5, False), (0.8, True)])
def test_an_error_says_that_the_time_was_over_where_more_of_it_may_help(share, stopped, monkeypatch):
    """Not where no layout at all keeps within the limit, which is soon proven."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)  # other processes do not make it late
    monkeypatch.setattr(time, "monotonic", time.process_time)
    step, state, batch = training()
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    limit = share * shardplan.plan(step, mesh, state, batch, donate_argnums=0).peak_bytes
    with pytest.raises(InfeasibleError) as caught:
        shardplan.plan(step, mesh, state, batch, donate_argnums=0, memory_limit=limit, time_limit=1e-6)
    assert ("was found in the 1e-06 seconds of its search (`time_limit`) that" in str(caught.value)) == stopped
    assert str(caught.value).endswith(", more time.") == stopped


def test_searches_that_have_taken_their_work_and_found_nothing_give_way_to_leaner_schedules(monkeypatch):
    searched = []
    once = Corrections._search_once
    monkeypatch.setattr(Corrections, "_search_once", lambda *given: (searched.append(1), once(*given))[1])
    monkeypatch.setattr(correcting, "LEAST_PATIENCE", 1e-3)
    monkeypatch.setattr(correcting, "_TIMES_SLOWER_WITHIN_LIMIT", 1e-6)
    monkeypatch.setattr("shardplan.searching.Leanest.look", lambda leanest: None)
    step, state, batch = training()
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    with pytest.raises(InfeasibleError):
        shardplan.plan(step, mesh, state, batch, donate_argnums=0, memory_limit=1.12e7)
    assert len(searched) == 2  # of all choices, and of those that the mesh has with its axes as one


@pytest.mark.parametrize(("times", "leaner"), [(20.0, True), (1.1, False)])
def test_what_fits_but_is_far_too_dear_is_held_against_leaner_schedules(monkeypatch, times, leaner):
    step, state, batch = training()
    free = shardplan.plan(step, MESH, state, batch, donate_argnums=0)

    def follow(self, found, otherwise):
        dear = replace(found.solution, cost=times * found.solution.cost)
        self.best = replace(found, solution=dear)

    monkeypatch.setattr(Corrections, "follow", follow)
    monkeypatch.setattr("shardplan.searching.fill", lambda known: None)
    limit = 0.8 * free.peak_bytes
    plan = shardplan.plan(step, MESH, state, batch, donate_argnums=0, memory_limit=limit)
    assert (plan.peak_bytes <= limit) == leaner


@pytest.mark.parametrize(("spent", "times", "searches"), [(1.1, 2.0, 2), (1.4, 2.0, 1), (1.4, 1.02, 4)])
def test_more_searches_may_overdraw_the_work_where_nothing_was_found(monkeypatch, spent, times, searches):
    """One where leaner schedules are dear, a few where what is found is hardly dearer than without a limit."""
    searched = []

    def nothing(corrections, found):
        searched.append(1)
        corrections.spent = spent * corrections.patience - corrections.counts.work
        if len(searched) > 1:
            corrections.spent += corrections.patience
        found = replace(found, solution=replace(found.solution, cost=times * corrections.unlimited))
        return found, found

    monkeypatch.setattr(Corrections, "_search_once", nothing)
    monkeypatch.setattr(Corrections, "_exclude", lambda corrections, found: True)
    monkeypatch.setattr("shardplan.leanest.Leanest.begin", lambda leanest: None)
    monkeypatch.setattr("shardplan.searching._mix_and_search", lambda corrections: None)
    plan_within()
    assert len(searched) == searches


def test_what_fits_only_in_the_order_of_the_search_is_searched_in_its_own_however_far_above_it_is_there(monkeypatch):
    orders = []

    def far(corrections, found):
        here = replace(found, peak_bytes=0.9 * corrections.limit_bytes)
        return here, replace(found, peak_bytes=1.5 * corrections.limit_bytes)

    monkeypatch.setattr(Corrections, "_search_once", far)
    monkeypatch.setattr(Corrections, "count_in", lambda corrections, order: orders.append(order))
    monkeypatch.setattr(Corrections, "_exclude", lambda corrections, found: len(orders) < 2)
    corrections, first = _corrections()
    corrections.follow(first, lambda again: None)
    assert len(orders) == 2  # the one to begin with, and its own


@pytest.mark.parametrize(("dearer", "above", "told"), [(1.0, 1.04, True), (1.2, 1.04, False), (1.0, 1.2, False)])
def test_what_just_exceeds_the_limit_and_costs_hardly_more_is_searched_again_before_anything_else(
    monkeypatch, dearer, above, told
):
    searched, otherwise = [], []

    def near(corrections, found):
        searched.append(1)
        solution = replace(found.solution, cost=dearer * corrections.unlimited)
        here = replace(found, solution=solution, peak_bytes=0.9 * corrections.limit_bytes)
        return here, replace(here, peak_bytes=above * corrections.limit_bytes)

    monkeypatch.setattr(Corrections, "_search_once", near)
    monkeypatch.setattr(Corrections, "_exclude", lambda corrections, found: len(searched) < 2)
    corrections, first = _corrections()
    corrections.follow(first, otherwise.append)
    assert otherwise == [told, False]


@pytest.mark.parametrize(
    ("status", "above", "again"), [("unknown", 1.04, 1), ("infeasible", 1.04, 0), ("unknown", 2, 0)]
)
def test_where_the_work_was_over_the_next_search_is_in_the_order_of_what_nearly_fits(monkeypatch, status, above, again):
    orders, otherwise = [], []

    def nothing(corrections, found):
        corrections.aside = replace(found, peak_bytes=above * corrections.limit_bytes)
        nowhere = replace(found, solution=replace(found.solution, cost=math.inf, status=status))
        return nowhere, replace(nowhere, peak_bytes=2 * corrections.limit_bytes)

    monkeypatch.setattr(Corrections, "_search_once", nothing)
    monkeypatch.setattr(Corrections, "_exclude", lambda corrections, found: not otherwise)
    corrections, first = _corrections()
    monkeypatch.setattr(Corrections, "count_in", lambda corrections, order: orders.append(order))
    corrections.follow(first, otherwise.append)
    assert (otherwise, len(orders)) == ([bool(again)], again)


@pytest.mark.parametrize(("dearer", "more"), [(None, 0.25), (2.0, 0.25), (1.1, 0.0)])
def test_what_does_not_fit_or_is_far_too_dear_is_mixed_though_the_work_is_over(dearer, more):
    corrections, first = _corrections()
    corrections.spent = 10 * corrections.until
    if dearer:
        corrections.best = replace(first, solution=replace(first.solution, cost=dearer * corrections.lower))
    until = corrections.work + more * corrections.patience if more else corrections.until
    assert corrections.until_filled() == until


def _corrections():
    """Corrections of the small step within four fifths of its peak, and what they begin with."""
    step, state, batch = training()
    free = shardplan.plan(step, MESH, state, batch, donate_argnums=0)
    search = finding.Search("auto", 60.0, 0.8 * free.peak_bytes, frozenset({0}))
    problem = free.schedule.problem
    counts = finding.Counts(problem, search)
    first = counts.own(finding.find(problem, problem.network, search, 60.0))
    return Corrections(counts, search, first), first


@pytest.mark.parametrize(("times", "searches"), [(1.2, 1), (4.0, 2)])
def test_what_fits_only_because_it_is_very_dear_does_not_end_the_searches(monkeypatch, times, searches):
    monkeypatch.setattr(correcting, "_TIMES_SLOWER_WITHIN_LIMIT", 100.0)  # more than the least patience
    searched = []
    once = Corrections._search_once

    def dear(corrections, found):
        searched.append(1)
        found, own = once(corrections, found)
        if len(searched) == 1:
            corrections.best = replace(own, solution=replace(own.solution, cost=times * found.solution.cost))
        return found, own

    monkeypatch.setattr(Corrections, "_search_once", dear)
    monkeypatch.setattr(Corrections, "search_a_little_more", lambda known: None)
    monkeypatch.setattr("shardplan.searching._FAR_TOO_DEAR", math.inf)
    monkeypatch.setattr("shardplan.searching.fill", lambda known: None)
    plan_within()
    assert len(searched) == searches


def test_what_is_found_among_leaner_schedules_is_filled_up_in_its_own_order_for_a_share_of_the_work(monkeypatch):
    left = []

    def fill(known):
        left.append((known.lifetimes is known.best.lifetimes, known.work, known.patience))

    monkeypatch.setattr(Corrections, "follow", lambda corrections, found, otherwise: None)
    monkeypatch.setattr("shardplan.searching.fill", fill)
    step, state, batch = training()
    free = shardplan.plan(step, MESH, state, batch, donate_argnums=0)
    limit = 0.8 * free.peak_bytes
    assert shardplan.plan(step, MESH, state, batch, donate_argnums=0, memory_limit=limit).peak_bytes <= limit
    [(in_its_order, work, patience)] = left
    assert in_its_order
    assert work < patience < work + correcting.LEAST_PATIENCE


@pytest.mark.slow
def test_mixing_ends_where_its_work_is_over(monkeypatch):
    tried = []
    within = Mixtures.within
    monkeypatch.setattr(Mixtures, "within", lambda mixtures, limit: (tried.append(limit), within(mixtures, limit))[1])
    step, state, batch = training()
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    free = shardplan.plan(step, mesh, state, batch, donate_argnums=0)
    shardplan.plan(step, mesh, state, batch, donate_argnums=0, memory_limit=0.95 * free.peak_bytes)
    assert tried
    tried.clear()
    monkeypatch.setattr("shardplan.filling._SECONDS_PER_VARIABLE", 1.0)
    monkeypatch.setattr("shardplan.relieving._above", lambda known: [])
    shardplan.plan(step, mesh, state, batch, donate_argnums=0, memory_limit=0.95 * free.peak_bytes)
    assert not tried


def test_what_is_derived_of_a_schedule_once_is_work_once():
    step, state, batch = training()
    free = shardplan.plan(step, MESH, state, batch, donate_argnums=0)
    problem, search = free.schedule.problem, finding.Search("auto", 60.0, free.peak_bytes, frozenset())
    counts = finding.Counts(problem, search)
    first = counts.own(finding.find(problem, problem.network, search, 60.0))
    before = counts.work
    counts.profile(first.solution.choices, first.lifetimes)
    known = counts.work - before
    other = first.solution.choices.copy()
    other[problem.variables.values[problem.program.inputs[0]]] = 0
    assert other.tobytes() != first.solution.choices.tobytes()
    counts.profile(other, first.lifetimes)
    assert counts.work - before > 3 * known


def test_prices_are_evaluated_for_the_work_that_is_left(monkeypatch):
    """Or for twice the longest so far: what is found then is worth having."""
    allowed, inner = [], Pricing._inner

    def watched(pricing, prices):
        solver = inner(pricing, prices)
        left = max(pricing.until - pricing.estimate, 2 * pricing.longest)
        allowed.append(solver.effort.seconds <= left < 60)
        return solver

    monkeypatch.setattr(Pricing, "_inner", watched)
    plan_within()
    assert allowed
    assert all(allowed)


def test_only_mixtures_that_fit_in_the_order_of_what_they_are_mixed_from_are_counted_in_their_own(monkeypatch):
    fitted, count = [], Corrections.count

    def watched(corrections, choices):
        fitted.append(corrections.within(choices).peak_bytes <= corrections.limit_bytes)
        return count(corrections, choices)

    monkeypatch.setattr(Corrections, "count", watched)
    step, state, batch = training()
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    free = shardplan.plan(step, mesh, state, batch, donate_argnums=0)
    shardplan.plan(step, mesh, state, batch, donate_argnums=0, memory_limit=0.95 * free.peak_bytes)
    assert fitted
    assert all(fitted)


def test_what_is_proven_within_the_limit_is_not_mixed_with_anything(monkeypatch):
    mixed = []
    monkeypatch.setattr("shardplan.filling._mix", lambda *given: mixed.append(given))
    plan = plan_within()
    assert plan.gap < 1e-3
    assert not mixed


@pytest.mark.parametrize(("sizes", "first", "last"), [((2, 2, 2), 0.5, 1.0), ((2, 4), 1.0, 1.0)])
def test_on_three_axes_what_two_can_do_is_searched_before_all_choices_are(monkeypatch, sizes, first, last):
    searched, find = [], finding.solve

    def solve(network, **options):
        if network.usage_limit is not None:
            searched.append(sum(costs.size for costs in network.costs[:whole]))
        return find(network, **options)

    step, state, batch = training()
    mesh = jax.sharding.AbstractMesh(sizes, "abc"[: len(sizes)])
    free = shardplan.plan(step, mesh, state, batch, donate_argnums=0)
    whole = len(free.schedule.problem.network)
    choices = sum(costs.size for costs in free.schedule.problem.network.costs)
    monkeypatch.setattr(finding, "solve", solve)
    plan = shardplan.plan(step, mesh, state, batch, donate_argnums=0, memory_limit=0.95 * free.peak_bytes)
    assert plan.peak_bytes <= 0.95 * free.peak_bytes
    assert searched[0] <= first * choices
    assert max(searched) == last * choices


def test_what_the_mesh_can_do_with_its_axes_as_one_is_found_where_searches_of_all_choices_find_nothing(monkeypatch):
    step, state, batch = training()
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    free = shardplan.plan(step, mesh, state, batch, donate_argnums=0)
    once = Corrections._search_once

    def within(corrections, found, *most):
        of_all = corrections.part.network is corrections.problem.network
        return (found, found) if of_all else once(corrections, found, *most)

    monkeypatch.setattr(Corrections, "_search_once", within)
    monkeypatch.setattr("shardplan.leanest.Leanest.look", lambda leanest: None)
    monkeypatch.setattr("shardplan.leanest.Leanest.begin", lambda leanest: None)
    plan = shardplan.plan(step, mesh, state, batch, donate_argnums=0, memory_limit=0.9 * free.peak_bytes)
    assert plan.peak_bytes <= 0.9 * free.peak_bytes
    splits = {entry for layout in plan.layouts.values() for entry in layout if entry is not None}
    assert splits <= {("x", "y")}


def test_loops_over_generated_values_of_no_elements():
    def step(x, y):
        return jax.lax.scan(lambda carry, part: (jnp.tanh(carry @ x) + part.sum(), None), y @ x, jnp.ones((4, 0)))[0]

    values = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    assert least_peak(step, MESH, *values) > 0


def test_what_is_nearly_the_best_by_the_bound_gets_little_more_work(monkeypatch):
    """Whether prices or a mixture found it."""
    spent = []
    raised = Pricing.raise_bound

    def watched(prices, seconds):
        prices.near = 10.0
        try:
            raised(prices, seconds)
        finally:  # a search may end on the way
            spent.append((prices.until, seconds, prices.solver.upper))

    monkeypatch.setattr(Pricing, "raise_bound", watched)
    monkeypatch.setattr(correcting, "_TIMES_SLOWER_WITHIN_LIMIT", 10.0)
    monkeypatch.setattr("shardplan.searching._FAR_TOO_DEAR", math.inf)
    step, state, batch = training(1024, 6, 1024)
    free = shardplan.plan(step, MESH, state, batch, donate_argnums=0)
    shardplan.plan(step, MESH, state, batch, donate_argnums=0, memory_limit=0.7 * free.peak_bytes)
    assert any(upper < float("inf") for *_, upper in spent)
    least = pricing._LEAST_WORK  # a search of no more is not cut off
    assert all(until < seconds or until < least for until, seconds, upper in spent if upper < float("inf"))
    assert any(until < seconds for until, seconds, _ in spent)
