"""Programs that compute values again are programs: what an operation reads was made before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardplan import _jax
from shardplan.models import load
from shardplan.program.program import Program
from shardplan.program.recompute import Offloaded, recomputing, ties
from shardplan.program.residuals import border, residuals
from shardplan.program.tracing import trace_program


def assert_in_order(program: Program) -> None:
    known = {*program.inputs, *program.captured}
    for index in program.regions[0].operations:
        operation = program.operations[index]
        assert known.issuperset(operation.read), (index, operation.primitive.name)
        known.update(operation.results)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg", "gpt"])
def test_copies_follow_what_they_read(name: str):
    """Late operations read no value that waits on the host, whatever is made again and when copies begin."""
    module = load(name)
    training = module.training(module.SMALL)
    program = trace_program(training.train_step, (training.state, training.batch))
    found, stages = residuals(program), sorted({*ties(program).values(), *residuals(program)})
    for seed in range(3):
        random = np.random.default_rng(seed)
        fates = random.integers(0, 3, len(found))
        away, back = (random.choice(stages, len(found)).tolist() for _ in range(2))
        every = [Offloaded(*one) for one in zip(found, away, back, strict=True)]
        again = frozenset(value for value, fate in zip(found, fates, strict=True) if fate == 1)
        offloaded = tuple(one for one, fate in zip(every, fates, strict=True) if fate == 2)
        rewritten = recomputing(program, again, offloaded)
        assert_in_order(rewritten)
        late = {id(program.operations[index].equation) for index in ties(program)}
        barrier = _jax.optimization_barrier
        readers = [o for o in rewritten.operations if id(o.equation) in late and o.primitive is not barrier]
        gone = {one.value for one in offloaded}
        assert readers
        assert all(gone.isdisjoint(o.read) for o in readers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg", "gpt", "t5"])
def test_clones_follow_what_they_read(name: str):
    """Whatever of its residuals a step computes again, with layers that shrink along the network or do not."""
    module = load(name)
    training = module.training(module.SMALL)
    program = trace_program(training.train_step, (training.state, training.batch))
    found = residuals(program)
    for chosen in (found, found[::2], found[: len(found) // 2]):
        assert_in_order(recomputing(program, frozenset(chosen)))


def test_border_of_a_network_whose_layers_shrink():
    """The border is at the loss, though more bytes are live at the first convolutions than there."""
    module = load("vgg")
    config = module.Config(stages=((2, 16), (1, 16), (1, 16)), classifier=False, image=64, batch=1)
    training = module.training(config)
    program = trace_program(training.train_step, (training.state, training.batch))
    made = [o.index for o in program.operations if o.primitive.name == "reduce_window_max"]
    assert border(program) >= max(made)


def test_masks_of_several_layers_wait_for_their_own_stage():
    """Keys that layers share are cloned once. The masks that are made of them wait for the gradient of their layer."""

    def loss(weights, x, key):
        for w in weights:
            key, own = jax.random.split(key)
            x = jnp.sin(x @ w) * jax.random.uniform(own, x.shape)
        return jnp.sum(x @ weights[0])

    step = jax.grad(loss)
    program = trace_program(step, ([jnp.ones((8, 8))] * 3, jnp.ones((512, 8)), jax.random.key(0)))
    masked = [value for value in residuals(program) if program.makers[value].primitive.name == "mul"]
    rewritten = recomputing(program, frozenset(masked))
    waits = dict[int, int]()  # per value, the last barrier that it waits for
    for operation in rewritten.operations:
        own = operation.index if operation.primitive is _jax.optimization_barrier else -1
        waits |= dict.fromkeys(operation.results, max([own, *(waits.get(o, -1) for o in operation.read)]))
    masks = [o for o in rewritten.operations if o.again and o.primitive.name == "random_bits"]
    assert len(masks) == len({waits[o.results[0]] for o in masks}) == 2
