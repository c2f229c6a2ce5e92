"""The place of each operation in the user's code: its phase, and the modules that it belongs to.

Names come from JAX's name stacks. Flax linen fills these, Flax NNX and plain functions do not: their operations have the
names of the functions that call each other. Numbers become `*`, so that equal layers have one place.

>>> named_modules("transpose(jvp(GPT))/layer_11/attention/bqhd,bkhd->bhqk")
('GPT', 'layer_*', 'attention')
>>> called_modules(("step", "Llama.__call__", "Block.__call__", "Linear.__call__", "promote.<locals>.<genexpr>"))
('Llama', 'Block', 'Linear', 'promote')
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardplan import _jax
from shardplan.program.program import Operation, Program

PHASES = ("forward", "backward", "recomputed", "update", "program")
"""The phases of a step. A program without derivatives only has the last one."""

_PARTS_OF_LOOPS = frozenset({"while", "body", "cond", "scan", "checkpoint", "rematted_computation", "closed_call"})
_RECOMPUTED = "rematted_computation"


@dataclass(frozen=True, slots=True)
class Place:
    """The phase and the modules of an operation, outermost first."""

    phase: str
    modules: tuple[str, ...]


def with_stars(name: str) -> str:
    """A name with `*` for each of its numbers.

    >>> with_stars("layer_11")
    'layer_*'
    """
    return re.sub(r"\d+", "*", name)


def named_modules(path: str) -> tuple[str, ...]:
    """The modules of a name stack, without its transformations, parts of loops and einsum formulas."""
    before = None
    while before != path:
        before, path = path, re.sub(r"\w+\(([^()]*)\)", r"\1", path)
    return tuple(
        with_stars(name) for name in path.split("/") if name and name not in _PARTS_OF_LOOPS and "->" not in name
    )


def called_modules(chain: tuple[str, ...]) -> tuple[str, ...]:
    """The modules of a chain of calls: from the first method `__call__` on, or all functions after the first one."""
    first = next((n for n, name in enumerate(chain) if name.endswith(".__call__")), 1)
    found: list[str] = []
    for name in chain[first:]:
        short = name.split(".<locals>")[0].removesuffix(".__call__")
        if short and short[0] not in "_<" and short != "merge_inputs" and found[-1:] != [short]:
            found.append(short)
    return tuple(found)


def places_of(program: Program) -> list[Place]:
    """The place of each operation. Those of a loop's body have the phase and the modules of the loop as well.

    Sums of gradients, which JAX adds without a name, have the place of their first operand.
    """
    paths = [_jax.module_path(operation.equation) for operation in program.operations]
    differentiated = any("jvp(" in path for path in paths)
    holders = {body: operation for operation in program.operations for body in operation.bodies}
    found: dict[int, Place] = {}

    def place(operation: Operation) -> Place:
        if operation.index in found:
            return found[operation.index]
        path, chain = paths[operation.index], _jax.call_chain(operation.equation)
        makers = (program.makers.get(operand) for operand in operation.operands if isinstance(operand, int))
        first = next((maker for maker in makers if maker is not None), None) if not path and not chain else None
        if first is not None:
            found[operation.index] = place(first)
        else:
            holder = holders.get(operation.region)
            outer = place(holder) if holder is not None else None
            found[operation.index] = _place(path, chain, outer, differentiated)
        return found[operation.index]

    return [place(operation) for operation in program.operations]


def _place(path: str, chain: tuple[str, ...], outer: Place | None, differentiated: bool) -> Place:
    modules = named_modules(path) or called_modules(chain)
    if outer is not None and modules[: len(outer.modules)] != outer.modules:
        modules = outer.modules + modules
    if _RECOMPUTED in path:
        return Place("recomputed", modules)
    if "transpose(" in path:
        return Place("backward", modules)
    if "jvp(" in path:
        return Place("forward", modules)
    if outer is not None:
        return Place(outer.phase, modules)
    return Place("update" if differentiated else "program", modules)
