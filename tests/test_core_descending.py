"""Descending: what is cheaper where a schedule stands is taken over, as far as it fits."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import shardplan
from shardplan import searching
from shardplan.descending import descend
from shardplan.finding import Counts, Search
from shardplan.models import dlrm
from shardplan.search import Network, Solution, descents
from tests.core_limited import least_peak

MESH = AbstractMesh((2, 4), ("x", "y"))


class _Known:
    """Searches that have found an assignment of independent variables, whose second choices save a unit each."""

    def __init__(self, sizes, limit, hidden=0):
        self.sizes, self.limit_bytes, self.stood, self.spent, self.patience = np.array(sizes), limit, b"", 0.0, 100.0
        network = Network()
        for _ in sizes:
            network.add_variable([1.0, 0.0])
        self.problem, self.hidden, self.counted = SimpleNamespace(network=network), hidden, 0
        self.best = self._found(np.zeros(len(sizes), dtype=np.int64))

    @property
    def work(self):
        return self.spent

    def _found(self, choices, hidden=0):
        solution = SimpleNamespace(choices=choices, cost=self.problem.network.cost(choices))
        return SimpleNamespace(solution=solution, peak_bytes=int(self.sizes @ choices) + hidden, lifetimes=None)

    def within(self, choices, lifetimes):
        return self._found(choices)

    def count(self, choices):
        """In its own order, the last of the variables takes more than in that of another schedule."""
        self.counted, self.spent = self.counted + 1, self.spent + 1
        found = self._found(choices, self.hidden * int(choices[-1]))
        if found.peak_bytes <= self.limit_bytes and found.solution.cost < self.best.solution.cost:
            self.best = found
        return found


@pytest.mark.parametrize(
    ("sizes", "hidden", "taken"),
    [
        ([1, 1, 1, 1, 1, 1], 0, [1, 1, 1, 1, 1, 1]),
        ([1, 99, 1, 1, 1, 1], 0, [1, 0, 1, 1, 1, 1]),
        ([1, 1, 1, 1, 1, 1], 99, [1, 1, 1, 1, 1, 0]),
    ],
)
def test_what_fits_is_taken_over(sizes, hidden, taken):
    known = _Known(sizes, 10, hidden)
    descend(known)
    assert known.best.solution.choices.tolist() == taken
    assert known.work == 0.0, "searches have as much work left as before"
    counted = known.counted
    descend(known)
    assert known.counted == counted, "a schedule is looked at once"


def test_where_the_memory_is_used_nothing_is_tried():
    known = _Known([1, 1], 10)
    known.best.peak_bytes = 10
    descend(known)
    assert known.counted == 0


def test_cheaper_choices_that_need_each_other_are_one_change():
    """A tensor that is split in another way, and its copy for what reads it: neither alone saves the edge's cost."""
    network = Network()
    first, second, apart = (network.add_variable([0.0, -0.1]) for _ in range(3))
    network.add_edge(first, second, np.array([[2.0, 2.0], [2.0, 0.0]]))
    found = descents(network, np.array([0, 0, 0]))
    assert [(round(one.gain, 6), one.choices) for one in found] == [(2.2, {first: 1, second: 1}), (0.1, {apart: 1})]


@pytest.fixture(scope="module")
def within_limit():
    """Arguments of a plan, the plan without a limit, and the least peak."""
    training = dlrm.training(dlrm.SMALL)
    arguments = (training.train_step, MESH, training.state, training.batch)
    free = shardplan.plan(*arguments, donate_argnums=0)
    return arguments, free, least_peak(*arguments, donate_argnums=0)


@pytest.mark.slow
def test_a_plan_within_a_limit_leaves_nothing_cheaper_that_fits(within_limit):
    arguments, free, least = within_limit
    limit = least + 0.75 * (free.peak_bytes - least)
    plan = shardplan.plan(*arguments, donate_argnums=0, memory_limit=limit)
    assert plan.peak_bytes <= limit
    problem, choices = plan.schedule.problem, np.array(plan.recipe.choices)
    cheaper = descents(problem.network, choices)
    if sum(descent.gain for descent in cheaper) > 0.01 * plan.objective:
        for descent in cheaper:
            choices[[*descent.choices]] = [*descent.choices.values()]
        donated = frozenset(range(len(jax.tree.leaves(arguments[2]))))
        counts = Counts(problem, Search("auto", 60.0, limit, donated))
        assert counts.own(Solution(choices, np.inf, -np.inf, "feasible", "auto")).peak_bytes > limit


@pytest.mark.slow
def test_a_search_is_asked_about_what_its_result_becomes(within_limit, monkeypatch):
    """It ended before it had proven anything, where the same in another order of mesh axes fitted."""
    arguments, free, limit = within_limit
    monkeypatch.setattr(searching, "CLEARLY", 1.0)
    lean = np.array(shardplan.plan(*arguments, donate_argnums=0, memory_limit=limit).recipe.choices)

    def find(problem, network, search, seconds, serves):
        raise RuntimeError(str(serves(np.array(free.recipe.choices))))

    monkeypatch.setattr(searching, "find", find)
    for straightened, answer in ((lambda problem, choices: choices, "False"), (lambda problem, choices: lean, "True")):
        monkeypatch.setattr(searching, "straightened", straightened)
        with pytest.raises(RuntimeError, match=answer):
            shardplan.plan(*arguments, donate_argnums=0, memory_limit=limit)
