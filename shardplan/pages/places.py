"""The place of each operation in the user's code: its phase, and the modules that it belongs to.

Names come from JAX's name stacks. Flax linen fills these. Flax NNX and plain functions do not: their operations have
the names of the functions that call each other. Numbers become `*`, so that equal layers have one place.

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

DERIVED = ("backward", "recomputed")

_PARTS_OF_LOOPS = frozenset({"while", "body", "cond", "scan", "checkpoint", "rematted_computation", "closed_call"})
_WRAPPERS = frozenset({"merge_inputs", "UpdateContextManager"})
"""Functions in which Flax NNX runs those of the user."""

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
        if short and short[0] not in "_<" and short not in _WRAPPERS and found[-1:] != [short]:
            found.append(short)
    return tuple(found)


def places_of(program: Program) -> list[Place]:
    """The place of each operation. Those of a loop's body have the phase and the modules of the loop as well."""
    return _Places(program).all()


class _Places:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.paths = [_jax.module_path(operation.equation) for operation in program.operations]
        self.chains = _chains(program)
        self.holders = {body: operation for operation in program.operations for body in operation.bodies}
        pairs = list(zip(self.paths, self.chains, strict=True))
        self.differentiated = {chain[:2] for path, chain in pairs if "jvp(" in path and chain}
        self.roots = {chain[0] for chain in self.differentiated}
        self.named = any(named_modules(path) for path in self.paths)
        self.found: dict[int, Place] = {}

    def all(self) -> list[Place]:
        return [self.place(operation) for operation in self.program.operations]

    def place(self, operation: Operation) -> Place:
        if operation.index not in self.found:
            self.found[operation.index] = self._place(operation)
        return self.found[operation.index]

    def _place(self, operation: Operation) -> Place:
        path, chain = self.paths[operation.index], self.chains[operation.index]
        modules = named_modules(path) or called_modules(chain)
        again = operation.again or _RECOMPUTED in path
        holder = self.holders.get(operation.region)
        if holder is not None:
            outer = self.place(holder)
            inner = modules if modules[: len(outer.modules)] == outer.modules else outer.modules + modules
            return Place("recomputed" if again else outer.phase, inner)
        if again:
            return Place("recomputed", modules)
        if "transpose(" in path:
            return Place("backward", modules)
        if "jvp(" in path:
            return Place("forward", modules)
        unknown = not chain or chain[0] not in self.roots
        if self.differentiated and (unknown or chain[:2] in self.differentiated):
            return self._unnamed(operation, modules)
        return Place("update" if self.differentiated else "program", modules)

    def _unnamed(self, operation: Operation, modules: tuple[str, ...]) -> Place:
        """The place of an operation of the differentiated function without a name: of an inner `jit`, or a sum of
        gradients. It is in the backward pass if an operand is."""
        makers = [self.program.makers.get(operand) for operand in operation.operands if isinstance(operand, int)]
        places = [self.place(maker) for maker in makers if maker is not None]
        phase = next((place.phase for place in places if place.phase in DERIVED), "forward")
        same = next((place.modules for place in places if place.phase == phase), modules)
        return Place(phase, same if self.named or not modules else modules)


def _chains(program: Program) -> list[tuple[str, ...]]:
    """The chain of calls of each operation. An operation of an inner `jit` has none. It takes that of its source line,
    or of another call of its function."""
    own = [_jax.call_chain(operation.equation) for operation in program.operations]
    of_line = {o.source: chain for o, chain in zip(program.operations, own, strict=True) if chain}
    of_function = {chain[place]: chain[: place + 1] for chain in own for place in range(len(chain))}

    def found(operation: Operation) -> tuple[str, ...]:
        function = operation.source.partition(" (")[2].removesuffix(")")
        unknown = ("", function) if function else ()
        return of_line.get(operation.source) or of_function.get(function, unknown)

    return [chain or found(operation) for operation, chain in zip(program.operations, own, strict=True)]
