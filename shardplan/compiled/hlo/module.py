r"""HLO text as plain data: computations of instructions, and the tables in front of them.

>>> module = Module.parse('HloModule m, num_partitions=4\n\nENTRY %main (x: f32[8]) -> f32[8] {\n'
...                       '  %x = f32[8]{0} parameter(0)\n  ROOT %y = f32[8]{0} negate(%x)\n}\n')
>>> module.device_count, [(i.name, i.opcode, i.operands) for i in module.computations[module.entry].values()]
(4, [('x', 'parameter', ()), ('y', 'negate', ('x',))])
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_ELEMENT_BITS = {"pred": 8, "token": 0, "opaque": 0}

_ARRAY_TYPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_BITS = re.compile(r"\d+")
_DEFINITION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (?:(\w+\[[^\]]*\](?:\{[^}]*\})?) ([\w\-]+)\(|\()")
_OPCODE = re.compile(r" ([\w\-]+)\(")
_PARENTHESIS = re.compile(r"[()]")
_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_SOURCE = re.compile(r'\bsource_file="((?:[^"\\]|\\.)*)"(?: source_line=(\d+))?')
_MODULE_COUNT = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")


@dataclass(slots=True)
class Instruction:
    """One parsed line of a computation."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    line: str

    @property
    def op_name(self) -> str:
        """Its scopes and operation, or empty."""
        match = _OP_NAME.search(self.line)
        return match[1].replace('\\"', '"') if match else ""


def _closing(line: str, opening: int) -> int:
    """Position of the parenthesis that closes the one at `opening`."""
    depth = 0
    for match in _PARENTHESIS.finditer(line, opening):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.start()
    return len(line)


def _parse_instruction(line: str) -> Instruction | None:
    """Parses `%name = type opcode(operands), attributes`. None for a line that defines nothing."""
    match = _DEFINITION.match(line)
    if match is None:
        return None
    if match[2]:
        type_text, opcode, opening = match[2], match[3], match.end() - 1
    else:
        end = _closing(line, match.end() - 1)
        follows = _OPCODE.match(line, end + 1)
        if follows is None:
            return None
        type_text, opcode, opening = line[match.end() - 1 : end + 1], follows[1], follows.end() - 1
    if opcode in ("parameter", "constant"):
        return Instruction(match[1], type_text, opcode, (), line)  # its parentheses hold a number or a literal
    inside = _COMMENT.sub("", line[opening + 1 : _closing(line, opening)])
    operands = tuple(part.split()[-1].lstrip("%") for part in inside.split(", ") if part.strip())
    return Instruction(match[1], type_text, opcode, operands, line)


def elements(type_text: str) -> Iterator[tuple[str, int]]:
    """Element type and bytes of every array in a printed type."""
    for match in _ARRAY_TYPE.finditer(type_text):
        dtype, dims = match[1], match[2]
        found = _BITS.search(dtype)
        bits = _ELEMENT_BITS.get(dtype, int(found[0]) if found else 8)
        count = math.prod(int(size.lstrip("<=")) for size in dims.split(",") if size)
        yield dtype, (bits * count + 7) // 8


@dataclass(slots=True)
class Module:
    """HLO text as instructions per computation, with the source lines of its header tables."""

    entry: str
    device_count: int
    computations: dict[str, dict[str, Instruction]]
    frames: dict[int, str]

    @classmethod
    def parse(cls, text: str) -> Module:
        computations: dict[str, dict[str, Instruction]] = {}
        current: dict[str, Instruction] | None = None
        entry, header = "", []
        for line in text.splitlines():
            if line.startswith("}"):
                current = None
            elif current is not None:
                if instruction := _parse_instruction(line):
                    current[instruction.name] = instruction
            elif line.endswith("{") and (match := _HEADER.match(line)):
                current = computations.setdefault(match[2], {})
                entry = match[2] if match[1] else entry
            else:
                header.append(line)
        if not entry:
            raise ValueError("the HLO text has no `ENTRY` computation: is it a whole module?")
        counts = _MODULE_COUNT.findall(header[0]) if header else []
        return cls(entry, math.prod(map(int, counts)), computations, _source_frames(header))

    def source(self, instruction: Instruction) -> str:
        """`file:line` of an instruction, or empty."""
        if match := _FRAME.search(instruction.line):
            return self.frames.get(int(match[1]), "")
        if match := _SOURCE.search(instruction.line):
            return f"{match[1]}:{match[2] or '?'}"
        return ""


def _source_frames(header: list[str]) -> dict[int, str]:
    """`file:line` per stack frame id, from the tables in front of the computations."""
    tables: dict[str, dict[int, str]] = {name: {} for name in ("FileNames", "FileLocations", "StackFrames")}
    table: dict[int, str] = {}
    for line in header:
        if line[:1].isdigit():
            number, value = line.split(" ", 1)
            table[int(number)] = value
        else:
            table = tables.get(line, {})
    places = {number: _place(value, tables["FileNames"]) for number, value in tables["FileLocations"].items()}
    frames = tables["StackFrames"].items()
    return {number: places.get(_identifier(value, "file_location_id"), "") for number, value in frames}


def _identifier(entry: str, name: str) -> int:
    """The number after `name=` in a header entry such as `{file_location_id=4 parent_frame_id=2}`. 0 for none."""
    found = re.search(rf"\b{name}=(\d+)", entry)
    return int(found[1]) if found else 0


def _place(entry: str, file_names: dict[int, str]) -> str:
    file_name = file_names.get(_identifier(entry, "file_name_id"), "").strip('"')
    return f"{file_name}:{_identifier(entry, 'line')}" if file_name else ""
