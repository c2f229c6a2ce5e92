"""All models in blocks: gradients, as the moments have them after one step from zeros, are those of the plain step."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from shardplan.layout.layout import MeshAxes
from shardplan.models import NAMES, load
from shardplan.plans.blocks_by_hand import blocks_by_hand
from shardplan.program.tracing import trace_program
from tests.helpers.run_program import run_program

BLOCKS = {"unet3d": {"1/volumes[1]": 2}}
CHANGED = {"unet3d": {"norm": "group", "volume": (16, 16, 8)}}
"""The gradients of biases before a batch norm are nothing but rounding errors, and a small volume takes less time."""
TOLERANCE = 1e-5
WIDE = {"inception"}
"""Models whose batch norms make 5e-5 of the rounding of float32: they are compared in float64."""


def widened(tree):
    return jax.tree.map(lambda leaf: leaf.astype("float64") if leaf.dtype == "float32" else leaf, tree)


def paths(tree) -> list[str]:
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(tree)]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_two_blocks_equal_the_whole(name: str):
    """Tensor by tensor. Parameters without moments are compared after a large step along the gradient."""
    with jax.enable_x64(name in WIDE):
        compare(name)


def compare(name: str) -> None:
    module = load(name)
    small = replace(module.SMALL, **CHANGED.get(name, {}))
    training = module.training(replace(small, compute_dtype="float64") if name in WIDE else small)
    has_moments = any("trace" in path or "mu" in path for path in paths(training.state.get("opt_state")))
    if not has_moments:
        training = module.training(replace(small, learning_rate=1e4))
    arguments = training.init(), training.example()
    arguments = widened(arguments) if name in WIDE else arguments
    program = trace_program(training.train_step, arguments)
    asked = blocks_by_hand(program, BLOCKS.get(name, {"batch": 2}), MeshAxes((), ()), None)
    expected, found = run_program(program, arguments), run_program(asked[-1].program, arguments)
    compared = 0
    for path, one, other in zip(program.output_names, expected, found, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        if has_moments and path.startswith("0/params"):
            continue
        compared += 1
        np.testing.assert_allclose(other, one, rtol=TOLERANCE, atol=TOLERANCE * np.abs(one).max(), err_msg=path)
    assert compared > 2
