"""Predicted peaks and bytes of training steps of two layers, as people write them, against what is compiled."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.audit import audit
from shardplan.memory.liveness import Lifetimes
from shardplan.memory.outputs import sent_at_the_end
from shardplan.memory.transposed import lying_as_met
from shardplan.target import gpu_mesh
from shardplan.tracing import trace_program
from shardplan.widened import narrowed_to

compiles_for_gpus = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")

_BATCH, _LENGTH, _WIDTH, _HEADS = 64, 256, 512, 8
_ROWS, _TOKENS = (_BATCH * _LENGTH, _WIDTH), (_BATCH, _LENGTH, _WIDTH)
_SQUARE, _WIDE, _NARROW, _VECTOR = (_WIDTH, _WIDTH), (_WIDTH, 4 * _WIDTH), (4 * _WIDTH, _WIDTH), (_WIDTH,)


def _normalized(x: jax.Array, gain: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6) * gain


def _rows(w: Any, x: jax.Array) -> jax.Array:
    return jax.nn.relu(_normalized(x @ w[0], w[2])) @ w[1]


def _gated(w: Any, x: jax.Array) -> jax.Array:
    return x + (jax.nn.silu(x @ w[0]) * (x @ w[1])) @ w[2]


def _checkpointed(w: Any, x: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda x: x + jax.nn.gelu(_normalized(x, w[2]) @ w[0]) @ w[1])(x)


def _attended(w: Any, x: jax.Array) -> jax.Array:
    queries, keys, values = ((x @ m).reshape(_BATCH, _LENGTH, _HEADS, -1) for m in w[:3])
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / 8)
    return x + jnp.einsum("bhqk,bkhd->bqhd", weights, values).reshape(x.shape) @ w[3]


def _perceptron(w: Any, x: jax.Array) -> jax.Array:
    return x + jax.nn.relu(x @ w[0]) @ w[1]


def _both(w: Any, x: jax.Array) -> jax.Array:
    return _attended(w, x) + jax.nn.gelu(x @ w[4]) @ w[5]


def _recurrent(w: Any, x: jax.Array) -> jax.Array:
    def combine(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return left[0] * right[0], left[1] * right[0] + right[1]

    gate, update = jax.nn.sigmoid(x @ w[0]), x @ w[1]
    scanned = jax.lax.associative_scan(combine, (gate, update * jnp.sqrt(1 - gate * gate + 1e-6)), axis=1)
    return x + scanned[1] @ w[2]


def _step(layer: Callable[[Any, jax.Array], jax.Array]) -> Callable[..., Any]:
    def loss(layers: Any, x: jax.Array, wanted: jax.Array) -> jax.Array:
        for weights in layers:
            x = layer(weights, x)
        return jnp.mean((x - wanted) ** 2)

    def step(state: Any, x: jax.Array, wanted: jax.Array) -> Any:
        layers, momenta = state
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, jax.grad(loss)(layers, x, wanted))
        return jax.tree.map(lambda w, m: w - 1e-3 * m, layers, momenta), momenta

    return step


def _shape(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.slow
@compiles_for_gpus
@pytest.mark.parametrize(
    ("layer", "shapes", "x"),
    [
        (_rows, (_SQUARE, _SQUARE, _VECTOR), _ROWS),
        (_gated, (_WIDE, _WIDE, _NARROW), _TOKENS),
        (_checkpointed, (_WIDE, _NARROW, _VECTOR), _TOKENS),
        (_attended, (_SQUARE,) * 4, _TOKENS),
        (_perceptron, (_WIDE, _NARROW), _TOKENS),
        (_both, (*(_SQUARE,) * 4, _WIDE, _NARROW), _TOKENS),
        (_recurrent, ((1024, 1024),) * 3, (64, 512, 1024)),
    ],
)
def test_steps_of_two_layers(layer: Any, shapes: tuple[tuple[int, ...], ...], x: tuple[int, ...]) -> None:
    """Kernels of several results, reductions of rows within those that go through them, views of products' operands,
    sums that products write into copies, and what is computed as matrices."""
    mesh, weights = gpu_mesh("h100", (2, 4), ("x", "y")), [[_shape(shape) for shape in shapes]] * 2
    arguments = (weights, weights), _shape(x), _shape(x)
    plan = shardplan.plan(_step(layer), mesh, *arguments, donate_argnums=0, memory_limit=float("inf"))
    report = audit(plan, mesh=mesh)
    assert report.compiled.communication_bytes == pytest.approx(plan.communication_bytes, rel=0.001)
    assert report.compiled.memory.peak == pytest.approx(plan.peak_bytes, rel=0.015)


@pytest.mark.slow
@compiles_for_gpus
def test_weights_that_leave_whole_are_gathered_at_the_end() -> None:
    """Where they are not said to be, the gradients of the last layer fill other waits: 1.07 of what was predicted."""

    def loss(layers: Any, x: jax.Array, wanted: jax.Array) -> jax.Array:
        for w in layers:
            x = x + jnp.tanh(x @ w[0]) @ w[1]
        return jnp.mean((x - wanted) ** 2)

    def step(state: Any, x: jax.Array, wanted: jax.Array) -> Any:
        layers, momenta = state
        value, gradients = jax.value_and_grad(loss)(layers, x, wanted)
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, gradients)
        return (jax.tree.map(lambda w, m: w - 1e-3 * m, layers, momenta), momenta), value

    mesh = gpu_mesh("h100", (8,), ("x",))
    pins = {"0/0/*/*": jax.P(), "0/1/*/*": jax.P("x"), "1": jax.P("x"), "2": jax.P("x")}
    layers, x = [[_shape((1024, 4096)), _shape((4096, 1024))]] * 3, _shape((32768, 1024))
    plan = shardplan.plan(step, mesh, (layers, layers), x, x, pins=pins, donate_argnums=0, memory_limit=float("inf"))
    assert [len(group) for group in sent_at_the_end(plan.schedule)] == [1] * 6
    assert audit(plan, mesh=mesh).compiled.memory.peak == pytest.approx(plan.peak_bytes, rel=0.01)


@pytest.mark.slow
@compiles_for_gpus
@pytest.mark.parametrize(
    "layer",
    [
        lambda x, w: jnp.tanh(x @ w),  # the backward pass needs what is stored for the next layer
        lambda x, w: x + jnp.tanh(x @ w),  # what is added up is stored: a part of it is taken as it is
        lambda x, w: jax.nn.silu(x @ w),  # the backward pass needs the product, of which a part is computed
    ],
)
def test_weights_gradients_of_parts_of_what_other_products_read_whole(layer: Any) -> None:
    def loss(w: Any, x: jax.Array, picked: jax.Array) -> jax.Array:
        for weights in w["layers"]:
            x = layer(x, weights)
        batch, length = picked.shape
        return -jnp.mean(jax.nn.log_softmax(x @ w["out"])[jnp.arange(batch)[:, None], jnp.arange(length)[None], picked])

    def step(w: Any, x: jax.Array, picked: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - g, w, jax.grad(loss)(w, x, picked))

    mesh = gpu_mesh("h100", (2, 4), ("x", "y"))
    pins = {"0/out": jax.P(None, "y"), "0/layers/*": jax.P(), "1": jax.P(None, "x"), "2": jax.P()}
    weights = {"layers": [_shape((256, 256))] * 6, "out": _shape((256, 8192))}
    shapes = weights, _shape((16, 1024, 256)), _shape((16, 1024), jnp.int32)
    plan = shardplan.plan(step, mesh, *shapes, pins=pins, donate_argnums=0, memory_limit=float("inf"))
    assert audit(plan, mesh=mesh).compiled.memory.peak == pytest.approx(plan.peak_bytes, rel=0.01)


@compiles_for_gpus
def test_a_batch_of_one_on_each_device_needs_no_copies_of_operands() -> None:
    def experts(x: jax.Array, w: jax.Array) -> Any:
        h = jnp.sin(jnp.einsum("egcd,edh->egch", x, w))
        return jnp.einsum("egcd,egch->edh", x, h), jnp.einsum("egch,edh->egcd", h, w)

    mesh, pins = gpu_mesh("h100", (8,), ("x",)), {"0": jax.P("x"), "1": jax.P("x")}
    shapes = _shape((8, 64, 128, 512), jnp.bfloat16), _shape((8, 512, 1024), jnp.bfloat16)
    plan = shardplan.plan(experts, mesh, *shapes, pins=pins, memory_limit=float("inf"))
    assert audit(plan, mesh=mesh).compiled.memory.peak == pytest.approx(plan.peak_bytes, rel=0.001)


def _first_of_split(x: jax.Array) -> jax.Array:
    return jnp.split(jnp.sin(x), [3072])[0]


def _stacked(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, u: (h + u, jnp.sin(h * u)), x[0], x)[1]


@compiles_for_gpus
@pytest.mark.parametrize(("compute", "made"), [(jnp.sin, "sin"), (_first_of_split, "split"), (_stacked, "scan")])
def test_what_is_narrowed_behind_a_view_is_sent_narrow(compute: Any, made: str) -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        x = compute(x)
        return x.reshape(x.shape[0], -1).astype(jnp.bfloat16) @ w

    shapes = _shape((4096, 16, 64)), _shape((1024, 512), jnp.bfloat16)
    program = trace_program(step, shapes, {})
    narrowed = [program.makers[value].primitive.name for value in narrowed_to(program)]
    assert narrowed == [made]
    mesh = gpu_mesh("h100", (8,), ("x",))
    pins = {"0": jax.P(None, None, "x"), "1": jax.P()}
    plan = shardplan.plan(step, mesh, *shapes, pins=pins, memory_limit=float("inf"))
    assert audit(plan, mesh=mesh).compiled.communication_bytes == plan.communication_bytes > 0


@compiles_for_gpus
@pytest.mark.parametrize("compute", [lambda c: c, jnp.exp])
def test_transposed_updates_of_a_scatter_are_stored(compute: Any) -> None:
    def step(places: jax.Array, c: jax.Array) -> jax.Array:
        return jnp.zeros((16384, 512)).at[places].add(compute(c).transpose(0, 2, 1))

    mesh = gpu_mesh("h100", (1,), ("x",))
    shapes = _shape((4096, 16), jnp.int32), _shape((4096, 512, 16))
    plan = shardplan.plan(step, mesh, *shapes, memory_limit=float("inf"))
    assert audit(plan, mesh=mesh).compiled.memory.peak == pytest.approx(plan.peak_bytes, rel=0.04)


def test_a_loop_holds_what_it_reads_no_longer_than_it_runs() -> None:
    """The loop of the backward pass reads one of two stacks alone that the first one makes, which are the same."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(h: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(h @ w + u)
            return h, h

        return jnp.sum(jax.lax.scan(body, jnp.zeros((64, 64)), jnp.sin(x))[1] ** 2)

    plan = shardplan.plan(jax.grad(loss), 1, _shape((64, 64)), _shape((32, 64, 64)))
    program = plan.program
    lifetimes = Lifetimes(plan.schedule.problem, range(len(program.operations)))
    forward, _ = (operation for operation in program.operations if operation.bodies)
    [stack] = (link.source for link in plan.schedule.problem.links[forward.index].enter if link.stacked)
    assert isinstance(stack, int)
    assert lifetimes.held[stack].end <= lifetimes.place[forward.index]


def test_numbers_and_vectors_say_nothing_of_an_order() -> None:
    """Gradients are scaled by the norm of all; one is of a transposed argument."""

    def step(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        sums = jnp.sum(jnp.exp(y @ w), 0)
        return sums * (jnp.sum(x.T**2) + jnp.sum(sums**2))

    program = trace_program(step, (_shape((8, 16)), _shape((4, 64)), _shape((64, 64))), {})
    pointwise = [
        o.index for o in program.operations if o.primitive.name in ("exp", "mul", "add", "integer_pow", "square")
    ]
    shapes = {program.values[value].shape for value in lying_as_met(program, pointwise, ())[0]}
    assert shapes == {(16, 8)}
