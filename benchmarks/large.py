"""Models that fill their devices: `python -m benchmarks.large`.

A decoder in plain JAX (grouped-query attention, rotary positions, gated MLP; layers scanned and rematerialised;
bfloat16 compute over float32 parameters; AdamW) at 20 billion parameters on 8 H100 and 175 billion on 64. Each is
planned within the memory of a device (80 GB less the planner's reserve), compiled for the devices, and read back.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import shardplan
from benchmarks.documents import Document
from benchmarks.processes import in_own_process, timed
from shardplan.audits.audit import measure
from shardplan.compiled.target import gpu_mesh

HEAD = 64
VOCABULARY = 32768
SEQUENCE = 2048
OPTIMIZER = optax.adamw(1e-3)


@dataclass(frozen=True, slots=True)
class Config:
    """Layers, width, batch, the planned mesh, and the number of plans among which the compiler decides."""

    layers: int
    width: int
    batch: int
    mesh: dict[str, int]
    ways: int = 1

    @property
    def parameters(self) -> dict[str, Any]:
        d, hidden, keys = self.width, int(self.width * 3.5) // 256 * 256, self.width // HEAD // 4 * HEAD
        square = {"query": (d, d), "key": (d, keys), "value": (d, keys), "out": (d, d)}
        mlp = {"gate": (d, hidden), "up": (d, hidden), "down": (hidden, d)}
        layer = {**square, **mlp, "attention_norm": (d,), "mlp_norm": (d,)}
        shape = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        layers = {name: shape((self.layers, *sizes)) for name, sizes in layer.items()}
        return {
            "embedding": shape((VOCABULARY, d)),
            "head": shape((d, VOCABULARY)),
            "norm": shape((d,)),
            "layers": layers,
        }

    @property
    def arguments(self) -> tuple[Any, Any]:
        """The state and the batch of a training step, as shapes."""
        tokens = jax.ShapeDtypeStruct((self.batch, SEQUENCE), jnp.int32)
        state = {"params": self.parameters, "moments": jax.eval_shape(OPTIMIZER.init, self.parameters)}
        return state, {"tokens": tokens, "labels": tokens}


def normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return (x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale).astype(jnp.bfloat16)


def rotate(x: jax.Array) -> jax.Array:
    angles = jnp.arange(x.shape[1])[:, None] * 10000 ** (-jnp.arange(HEAD // 2) / (HEAD // 2))
    cosine, sine = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    left, right = jnp.split(x, 2, -1)
    return jnp.concatenate([left * cosine - right * sine, right * cosine + left * sine], -1).astype(x.dtype)


def layer(x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    batch, length, width = x.shape
    weight = {name: value.astype(jnp.bfloat16) for name, value in params.items()}
    h = normalize(x, params["attention_norm"])
    query = rotate((h @ weight["query"]).reshape(batch, length, -1, HEAD))
    key = rotate((h @ weight["key"]).reshape(batch, length, -1, HEAD))
    value = (h @ weight["value"]).reshape(batch, length, -1, HEAD)
    query = query.reshape(batch, length, key.shape[2], -1, HEAD)
    scores = jnp.einsum("btghd,bsgd->bghts", query, key).astype(jnp.float32) / 8
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
    mixed = jnp.einsum("bghts,bsgd->btghd", jax.nn.softmax(scores, -1).astype(jnp.bfloat16), value)
    x = x + mixed.reshape(batch, length, width) @ weight["out"]
    h = normalize(x, params["mlp_norm"])
    return x + (jax.nn.silu(h @ weight["gate"]) * (h @ weight["up"])) @ weight["down"]


def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    x = params["embedding"][batch["tokens"]].astype(jnp.bfloat16)
    x, _ = jax.lax.scan(lambda x, one: (jax.checkpoint(layer)(x, one), None), x, params["layers"])
    logits = (normalize(x, params["norm"]) @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def train_step(state: Any, batch: dict[str, jax.Array]) -> Any:
    value, gradients = jax.value_and_grad(loss)(state["params"], batch)
    updates, moments = OPTIMIZER.update(gradients, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, value


def row(config: Config) -> list[str]:
    """Plans, compiles and reads back one configuration."""
    state, batch = config.arguments
    mesh = gpu_mesh("h100", tuple(config.mesh.values()), tuple(config.mesh))
    options = {"donate_argnums": 0, "refine": config.ways}
    plan, seconds, _ = timed(lambda: shardplan.plan(train_step, mesh, state, batch, **options))
    report = measure(plan.lower())
    count = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    return [
        f"{count / 1e9:.1f}",
        "x".join(map(str, config.mesh.values())),
        str(config.batch),
        str(config.ways),
        f"{plan.communication_bytes / 1e9:.2f}",
        f"{report.communication_bytes / 1e9:.2f}",
        f"{plan.peak_bytes / 1e9:.1f}",
        f"{report.memory.peak / 1e9:.1f}",
        f"{100 * plan.gap:.2f} %",
        f"{seconds:.1f}",
    ]


HEADER = (
    "billion parameters",
    "mesh",
    f"sequences of {SEQUENCE}",
    "plans compiled",
    "predicted GB sent",
    "compiled GB sent",
    "predicted peak GB",
    "compiled peak GB",
    "gap",
    "s to plan",
)
CONFIGS = (Config(40, 6144, 8, {"data": 8}), Config(89, 12288, 64, {"data": 8, "model": 8}, ways=3))


def main() -> None:
    introduction = (
        "Models planned within the memory of their devices (84.9 GB), compiled for H100 without one, and read back. "
        "Where several plans are compiled (`refine`), one that needs more than was predicted lowers the limit of the "
        "next; seconds to plan include these compilations."
    )
    document = Document("large", "Large models", introduction, "large")
    table = document.table(HEADER)
    for config in CONFIGS:
        table.add(in_own_process(row, config))
    document.print()


if __name__ == "__main__":
    main()
