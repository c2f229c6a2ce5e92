"""Programs that compute values again are programs: what an operation reads was made before."""

import pytest

from shardplan.models import load
from shardplan.program.program import Program
from shardplan.program.recompute import recomputing
from shardplan.program.residuals import border, residuals
from shardplan.program.tracing import trace_program


def assert_in_order(program: Program) -> None:
    known = {*program.inputs, *program.captured}
    for index in program.regions[0].operations:
        operation = program.operations[index]
        assert known.issuperset(operation.read), (index, operation.primitive.name)
        known.update(operation.results)


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
