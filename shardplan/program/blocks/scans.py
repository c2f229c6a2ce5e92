"""Scans of the program inside of a loop of blocks: each turn runs on the block.

An index goes through a scan if it goes through all operations of the body that meet it, and enters and leaves each turn
in the same dimension. A sum over the index may leave a turn, stacked or carried, as gradients of weights do. It is then
a part of that sum, and what reads it on its way has to be linear.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardplan import _jax, rules
from shardplan.program.blocks.places import Growth, Place, is_barrier
from shardplan.program.operation_kinds import readers_in
from shardplan.program.program import Constant, Operation, Program, Region, operand_type
from shardplan.rules import Along, Refusal

Found = tuple[tuple[Along, ...], list[dict[int, Place]]]
"""An operation along every index, and the places of its values."""

Through = Callable[[Program, Operation, int, Growth], Found]

Edge = tuple[int | Constant, int | Constant, int]
"""Two values that become each other, and the dimensions that the first has in front of the second's."""


def with_bodies(program: Program, operation: Operation) -> Iterator[Operation]:
    """An operation, and those of its bodies."""
    yield operation
    for body in operation.bodies:
        for index in program.regions[body].operations:
            yield from with_bodies(program, program.operations[index])


def through_scan(program: Program, operation: Operation, growth: Growth, through: Through) -> Found:
    """A scan along every index, from the values around it that have a place. ``through`` is the same for an operation
    of its body. The growth has the inside of the scan afterwards."""
    if operation.primitive.name != "scan":
        raise Refusal("a loop of unknown length or a branch runs as a whole")
    body = program.regions[operation.bodies[0]]
    first, last = operation.params["num_consts"], operation.params["num_consts"] + operation.params["num_carry"]
    entering = [(o, i, int(n >= last)) for n, (o, i) in enumerate(zip(operation.operands, body.inputs, strict=True))]
    given = enumerate(zip(operation.results, body.outputs, strict=True))
    leaving = [(r, o, int(n >= last - first)) for n, (r, o) in given]
    carried = [(o, i, 0) for o, i in zip(body.outputs, body.inputs[first:last], strict=False)]
    inner = _Inside(program, body, growth, [*entering, *leaving, *carried], through)
    inner.grow()
    inner.find_partial(operation.operands[first:last], first)
    growth.inside |= inner.growth.inside
    growth.partial |= inner.growth.partial
    reducers = tuple("sum" if _among(output, inner.growth.partial) else None for output in body.outputs)
    along, found = [], []
    for places in inner.growth.places:
        operands, results = (
            tuple(places[end].dim if isinstance(end, int) and end in places else None for end in ends)
            for ends in (operation.operands, operation.results)
        )
        met = zip((*operation.operands, *operation.results), (*operands, *results), strict=True)
        size = next(program.values[v].shape[dim] for v, dim in met if isinstance(v, int) and dim is not None)
        along.append(Along.of_loop(size, operands, results, reducers))
        found.append({value: place for value, place in places.items() if value in inner.reached})
    return tuple(along), found


_MOVING = frozenset({"reshape", "squeeze", "expand_dims", "transpose", "copy"})


def dtype_before(program: Program, value: int) -> Any:
    """The type of a sum before it was widened and stacked by a scan: that in which each turn makes its part.

    Gradients of weights that a layer converts to bfloat16 are sums in bfloat16, and leave the scan in float32."""
    narrow, maker = program.values[value].dtype, program.makers.get(value)
    while maker is not None:
        place, name = maker.results.index(value), maker.primitive.name
        if name == "scan" and place >= maker.params["num_carry"]:
            source = program.regions[maker.bodies[0]].outputs[place]
        elif is_barrier(maker) or name in _MOVING or name == "convert_element_type":
            source = maker.operands[place]
        else:
            break
        if not isinstance(source, int) or not _jax.is_float(program.values[source].dtype):
            break
        value, maker = source, program.makers.get(source)
        narrow = min(program.values[value].dtype, narrow, key=_jax.item_bytes)
    return narrow


@dataclass(frozen=True, slots=True)
class ScanPart:
    """What of a scan gives some of its results: positions of operands and results, and operations of the body.
    ``known`` are values of the body whose stacks are there."""

    program: Program
    operation: Operation
    read: tuple[int, ...]
    results: tuple[int, ...]
    operations: tuple[int, ...]
    known: tuple[int, ...]

    @classmethod
    def of(cls, program: Program, operation: Operation, wanted: Iterable[int], known: Collection[int] = ()) -> ScanPart:
        """The part that gives the results in some positions, and all carries that these need, where the values of the
        body in ``known`` need not be made."""
        body, makers, results = program.regions[operation.bodies[0]], program.makers, {*wanted}
        first, carries = operation.params["num_consts"], operation.params["num_carry"]
        while True:
            waiting, operations = [body.outputs[n] for n in results], set[int]()
            needed = {body.inputs[first + n] for n in results if n < carries}
            while waiting:
                value = waiting.pop()
                if isinstance(value, int) and value not in needed:
                    needed.add(value)
                    if value not in known and value in makers and makers[value].region == body.index:
                        operations.add(makers[value].index)
                        waiting += makers[value].read
            read = tuple(n for n, value in enumerate(body.inputs) if value in needed)
            more = {n - first for n in read if first <= n < first + carries} - results
            if not more:
                inside = tuple(index for index in body.operations if index in operations)
                stacks = tuple(value for value in known if value in needed)
                return cls(program, operation, read, tuple(sorted(results)), inside, stacks)
            results |= more

    def run(
        self, operands: Sequence[Any], run: Callable[[dict[int, Any], Sequence[int]], Mapping[int, Any]]
    ) -> list[Any]:
        """The results, from the operands in ``read`` and the stacks of ``known``. ``run`` gives the values of one turn,
        from those that enter it, by some operations of the body."""
        body, params = self.program.regions[self.operation.bodies[0]], self.operation.params
        first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
        inputs = [*(body.inputs[n] for n in self.read), *self.known]
        outputs = [body.outputs[n] for n in self.results]
        begin = sum(n < first for n in self.read)
        end = begin + sum(first <= n < last for n in self.read)

        def turn(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            entering = dict(zip(inputs, (*operands[:begin], *carry, *slices), strict=True))
            held = run(entering, self.operations)
            given = [jnp.asarray(o.value, o.aval.dtype) if isinstance(o, Constant) else held[o] for o in outputs]
            return [one.astype(old.dtype) for one, old in zip(given, carry, strict=False)], given[len(carry) :]

        settings = {name: params[name] for name in ("length", "reverse", "unroll")}
        with _jax.traced_as(self.operation.equation):
            carry, stacks = jax.lax.scan(turn, [*map(jnp.asarray, operands[begin:end])], [*operands[end:]], **settings)
        return [*carry, *stacks]


_COMES_BACK = "a sum over the index comes back into the turn of a loop"


class _Inside:
    """The growth of indices in the body of a scan."""

    def __init__(self, program: Program, body: Region, growth: Growth, edges: list[Edge], through: Through) -> None:
        self._program, self._body, self._through = program, body, through
        self.growth = Growth(tuple(dict(places) for places in growth.places), cuts=growth.cuts)
        self._edges = edges
        self.reached = set[int]()

    def grow(self) -> None:
        """Follows the indices until nothing more has them."""
        program, ends = self._program, [end for a, b, _ in self._edges for end in (a, b)]
        waiting = [end for end in dict.fromkeys(e for e in ends if isinstance(e, int)) if self.growth.blocked(end)]
        inside, readers = {*self._body.operations}, readers_in(program)
        while waiting:
            value = waiting.pop()
            self.reached.add(value)
            waiting += self._across(value)
            around = [program.makers[value]] if value in program.makers else []
            for operation in (*around, *readers.get(value, ())):
                if operation.index not in inside or operation.index in self.growth.inside:
                    continue
                if operation.index in self.growth.cuts:
                    raise Refusal(self.growth.cuts[operation.index])
                along, found = self._through(program, operation, value, self.growth)
                if not is_barrier(operation):
                    self.growth.inside[operation.index] = along
                waiting += self._take(found)
        for index in self._body.operations:
            self._check(program.operations[index])

    def _across(self, value: int) -> list[int]:
        """Takes the places of what a value becomes, and of what becomes it."""
        found = []
        for outer, inner, lead in self._edges:
            for one, other, more in ((outer, inner, -lead), (inner, outer, lead)):
                if one == value and isinstance(one, int) and isinstance(other, int):
                    moved = [Place(p[one].dim + more, p[one].scale) for p in self.growth.places]
                    if any(place.dim < 0 for place in moved):
                        raise Refusal("it is the index of the turns of a loop")
                    found += self._take([{other: place} for place in moved])
        return found

    def _take(self, found: list[dict[int, Place]]) -> list[int]:
        new = [value for value in found[0] if value not in self.growth.places[0]]
        for places, more in zip(self.growth.places, found, strict=True):
            if any(places.get(value, place) != place for value, place in more.items()):
                raise Refusal("a turn of the loop needs another dimension of a value, or at another scale")
            places |= more
        self.reached.update(found[0])
        return new

    def _check(self, operation: Operation) -> None:
        """Raises Refusal where an operation reads blocks and is not along the index."""
        if is_barrier(operation):
            return
        along = self.growth.inside.get(operation.index)
        for number, operand in enumerate(operation.operands):
            blocked = isinstance(operand, int) and self.growth.blocked(operand)
            if blocked and (along is None or any(one.operands[number] is None for one in along)):
                raise Refusal("a turn of the loop needs the index whole")

    def find_partial(self, begins: tuple[int | Constant, ...], first: int) -> None:
        """Finds what is a part of a sum. The carries, from input ``first`` on, begin with ``begins``."""
        outputs, inputs = self._body.outputs, self._body.inputs[first : first + len(begins)]
        assumed = set[int]()
        while True:
            found, added = self._partial(assumed, {*inputs} - assumed)
            added |= {i for o, i in zip(outputs, inputs, strict=False) if _among(o, found) and i not in assumed}
            if not added:
                break
            assumed |= added
        for begin, output, value in zip(begins, outputs, inputs, strict=False):
            if value in assumed and not (_among(output, found) and _is_zero(self._program, begin)):
                raise Refusal("a sum over the index is carried through a loop that does not begin with zeros")
        self.growth.partial |= found

    def _partial(self, assumed: set[int], carries: set[int]) -> tuple[set[int], set[int]]:
        """The parts of sums where some carries are assumed to be some, and what of ``carries`` is added to them."""
        found, added = {*assumed}, set[int]()
        for index in self._body.operations:
            operation, along = self._program.operations[index], self.growth.inside.get(index)
            read = frozenset(n for n, operand in enumerate(operation.operands) if _among(operand, found))
            if is_barrier(operation):
                found |= {operation.results[n] for n in read}
            elif along is not None:
                found.update(self._reduced(operation, along, read))
            elif read:
                added |= self._passed(operation, read, carries)
                found.update(operation.results)
        return found, added

    def _reduced(self, operation: Operation, along: tuple[Along, ...], read: frozenset[int]) -> Iterator[int]:
        if read:
            raise Refusal(_COMES_BACK)
        for one in along:
            for result, reducer in zip(operation.results, one.reducers, strict=True):
                if reducer not in (None, "sum"):
                    raise Refusal("what a turn of a loop combines over the index is no sum")
                if reducer:
                    yield result

    def _passed(self, operation: Operation, read: frozenset[int], carries: set[int]) -> set[int]:
        """The carries that an operation adds to parts of sums."""
        sets = () if operation.bodies else _linear(self._program, operation)
        wider = min((one for one in sets if read <= one), key=len, default=None)
        more = (
            {operation.operands[n] for n in wider - read if isinstance(operation.operands[n], int)} if wider else None
        )
        if wider is None or more is None or len(more) < len(wider - read) or not more <= carries:
            raise Refusal(_COMES_BACK)
        return {value for value in more if isinstance(value, int)}


def _among(value: int | Constant, found: Collection[int]) -> bool:
    return isinstance(value, int) and value in found


def _linear(program: Program, operation: Operation) -> tuple[frozenset[int], ...]:
    types = [operand_type(program, operand) for operand in operation.operands]
    results = [program.values[result] for result in operation.results]
    return rules.derive(operation.primitive, operation.params, types, results).linear


def _is_zero(program: Program, value: int | Constant) -> bool:
    if isinstance(value, Constant):
        return not np.any(np.asarray(value.value))
    maker = program.makers.get(value)
    return maker is not None and maker.primitive.name == "broadcast_in_dim" and _is_zero(program, maker.operands[0])
