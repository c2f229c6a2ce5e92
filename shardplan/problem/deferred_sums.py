"""Deferred sums: partial results that pass through linear operations and are reduced once.

The sum of three partial gradients, each reduced on its own, sends three times the bytes of the reduction after the
addition. Gradients that a loop accumulates are sent once per iteration. A value may therefore stay partial: an array
with one more dimension in front, as long as the pending axes have devices and split over them, whose sum is the value.
Additions, conversions and other linear operations then run on every device's part alone. The analysis of the rules
finds the linear operations.

Deferring pays in two cases. The first is a place where partial sums meet: an addition of two of them, or a loop's
carry. The second is a value larger than all results computed from it: tokens that an operation has twice, for two
experts, are added up before they are sent. Only values on a linear way to such a place get partial layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from shardplan import _jax
from shardplan.problem.loop_carry_sums import carries_of_sums
from shardplan.problem.ops.slice import SLICES
from shardplan.problem.strategy import Choices
from shardplan.problem.sum_dtypes import deferred_dtype
from shardplan.program.blocks.loop import ends_sum
from shardplan.program.control_flow import Links
from shardplan.program.program import Constant, Operation, Program

_SPREADING = frozenset({"broadcast_in_dim", "convert_element_type"})

_BARRIER_CHOICES = Choices((), True, True, (frozenset({0}),), False, 0, 0, None)
"""The choices of the part of a barrier for one operand."""


class DeferredSums:
    """The values of a program that may stay partial, and the operands through which each operation passes partial sums
    on.

    ``values`` are those values. ``operands`` maps an operation to the sets of positions of operands that are partial
    together. An operation uses one of these sets, and an operation with strategies of its own may use any. ``rounded``
    are values that only pass on other sums. ``reduce_dtype`` is the user's.
    """

    def __init__(
        self,
        program: Program,
        choices: Mapping[int, Choices],
        links: Mapping[int, Links],
        fixed: Mapping[int, Any],
        reduce_dtype: Any,
    ) -> None:
        self._program, self._reduce_dtype = program, reduce_dtype
        self._operations = tuple(part for operation in program.operations for part in _parts(operation))
        self._choices = {part.index: _BARRIER_CHOICES for part in self._operations if part.index < 0} | {**choices}
        self._fixed = fixed
        self._makers = program.makers
        self._links = tuple(link for around in links.values() for link in (*around.enter, *around.inside))
        self._open = frozenset(filter(self._may, range(len(program.values))))
        self._summing = frozenset(o.index for o in self._operations if self._sums(o))
        self._passed = {o.index: passed for o in self._operations if (passed := self._passed_by(o))}
        """Per operation, the sets of positions of operands that are partial together, with these operands, and those of
        them that are zeros."""
        on_ways = self._summing | self._passed.keys()
        self._ways = tuple((o, self._moves(o)) for o in self._operations if o.index in on_ways and self._is_open(o))
        """Operations that make or pass on sums, each with whether it passes them on without strategies of its own."""
        self._becomes = self._stacked()
        self._came = {target: source for source, targets in self._becomes.items() for target in targets}
        same = {value: other for found in links.values() for value, other in found.same.items()}
        carries = carries_of_sums(program, choices, links, self.is_zero)
        most = self._passing({value for value, other in same.items() if other in carries} | carries.keys(), True, set())
        self._ways = tuple((o, moves) for o, moves in self._ways if most.issuperset(o.results))  # no others ever pass
        self._linears = tuple(o for o, _ in self._ways if o.index in self._passed)
        self._read_by_linears = [(o, _values_read(o)) for o in self._linears if not o.bodies]
        self._read_whole = self._read_by_others()
        while True:  # a carry is able only if the next iteration's value is
            left = {value for value, other in same.items() if other in carries} | carries.keys()
            able, needed = self._able(left)
            broken = {entering for entering, coming in carries.items() if entering in able and coming not in able}
            if not broken:
                break
            carries = {entering: coming for entering, coming in carries.items() if entering not in broken}
        useful = self._useful(able, needed, carries) | self._shrinking(*self._able(left, through=True))
        useful |= {value for value, other in same.items() if other in useful and other in carries}
        useful |= {o.results[0] for o in self._ends_of_blocks() if useful.issuperset(o.operands)}
        self.values = frozenset(self._with_other_parts(useful))
        self.operands = {
            operation.index: sets[:1] if self._choices[operation.index].follows_result else sets
            for operation in self._operations
            if (sets := tuple(self._all_linear(operation, self.values))) and operation.results[0] in self.values
        }
        self.rounded = self._rounded()
        self.operands = {index: sets for index, sets in self.operands.items() if index >= 0}

    def _ends_of_blocks(self) -> Iterator[Operation]:
        """The conversions of sums over blocks to the types in which the step without blocks reduces them. What is
        reduced in a wider type (vectors) is so before."""
        for operation in self._linears:
            if ends_sum(operation) and self._is_open(operation):
                before, after = (self._program.values[v] for v in (*operation.read, *operation.results))
                if _jax.item_bytes(deferred_dtype(after, self._reduce_dtype)) < _jax.item_bytes(before.dtype):
                    yield operation

    def _is_open(self, operation: Operation) -> bool:
        return bool(operation.results) and self._open.issuperset(operation.results)

    def _moves(self, operation: Operation) -> bool:
        cuts = len(operation.results) > 1 or operation.primitive.name in SLICES  # parts of a sum are sums
        return cuts or self._choices[operation.index].follows_result

    def _read_by_others(self) -> frozenset[int]:
        """The values that are outputs, or read by operations that pass no sums on, whatever is partial."""
        linears = {operation.index for operation in self._linears}
        others = (o for o in self._operations if o.index not in linears and not o.bodies)
        read = {operand for o in others for operand in o.operands if isinstance(operand, int)}
        return frozenset(read | {output for output in self._program.outputs if isinstance(output, int)})

    def _stacked(self) -> dict[int, list[int]]:
        """The stack of each slice in loops, and the slices of each stack.

        The stack of partial sums is a partial sum of stacks, and its slices are the partial sums.
        """
        found: dict[int, list[int]] = {}
        for link in self._links:
            if link.stacked and isinstance(link.source, int) and {link.source, link.target} <= self._open:
                found.setdefault(link.source, []).append(link.target)
        return found

    def _with_stacks(self, values: Iterable[int]) -> set[int]:
        """Values, with all their stacks and slices in loops."""
        found, waiting = set(), list(values)
        while waiting:
            value = waiting.pop()
            found.add(value)
            waiting += self._becomes.get(value, ())
        return found

    def _with_sources(self, values: Iterable[int]) -> set[int]:
        """Values, with all values that they are stacks or slices of."""
        found: set[int] = set()
        for value in values:
            found.add(value)
            while value in self._came:
                value = self._came[value]
                found.add(value)
        return found

    def _with_other_parts(self, values: set[int]) -> set[int]:
        """Values, with other parts of the same sums: all parts are deferred together."""
        cuts = (o for o in self._operations if len(o.results) > 1 and not values.isdisjoint(o.results))
        return values.union(*(o.results for o in cuts if self._linear(o, values) is not None))

    def is_zero(self, value: int | Constant | None) -> bool:
        """Whether a value is zeros: a literal 0, converted or broadcast."""
        if isinstance(value, Constant):
            return not np.any(value.value)
        maker = self._makers.get(value) if value is not None else None
        return maker is not None and maker.primitive.name in _SPREADING and self.is_zero(maker.operands[0])

    def _able(self, carries: set[int], through: bool = False) -> tuple[set[int], set[int]]:
        """The values that can be left partial, ``through`` operations with strategies of their own as well, and those
        of them that are reduced in any case.

        A value computed only from sums that are reduced in any case, for some other reader, is not among them: it needs
        no bytes.
        """
        needed: set[int] = set()
        while True:
            able = self._passing(carries, through, needed)
            more = self._needed(able)
            if more <= needed:
                return able, more
            needed |= more

    def _passing(self, carries: set[int], through: bool, needed: set[int]) -> set[int]:
        """The values that can be left partial, if no operation passes only ``needed`` values."""
        able = self._with_stacks(self._open & carries)
        for operation, moves in self._ways:
            passes = operation.index in self._summing
            if not passes and (moves or through):
                passes = self._passes(operation, able, needed)
            if passes:
                able.update(operation.results)
                if not self._becomes.keys().isdisjoint(operation.results):
                    able |= self._with_stacks(operation.results)
        return able

    def _passes(self, operation: Operation, able: set[int], needed: set[int]) -> bool:
        """Whether sums pass through an operation that are not all ``needed`` as whole values."""
        passed = self._passed.get(operation.index, ())
        if all(len(values) == 1 for _, values, _ in passed):  # of most operations, see `_able_sets`
            return any(value in able and value not in needed for _, [value], _ in passed)
        return any(not waiting <= needed for waiting in self._able_sets(operation, able))

    def _sums(self, operation: Operation) -> bool:
        """Whether the result of an operation may be a partial sum."""
        choices = self._choices.get(operation.index)
        if choices is None or choices.follows_result or not choices.islands:
            return False
        return any(strategy.pending[0] for strategy in choices.strategies)

    def _may(self, index: int) -> bool:
        value = self._program.values[index]
        inexact = bool(value.shape) and _jax.is_inexact(value.dtype)
        return inexact and index not in self._fixed and value.memory_kind is None

    def _linear(self, operation: Operation, able: Any) -> tuple[int, ...] | None:
        return next(self._all_linear(operation, able), None)

    def _all_linear(self, operation: Operation, able: Any) -> Iterator[tuple[int, ...]]:
        """The sets of operands through which sums pass if all able values are partial. Zeros are partial as well."""
        for positions, values, zeros in self._passed.get(operation.index, ()):
            if any(v in able for v in values) and all(v in able or v in zeros for v in values):
                yield positions

    def _able_sets(self, operation: Operation, able: set[int]) -> list[set[int]]:
        """The able values of these sets."""
        found = []
        for _, values, zeros in self._passed.get(operation.index, ()):
            if len(values) == 1:  # of most operations; an able value is none that stays zero without it
                if values[0] in able:
                    found.append({values[0]})
            elif (waiting := able.intersection(values)) and all(v in waiting or v in zeros for v in values):
                found.append(waiting)
        return found

    def _passed_by(self, operation: Operation) -> list[tuple[tuple[int, ...], tuple[int, ...], frozenset[int]]]:
        """The sets of an operation's operands in which it is linear, with zeros for the operands that are no values.

        The scalar that a pad fills in is on all devices, and left out. The operand that is made last comes first: of a
        gradient and its factor, the gradient.
        """
        choices, operands = self._choices.get(operation.index), operation.operands
        found = []
        for linear in choices.linear if choices is not None else ():
            values = tuple(o for n in sorted(linear) if isinstance(o := operands[n], int))
            if values and all(self.is_zero(operands[n]) for n in linear if not isinstance(operands[n], int)):
                positions = tuple(n for n in sorted(linear) if self._has_dimensions(operands[n]))
                found.append((positions, values, frozenset(filter(self._stays_zero, values))))
        return sorted(found, key=lambda passed: max(passed[1]), reverse=True)

    def _stays_zero(self, value: int) -> bool:
        return self.is_zero(value) and value not in self._fixed

    def _has_dimensions(self, operand: int | Constant) -> bool:
        return isinstance(operand, int) and bool(self._program.values[operand].shape)

    def _useful(self, able: set[int], needed: set[int], carries: Mapping[int, int]) -> set[int]:
        """The able values on a way to a place where sums of several origins meet that have no other readers."""
        origins = self._origins(able)
        ends = carries.keys() & able
        ends |= {link.source for link in self._links if link.target in ends and link.source in able}
        useful = self._with_sources(ends)
        for operation in reversed(self._linears):
            sets = self._able_sets(operation, able) if able.issuperset(operation.results) else []
            if not sets:
                continue
            operands = sets[0]
            meet = len({origins.get(operand, operand) for operand in operands - needed}) > 1
            if meet or not useful.isdisjoint(operation.results):
                useful |= {*operation.results, *self._with_sources(operands)}
        return useful

    def _needed(self, able: set[int]) -> set[int]:
        """The able values that are reduced in any case.

        Either an operation reads them through which no sum passes, or a value computed from them alone, no smaller than
        they are, is reduced.
        """
        found = set(self._read_whole)
        sizes = self._program.values
        for operation, read in reversed(self._read_by_linears):
            sets = self._able_sets(operation, able) if able.issuperset(operation.results) else []
            found |= read.difference(*sets)
            alone = [value for one in sets if len(one) == 1 for value in one if value not in found]
            if alone:
                needed = found.intersection(operation.results)
                size = max((sizes[result].total_bytes for result in needed), default=0)
                found.update(value for value in alone if sizes[value].total_bytes <= size)
        return found & able

    def _origins(self, able: set[int]) -> dict[int, int]:
        """Per able value, the sum from which all its parts come, or itself if there are several.

        A value computed from one sum alone, as by rotating the halves of a vector, is no smaller if it is added up
        again.
        """
        found: dict[int, int] = {}
        for operation in self._operations:
            if not operation.results or not able.issuperset(operation.results):
                continue
            known = {found.get(o, o) for waiting in self._able_sets(operation, able)[:1] for o in waiting}
            if operation.index in self._summing:
                known.add(operation.results[0])
            origin = known.pop() if len(known) == 1 else operation.results[0]
            found |= dict.fromkeys(self._with_stacks(operation.results), origin)
        return found

    def _shrinking(self, able: set[int], needed: set[int]) -> set[int]:
        """The able values that send fewer bytes if all their readers pass them on, with the results of these readers.

        The least bytes that are sent per step for a value are its own, each time that it is made, or those of its
        readers' results if all readers pass it on.
        """
        sizes = self._sizes(able)
        readers: dict[int, list[Operation]] = {value: [] for value in able}
        for operation in (o for o in self._operations if not o.bodies):
            for value in _values_read(operation) & able:
                readers[value].append(operation)
        whole = {output for output in self._program.outputs if isinstance(output, int)}
        whole |= {link.source for link in self._links if isinstance(link.source, int) and link.target not in self._came}
        sent: dict[int, float] = {}
        found: set[int] = set()
        for value in sorted(able, reverse=True):
            stacks = self._becomes.get(value, [])
            parts = [self._share(operation, value, able, needed, sent) for operation in readers[value]]
            parts += [sent.get(stack, inf) for stack in stacks]
            sent[value] = sizes[value]
            if parts and value not in whole and (total := sum(parts)) < sizes[value]:
                sent[value] = total
                found |= {value, *stacks, *(operation.results[0] for operation in readers[value])}
        found = self._with_sources(found)
        for operation in reversed(self._operations):
            if not found.isdisjoint(operation.results) and self._linear(operation, found) is None:
                linear = self._linear(operation, able) or ()
                found |= self._with_sources({operation.operands[position] for position in linear} & able)  # type: ignore[arg-type]
        return found

    def _sizes(self, able: set[int]) -> dict[int, int]:
        """The bytes of able values per step, with elements no narrower than those of the sum's terms.

        A sum that is widened, added up further and narrowed again is as small as before. Narrowing a wide sum to send
        fewer bytes saves nothing here: it gives another result.
        """
        made, times = self._made_in(able), self._program.times_of_values()
        found = {}
        for value in able:
            own = self._number_bytes(value)
            tensor, wider = self._program.values[value], max(own, made.get(value, 0)) // own
            found[value] = tensor.total_bytes * wider * times[value]
        return found

    def _made_in(self, able: set[int]) -> dict[int, int]:
        """Bytes per element of the sums that operations make or pass on."""
        made: dict[int, int] = {}
        for operation in self._operations:
            for value in operation.results:
                if value not in able:
                    continue
                passed = [
                    made[operand] for operand in operation.operands if isinstance(operand, int) and operand in made
                ]
                size = max(passed, default=self._number_bytes(value))
                made |= dict.fromkeys(self._with_stacks((value,)), size)
        return made

    def _number_bytes(self, value: int) -> int:
        """Bytes per element of a value, or of each of the two numbers of a complex one."""
        dtype = self._program.values[value].dtype
        return _jax.item_bytes(dtype) if _jax.is_float(dtype) else _jax.item_bytes(dtype) // 2

    def _rounded(self) -> frozenset[int]:
        """The values that pass on sums of narrower elements and are narrowed again: their own sums are not deferred.

        These sums are made in the wider elements, and are reduced before they are rounded.
        """
        made = self._made_in(self._passing(set(), True, set()))
        ends: dict[int, int] = {}
        found = set()
        for operation in reversed(self._operations):
            if operation.index not in self.operands:
                continue
            value = operation.results[0]
            own = self._number_bytes(value)
            end = min(own, *(ends.get(result, own) for result in operation.results))
            if ends_sum(operation):  # each device rounds its part, as without blocks
                end = self._number_bytes(operation.read[0])
            waiting = {operation.operands[position] for linear in self.operands[operation.index] for position in linear}
            passed = self._with_sources(o for o in waiting if isinstance(o, int))
            ends |= {o: min(end, ends.get(o, end)) for o in passed}
            if made.get(value, own) < own and end < own and operation.index in self._summing:
                found.add(value)
        return frozenset(found)

    def _share(
        self, operation: Operation, value: int, able: set[int], needed: set[int], sent: Mapping[int, float]
    ) -> float:
        """The bytes of an operation's result that must be sent for one of its operands."""
        result = operation.results[0] if len(operation.results) == 1 else -1
        for linear in self._all_linear(operation, able):
            waiting = {operation.operands[position] for position in linear} & able
            if value in waiting and result in sent:
                return sent[result] / max(len(waiting - needed), 1)
        return inf


def _parts(operation: Operation) -> Iterator[Operation]:
    """An operation, or for a barrier one operation per operand, with a negative index of its own."""
    if operation.primitive is not _jax.optimization_barrier:
        yield operation
        return
    for operand, result in zip(operation.operands, operation.results, strict=True):
        yield replace(operation, index=-1 - result, operands=(operand,), results=(result,))


def _values_read(operation: Operation) -> frozenset[int]:
    return frozenset(operand for operand in operation.operands if isinstance(operand, int))
