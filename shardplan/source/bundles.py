"""Values that one function returns for one other alone: a tuple, as layers keep values for their gradients.

add, kept = forward_block(add, ...)
...
gradient = backward_block(gradient, kept, ...)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardplan.source.expressions import Expression
from shardplan.source.statements import Statement

LEAST = 4
"""The least values of a tuple."""

KEPT = "kept"


@dataclass(slots=True)
class Part:
    """A function of a repeated part: the names of its parameters, its lines, and the names that it returns."""

    name: str
    title: str
    parameters: list[str]
    lines: list[str]
    returned: list[str]
    calls: list[Statement] = field(default_factory=list)

    def text(self) -> str:
        """The function."""
        said = f'"""{self.title[0].upper()}{self.title[1:]}, called {len(self.calls)} times."""'
        result = self.returned[0] if len(self.returned) == 1 else f"({', '.join(self.returned)})"
        lines = [said, *self.lines, f"return {result}"]
        return "\n".join([f"def §name§({', '.join(self.parameters)}):", *(f"    {line}" for line in lines)])


def bundle(parts: Sequence[Part], statements: Sequence[Statement], outputs: Sequence[int], fresh: int) -> None:
    """Changes functions and their calls, so that values for one other function alone are passed as one tuple.

    ``fresh`` is the first number of new variables.
    """
    pairs = [(maker, reader) for maker in parts for reader in parts if maker is not reader]
    for maker, reader in pairs:
        calls = _Calls(parts, statements, outputs)
        passed = calls.passed(maker, reader)
        if len(passed) >= LEAST:
            calls.pass_together(maker, reader, passed, fresh)
            fresh += len(maker.calls)


class _Calls:
    """Who reads what calls make: the statement, and the place of the operand. Outputs have a reader of their own."""

    def __init__(self, parts: Sequence[Part], statements: Sequence[Statement], outputs: Sequence[int]) -> None:
        self.parts = {id(call): part for part in parts for call in part.calls}
        self.readers: dict[int, list[tuple[Statement | None, int]]] = {one: [(None, 0)] for one in outputs}
        for one in statements:
            for place, variable in enumerate(one.operands):
                if isinstance(variable, int):
                    self.readers.setdefault(variable, []).append((one, place))

    def passed(self, maker: Part, reader: Part) -> dict[int, int]:
        """The results of one function that one call of the other alone reads, with the parameter for each."""
        if len(maker.calls) != len(reader.calls):
            return {}
        found = {}
        for number in range(len(maker.returned)):
            places = {self._place(call.results[number], reader) for call in maker.calls}
            if len(places) == 1 and None not in places:
                found[number] = places.pop()
        for call in maker.calls:  # all of one call go to one other call
            if len({id(self.readers[call.results[number] or 0][0][0]) for number in found}) > 1:
                return {}
        return {number: place for number, place in found.items() if place is not None}

    def _place(self, variable: int | None, reader: Part) -> int | None:
        """The parameter of the only call that reads a variable, if it is one of this function."""
        read = self.readers.get(variable, []) if variable is not None else []
        alone = len(read) == 1 and self.parts.get(id(read[0][0])) is reader
        return read[0][1] if alone else None

    def pass_together(self, maker: Part, reader: Part, passed: Mapping[int, int], fresh: int) -> None:
        """Makes one tuple of these results, and of these parameters."""
        places = set(passed.values())
        names = (KEPT, *(f"{KEPT}_{number}" for number in range(2, len(reader.parameters) + 3)))
        kept = next(name for name in names if name not in reader.parameters)
        reader.lines.insert(0, f"{', '.join(reader.parameters[place] for place in passed.values())} = {kept}")
        reader.parameters = [*_without(reader.parameters, places), kept]
        inside = ", ".join(maker.returned[number] for number in passed)
        maker.returned = [*_without(maker.returned, set(passed)), f"({inside})"]
        for number, call in enumerate(maker.calls, start=fresh):
            reading = self.readers[call.results[next(iter(passed))] or 0][0][0]
            assert reading is not None
            call.results = (*_without(call.results, set(passed)), number)
            call.result_names = (*_without(call.result_names, set(passed)), KEPT)
            reading.operands = (*_without(reading.operands, places), number)
            given = ", ".join(f"§{place}§" for place in range(len(reading.operands)))
            reading.expression = Expression(f"{reader.name}({given})")


def _without(items: Sequence[Any], places: set[int]) -> list[Any]:
    """A list without the items of these places."""
    return [one for place, one in enumerate(items) if place not in places]
