"""A graph network as in GraphCast (Lam et al., 2023), of interaction networks between sets of nodes, with AdamW.

An encoder carries values of a fine grid along edges to the nodes of a coarser mesh. A processor passes messages between
these, and a decoder carries the result back along edges. The loss is the mean squared error. Each interaction network
(Battaglia et al., 2016) has one MLP for edges, which reads an edge and the nodes at its two ends, and one for nodes,
which reads a node and the sum of its incoming edges.

The published count, 36.7 million, is a little more than that of the layers described there:

>>> from shardplan.models import gnn
>>> round(gnn.training(gnn.CONFIGS["graphcast"]).parameters / 1e6, 1)
35.6
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from shardplan.models.logical import logical
from shardplan.models.training import Batch, State, Training, make_training


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes: nodes of the grid and of the mesh, edges into, inside and out of the mesh, features of a node and an edge.

    `inputs` and `outputs` are features of a node of the grid, `hidden` those of all inner layers. `layers` are the
    rounds of messages in the mesh. `remat` recomputes the activations inside a round in the backward pass.
    """

    grid: int = 721 * 1440
    mesh: int = 40_962
    edges_in: int = 1_618_746
    edges: int = 327_660
    edges_out: int = 3_114_720
    inputs: int = 471
    outputs: int = 227
    node_features: int = 3
    edge_features: int = 4
    hidden: int = 512
    layers: int = 16
    remat: bool = False
    compute_dtype: DTypeLike = jnp.float32
    learning_rate: float = 1e-3
    weight_decay: float = 0.1


CONFIGS = {
    "graphcast": Config(),
    # 1 degree, a mesh refined 5 times instead of 6, 13 levels instead of 37; edges in proportion.
    "graphcast-small": Config(181 * 360, 10_242, 102_000, 81_900, 195_480, inputs=183, outputs=83),
}
SMALL = Config(64, 32, 128, 64, 192, inputs=8, outputs=4, hidden=16, layers=2)
# Node and edge counts are rounded up to multiples of 8 devices, as graphs are padded in practice.
BENCHMARK = Config(mesh=40_968, edges_in=1_618_752, edges=327_664, layers=2, compute_dtype=jnp.bfloat16)


class MLP(nn.Module):
    """One hidden layer with SiLU, and normalised unless `plain`: `[n, any]` to `[n, features]`."""

    config: Config
    features: int
    plain: bool = False

    @nn.compact
    def __call__(self, *parts: jax.Array) -> jax.Array:
        dense = partial(nn.Dense, dtype=self.config.compute_dtype)
        x = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        x = dense(self.features, name="out")(nn.silu(dense(self.config.hidden, name="hidden")(x)))
        return x if self.plain else nn.LayerNorm(dtype=self.config.compute_dtype, name="norm")(x)


class Interaction(nn.Module):
    """Messages from `senders` to `receivers` along edges: the changes of the receivers and the edges."""

    config: Config

    @nn.compact
    def __call__(
        self, senders: jax.Array, receivers: jax.Array, edges: jax.Array, ends: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Nodes `[nodes, hidden]`, edges `[edges, hidden]`, and the numbers of their senders and receivers."""
        mlp = partial(MLP, self.config, self.config.hidden)
        sent = logical(senders[ends[0]], "edges", "features")
        received = logical(receivers[ends[1]], "edges", "features")
        messages = logical(mlp(name="edge_mlp")(sent, received, edges), "edges", "features")
        summed = jax.ops.segment_sum(messages.astype(jnp.float32), ends[1], receivers.shape[0])
        summed = logical(summed.astype(messages.dtype), "nodes", "features")
        return logical(mlp(name="node_mlp")(receivers, summed), "nodes", "features"), messages


class GraphNet(nn.Module):
    """A graph (see `training`) to float32 `[grid, outputs]`."""

    config: Config

    @nn.compact
    def __call__(self, graph: Batch) -> jax.Array:
        config = self.config
        mlp = partial(MLP, config, config.hidden)
        interaction = partial(nn.remat(Interaction) if config.remat else Interaction, config)
        inputs = {name: graph[name].astype(config.compute_dtype) for name in graph if graph[name].dtype == jnp.float32}
        grid = logical(mlp(name="grid")(inputs["grid"]), "nodes", "features")
        mesh = logical(mlp(name="mesh")(inputs["mesh"]), "nodes", "features")
        edges = {
            name: logical(mlp(name=name)(inputs[name]), "edges", "features")
            for name in ("edges_in", "edges", "edges_out")
        }
        change, _ = interaction(name="encode")(grid, mesh, edges["edges_in"], (graph["from_in"], graph["to_in"]))
        mesh = mesh + change
        grid = grid + mlp(name="encode_grid")(grid)
        inside = edges["edges"]
        for number in range(config.layers):
            change, messages = interaction(name=f"layer_{number}")(mesh, mesh, inside, (graph["from"], graph["to"]))
            mesh, inside = mesh + change, inside + messages
        change, _ = interaction(name="decode")(mesh, grid, edges["edges_out"], (graph["from_out"], graph["to_out"]))
        return MLP(config, config.outputs, plain=True, name="head")(grid + change).astype(jnp.float32)


def training(config: Config | None = None) -> Training:
    """The training step: mean squared error of the outputs at every node of the grid, AdamW.

    The batch is a graph: float32 features `grid`, `mesh`, `edges_in`, `edges` and `edges_out`, the numbers of each
    edge's ends, int32 `from_in`, `to_in`, `from`, `to`, `from_out` and `to_out`, and float32 `targets`
    `[grid, outputs]`.
    """
    config = config or Config()
    model = GraphNet(config)
    features = {
        "grid": (config.grid, config.inputs + config.node_features),
        "mesh": (config.mesh, config.node_features),
        "edges_in": (config.edges_in, config.edge_features),
        "edges": (config.edges, config.edge_features),
        "edges_out": (config.edges_out, config.edge_features),
        "targets": (config.grid, config.outputs),
    }
    ends = {
        "from_in": (config.edges_in, config.grid),
        "to_in": (config.edges_in, config.mesh),
        "from": (config.edges, config.mesh),
        "to": (config.edges, config.mesh),
        "from_out": (config.edges_out, config.mesh),
        "to_out": (config.edges_out, config.grid),
    }

    def make_batch(key: jax.Array) -> Batch:
        keys = iter(jax.random.split(key, len(features) + len(ends)))
        values = {name: jax.random.normal(next(keys), shape) for name, shape in features.items()}
        numbers = {name: jax.random.randint(next(keys), (n,), 0, nodes) for name, (n, nodes) in ends.items()}
        return values | numbers

    def init(key: jax.Array) -> State:
        return dict(model.init(key, make_batch(key)))

    def loss_function(params: Any, others: State, batch: Batch) -> tuple[jax.Array, State]:
        outputs: Any = model.apply({"params": params}, batch)
        return jnp.mean(jnp.square(outputs - batch["targets"])), others

    optimizer = optax.adamw(config.learning_rate, weight_decay=config.weight_decay)
    return make_training(init, make_batch, loss_function, optimizer)
