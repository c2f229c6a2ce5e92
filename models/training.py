"""Training steps of all models: pure functions of plain pytrees.

The state is a dictionary (`params`, `opt_state`, `step`, and `batch_stats` if a model has them). A leaf's path
therefore tells its role: `params/layer_0/mlp/up/kernel`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

State = dict[str, Any]
Batch = dict[str, Any]
LossFunction = Callable[[Any, State, Batch], tuple[jax.Array, State]]


@dataclass(frozen=True, slots=True)
class Training:
    """A training step with its arguments.

    `train_step(state, batch) -> (state, loss)` is pure and not yet jitted. `make_state` and `make_batch` make its
    arguments from a random key. `parameters` counts the trained numbers. `loss_function` and `optimizer` are the parts
    of the step, for other versions of the same step by hand, and None for a step of other parts. With a `seed`, the
    loss takes the batch of `batch_for(state, batch)`, which has the step's random key.
    """

    train_step: Callable[[State, Batch], tuple[State, jax.Array]]
    make_state: Callable[[jax.Array], State]
    make_batch: Callable[[jax.Array], Batch]
    loss_function: LossFunction | None = None
    optimizer: optax.GradientTransformation | None = None
    seed: int | None = None

    def batch_for(self, state: State, batch: Batch) -> Batch:
        """The batch for the loss. With a `seed` its `key` is another one for each number of `step`."""
        return batch if self.seed is None else _with_key(state, batch, self.seed)

    @property
    def state(self) -> State:
        """The state as `jax.ShapeDtypeStruct`s, without computation, allocation or a device."""
        return jax.eval_shape(lambda: self.make_state(jax.random.key(0)))

    @property
    def batch(self) -> Batch:
        """The batch as `jax.ShapeDtypeStruct`s."""
        return jax.eval_shape(lambda: self.make_batch(jax.random.key(0)))

    @property
    def parameters(self) -> int:
        """The number of trained numbers."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.state["params"]))

    def init(self, seed: int = 0) -> State:
        """The state as arrays, the same ones for the same seed."""
        return jax.jit(self.make_state)(jax.random.key(seed))

    def example(self, seed: int = 0) -> Batch:
        """A batch of random numbers, to run the step without data."""
        return jax.jit(self.make_batch)(jax.random.key(seed))


def checkpoint_policy(name: str) -> Callable[..., Any]:
    """The policy of `jax.checkpoint` by its name in `jax.checkpoint_policies`: `nothing_saveable`, `dots_saveable`, ...

    Raises `ValueError` for an unknown name.
    """
    found = getattr(jax.checkpoint_policies, name, None)
    if found is None:
        known = [known for known in dir(jax.checkpoint_policies) if not known.startswith("_")]
        raise ValueError(f"there is no checkpoint policy `{name}`; there are {', '.join(known)}")
    return found


def make_training(
    init: Callable[[jax.Array], State],
    make_batch: Callable[[jax.Array], Batch],
    loss_function: LossFunction,
    optimizer: optax.GradientTransformation,
    seed: int | None = None,
) -> Training:
    """The `Training` of a model from its initial variables and its loss.

    `init(key)` gives the variables: `params`, and others that the step updates without gradients.
    `loss_function(params, others, batch)` gives the loss, a scalar, and the new others. With a `seed`, for dropout and
    other noise, it finds a random key in `batch["key"]`: another one for each number of `step`, the same in each run.
    """

    def make_state(key: jax.Array) -> State:
        variables = init(key)
        return {
            **variables,
            "opt_state": optimizer.init(variables["params"]),
            "step": jnp.zeros((), jnp.int32),
        }

    def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        others = {name: value for name, value in state.items() if name not in ("params", "opt_state", "step")}
        if seed is not None:
            batch = _with_key(state, batch, seed)
        gradient_function = jax.value_and_grad(loss_function, has_aux=True)
        (loss, others), gradients = gradient_function(state["params"], others, batch)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        new_state = {
            **others,
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
            "step": state["step"] + 1,
        }
        return new_state, loss

    return Training(train_step, make_state, make_batch, loss_function, optimizer, seed)


def random_tokens(key: jax.Array, batch_size: int, sequence: int, vocabulary: int) -> Batch:
    """`inputs` and `labels`, int32 `[batch_size, sequence]`: random tokens, and the same tokens one position later."""
    tokens = jax.random.randint(key, (batch_size, sequence + 1), 0, vocabulary)
    return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}


def random_images(key: jax.Array, shape: tuple[int, ...], classes: int) -> Batch:
    """`images`, float32 of a `shape` that begins with the batch, and `labels`, int32 `[batch]`."""
    images, labels = jax.random.split(key)
    return {
        "images": jax.random.normal(images, shape),
        "labels": jax.random.randint(labels, shape[:1], 0, classes),
    }


def next_token_training(
    init: Callable[[jax.Array], State],
    logits: Callable[[Any, Batch], jax.Array],
    sizes: tuple[int, int, int],
    optimizer: optax.GradientTransformation,
    seed: int | None = None,
) -> Training:
    """The `Training` of a language model: mean cross-entropy of the next token.

    `logits(params, batch)` gives float `[batch, sequence, vocabulary]`, with these three numbers in `sizes`. The batch
    is that of `random_tokens`. For `init` and `seed` see `make_training`.
    """

    def loss_function(params: Any, others: State, batch: Batch) -> tuple[jax.Array, State]:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, batch), batch["labels"])
        return losses.mean(), others

    return make_training(init, lambda key: random_tokens(key, *sizes), loss_function, optimizer, seed)


def _with_key(state: State, batch: Batch, seed: int) -> Batch:
    return {**batch, "key": jax.random.fold_in(jax.random.key(seed), state["step"])}
