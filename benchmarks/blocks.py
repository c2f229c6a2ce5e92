"""Steps in blocks against the same steps written by hand: `python -m benchmarks.blocks`.

Gradients are accumulated over blocks of a batch, the loss of a large vocabulary is computed in chunks, and attention in
blocks of queries. Every row is compiled for H100, which need not be there. `--only accumulation` measures one table.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import shardplan
from benchmarks.documents import Document
from benchmarks.processes import in_own_process
from benchmarks.recompute import products, step_of
from shardplan.audits.audit import measure
from shardplan.compiled.target import gpu_mesh, only_described
from shardplan.models import Training, gpt
from shardplan.program.tracing import trace_program

INTRODUCTION = """Steps in bfloat16 with state in float32. Operations are those of products, as a share of those of the
step without blocks. MB are sent per device and step. Everything is compiled for H100 without one. By hand on 8 devices,
each has a part of the batch and all weights ("data parallel"), or the weights are split as the plan in blocks splits
them ("weights split")."""
HEADER = ("step", "devices", "way", "blocks", "compiled GB", "predicted GB", "operations", "MB sent", "predicted MB")
DEVICES = (1, 8)
ACCUMULATED = (2, 4, 8)
WORDS, WIDTH, TOKENS = 128_256, 1024, 2048
CHUNKS = (8, 32)
HEADS = 16
ATTENTION = {8192: "4GB", 32_768: "16GB"}
"""Tokens, and the memory limit of the plan in blocks."""

TABLES = {
    "accumulation": (
        "Gradient accumulation",
        "GPT of 4 layers, 8 sequences of 1024 tokens per device. By hand, a scan over strided blocks `[B/n, n]` adds "
        "up gradients in float32, under `jax.jit` or planned.",
    ),
    "head": (
        "The loss of a large vocabulary",
        f"A head of {WORDS:,} words, {WIDTH} wide, {8 * TOKENS:,} tokens per device. By hand, a scan over strided "
        "blocks of sequences, with `jax.checkpoint` around each.",
    ),
    "attention": (
        "Attention in blocks of queries",
        f"Causal attention of one sequence, {WIDTH} wide with {HEADS} heads, and its gradients, within "
        + " and ".join(f"{limit.removesuffix('GB')} GB ({tokens:,} tokens)" for tokens, limit in ATTENTION.items())
        + ". No layer follows, so that the forward and the backward part are one loop. By hand, a scan over blocks of "
        "queries has `jax.checkpoint` around each; the last way has it around the whole attention.",
    ),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A step on so many devices, ``whole`` without blocks. Tensors of the arguments from ``batch`` on are a batch."""

    name: str
    devices: int
    whole: Callable[..., Any]
    arguments: tuple[Any, ...]
    batch: int = 1

    def planned(self, way: str, count: str = "", step: Callable[..., Any] | None = None, **options: Any) -> list[str]:
        """The row of a plan."""
        plan = self.plan(step, **options)
        with only_described():
            report = measure(plan.lower(self._mesh), plan.mesh_axes)
        return self._row(way, count or _counts(plan), report, products(plan.program), plan)

    def by_hand(self, way: str, count: int, step: Callable[..., Any], split: shardplan.Plan | None = None) -> list[str]:
        """The row of a step under `jax.jit`, data parallel or with the shardings of a plan."""
        mesh = self._mesh
        parts = [PartitionSpec(*["data"][: place >= self.batch]) for place in range(len(self.arguments))]
        shardings: Any = tuple(NamedSharding(mesh, part) for part in parts)
        options = {"in_shardings": shardings}
        if split is not None:
            options = {"in_shardings": split.in_shardings, "out_shardings": split.out_shardings}
        with only_described():
            lowered = jax.jit(step, donate_argnums=0, **options).lower(*self.arguments)
            report = measure(lowered, {"data": self.devices})
        return self._row(way, str(count), report, products(trace_program(step, self.arguments)), None)

    def plan(self, step: Callable[..., Any] | None = None, **options: Any) -> shardplan.Plan:
        options = {"memory_limit": 1e15} | options
        return shardplan.plan(step or self.whole, self._mesh, *self.arguments, donate_argnums=0, **options)

    @property
    def _mesh(self) -> jax.sharding.Mesh:
        return gpu_mesh("h100", (self.devices,), ("data",))

    def _row(self, way: str, count: str, report: Any, operations: float, plan: shardplan.Plan | None) -> list[str]:
        whole = products(trace_program(self.whole, self.arguments))
        return [
            *(self.name, str(self.devices), way, count),
            f"{report.memory.peak / 1e9:.2f}",
            "" if plan is None else f"{plan.peak_bytes / 1e9:.2f}",
            f"{operations / whole:.3f}",
            f"{report.communication_bytes / 1e6:,.1f}" if self.devices > 1 else "",
            f"{plan.communication_bytes / 1e6:,.1f}" if plan is not None and self.devices > 1 else "",
        ]


def _counts(plan: shardplan.Plan) -> str:
    return ", ".join(" x ".join(map(str, row["count"])) for row in plan.blocks)


def strided(batch: Any, count: int, number: Any) -> Any:
    """A block of a batch: every ``count``-th position, so that each device has a part of it."""

    def one(leaf: jax.Array) -> jax.Array:
        blocks = leaf.reshape(leaf.shape[0] // count, count, *leaf.shape[1:])
        return jax.lax.dynamic_index_in_dim(blocks, number, 1, keepdims=False)

    return jax.tree.map(one, batch)


def accumulating(training: Training, count: int) -> Callable[..., Any]:
    """The step of a model, with gradients accumulated over blocks of the batch by hand."""
    loss_function, optimizer = training.loss_function, training.optimizer
    assert loss_function is not None and optimizer is not None

    def step(state: Any, batch: Any) -> Any:
        params = state["params"]

        def turn(total: Any, number: Any) -> Any:
            block = strided(batch, count, number)
            (loss, _), gradients = jax.value_and_grad(loss_function, has_aux=True)(params, {}, block)
            return jax.tree.map(lambda sum_, part: sum_ + part.astype(sum_.dtype), total, (loss, gradients)), None

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (jnp.float32(0), params))
        (loss, gradients), _ = jax.lax.scan(turn, zeros, jnp.arange(count))
        gradients = jax.tree.map(lambda total, leaf: (total / count).astype(leaf.dtype), gradients, params)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], params)
        found = {"params": optax.apply_updates(params, updates), "opt_state": opt_state, "step": state["step"] + 1}
        return found, loss / count

    return step


def accumulation(devices: int) -> Iterator[list[str]]:
    """GPT of 4 layers: the step as it is, in blocks, and with accumulation by hand."""
    given = step_of("gpt4", devices)
    sizes = gpt.Config(4, vocabulary=8192, batch=8 * devices, compute_dtype=jnp.bfloat16)
    case = Case("GPT, 4 layers", devices, given.function, given.arguments)
    yield case.planned("plan")
    for count in ACCUMULATED:
        yield case.planned("plan in blocks", blocks={"batch": count})
        step = accumulating(gpt.training(sizes), count)
        if devices == 1:
            yield case.by_hand("by hand", count, step)
        else:
            yield case.by_hand("by hand, data parallel", count, step)
            yield case.by_hand("by hand, weights split", count, step, case.plan(blocks={"batch": count}))
            yield case.planned("by hand, planned", str(count), step)


def head_step(weights: jax.Array, hidden: jax.Array, labels: jax.Array, count: int = 1) -> Any:
    """One step of a head, and the gradient of what it reads. By hand in chunks where ``count`` is more than one."""

    def losses(weights: jax.Array, block: Any) -> jax.Array:
        hidden, labels = block
        logits = (hidden.astype(jnp.bfloat16) @ weights.astype(jnp.bfloat16)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()

    def loss(weights: jax.Array, hidden: jax.Array) -> jax.Array:
        if count == 1:
            return losses(weights, (hidden, labels)) / labels.size
        one = jax.checkpoint(losses)
        block = partial(strided, (hidden, labels), count)
        total, _ = jax.lax.scan(
            lambda sum_, number: (sum_ + one(weights, block(number)), None), jnp.float32(0), jnp.arange(count)
        )
        return total / labels.size

    value, (of_weights, of_hidden) = jax.value_and_grad(loss, (0, 1))(weights, hidden)
    return weights - 0.1 * of_weights, value, of_hidden


def head(devices: int) -> Iterator[list[str]]:
    """A head of many words: as it is, in blocks of the batch, and in chunks by hand."""
    batch = CHUNKS[-1] if devices == 1 else CHUNKS[0] * devices
    tokens = 8 * devices * TOKENS // batch
    shapes = ((WIDTH, WORDS), jnp.float32), ((batch, tokens, WIDTH), jnp.float32), ((batch, tokens), jnp.int32)
    case = Case("head", devices, head_step, tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    yield case.planned("plan")
    for count in CHUNKS if devices == 1 else CHUNKS[:1]:
        yield case.planned("plan in blocks", blocks={"1": count})
        step = partial(head_step, count=count)
        if devices == 1:
            yield case.by_hand("by hand", count, step)
        else:
            yield case.by_hand("by hand, data parallel", count, step)
            yield case.by_hand("by hand, weights split", count, step, case.plan(blocks={"1": count}))


def attention_step(weights: Any, x: jax.Array, count: int = 1, again: bool = False) -> Any:
    """The loss of an attention and its gradients. ``again``: with `jax.checkpoint` around it; or by hand around each of
    ``count`` blocks of queries."""

    def attention(weights: Any, x: jax.Array) -> jax.Array:
        tokens = len(x)
        heads = [(x @ w.astype(x.dtype)).reshape(tokens, HEADS, -1).swapaxes(0, 1) for w in weights[:3]]

        def of_queries(block: Any) -> jax.Array:
            queries, places = block
            scores = (queries @ heads[1].swapaxes(1, 2)).astype(jnp.float32) / (WIDTH / HEADS) ** 0.5
            scores = jnp.where(places[:, None] >= jnp.arange(tokens)[None], scores, -1e30)
            return jax.nn.softmax(scores, axis=-1).astype(x.dtype) @ heads[2]

        places = jnp.arange(tokens)
        if count == 1:
            mixed = of_queries((heads[0], places))
        else:
            queries = heads[0].reshape(HEADS, count, tokens // count, -1).swapaxes(0, 1)
            found = jax.lax.map(jax.checkpoint(of_queries), (queries, places.reshape(count, -1)))
            mixed = found.swapaxes(0, 1).reshape(heads[0].shape)
        return mixed.swapaxes(0, 1).reshape(tokens, -1) @ weights[3].astype(x.dtype)

    def loss(weights: Any) -> jax.Array:
        run = jax.checkpoint(attention) if again else attention
        return jnp.mean(jnp.square(run(weights, x).astype(jnp.float32)))

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def attention(devices: int) -> Iterator[list[str]]:
    """Attention over long sequences, on one device."""
    for tokens, limit in ATTENTION.items() if devices == 1 else ():
        weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 4
        x = jax.ShapeDtypeStruct((tokens, WIDTH), jnp.bfloat16)
        case = Case(f"attention, {tokens:,} tokens", devices, attention_step, (weights, x))
        yield case.planned("plan")
        found = case.planned("plan in blocks", memory_limit=limit, fit=("blocks",))
        yield found
        yield case.by_hand("by hand", int(found[3]), partial(attention_step, count=int(found[3])))
        yield case.by_hand("`jax.checkpoint`", 1, partial(attention_step, again=True))


CASES = {"accumulation": accumulation, "head": head, "attention": attention}


def rows(name: str, devices: int) -> list[list[str]]:
    return [*CASES[name](devices)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=TABLES, help="the document stays")
    options = parser.parse_args()
    document = Document("blocks", "Steps in blocks", INTRODUCTION, "blocks", writes=not options.only)
    for name in options.only or TABLES:
        title, note = TABLES[name]
        table = document.table(HEADER, title)
        table.say([note])
        for devices in DEVICES:
            for found in in_own_process(rows, name, devices):
                table.add(found)
    document.print()


if __name__ == "__main__":
    main()
