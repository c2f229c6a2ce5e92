"""The variables of a problem's network, numbered: the meaning of a solution's choices, without costs.

Values come first, then the copies that several readers share, then operations with a choice of their own. A solution
from a cache is read by them without the network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardplan.layout.layout import Domain
from shardplan.problem.strategy import Choices
from shardplan.program.control_flow import Links
from shardplan.program.program import Constant, Program


@dataclass(slots=True)
class Variables:
    """Numbers of variables: of values, of shared copies, of operations, with a name and a number of choices each.

    Values that share their layout with another one (a loop's result and its carry) share its variable.
    """

    values: dict[int, int] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    operations: dict[int, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(self, name: str, size: int) -> int:
        """Adds a variable and gives its number."""
        self.names.append(name)
        self.sizes.append(size)
        return len(self.names) - 1

    def read(self, value: int) -> int:
        """The variable that readers of a value see: its shared copy's, or its own."""
        return self.copies.get(value, self.values[value])

    def digest(self) -> str:
        """A digest of names and sizes. Choices are positions, which hold for no other variables."""
        return hashlib.sha256(repr((self.names, self.sizes)).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Numbering:
    """The inputs that determine the variables of a program."""

    program: Program
    choices: Mapping[int, Choices]
    links: Mapping[int, Links]
    generated: frozenset[int]
    domain: Callable[[int], Domain]

    def variables(self) -> Variables:
        """Numbers all variables."""
        program, found = self.program, Variables()
        same = {value: other for links in self.links.values() for value, other in links.same.items()}
        produced = [r for operation in program.operations for r in operation.results if r not in self.generated]
        entering = [value for region in program.regions for value in region.inputs]
        for index in (*entering, *program.captured, *produced):
            if index not in same:
                found.values[index] = found.add(self._name(index), len(self.domain(index)))
        for value, other in same.items():
            found.values[value] = found.values[other]
        for index, count in self._reader_counts().items():
            if count > 1 and len(self.domain(index)) > 1:
                name = program.values[index].name or index
                found.copies[index] = found.add(f"copy of {name}", len(self.domain(index)))
        for operation in program.operations:
            choices = self.choices.get(operation.index)
            if choices is not None and not choices.follows_result:
                name = f"{operation.scope} {operation.primitive.name}"
                found.operations[operation.index] = found.add(name, len(choices.strategies))
        return found

    def _name(self, value: int) -> str:
        return self.program.values[value].name or f"value {value}"

    def _reader_counts(self) -> dict[int, int]:
        readers: dict[int, set[Any]] = {}
        for operation in self.program.operations:
            if operation.results and operation.results[0] in self.generated:
                continue
            for operand in operation.operands if not operation.bodies else ():
                if isinstance(operand, int) and operand not in self.generated:
                    readers.setdefault(operand, set()).add(operation.index)
        for reader, source in self._linked():
            readers.setdefault(source, set()).add(reader)
        return {index: len(found) for index, found in readers.items()}

    def _linked(self) -> Iterator[tuple[Any, int]]:
        """Values that no operation reads, but links and outputs that are fed back, each with its reader."""
        for number, replaced in self.program.replaced.items():
            output = self.program.outputs[number]
            if isinstance(output, int) and output not in self.generated:
                yield ("output", replaced), output
        for links in self.links.values():
            for link in (*links.enter, *links.inside):
                if isinstance(link.source, int) and link.source not in self.generated:
                    yield ("link", link.target, link.source), link.source


def generated_values(program: Program, choices: Mapping[int, Choices], fixed: Mapping[int, Any]) -> frozenset[int]:
    """Results of operations that read no tensor, follow their result, and compute each element by one operation at
    most.

    They cost nothing in any layout. A dot or a sum of such results has a kernel, and a layout, of its own.
    """
    generated: set[int] = set()
    for operation in program.operations:
        found = choices.get(operation.index)
        free = all(isinstance(o, Constant) or o in generated for o in operation.operands)
        free = free and not fixed.keys() & operation.results
        work, made = found.flops if found is not None else 0, sum(program.values[r].elements for r in operation.results)
        free = free and work <= made and not operation.equation.effects
        if free and found is not None and found.follows_result:
            generated.update(operation.results)
    return frozenset(generated)
