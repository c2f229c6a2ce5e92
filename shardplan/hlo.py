"""The collectives of a compiled program, read from its optimised HLO text.

Works on the text of XLA:GPU (start/done pairs) and of XLA:CPU (plain operations). Only what the entry computation
reaches is counted: a loop's body times its trip count, a conditional's branch that sends most, and everything called.

>>> text = '''HloModule step, num_partitions=8
...
... %body (p: (f32[16])) -> (f32[16]) {
...   %p = (f32[16]{0}) parameter(0)
...   %x = f32[16]{0} get-tuple-element(%p), index=0
...   %sum = f32[16]{0} all-reduce(%x), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
...   ROOT %r = (f32[16]{0}) tuple(%sum)
... }
...
... ENTRY %main (a: f32[16]) -> (f32[16]) {
...   %a = f32[16]{0} parameter(0)
...   %t = (f32[16]{0}) tuple(%a)
...   ROOT %w = (f32[16]{0}) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
... }
... '''
>>> (found,) = collectives(text)
>>> found.kind, found.groups, found.bytes, found.bytes_sent, found.times
('all-reduce', ((0, 1, 2, 3), (4, 5, 6, 7)), 64, 96, 3)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from shardplan.hlo_groups import Groups, mesh_axes, permute_axes, replica_groups

__all__ = ["KINDS", "CompiledCollective", "bytes_sent", "collectives", "mesh_axes", "permute_axes"]

KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)

_ELEMENT_BITS = {"pred": 8, "token": 0, "opaque": 0}
_OPERAND_SEARCH_DEPTH = 6

_ARRAY_TYPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_BITS = re.compile(r"\d+")
_DEFINITION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (?:(\w+\[[^\]]*\](?:\{[^}]*\})?) ([\w\-]+)\(|\()")
_OPCODE = re.compile(r" ([\w\-]+)\(")
_PARENTHESIS = re.compile(r"[()]")
_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|called_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)\}?")
_BRANCHES = re.compile(r"\b(?:branch_computations|true_computation|false_computation)=\{?((?:%?[\w.\-]+(?:, )?)+)\}?")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_GROUPS = re.compile(
    r"\breplica_groups=(\{\}|\{\{.*?\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|mesh\[[^\]]*\](?:, device_ids=\(.*?\))? ?\{[^}]*\})"
)
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?\s?)*)\}")
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_SOURCE = re.compile(r'\bsource_file="((?:[^"\\]|\\.)*)"(?: source_line=(\d+))?')
_MODULE_COUNT = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")


@dataclass(frozen=True, slots=True)
class CompiledCollective:
    """One collective operation of a compiled program.

    Attributes:
        kind: one of `KINDS`.
        groups: device ids that exchange data with each other; empty for a collective-permute.
        pairs: (source, target) device ids of a collective-permute.
        group_size: devices in a group; 2 for a collective-permute.
        bytes: of the operands on one device; for an all-gather, of its results on one device.
        bytes_sent: by one device in one execution, by a ring algorithm.
        times: how often it runs: the product of the trip counts of the loops around it.
        dtypes: element type of each tensor that it carries.
        op_name: scopes and operation that it came from, where XLA kept them.
        source: `file:line` that it came from, or empty.
        synchronous: nothing else runs meanwhile.
        name, computation: where it stands in the HLO text.
    """

    kind: str
    groups: Groups
    pairs: tuple[tuple[int, int], ...]
    group_size: int
    bytes: int
    bytes_sent: int
    times: int
    dtypes: tuple[str, ...]
    op_name: str
    source: str
    synchronous: bool
    name: str
    computation: str

    def axes(self, mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
        """The mesh axes that it runs over; None where it runs over part of an axis."""
        if self.kind == "collective-permute":
            return permute_axes(self.pairs, mesh_shape)
        return mesh_axes(self.groups, mesh_shape)


def bytes_sent(kind: str, size: int, group_size: int) -> int:
    """Bytes that one device sends in a collective of `size` bytes, by ring algorithms over `group_size` devices.

    `size` is the bytes of the operand on one device; for an all-gather, of its result on one device.
    """
    if kind in ("collective-permute", "collective-broadcast"):
        return size
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * (group_size - 1) * size // group_size


def collectives(hlo_text: str) -> tuple[CompiledCollective, ...]:
    """Every collective that one run of the program executes, in the order of the text, loops counted in `times`.

    Raises:
        ValueError: the text has no entry computation, or spells a collective's groups in an unknown way.
    """
    return _Reader(_Module.parse(hlo_text)).flatten_entry()


@dataclass(slots=True)
class _Instruction:
    """One line of a computation, cut into its parts."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    line: str


def _closing(line: str, opening: int) -> int:
    """Position of the parenthesis that closes the one at `opening`."""
    depth = 0
    for match in _PARENTHESIS.finditer(line, opening):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.start()
    return len(line)


def _parse_instruction(line: str) -> _Instruction | None:
    """Cuts `%name = type opcode(operands), attributes`; None for a line that defines nothing."""
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
    inside = _COMMENT.sub("", line[opening + 1 : _closing(line, opening)])
    operands = tuple(part.split()[-1].lstrip("%") for part in inside.split(", ") if part.strip())
    return _Instruction(match[1], type_text, opcode, operands, line)


def _elements(type_text: str) -> Iterator[tuple[str, int]]:
    """Element type and bytes of every array in a printed type."""
    for match in _ARRAY_TYPE.finditer(type_text):
        dtype, dims = match[1], match[2]
        found = _BITS.search(dtype)
        bits = _ELEMENT_BITS.get(dtype, int(found[0]) if found else 8)
        count = math.prod(int(size.lstrip("<=")) for size in dims.split(",") if size)
        yield dtype, (bits * count + 7) // 8


@dataclass(slots=True)
class _Module:
    """HLO text as lines per computation, with what its header tables say about source lines."""

    entry: str
    device_count: int
    computations: dict[str, dict[str, _Instruction]]
    frames: dict[int, str]

    @classmethod
    def parse(cls, text: str) -> _Module:
        computations: dict[str, dict[str, _Instruction]] = {}
        current: dict[str, _Instruction] | None = None
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
    """The number behind `name=` in a header entry such as `{file_location_id=4 parent_frame_id=2}`; 0 for none."""
    found = re.search(rf"\b{name}=(\d+)", entry)
    return int(found[1]) if found else 0


def _place(entry: str, file_names: dict[int, str]) -> str:
    file_name = file_names.get(_identifier(entry, "file_name_id"), "").strip('"')
    return f"{file_name}:{_identifier(entry, 'line')}" if file_name else ""


@dataclass(slots=True)
class _Reader:
    """Walks the computations from the entry, each read once."""

    module: _Module
    _done: dict[str, tuple[CompiledCollective, ...]] = field(default_factory=dict)

    def flatten_entry(self) -> tuple[CompiledCollective, ...]:
        return self._flatten(self.module.entry)

    def _flatten(self, computation: str) -> tuple[CompiledCollective, ...]:
        """All collectives that one run of `computation` executes."""
        if computation not in self._done:
            self._done[computation] = ()
            found: list[CompiledCollective] = []
            for instruction in self.module.computations.get(computation, {}).values():
                found += self._of_instruction(instruction, computation)
            self._done[computation] = tuple(found)
        return self._done[computation]

    def _of_instruction(self, instruction: _Instruction, computation: str) -> tuple[CompiledCollective, ...]:
        opcode = instruction.opcode
        if opcode.removesuffix("-start") in KINDS:
            return (self._collective(instruction, computation),)
        if opcode == "conditional":
            branches = [self._flatten(name) for name in _names(_BRANCHES, instruction.line)]
            return max(branches, key=lambda branch: sum(c.bytes_sent * c.times for c in branch), default=())
        if opcode in ("async-update", "async-done"):
            return ()  # counted at its start
        inner = [c for name in _names(_CALLED, instruction.line) for c in self._flatten(name)]
        if opcode == "while":
            trips = _TRIPS.search(instruction.line)
            return tuple(replace(c, times=c.times * (int(trips[1]) if trips else 1)) for c in inner)
        if opcode == "async-start":
            return tuple(replace(c, synchronous='"is_sync":true' in instruction.line) for c in inner)
        return tuple(inner)

    def _collective(self, instruction: _Instruction, computation: str) -> CompiledCollective:
        kind = instruction.opcode.removesuffix("-start")
        line = instruction.line
        pairs: tuple[tuple[int, int], ...] = ()
        groups: Groups = ()
        if kind == "collective-permute":
            printed_pairs = _PAIRS.search(line)
            numbers = [int(n) for n in re.findall(r"\d+", printed_pairs[1])] if printed_pairs else []
            pairs = tuple(zip(numbers[::2], numbers[1::2], strict=True))
            group_size = 2
        else:
            printed = _GROUPS.search(line)
            groups = replica_groups(printed[1] if printed else "{}", self.module.device_count)
            group_size = max(map(len, groups))
        dtypes, size = self._carried(instruction, computation)
        size *= group_size if kind == "all-gather" else 1
        moved = bytes_sent(kind, size, group_size)
        if kind == "collective-permute" and all(source == target for source, target in pairs):
            moved = 0
        return CompiledCollective(
            kind=kind,
            groups=groups,
            pairs=pairs,
            group_size=group_size,
            bytes=size,
            bytes_sent=moved,
            times=1,
            dtypes=dtypes,
            op_name=self._op_name(instruction, computation),
            source=self._source(instruction),
            synchronous=not instruction.opcode.endswith("-start") or '"is_sync":true' in line,
            name=instruction.name,
            computation=computation,
        )

    def _carried(self, instruction: _Instruction, computation: str) -> tuple[tuple[str, ...], int]:
        """Element types and bytes of the operands on one device."""
        defined = self.module.computations[computation]
        operands = instruction.operands[:1] if "ragged" in instruction.opcode else instruction.operands
        elements = [element for name in operands if name in defined for element in _elements(defined[name].type)]
        return tuple(dtype for dtype, _ in elements), sum(size for _, size in elements)

    def _op_name(self, instruction: _Instruction, computation: str) -> str:
        """Its own `op_name`; where a pass dropped it, that of the nearest operation that leads to its operands."""
        defined = self.module.computations[computation]
        for _ in range(_OPERAND_SEARCH_DEPTH):
            if match := _OP_NAME.search(instruction.line):
                return match[1].replace('\\"', '"')
            producers = [defined[name] for name in instruction.operands if name in defined]
            if not producers:
                break
            instruction = producers[0]
        return ""

    def _source(self, instruction: _Instruction) -> str:
        if match := _FRAME.search(instruction.line):
            return self.module.frames.get(int(match[1]), "")
        if match := _SOURCE.search(instruction.line):
            return f"{match[1]}:{match[2] or '?'}"
        return ""


def _names(pattern: re.Pattern[str], line: str) -> list[str]:
    """Computations that a line's attributes name."""
    listed = [name.strip() for match in pattern.finditer(line) for name in match[1].split(",")]
    return [name.lstrip("%") for name in listed if name]
