"""Predicted peaks where all-to-alls send copies, against what is compiled."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import shardplan
from shardplan.audit import measure
from shardplan.hardware import load
from shardplan.layout import LayoutSpace, MeshAxes
from shardplan.memory.exchanging import exchanged_behind
from shardplan.memory.liveness import Lifetimes, memory_held
from shardplan.memory.usages import Usages
from shardplan.prices import Prices
from shardplan.search import extended
from shardplan.target import gpu_mesh
from shardplan.transition import Transitions

compiles_for_gpus = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")

WIDE, NARROW, WEIGHT = (64, 1024, 4096), (64, 1024, 512), (4096, 512)
IMAGES, LAST = jax.P("x"), jax.P(None, None, "x")


def _moved(x: jax.Array, to: jax.P = LAST) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, to)


def _added_up(x: jax.Array, to: jax.P = LAST) -> jax.Array:
    return jnp.sum(jnp.sin(_moved(x, to)), 0)


def _parts_added_up(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    first, second = jnp.split(jnp.tanh(x), 2, axis=2)
    return _added_up(second.reshape(64, 32, 32, 2048), jax.P(None, None, None, "x")), first.sum(2)


def _and_multiplied(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _added_up(x), x @ w


def _and_kept(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _added_up(x), x


SENT: list[tuple[Callable[..., Any], tuple[tuple[int, ...], ...], tuple[jax.P, ...]]] = [
    (_added_up, (WIDE,), (IMAGES,)),
    (lambda x: _added_up(jnp.tanh(x)), (WIDE,), (IMAGES,)),
    (lambda x: _added_up(jnp.tanh(x)), (WIDE,), (jax.P(None, "x"),)),
    (lambda x: jnp.sum(jnp.sin(_moved(jnp.tanh(x), jax.P(None, "x"))), 0), (WIDE,), (IMAGES,)),
    (lambda x, y, w: _and_multiplied(jnp.tanh(x) * y, w), (WIDE, WIDE, WEIGHT), (IMAGES, IMAGES, jax.P())),
    (lambda u, v, w: _and_multiplied(u @ v, w), (NARROW, WEIGHT[::-1], WEIGHT), (IMAGES, jax.P(), jax.P())),
    (lambda x: _and_kept(jnp.tanh(x)), (WIDE,), (IMAGES,)),
    (lambda a, w, v: _moved(a @ w, jax.P(None, "x")) @ v, (WIDE, (4096, 2048), (2048, 512)), (LAST, IMAGES, jax.P())),
    (_parts_added_up, (WIDE,), (IMAGES,)),
    (lambda x: jnp.sum(jnp.sin(_moved(jnp.tanh(x), IMAGES)), 2), (WIDE,), (LAST,)),  # whose parts lie as they are sent
]


@compiles_for_gpus
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("step", "shapes", "specs"), SENT)
def test_what_is_sent_takes_what_is_predicted(
    step: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], specs: tuple[jax.P, ...], dtype: Any
) -> None:
    mesh = gpu_mesh("h100", (8,), ("x",))
    pins = {str(number): spec for number, spec in enumerate(specs)}
    with jax.set_mesh(mesh):
        plan = shardplan.plan(step, mesh, *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), pins=pins)
    assert "all-to-all" in {collective.kind for collective in plan.collectives}
    assert measure(plan.lower(mesh)).memory.peak == pytest.approx(plan.peak_bytes, rel=0.02)


@compiles_for_gpus
@pytest.mark.parametrize("spec", [IMAGES, LAST])
def test_what_a_constraint_gathers_for_a_product_is_in_memory_once(spec: jax.P) -> None:
    mesh = gpu_mesh("h100", (8,), ("x",))
    with jax.set_mesh(mesh):
        x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (WIDE, WEIGHT))
        plan = shardplan.plan(lambda x, w: _moved(jnp.tanh(x), jax.P()) @ w, mesh, x, w, pins={"0": spec, "1": jax.P()})
    assert [collective.kind for collective in plan.collectives] == ["all-gather"]
    assert measure(plan.lower(mesh)).memory.peak == pytest.approx(plan.peak_bytes, rel=0.02)


def test_what_is_split_behind_others_is_told_of_all_transitions_at_once() -> None:
    axes = MeshAxes(("x", "y"), (2, 4))
    transitions, shape = Transitions(LayoutSpace(axes), Prices("bytes", load("h100"), axes)), (4, 16, 16)
    domain = transitions.space.domain(shape)

    def behind(before: Any, after: Any) -> bool:
        return exchanged_behind(
            before, after, [size // axes.degree(dim) for size, dim in zip(shape, before, strict=True)]
        )

    shares, found = transitions.exchanged(domain, behind), 0
    for source in domain.layouts:
        for target in domain.layouts:
            before, largest = source, 0.0
            for step in transitions.path(domain, source, target):
                if step.kind == "all-to-all" and behind(before, step.layout):
                    largest = max(largest, 1 / domain.parts[before])
                before = step.layout
            assert shares[domain.position[source], domain.position[target]] == largest
            found += largest > 0
    assert found


@pytest.mark.parametrize(("step", "shapes", "specs"), [SENT[0], SENT[5]])
def test_a_search_within_a_limit_counts_no_more_of_it(
    step: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], specs: tuple[jax.P, ...]
) -> None:
    """What is an argument it counts as the schedule does; of others it does not know who reads them as they are."""
    mesh = AbstractMesh((8,), ("x",))
    pins = {str(number): spec for number, spec in enumerate(specs)}
    with jax.sharding.use_abstract_mesh(mesh):
        plan = shardplan.plan(step, mesh, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes), pins=pins)
    schedule = plan.schedule
    lifetimes = Lifetimes(schedule.problem, range(len(plan.program.operations)))
    exact = np.zeros(lifetimes.end + 1)
    for held in memory_held(lifetimes, schedule, frozenset()):
        made = lifetimes.held[held.value].start if held.value in plan.program.outputs else 0
        exact[max(made, held.lifetime.start) : held.lifetime.end + 1] += held.size
    usages = Usages(lifetimes, schedule.problem, frozenset())
    usages.follow(schedule)
    network = usages.network(1e6, range(len(exact)))
    choices = extended(network, np.array(plan.recipe.choices))
    counted = [
        sum(u.amounts[choices[u.variable]] for u in network.usages if u.start <= time < u.end)
        for time in range(len(exact))
    ]
    assert all(one <= other * 1.001 for one, other in zip(counted, exact, strict=True))
    if step is _added_up:
        assert counted == pytest.approx(exact, rel=1e-3)
