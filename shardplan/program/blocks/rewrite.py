"""The rewriting: from a program, and an index to run block by block, to the program with the loops."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardplan.memoize import memoize
from shardplan.program.blocks.deep_halos import DeepHalos
from shardplan.program.blocks.growth import grown
from shardplan.program.blocks.loop import Loop, Refused
from shardplan.program.blocks.places import Growth, Place, is_barrier
from shardplan.program.blocks.regions import Region, regions
from shardplan.program.blocks.scans import ScanPart
from shardplan.program.blocks.tiles import run_on_tile
from shardplan.program.blocks.tiling import Tiling, tiling
from shardplan.program.program import Constant, Operation, Program
from shardplan.program.tracing import retraced
from shardplan.rules import Refusal


@dataclass(frozen=True, slots=True)
class Blocks:
    """What to run block by block: ``seeds`` are dimensions of one value, ``counts`` the number of blocks of each.

    Regions begin with the operations on values of at least ``least_bytes``. ``strided`` blocks interleave: see
    `shardplan.program.blocks.loop`. They are taken only where blocks divide every value evenly.

    ``mesh``: the name and the size of each mesh axis, and the number of the seed that it splits, -1 without one. Every
    device then has ``counts`` blocks, and the rows of its neighbours that these need: see
    `shardplan.program.blocks.deep_halos`.
    """

    seeds: tuple[tuple[int, int], ...]
    counts: tuple[int, ...]
    least_bytes: float = 0.0
    strided: bool = False
    mesh: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Blocked:
    """A program in blocks: its loops, each with the operations of the old program and its numbers of blocks.

    ``places``: per index, the dimensions that it is of values of the old program.
    ``cuts`` are operations of the old program that were left out, with the reasons.
    """

    program: Program
    loops: tuple[tuple[Region, Tiling], ...]
    places: tuple[Mapping[int, Place], ...]
    cuts: Mapping[int, str]


_MOST_TRIES = 40
"""Operations that turn out to have no form on blocks are left out, one after another."""


@memoize
def in_blocks(program: Program, blocks: Blocks) -> Blocked:
    """The program with loops. Without any region it is the program itself, and ``cuts`` say why."""
    refused, halos = dict[int, str](), DeepHalos(blocks.mesh, len(blocks.seeds))
    for _ in range(_MOST_TRIES):
        program, growth = grown(program, blocks.seeds, refused)
        loops = []
        for region in regions(program, growth, blocks.least_bytes):
            try:
                loops.append((region, tiling(program, growth, region, blocks.counts, halos.devices)))
            except Refusal as reason:
                growth.cuts |= dict.fromkeys(region.operations, str(reason))
        if not loops:
            return Blocked(program, (), growth.places, growth.cuts)
        try:
            rewriting = _Rewriting(program, growth, loops, blocks.strided, halos)
            return Blocked(retraced(program, rewriting.run), tuple(loops), growth.places, growth.cuts)
        except Refused as found:
            refused[found.index] = found.reason
    return Blocked(program, (), (), refused)


class _Rewriting:
    """The program as a function: the operations outside of loops, and the loops in their places."""

    def __init__(
        self,
        program: Program,
        growth: Growth,
        loops: Sequence[tuple[Region, Tiling]],
        strided: bool,
        halos: DeepHalos,
    ) -> None:
        self._program = program
        self._loops = []
        for region, tiles in loops:
            taken = [
                strided
                and not halos
                and tiles.even(axis, {v: program.values[v].shape[p.dim] for v, p in places.items()})
                for axis, places in enumerate(growth.places)
            ]
            taken = taken if all(taken) else [False] * len(taken)
            self._loops.append(Loop(program, growth, region, tiles, taken, halos))
        self._inside = {
            index: number
            for number, (region, _) in enumerate(loops)
            for index in region.operations
            if index not in region.own
        }
        self._regions = [region for region, _ in loops]
        self._whole = {  # by barrier or scan, the places of results that have no part in its loop
            index: [
                place
                for place, result in enumerate(program.operations[index].results)
                if not growth.blocked(result) and result not in loops[number][1].reduced
            ]
            for index, number in self._inside.items()
            if is_barrier(program.operations[index]) or program.operations[index].bodies
        }
        self._order = self._ordered()

    def run(self, *arrays: Any) -> list[Any]:
        """The outputs, from the inputs and what is captured."""
        program = self._program
        captured = (value for value in program.captured if value not in program.inputs)
        values = dict(zip((*program.inputs, *captured), arrays, strict=True))
        for node in self._order:
            if node < 0:
                values |= self._loops[-1 - node].run(values)
            else:
                self._run_whole(program.operations[node], values)
        return [o.value if isinstance(o, Constant) else values[o] for o in program.outputs]

    def _run_whole(self, operation: Operation, values: dict[int, Any]) -> None:
        read, places = self._passing(operation)
        given = [operation.operands[place] for place in read]
        operands = [o.value if isinstance(o, Constant) else values[o] for o in given]
        results: Sequence[Any]
        if operation.primitive.name == "scan":  # its body is that of the program, not of the equation
            part = ScanPart.of(self._program, operation, places)
            places, results = part.results, part.run(operands, self._turn)
        else:
            results = run_on_tile(operation, operation.params, operands)
        values |= zip((operation.results[place] for place in places), results, strict=True)

    def _turn(self, values: dict[int, Any], operations: Sequence[int]) -> dict[int, Any]:
        for index in operations:
            self._run_whole(self._program.operations[index], values)
        return values

    def _passing(self, operation: Operation) -> tuple[Sequence[int], Sequence[int]]:
        """The places of what an operation reads and gives outside of loops."""
        places = self._whole.get(operation.index, range(len(operation.results)))
        if operation.primitive.name == "scan":
            return ScanPart.of(self._program, operation, places).read, places
        return (places if operation.index in self._whole else range(len(operation.operands))), places

    def _ordered(self) -> list[int]:
        """Operations by index, and loops as negative numbers, in an order in which each follows what it reads."""
        program = self._program
        reads = dict[int, set[int]]()
        for index in program.regions[0].operations:
            operation = program.operations[index]
            if index not in self._inside:
                reads[index] = self._makers(operation.read)
            elif self._whole.get(index):
                reads[index] = self._makers(operation.operands[place] for place in self._passing(operation)[0])
        for number, region in enumerate(self._regions):
            found = set[int]()
            for index in region.operations:
                found |= self._makers(program.operations[index].read, number)
            reads[-1 - number] = found
        first = {-1 - number: region.operations[0] for number, region in enumerate(self._regions)}
        behind: dict[int, list[int]] = {}
        for node, before in reads.items():
            for other in before:
                behind.setdefault(other, []).append(node)
        missing = {node: len(before) for node, before in reads.items()}
        ready = [(first.get(node, node), node) for node, count in missing.items() if not count]
        heapq.heapify(ready)
        order = []
        while ready:
            _, node = heapq.heappop(ready)
            order.append(node)
            for reader in behind.get(node, ()):
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready, (first.get(reader, reader), reader))
        assert len(order) == len(reads), "a region is not convex"
        return order

    def _makers(self, operands: Any, inside: int | None = None) -> set[int]:
        """The nodes that make some operands, but for what loop ``inside`` makes itself."""
        found = set[int]()
        own = self._regions[inside].own if inside is not None else ()
        for operand in operands:
            maker = self._program.makers.get(operand) if isinstance(operand, int) else None
            if maker is None or maker.index in own:
                continue
            number = self._inside.get(maker.index)
            if number is None:
                found.add(maker.index)
            elif number != inside:
                whole = self._whole.get(maker.index, ())
                found.add(maker.index if maker.results.index(operand) in whole else -1 - number)
        return found
