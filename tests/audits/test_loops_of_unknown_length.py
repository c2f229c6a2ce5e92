"""Audits count what loops of unknown length send, in bodies and in conditions: as often as stated, or once and said."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardplan

pytestmark = [
    pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`"),
    pytest.mark.filterwarnings("ignore:the loop at"),
]

MESH = AbstractMesh((8,), ("x",))
X = jax.ShapeDtypeStruct((4096, 64), jnp.float32)

Scope = Callable[[int], Any]


def centred(x: Any) -> Any:
    return x - x.mean(0)


def body(x: Any, trips: Scope) -> Any:
    def step(carry: Any) -> Any:
        return centred(carry[0]), carry[1] + jnp.abs(carry[0]).max()

    with trips(50):
        return lax.while_loop(lambda carry: carry[1] < 9, step, (x, jnp.float32(0)))


def condition(x: Any, trips: Scope) -> Any:
    with trips(50):
        return lax.while_loop(lambda x: jnp.linalg.norm(x.sum(0)) > 0.1, lambda x: x * 0.9, x)


def vmapped(x: Any, trips: Scope) -> Any:
    with trips(50):
        return jax.vmap(lambda y: lax.while_loop(lambda y: y.max() > 1, lambda y: y / 2, y))(x)


def nested(x: Any, trips: Scope) -> Any:
    def inner(x: Any) -> Any:
        with trips(7):
            return lax.while_loop(lambda x: x.sum() > 1, lambda x: centred(x) * 0.5, x)

    with trips(5):
        return lax.while_loop(lambda x: x.max() > 1, inner, x)


def of_traced_bounds(x: Any, trips: Scope) -> Any:
    with trips(6):
        return lax.fori_loop(0, x[0, 0].astype(jnp.int32), lambda i, x: centred(x), x)


def in_scan(x: Any, trips: Scope) -> Any:
    def one(x: Any, _: Any) -> Any:
        with trips(4):
            return lax.while_loop(lambda x: x.sum() > 1, centred, x), None

    return lax.scan(one, x, None, length=3)[0]


def branch_in_condition(x: Any, trips: Scope) -> Any:
    def test(c: Any) -> Any:
        return lax.cond(c[1] > 3, lambda x: x.sum() > 1, lambda x: jnp.abs(x).max(0).sum() > 2, c[0])

    with trips(9):
        return lax.while_loop(test, lambda c: (c[0] * 0.9, c[1] + 1), (x, 0))


FORMS = (body, condition, vmapped, nested, of_traced_bounds, in_scan, branch_in_condition)


def audited(form: Any, trips: Scope) -> Any:
    plan = shardplan.plan(lambda x: form(x, trips), MESH, X, pins={"0": P("x")})
    assert plan.communication_bytes > 0
    return shardplan.audit(plan)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_loop_whose_length_is_stated(form: Any) -> None:
    """What is predicted is what is compiled, and nothing is assumed."""
    audit = audited(form, shardplan.trip_count)
    assert audit.ok(1e-6) and not audit.compiled.counted_once


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_loop_whose_length_nobody_knows(form: Any) -> None:
    """It is counted once by both, and the audit says so."""
    audit = audited(form, lambda _: nullcontext())
    assert audit.ok(1e-6) and "loops of unknown length are counted once" in str(audit)
