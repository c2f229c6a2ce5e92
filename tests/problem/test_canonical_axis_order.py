"""Canonical axis order: of assignments of equal cost, the one whose dimensions have mesh axes in the mesh's order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from shardplan.problem.canonical_axis_order import canonical_choices, canonicalize_axis_order

_MESH = jax.sharding.AbstractMesh((2, 4), ("x", "y"))


def _loss(layers, x):
    for w in layers:
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def _plan(pins=None):
    layers, x = [jax.ShapeDtypeStruct((64, 64), "float32")] * 3, jax.ShapeDtypeStruct((65536, 64), "float32")
    return shardplan.plan(jax.grad(_loss), _MESH, layers, x, pins=pins, memory_limit=float("inf"))


def _choices(plan):
    """The choices that stand for a plan's schedule."""
    problem, assignment = plan.schedule.problem, plan.schedule.assignment
    found = np.zeros(len(problem.variables.sizes), dtype=np.int64)
    for value, variable in problem.variables.values.items():
        found[variable] = problem.domain(value).position[assignment.values[value]]
    for value, variable in problem.variables.copies.items():
        found[variable] = problem.domain(value).position[plan.schedule.copy(value)]
    for operation, variable in problem.variables.operations.items():
        found[variable] = problem.choices[operation].strategies.index(assignment.strategies[operation])
    return found


def _orders(plan):
    """The orders in which several mesh axes split a dimension."""
    layouts = plan.schedule.assignment.values.values()
    return {axes for layout in layouts for axes in layout if len(axes) > 1}


def test_a_batch_is_split_in_the_order_of_the_mesh():
    assert _orders(_plan()) == {(0, 1)}


def test_a_user_who_asks_for_another_order_gets_it():
    plan = _plan({"1": jax.P(("y", "x"), None)})
    assert (1, 0) in _orders(plan)
    assert plan.communication_bytes == pytest.approx(_plan().communication_bytes)


def test_another_order_at_the_same_cost():
    """All its variables change to the mesh's order together."""
    plan = _plan()
    problem, straight = plan.schedule.problem, _choices(plan)
    other = straight.copy()
    for variable, to in canonical_choices(problem).items():
        same = [choice for choice, canonical in enumerate(to) if canonical == straight[variable]]
        other[variable] = max(same, key=lambda choice: choice != straight[variable])
    assert (other != straight).any()
    assert problem.network.cost(other) == pytest.approx(problem.network.cost(straight))
    assert (canonicalize_axis_order(problem, other) == straight).all()


def test_a_pinned_order():
    """It stays, and the cost does not rise."""
    plan = _plan({"1": jax.P(("y", "x"), None)})
    problem, choices = plan.schedule.problem, _choices(plan)
    cost = problem.network.cost(choices)
    assert cost < np.inf
    assert problem.network.cost(canonicalize_axis_order(problem, choices)) <= cost
