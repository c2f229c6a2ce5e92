"""What a network within a memory limit counts of schedules that bring more to other layouts than the one followed."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from shardplan import finding, searching
from shardplan.correcting import Corrections, complete
from shardplan.leanest import Leanest
from shardplan.memory.foreseeing import lasting
from shardplan.memory.gathering import groups_gathered
from shardplan.memory.liveness import memory_profile
from shardplan.memory.usages import Usages
from shardplan.search import Solution, extended
from tests.core_limited import plan_within

MESH = jax.sharding.AbstractMesh((2,), ("x",))
WEIGHTS = [jax.ShapeDtypeStruct((256, 256), "float32")] * 4
ROWS = jax.ShapeDtypeStruct((1024, 256), "float32")


def _step(weights, x):
    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.sum(y)

    return [w - 0.1 * gradient for w, gradient in zip(weights, jax.grad(loss)(weights), strict=True)]


def _transposed(weights, x):
    transposed = weights[0].T
    return jnp.sum(jnp.tanh(jnp.tanh(x @ transposed) @ transposed))


def _found(step, weights, *stored):
    """Schedules that store these weights in parts, and the others whole, in one problem's counts."""
    pins = [{f"0/{n}": jax.P("x") if n in parts else jax.P() for n in range(len(weights))} for parts in stored]
    plans = [shardplan.plan(step, MESH, weights, ROWS, pins=pinned | {"1": jax.P("x", None)}) for pinned in pins]
    problem = shardplan.plan(step, MESH, weights, ROWS).schedule.problem
    counts = finding.Counts(problem, finding.Search("auto", 60.0, 1e9, frozenset()))
    chosen = [Solution(np.array(plan.recipe.choices), np.inf, -np.inf, "feasible", "auto") for plan in plans]
    return counts, [counts.own(one) for one in chosen]


def _uncounted(counts, followed, found, foresees):
    """Bytes that a network which follows a schedule does not count of another one, per place of its order."""
    exact = counts.profile(found.solution.choices, followed.lifetimes)[:-1]
    usages = Usages(followed.lifetimes, counts.problem, frozenset(), foresees)
    usages.follow(followed.schedule)
    network = usages.network(1e9, range(len(exact)))
    return exact - _profile(network, found, len(exact)), exact


def _profile(network, found, places):
    times, used = network.profile(extended(network, found.solution.choices))
    return np.append(0.0, used)[np.searchsorted(times, np.arange(places), side="right")]


def test_what_is_gathered_besides_is_counted_from_where_the_first_of_its_group_is_read():
    counts, (one, all_of_them) = _found(_step, WEIGHTS, (0,), (0, 1, 2, 3))
    forward = 6
    missed, _ = _uncounted(counts, one, all_of_them, foresees=False)
    size = 4 * 256 * 256
    assert missed[:forward].tolist() == [3 * size, 3 * size, 2 * size, 2 * size, size, size]
    missed, _ = _uncounted(counts, one, all_of_them, foresees=True)
    assert not missed[:forward].any()
    # nor more than there is, of the schedule itself
    missed, _ = _uncounted(counts, one, one, foresees=True)
    assert (missed >= 0).all()


def test_what_is_changed_on_the_way_is_counted_until_its_last_reader():
    counts, (whole,) = _found(_transposed, WEIGHTS[:1], ())
    operations, lifetimes = counts.problem.program.operations, whole.lifetimes
    [transpose] = [o for o in operations if o.primitive.name == "transpose"]
    place = lifetimes.place[transpose.index]
    last = max(lifetimes.place[o.index] for o in operations if o.primitive.name == "dot_general")
    assert lasting(lifetimes)[transpose.index] == last > place + 1
    [weight], moments = transpose.operands, np.arange(lifetimes.end)
    ends = [
        {pair.end for pair in usages._brought(frozenset({weight}), moments) if pair.start == place}
        for usages in (Usages(lifetimes, counts.problem, frozenset(), foresees) for foresees in (False, True))
    ]
    assert ends == [{place + 1}, {last + 1}]


def test_what_a_network_does_not_count_of_a_schedule_is_added():
    counts, (whole, parts) = _found(_step, WEIGHTS, (), (0, 1, 2, 3))
    missed, exact = _uncounted(counts, whole, parts, foresees=False)
    assert missed.max() > 0
    usages = Usages(whole.lifetimes, counts.problem, frozenset(), False)
    usages.follow(whole.schedule)
    network = usages.network(1e9, range(len(exact)))
    complete(network, parts, range(len(exact)), exact)
    assert _profile(network, parts, len(exact)) == pytest.approx(exact)


def test_what_is_sent_while_others_run_is_counted_by_networks_too():
    counts, (found,) = _found(_step, WEIGHTS, (3,))
    lifetimes, size = found.lifetimes, 4 * 256 * 256
    [[gather]] = [group for _, _, group in groups_gathered(found.schedule)]
    read = lifetimes.copied[gather.value][0]
    lifetimes.sending.begins.clear()
    before = memory_profile(lifetimes, found.schedule, frozenset(), lifetimes.sending)
    lifetimes.sending.begins[gather] = lifetimes.order[read - 2].index
    missed, exact = _uncounted(counts, found, found, foresees=False)
    more = exact - before[:-1]
    assert more[: read + 1].tolist() == [0.0] * (read - 2) + [size, size, 0.0]
    assert not missed[: read + 1].any()


def test_leaner_schedules_are_looked_for_only_where_nothing_fits(monkeypatch):
    done = []

    def follow(corrections, found, otherwise):
        corrections.best = replace(found, solution=replace(found.solution, cost=20 * found.solution.cost))

    monkeypatch.setattr(Corrections, "follow", follow)
    monkeypatch.setattr(Corrections, "search_from_best", lambda corrections: done.append("from the best"))
    monkeypatch.setattr(Leanest, "look", lambda leanest: done.append("leaner"))
    monkeypatch.setattr(searching, "fill", lambda known: None)
    plan_within()
    assert done == ["from the best"]


def test_a_bound_that_a_schedule_contradicts_is_not_one(monkeypatch):
    bounds = []

    def follow(corrections, found, otherwise):
        cost = corrections.cost(found.solution.choices)
        corrections.best = replace(found, solution=replace(found.solution, cost=1.2 * cost))
        corrections.lower = bounds[-1] * cost
        corrections.unlimited = cost

    monkeypatch.setattr(Corrections, "follow", follow)
    monkeypatch.setattr(searching, "fill", lambda known: None)
    for bound, gap in ((1.1, 1 - 1.1 / 1.2), (1.2, 0.0), (1.3, 1 - 1 / 1.2)):
        bounds.append(bound)
        assert plan_within().gap == pytest.approx(gap, abs=1e-6)
