"""The training steps whose compiled peaks are on file, by name.

A step is a function with the shapes of its arguments. Its name says where it comes from:

| prefix | steps |
|---|---|
| `zoo/` | the models of `shardplan.models`, as benchmarks run them |
| `flax/` | Flax models of the transformers library, small configurations (`tests.fidelity.flax_models`) |
| `layers/` | two layers of one kind, as people write them (`tests.fidelity.layers`) |
| `drawn/` | networks drawn from a seed (`tests.fidelity.drawn`) |
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardplan.models import NAMES, load

MESHES = {"8": {"x": 8}, "2x4": {"x": 2, "y": 4}, "2x2x2": {"x": 2, "y": 2, "z": 2}}


@dataclass(frozen=True, slots=True)
class Step:
    """A function, the shapes of its arguments, and the positions of those that it donates."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = (0,)


def step_of(name: str) -> Step:
    """The step of a name. Raises KeyError for a name that no step has."""
    family, rest = name.split("/", 1)
    if family == "zoo":
        module = load(rest)
        training = module.training(module.BENCHMARK)
        return Step(training.train_step, (training.state, training.batch))
    if family == "flax":
        from tests.fidelity.flax_models import flax_step

        return flax_step(rest)
    if family == "layers":
        from tests.fidelity.layers import layers_step

        return layers_step(rest)
    if family == "drawn":
        from tests.fidelity.drawn import drawn_step

        return drawn_step(int(rest))
    raise KeyError(name)


def names() -> list[str]:
    """All names, without those of the part that is drawn last."""
    from tests.fidelity.flax_models import MODELS
    from tests.fidelity.layers import LAYERS

    zoo = [f"zoo/{name}" for name in NAMES]
    return [*zoo, *(f"flax/{n}" for n in MODELS), *(f"layers/{n}" for n in LAYERS), *(f"drawn/{s}" for s in range(56))]


def part_of(name: str) -> str:
    """The part of a step: `fit` or `decide`, by its name alone, so that it never changes."""
    return ("fit", "decide")[hashlib.sha256(name.encode()).digest()[0] % 2]
