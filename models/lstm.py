"""An LSTM language model after Jozefowicz et al. (2016), in the sizes of the Tofu paper: SGD with momentum.

Words are embedded and projected, both 1024 wide, and pass through the layers of an LSTM. The last layer's state at each
step predicts the next word.

`CONFIGS` are the models of "Supporting Very Large Models using Automatic Dataflow Graph Partitioning" (Wang et al.,
EuroSys 2019, section 7, table 1), unrolled over 20 timesteps: a layer whose input is as wide as its state holds
`8 * hidden**2` weights. With gradients and momentum, 12 bytes a weight, the recurrent layers alone agree with the
table in GiB, which leaves no room for a large vocabulary: it is 1024 here.

>>> from shardplan.models import lstm
>>> round(12 * lstm.training(lstm.CONFIGS["rnn-8-8k"]).parameters / 2**30, 1)  # the table: 45.3
45.5
"""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from shardplan.models.logical import logical
from shardplan.models.training import Batch, State, Training, next_token_training

GATES = 4
"""Input, forget and output gate, and the candidate of the cell."""


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes: `embed` is the width of embedded words and of their projection, `hidden` that of each layer's state.

    Timesteps are written out one after another, or `scanned` by a loop in every layer. Parameters are float32;
    `compute_dtype` is that of the layers (lookup, cell state, softmax and loss: float32).
    """

    layers: int = 2
    hidden: int = 1024
    embed: int = 1024
    vocabulary: int = 1024
    sequence: int = 20
    batch: int = 512
    scanned: bool = False
    compute_dtype: DTypeLike = jnp.float32
    learning_rate: float = 0.1
    momentum: float = 0.9


CONFIGS = {
    f"rnn-{layers}-{thousands}k": Config(layers=layers, hidden=1024 * thousands)
    for layers in (6, 8, 10)
    for thousands in (4, 6, 8)
}
SMALL = Config(layers=2, hidden=32, embed=32, vocabulary=64, sequence=4, batch=16)
BENCHMARK = Config(layers=2, hidden=4096)


class Layer(nn.Module):
    """One layer of an LSTM: `[batch, width]` at every timestep to `[batch, hidden]` at every timestep."""

    config: Config

    @nn.compact
    def __call__(self, inputs: list[jax.Array]) -> list[jax.Array]:
        config = self.config
        batch, width = inputs[0].shape
        # The gates are a dimension of their own, so that a split of the state splits all gates in the same way.
        kernel = nn.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
        input_kernel = self.param("input", kernel, (width, GATES, config.hidden))
        state_kernel = self.param("state", kernel, (config.hidden, GATES, config.hidden))
        bias = self.param("bias", nn.initializers.zeros_init(), (GATES, config.hidden))

        def step(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            cell, hidden = carry
            dtype = config.compute_dtype
            gates = jnp.einsum("bi,igh->bgh", x, input_kernel.astype(dtype))
            gates = gates + jnp.einsum("bi,igh->bgh", hidden, state_kernel.astype(dtype))
            gates = logical(gates.astype(jnp.float32) + bias, "batch", None, "mlp")
            enter, forget, leave, candidate = (gates[:, gate] for gate in range(GATES))
            # Nothing is forgotten at first (Jozefowicz et al., 2015): one is added to the forget gate.
            cell = nn.sigmoid(forget + 1.0) * cell + nn.sigmoid(enter) * jnp.tanh(candidate)
            hidden = logical((nn.sigmoid(leave) * jnp.tanh(cell)).astype(dtype), "batch", "mlp")
            return (cell, hidden), hidden

        shape = (batch, config.hidden)
        carry = jnp.zeros(shape, jnp.float32), jnp.zeros(shape, config.compute_dtype)
        if config.scanned:
            return list(jax.lax.scan(step, carry, jnp.stack(inputs))[1])
        outputs = []
        for x in inputs:
            carry, output = step(carry, x)
            outputs.append(output)
        return outputs


class LSTM(nn.Module):
    """Tokens to logits: int32 `[batch, sequence]` to float32 `[batch, sequence, vocabulary]`."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        words = nn.Embed(config.vocabulary, config.embed, name="tokens")(tokens).astype(config.compute_dtype)
        words = nn.Dense(config.embed, dtype=config.compute_dtype, name="projection")(words)
        words = logical(words, "batch", "sequence", "embed")
        steps = [words[:, step] for step in range(tokens.shape[1])]
        for number in range(config.layers):
            steps = Layer(config, name=f"layer_{number}")(steps)
        hidden = jnp.stack(steps, axis=1)
        logits = nn.Dense(config.vocabulary, dtype=config.compute_dtype, name="head")(hidden)
        return logical(logits.astype(jnp.float32), "batch", "sequence", "vocabulary")


def training(config: Config | None = None) -> Training:
    """The training step: mean cross-entropy of the next word, SGD with momentum.

    The batch is `inputs` and `labels`, int32 `[batch, sequence]`. Every sequence starts from a state of zeros.
    """
    config = config or Config()
    model = LSTM(config)

    def init(key: jax.Array) -> State:
        return dict(model.init(key, jnp.zeros((1, 1), jnp.int32)))  # all timesteps share their parameters

    def logits(params: Any, batch: Batch) -> jax.Array:
        found: Any = model.apply({"params": params}, batch["inputs"])
        return found

    optimizer = optax.sgd(config.learning_rate, momentum=config.momentum)
    sizes = (config.batch, config.sequence, config.vocabulary)
    return next_token_training(init, logits, sizes, optimizer)
