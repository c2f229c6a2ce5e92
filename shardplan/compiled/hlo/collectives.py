"""The collectives of a compiled program, read from its optimised HLO text.

The reader takes the text of XLA:GPU (start/done pairs) and of XLA:CPU (plain operations). It counts the computations
reachable from the entry. The body and the condition of a loop count times its trip count. Of a conditional, the branch
that sends most counts. For a trip count unknown to the compiler, it takes that of `shardplan.trip_count`.

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
('all-reduce', ((0, 1, 2, 3), (4, 5, 6, 7)), 64, 96.0, 3)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardplan.compiled.hlo.dataflow import consumers, producers, users_of
from shardplan.compiled.hlo.module import Instruction, Module, elements
from shardplan.compiled.hlo.replica_groups import Groups as Groups
from shardplan.compiled.hlo.replica_groups import mesh_axes as mesh_axes
from shardplan.compiled.hlo.replica_groups import permute_axes as permute_axes
from shardplan.compiled.hlo.replica_groups import replica_groups
from shardplan.layout.collectives import CollectiveKind
from shardplan.program.control_flow import trips_stated_around

KINDS = tuple(kind for kind in CollectiveKind if kind != CollectiveKind.SLICE)

_NO_KERNELS = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *(kind + end for kind in (*KINDS, "async") for end in ("-start", "-done")),
}

_NAMED = r"=(?:\{([^}]*)\}|(%?[\w.\-]+))"
_CALLED = re.compile(r"\b(?:calls|to_apply|condition|body|called_computations)" + _NAMED)
_BRANCHES = re.compile(r"\b(?:branch_computations|true_computation|false_computation)" + _NAMED)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_GROUPS = re.compile(
    r"\breplica_groups=(\{\}|\{\{.*?\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|mesh\[[^\]]*\](?:, device_ids=\(.*?\))? ?\{[^}]*\})"
)
_IS_SYNCHRONOUS = '"is_sync":true'
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?\s?)*)\}")


@dataclass(frozen=True, slots=True)
class CarriedTensor:
    """One of the tensors of a collective.

    `bytes` have the definition of those of the collective. `producers` and `consumers` are the scopes and operations
    (`op_name`) of the instructions before it and after it, nearest first.
    """

    dtype: str
    bytes: int
    producers: tuple[str, ...]
    consumers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CompiledCollective:
    """One collective operation of a compiled program.

    Attributes:
        kind: one of `KINDS`.
        groups: device ids that exchange data with each other; empty for a collective-permute.
        pairs: (source, target) device ids of a collective-permute.
        group_size: devices in a group; 2 for a collective-permute.
        bytes: of the operands on one device. For an all-gather, of its results on one device.
        bytes_sent: by one device in one execution, by a ring algorithm.
        times: its executions per step, the product of the trip counts of the loops around it.
        assumed: whether a loop around it has an unknown trip count, and counts once.
        tensors: its tensors. The compiler merges collectives of many tensors into one.
        op_name: its scopes and operation, if the compiler kept them. Of a merged collective, those of one.
        source: `file:line` of its operation, or empty.
        synchronous: whether it cannot overlap with other work.
        kernels_meanwhile: kernels that start between its start and its end, in the schedule of the compiler.
        name, computation: its position in the HLO text.
    """

    kind: CollectiveKind
    groups: Groups
    pairs: tuple[tuple[int, int], ...]
    group_size: int
    bytes: int
    bytes_sent: float
    times: int
    tensors: tuple[CarriedTensor, ...]
    op_name: str
    source: str
    synchronous: bool
    meanwhile: tuple[str, ...]
    name: str
    computation: str
    assumed: bool = False

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Element type of each tensor that it carries."""
        return tuple(tensor.dtype for tensor in self.tensors)

    @property
    def kernels_meanwhile(self) -> int:
        """The number of kernels between its start and its end."""
        return len(self.meanwhile)

    @property
    def overlapped(self) -> bool:
        """Whether other work runs meanwhile."""
        return not self.synchronous and self.kernels_meanwhile > 0

    def axes(self, mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
        """The mesh axes that it runs over. None for a part of an axis."""
        if self.kind == CollectiveKind.PERMUTE:
            return permute_axes(self.pairs, mesh_shape)
        return mesh_axes(self.groups, mesh_shape)


def collectives(hlo_text: str) -> tuple[CompiledCollective, ...]:
    """All collectives of one run of the program, in the order of the text. `times` counts iterations of loops.

    Raises:
        ValueError: the text has no entry computation, or spells a collective's groups in an unknown way.
    """
    return _Reader(Module.parse(hlo_text)).flatten_entry()


@dataclass(slots=True)
class _Reader:
    """A walk over the computations from the entry, which reads each one once."""

    module: Module
    _done: dict[str, tuple[CompiledCollective, ...]] = field(default_factory=dict)
    _kernels: dict[str, tuple[list[Instruction], dict[str, int]]] = field(default_factory=dict)
    _users: dict[str, dict[str, list[Instruction]]] = field(default_factory=dict)

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

    def _of_instruction(self, instruction: Instruction, computation: str) -> tuple[CompiledCollective, ...]:
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
            known = _TRIPS.search(instruction.line)
            trips = int(known[1]) if known else trips_stated_around(instruction.op_name)
            times, assumed = (1, True) if trips is None else (trips, False)
            return tuple(replace(c, times=c.times * times, assumed=c.assumed or assumed) for c in inner)
        if opcode == "async-start":
            kernels = self._kernels_meanwhile(instruction, computation)
            synchronous = _IS_SYNCHRONOUS in instruction.line
            return tuple(replace(c, synchronous=synchronous, meanwhile=kernels) for c in inner)
        return tuple(inner)

    def _collective(self, instruction: Instruction, computation: str) -> CompiledCollective:
        kind = CollectiveKind(instruction.opcode.removesuffix("-start"))
        line = instruction.line
        pairs: tuple[tuple[int, int], ...] = ()
        groups: Groups = ()
        if kind == CollectiveKind.PERMUTE:
            printed_pairs = _PAIRS.search(line)
            numbers = [int(n) for n in re.findall(r"\d+", printed_pairs[1])] if printed_pairs else []
            pairs = tuple(zip(numbers[::2], numbers[1::2], strict=True))
            group_size = 2
        else:
            printed = _GROUPS.search(line)
            groups = replica_groups(printed[1] if printed else "{}", self.module.device_count)
            group_size = max(map(len, groups))
        tensors = self._tensors(instruction, computation, group_size if kind == CollectiveKind.ALL_GATHER else 1)
        size = sum(tensor.bytes for tensor in tensors)
        moved = kind.sent(group_size) * size
        if kind == CollectiveKind.PERMUTE and all(source == target for source, target in pairs):
            moved = 0.0
        return CompiledCollective(
            kind=kind,
            groups=groups,
            pairs=pairs,
            group_size=group_size,
            bytes=size,
            bytes_sent=moved,
            times=1,
            tensors=tensors,
            op_name=instruction.op_name,
            source=self.module.source(instruction),
            synchronous=not instruction.opcode.endswith("-start") or _IS_SYNCHRONOUS in line,
            meanwhile=self._kernels_meanwhile(instruction, computation),
            name=instruction.name,
            computation=computation,
        )

    def _tensors(self, instruction: Instruction, computation: str, scale: int) -> tuple[CarriedTensor, ...]:
        """The tensors of the instruction. `scale` is 1, or the group size where the results' bytes count."""
        defined = self.module.computations[computation]
        users = self._users_of(computation)
        operands = instruction.operands[:1] if "ragged" in instruction.opcode else instruction.operands
        tensors = []
        for position, operand in enumerate(operands):
            for dtype, size in elements(defined[operand].type) if operand in defined else ():
                before, after = producers(defined, operand), consumers(users, instruction, position)
                tensors.append(CarriedTensor(dtype, size * scale, before, after))
        return tuple(tensors)

    def _kernels_meanwhile(self, instruction: Instruction, computation: str) -> tuple[str, ...]:
        """Paths (`op_name`) of the kernels between a start and its end. None for an instruction without a pair."""
        ends = [user for user in self._users_of(computation).get(instruction.name, []) if user.opcode.endswith("-done")]
        if not instruction.opcode.endswith("-start") or not ends:
            return ()
        if computation not in self._kernels:
            order = list(self.module.computations[computation].values())
            self._kernels[computation] = order, {one.name: place for place, one in enumerate(order)}
        order, place = self._kernels[computation]
        between = order[place[instruction.name] : place[ends[0].name]]
        return tuple(one.op_name for one in between if one.opcode not in _NO_KERNELS)

    def _users_of(self, computation: str) -> dict[str, list[Instruction]]:
        if computation not in self._users:
            self._users[computation] = users_of(self.module.computations[computation])
        return self._users[computation]


def _names(pattern: re.Pattern[str], line: str) -> list[str]:
    """The computations in a line's attributes."""
    listed = [name.strip() for match in pattern.finditer(line) for name in (match[1] or match[2] or "").split(",")]
    return [name.lstrip("%") for name in listed if name]
