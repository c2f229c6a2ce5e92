"""The categories of tensors, as memory profilers name them.

| category | tensors |
|---|---|
| parameters | the state that the forward pass reads |
| optimizer state | the other state |
| inputs | other arguments, and closed-over arrays |
| gradients and updates | gradients of parameters, and values of the update |
| activations | the other values |
| copies | resharded copies, and results before their reduction |
| workspaces | memory of library calls |
| results | results in memory of their own |
| host memory | arguments in host memory, which the devices' bytes exclude |

The state is what a step takes and returns. A program without derivatives has no optimizer state and no gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardplan.memory import Buffer
from shardplan.pages.places import Place
from shardplan.program.program import Program

CATEGORIES = (
    "parameters",
    "optimizer state",
    "inputs",
    "gradients and updates",
    "activations",
    "copies",
    "workspaces",
    "results",
    "host memory",
)

_SHAPING = frozenset({"convert_element_type", "transpose", "reshape", "add_any", "squeeze", "copy", "mul", "neg"})
"""Operations after which a gradient is the same gradient."""


def categories_of(program: Program, places: Sequence[Place]) -> dict[int, str]:
    """The category of each value."""
    phase = {result: places[o.index].phase for o in program.operations for result in o.results}
    readers: dict[int, set[str]] = {}
    for operation in program.operations:
        for operand in operation.operands:
            if isinstance(operand, int):
                readers.setdefault(operand, set()).add(places[operation.index].phase)
    state = {program.inputs[position] for position in program.ties.values()}
    found = dict.fromkeys((*program.inputs, *program.captured), "inputs")
    plain = not any(place.phase == "forward" for place in places)
    for value in state:
        found[value] = "parameters" if plain or "forward" in readers.get(value, ()) else "optimizer state"
    for value, when in phase.items():
        found[value] = "gradients and updates" if when == "update" else "activations"
    derived = ("backward", "recomputed")
    gradients = [v for v, when in phase.items() if when in derived and "update" in readers.get(v, ())]
    found |= dict.fromkeys(_unshaped(program, gradients, phase), "gradients and updates")
    return found


def _unshaped(program: Program, gradients: list[int], phase: Mapping[int, str]) -> set[int]:
    """Gradients of the backward pass, back to the products or sums that make them."""
    found: set[int] = set()
    waiting = list(gradients)
    while waiting:
        value = waiting.pop()
        if value in found or phase.get(value) not in ("backward", "recomputed"):
            continue
        found.add(value)
        maker, elements = program.makers[value], program.values[value].elements
        for operand in maker.operands if maker.primitive.name in _SHAPING else ():
            if isinstance(operand, int) and program.values[operand].elements == elements:
                waiting.append(operand)
    return found


def category_of(buffer: Buffer, of_value: Mapping[int, str]) -> str:
    """The category of a buffer."""
    if buffer.form == "scratch":
        return "workspaces"
    if buffer.form == "copy" or buffer.value is None:
        return "copies"
    return "results" if buffer.form == "result" else of_value.get(buffer.value, "activations")
