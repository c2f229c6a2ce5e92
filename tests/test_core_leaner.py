"""Leaner schedules: what they give to others that exceed a memory limit, and where the search for them ends."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import shardplan
from shardplan import InfeasibleError, finding, relieving, searching
from shardplan.correcting import Corrections
from shardplan.leanest import Leanest
from shardplan.memory.usages import Usages
from shardplan.models import load
from shardplan.relieving import relieve
from shardplan.search import Part, Solution, extended
from shardplan.search.pricing import Pricing
from tests.core_limited import MESH, plan_within, training


def test_what_a_first_search_finds_above_the_limit_takes_over_parts_of_leaner_schedules_before_another(monkeypatch):
    done = []
    once, leaner = Corrections._search_once, searching.relieve
    monkeypatch.setattr(Corrections, "_search_once", lambda *given: (done.append("search"), once(*given))[1])
    monkeypatch.setattr(Leanest, "begin", lambda leanest: done.append("lean"))

    def relieved(known, until):
        done.append("relieve")
        leaner(known, until)

    monkeypatch.setattr(searching, "relieve", relieved)
    monkeypatch.setattr(Corrections, "take", lambda known, own: own)  # nothing is ever within the limit
    monkeypatch.setattr(Leanest, "look", lambda leanest: None)
    with pytest.raises(InfeasibleError):
        plan_within()
    assert done[:3] == ["search", "lean", "relieve"]
    assert done == [*["search", "lean", "relieve"] * (len(done) // 3), "lean"]  # the last where all has found nothing


@pytest.mark.parametrize("fits", [True, False])
def test_what_is_known_takes_over_parts_before_the_joined_mesh_is_searched(monkeypatch, fits):
    done = []

    def relieved(known, until):
        done.append("relieve")
        if fits and known.best is None:
            known.best = replace(known.first, peak_bytes=0.0)

    def take_joined(attempt):
        done.append("join")
        attempt.joined = None
        return True

    monkeypatch.setattr(Corrections, "take", lambda known, own: own)
    monkeypatch.setattr(searching, "relieve", relieved)
    monkeypatch.setattr(searching._Attempt, "take_joined", take_joined)
    monkeypatch.setattr(Corrections, "search_from_best", lambda known: None)
    monkeypatch.setattr(searching, "fill", lambda known: None)
    monkeypatch.setattr(Leanest, "look", lambda leanest: None)
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    if fits:
        plan_within(mesh)
        assert done == ["relieve"]
    else:
        with pytest.raises(InfeasibleError):
            plan_within(mesh)
        assert done[:3] == ["relieve", "join", "relieve"]


@pytest.mark.parametrize(("excluded", "searches"), [(0.0, 3), (1.001, 1)])
def test_no_search_is_made_within_a_limit_that_the_first_trial_has_excluded(monkeypatch, excluded, searches):
    searched = []

    def far(corrections, found):
        searched.append(1)
        corrections.unreached = corrections.limit_bytes * excluded
        return found, replace(found, peak_bytes=1.04 * corrections.limit_bytes)

    monkeypatch.setattr(Corrections, "_search_once", far)
    monkeypatch.setattr(Corrections, "_exclude", lambda corrections, found: len(searched) < 3)
    step, state, batch = training()
    free = shardplan.plan(step, MESH, state, batch, donate_argnums=0)
    search = finding.Search("auto", 60.0, 0.8 * free.peak_bytes, frozenset({0}))
    counts = finding.Counts(free.schedule.problem, search)
    first = counts.own(finding.find(counts.problem, counts.problem.network, search, 60.0))
    Corrections(counts, search, first).follow(first, lambda again: None)
    assert len(searched) == searches


@pytest.mark.parametrize(("times", "searches"), [(20.0, 2), (1.02, 0)])  # and once more, since that found nothing
def test_what_is_far_too_dear_among_leaner_schedules_is_searched_on_from(monkeypatch, times, searches):
    searched = []

    def look(leanest):
        counts, lean = leanest._counts, leanest._known.first
        fits = replace(lean, peak_bytes=0.0)
        monkeypatch.setattr(counts, "counted", lambda: [fits])
        monkeypatch.setattr(Corrections, "cost", lambda known, choices: times * known.unlimited)

    def once(corrections, found, most):
        searched.append(found)
        assert most == math.inf
        assert corrections.lifetimes is corrections.best.lifetimes
        assert corrections.search.limit_bytes == corrections.limit_bytes
        return found, found

    monkeypatch.setattr(Corrections, "follow", lambda corrections, found, otherwise: None)
    monkeypatch.setattr(Corrections, "_search_once", once)
    monkeypatch.setattr(Leanest, "look", look)
    monkeypatch.setattr(searching, "fill", lambda known: None)
    plan_within()
    assert len(searched) == searches


@pytest.mark.parametrize(("times", "done", "searches"), [(1.08, 0.1, 1), (1.02, 0.1, 0), (1.08, 0.3, 0)])
def test_where_much_work_is_left_and_the_gap_is_wide_half_as_much_is_searched_again(monkeypatch, times, done, searches):
    searched = []

    def follow(corrections, found, otherwise):
        corrections.take(replace(found, peak_bytes=0.0))
        corrections.spent += done * corrections.patience - corrections.work

    def once(corrections, found, most):
        searched.append(found)
        assert found is corrections.best
        assert most == pytest.approx(0.5 * done * corrections.patience, rel=0.1)  # what is counted for it comes on top
        return found, found

    monkeypatch.setattr(Corrections, "follow", follow)
    monkeypatch.setattr(Corrections, "cost", lambda known, choices: times * known.unlimited)
    monkeypatch.setattr(Corrections, "_search_once", once)
    monkeypatch.setattr(searching, "fill", lambda known: None)
    plan_within()
    assert len(searched) == searches


@pytest.mark.parametrize(("times", "done", "searches"), [(1.2, 1.5, 1), (1.4, 1.5, 1), (1.05, 1.5, 0), (1.2, 1.8, 0)])
def test_what_is_far_above_what_is_proven_is_searched_on_from_while_work_is_left(monkeypatch, times, done, searches):
    searched, until = [], []

    def follow(corrections, found, otherwise):
        corrections.take(replace(found, peak_bytes=0.0))
        corrections.spent += done * corrections.patience - corrections.work

    def once(corrections, found, most):
        searched.append(found)
        corrections.spent += corrections.patience
        return found, found

    monkeypatch.setattr(Corrections, "follow", follow)
    monkeypatch.setattr(Corrections, "cost", lambda known, choices: times * known.unlimited)
    monkeypatch.setattr(Corrections, "_search_once", once)
    monkeypatch.setattr(searching, "fill", lambda known: until.append((known.until - known.work) / known.patience))
    plan_within()
    assert len(searched) == searches
    # what is there is mixed first, where that may be enough; then what the search has found
    mixed = [1.6 - done] * (times < 1.3) + [0.35] * searches
    assert until == [pytest.approx(left, abs=0.05) for left in mixed]


def test_trials_end_where_three_of_them_find_nothing_lower(monkeypatch):
    step, state, batch = training()
    free = shardplan.plan(step, MESH, state, batch, donate_argnums=0)
    search = finding.Search("auto", 60.0, 1.0, frozenset(range(len(state))))
    counts = finding.Counts(free.schedule.problem, search)
    first = counts.own(finding.find(counts.problem, counts.problem.network, search, 60.0))
    leanest, tried = Leanest(counts, search, first), []
    lower = replace(first, peak_bytes=0.9 * first.peak_bytes)

    def trial():
        tried.append(1)
        if len(tried) == 2:
            leanest._known.least = lower

    monkeypatch.setattr(leanest, "_try", trial)
    monkeypatch.setattr(leanest, "_nearest_reached", lambda: False)
    leanest.look()
    assert leanest.found is lower
    assert len(tried) == 5  # one in vain, one that finds something, three in vain
    below = Leanest(counts, search, first, above=leanest)
    monkeypatch.setattr(below, "_try", lambda: tried.append(below._unreached / below._least.peak_bytes))
    below.begin()
    assert tried[5:] == [0.9] and below._least is lower  # a little below what was found


def above_limit():
    """Corrections within a limit that the best schedule without one just exceeds, with a leaner plan counted."""
    step, state, batch = training()
    free = shardplan.plan(step, MESH, state, batch, donate_argnums=0)
    lean = shardplan.plan(step, MESH, state, batch, donate_argnums=0, memory_limit=0.75 * free.peak_bytes)
    problem = free.schedule.problem
    search = finding.Search("auto", 60.0, 0.95 * free.peak_bytes, frozenset(range(len(state))))
    counts = finding.Counts(problem, search)
    first = counts.own(finding.find(problem, problem.network, search, 60.0))
    corrections = Corrections(counts, search, first)
    corrections.count(np.array(lean.recipe.choices))
    assert corrections.best.solution.cost == pytest.approx(lean.objective)
    return corrections, lean


@pytest.mark.parametrize("share", [1.0, 0.9], ids=["counted", "not counted by the network"])
def test_what_just_exceeds_the_limit_in_its_own_order_takes_over_parts_of_leaner_schedules(monkeypatch, share):
    corrections, lean = above_limit()
    whole = Usages.network

    def network(*given, **named):
        made = whole(*given, **named)
        made.usages = [replace(usage, amounts=share * usage.amounts) for usage in made.usages]
        return made

    monkeypatch.setattr(Usages, "network", network)
    relieve(corrections, math.inf)
    assert corrections.best.peak_bytes <= corrections.limit_bytes
    assert corrections.first.solution.cost < corrections.best.solution.cost < lean.objective


@pytest.mark.parametrize(
    ("fits", "costs", "expected"),
    [
        (False, (1.0, 2.0, 2.01), [2, 0]),
        (False, (1.0, 1.005, 1.5), [1, 2]),
        (False, (1.0, 2.0, 2.5), [1, 2]),
        (True, (1.0, 2.0, 2.2), [2, 0]),
        (True, (1.0, 2.0, 2.9), [0, 1]),
    ],
    ids=[
        "about as cheap and lower",
        "about as cheap as without a limit",
        "cheapest",
        "nearest",
        "cheapest at the limit",
    ],
)
def test_parts_are_taken_over_into_what_may_cost_least_within_the_limit(monkeypatch, fits, costs, expected):
    corrections, _ = above_limit()
    choices = [corrections.first.solution.choices + number for number in range(3)]
    peaks = np.array([1.3, 1.2, 1.02]) * corrections.limit_bytes
    counted = [
        replace(corrections.first, solution=replace(corrections.first.solution, choices=c), peak_bytes=peak)
        for c, peak in zip(choices, peaks, strict=True)
    ]
    best = replace(corrections.best.solution, cost=3.0)
    corrections.best = replace(corrections.best, solution=best, peak_bytes=0.9 * corrections.limit_bytes)
    corrections.best = corrections.best if fits else None
    priced = {c.tobytes(): cost for c, cost in zip(choices, costs, strict=True)}
    monkeypatch.setattr(corrections.counts, "counted", lambda: counted)
    monkeypatch.setattr(Part, "holds", lambda part, choices: True)
    monkeypatch.setattr(corrections, "cost", lambda choices: priced[choices.tobytes()])
    bases = []
    monkeypatch.setattr(relieving, "_relieve", lambda known, base, until: bases.append(base))
    relieve(corrections, math.inf)
    assert [next(n for n, one in enumerate(counted) if one is base) for base in bases] == expected


@pytest.mark.slow
def test_what_is_brought_counts_for_as_long_as_in_what_was_mixed_before():
    model = load("gpt")
    training = model.training(model.SMALL)
    arguments = training.train_step, MESH, training.state, training.batch
    free = shardplan.plan(*arguments)
    lean = shardplan.plan(*arguments, memory_limit=0.9 * free.peak_bytes)
    problem, choices = free.schedule.problem, np.array(lean.recipe.choices)
    search = finding.Search("auto", 60.0, math.inf, frozenset())
    counts = finding.Counts(problem, search)
    first, other = (
        counts.own(Solution(np.array(plan.recipe.choices), 0.0, 0.0, "feasible", "auto")) for plan in (free, lean)
    )
    usages = Usages(first.lifetimes, problem, frozenset())
    usages.follow(first.schedule)
    places = range(first.lifetimes.end + 1)

    def used():
        network = usages.network(math.inf, places)
        times, amounts = network.profile(extended(network, choices))
        return np.append(0.0, amounts)[np.searchsorted(times, places, side="right")]

    before = used()
    usages.follow_besides(other.schedule, other.sending)
    after = used()
    assert (after >= before).all()
    assert after.sum() > before.sum()


def test_trials_take_any_schedule_that_is_not_far_too_dear_and_prune_nothing(monkeypatch):
    gaps, pruned = [], []
    raised, narrowed = Pricing.raise_bound, Pricing._narrow
    monkeypatch.setattr(Pricing, "raise_bound", lambda given, *a: (gaps.append(given.solver.gap), raised(given, *a))[1])
    monkeypatch.setattr(Pricing, "_narrow", lambda given, *a: (pruned.append(given.solver.gap), narrowed(given, *a))[1])
    step, state, batch = training()
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    with pytest.raises(InfeasibleError):
        shardplan.plan(step, mesh, state, batch, donate_argnums=0, memory_limit=1.1e6)
    assert 0.2 in gaps
    assert 0.2 not in pruned


@pytest.mark.long
def test_what_fits_in_no_order_of_a_search_is_counted_in_its_own(monkeypatch):
    model = load("gpt")
    training = model.training(model.BENCHMARK)
    arguments = training.train_step, MESH, training.state, training.batch
    limit = 0.963 * shardplan.plan(*arguments, donate_argnums=0).peak_bytes  # where nothing fits in the first order
    monkeypatch.setattr("shardplan.searching.Leanest.look", lambda leanest: None)
    assert shardplan.plan(*arguments, donate_argnums=0, memory_limit=limit).peak_bytes <= limit


@pytest.mark.parametrize("fits", [True, False])
def test_trials_are_made_only_where_nothing_fits_however_dear_that_is(monkeypatch, fits):
    asked = []

    def follow(corrections, found, otherwise):
        if fits:
            corrections.take(replace(found, peak_bytes=0.0))

    monkeypatch.setattr(Corrections, "follow", follow)
    monkeypatch.setattr(Corrections, "cost", lambda known, choices: 20.0 * known.unlimited)
    monkeypatch.setattr(Corrections, "search_from_best", lambda known: None)
    monkeypatch.setattr(Leanest, "begin", lambda leanest: None)
    monkeypatch.setattr(Leanest, "look", lambda leanest: asked.append(1))
    monkeypatch.setattr(searching, "fill", lambda known: None)
    if fits:
        plan_within()
    else:
        with pytest.raises(shardplan.InfeasibleError):
            plan_within()
    assert len(asked) == (0 if fits else 1)


@pytest.mark.parametrize(("times", "searches"), [(1.2, 1), (1.0005, 0)])
def test_what_fits_at_the_least_cost_is_not_searched_again_among_all_choices(monkeypatch, times, searches):
    searched = []

    def follow(corrections, found, otherwise):
        corrections.take(replace(found, peak_bytes=0.0))

    monkeypatch.setattr(Corrections, "follow", follow)
    monkeypatch.setattr(Corrections, "go_on_from", lambda known, others: known.take(others.best))
    monkeypatch.setattr(Corrections, "search_from_best", lambda known, most: searched.append(most))
    monkeypatch.setattr(Corrections, "cost", lambda known, choices: times * known.unlimited)
    monkeypatch.setattr(searching, "_mix_and_search", lambda corrections: None)
    plan_within(jax.sharding.AbstractMesh((2, 2, 2), ("x", "y", "z")))
    assert len(searched) == searches


ALL, FEWER, BELOW_FEWER = (True, False), (False, False), (True, True)


@pytest.mark.parametrize(("sizes", "among"), [((2, 4), [ALL, FEWER]), ((2, 2, 2), [FEWER, ALL, BELOW_FEWER])])
def test_the_least_peak_is_looked_for_among_all_choices_first_but_on_three_axes(monkeypatch, sizes, among):
    looked = []
    monkeypatch.setattr(Corrections, "follow", lambda corrections, found, otherwise: None)
    monkeypatch.setattr(Leanest, "begin", lambda leanest: None)

    def look(leanest):
        looked.append((leanest._known.part.kept is None, leanest._above is not None))

    monkeypatch.setattr(Leanest, "look", look)
    with pytest.raises(InfeasibleError):
        plan_within(jax.sharding.AbstractMesh(sizes, ("x", "y", "z")[: len(sizes)]))
    assert looked == among


def test_on_three_axes_searches_with_two_joined_take_their_share_of_the_work_of_all(monkeypatch):
    made, followed, init = [], [], Corrections.__init__

    def begin(corrections, *arguments):
        init(corrections, *arguments)
        made.append(corrections)

    def follow(corrections, *_):
        followed.append(corrections.patience)
        raise InterruptedError  # what comes then does not matter here

    monkeypatch.setattr("shardplan.correcting.LEAST_PATIENCE", 0.0)
    monkeypatch.setattr(Corrections, "__init__", begin)
    monkeypatch.setattr(Corrections, "follow", follow)
    with pytest.raises(InterruptedError):
        plan_within(jax.sharding.AbstractMesh((2, 2, 2), ("x", "y", "z")))
    assert followed == [pytest.approx(0.75 * made[0].patience)]


@pytest.mark.parametrize(("peak", "counted"), [(100.4, 1), (110.0, 0)])
def test_what_hardly_exceeds_the_limit_is_made_to_fit_whatever_the_work_is(
    monkeypatch: pytest.MonkeyPatch, peak: float, counted: int
) -> None:
    """Where nothing else fits: what would come next, a search for what is leaner, takes far longer."""
    made = list[np.ndarray]()

    def count(mixture: np.ndarray) -> SimpleNamespace:
        made.append(mixture)
        return SimpleNamespace(peak_bytes=99.0)

    monkeypatch.setattr(relieving, "_leaner", lambda known, base, target, mixed: np.zeros(1))
    known: Any = SimpleNamespace(limit_bytes=100.0, best=None, work=2.0, count=count, cost=lambda mixture: 1.0)
    base: Any = SimpleNamespace(peak_bytes=peak)
    relieving._relieve(known, base, until=1.0)
    assert len(made) == counted
