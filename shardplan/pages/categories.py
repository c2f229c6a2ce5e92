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

from collections.abc import Collection, Mapping, Sequence

from shardplan.memory import Buffer
from shardplan.pages.places import DERIVED, Place
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


def categories_of(program: Program, places: Sequence[Place], gradients: Collection[int]) -> dict[int, str]:
    """The category of each value. ``gradients`` are those of parameters."""
    found = dict.fromkeys((*program.inputs, *program.captured), "inputs")
    plain = not any(place.phase == "forward" for place in places)
    read = _read_in(program, places, "forward")
    for value in (program.inputs[position] for position in program.ties.values()):
        found[value] = "parameters" if plain or value in read else "optimizer state"
    for operation in program.operations:
        late = places[operation.index].phase == "update"
        for result in operation.results:
            found[result] = "gradients and updates" if late or result in gradients else "activations"
    return found


def gradients_of(program: Program, places: Sequence[Place]) -> dict[int, int]:
    """The gradients of parameters: values of the backward pass, with the input whose new state is computed from them.

    The way back from a new state passes operations of the update with as many elements. In the backward pass it passes
    casts, transposes and sums, up to the product or the sum that makes the gradient.
    """
    forward, found = _read_in(program, places, "forward"), dict[int, int]()
    states = [(program.inputs[position], program.outputs[number]) for number, position in program.ties.items()]
    for state, output in sorted(states, key=lambda pair: pair[0] not in forward):
        seen, waiting = set[int](), [output]
        while waiting:
            value = waiting.pop()
            maker = program.makers.get(value) if isinstance(value, int) else None
            if maker is None or not isinstance(value, int) or value in seen:
                continue
            seen.add(value)
            derived = places[maker.index].phase in DERIVED
            if program.values[value].elements != program.values[state].elements:
                continue
            if derived:
                found.setdefault(value, state)
            if not derived or maker.primitive.name in _SHAPING:
                waiting += maker.operands
    return found


def _read_in(program: Program, places: Sequence[Place], phase: str) -> set[int]:
    """The values that operations of a phase read."""
    return {
        operand
        for operation in program.operations
        if places[operation.index].phase == phase
        for operand in operation.operands
        if isinstance(operand, int)
    }


def category_of(buffer: Buffer, of_value: Mapping[int, str]) -> str:
    """The category of a buffer."""
    if buffer.form == "scratch":
        return "workspaces"
    if buffer.form == "copy" or buffer.value is None:
        return "copies"
    return "results" if buffer.form == "result" else of_value.get(buffer.value, "activations")
