"""State in host memory: the program with copies of some arguments to the devices, and of their new values back.

The user's step knows nothing of host memory. An argument is copied before its first reader, and the result that
replaces it goes back. XLA begins a copy from the host as early as it can, so that all state would be on the devices at
once. What the update of a parameter reads is one *group* (its moments), and groups make *batches* about as large as the
largest group. Batches follow each other in the order in which their gradients are made, and two are on the devices:

- The arguments of the first two batches pass a barrier. It waits for the gradients of the first, and until so many
  residuals are gone that the batches take no more than these did.
- Those of a later batch pass a barrier that waits for the new values of the batch before the last, back on the host.

>>> import jax, jax.numpy as jnp
>>> from shardplan.program.tracing import trace_program
>>> def step(state, x):
...     m = 0.9 * state["m"] + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) @ w))(state["w"])
...     return {"m": m, "w": state["w"] - m}
>>> program = trace_program(step, ({"m": jnp.ones((8, 8)), "w": jnp.ones((8, 8))}, jnp.ones((4, 8))))
>>> moved = state_on_host(program, [0])
>>> [o.primitive.name for o in moved.operations][10:]
['dot_general', 'optimization_barrier', 'device_put', 'mul', 'transpose', 'add_any', 'add', 'device_put', 'sub']
>>> moved.values[moved.inputs[0]].memory_kind, moved.values[moved.outputs[0]].memory_kind
('pinned_host', 'pinned_host')
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from shardplan import _jax
from shardplan.program.operation_kinds import is_product, readers_in
from shardplan.program.program import Constant, Operation, Program, Value
from shardplan.program.prune import prune
from shardplan.program.residuals import border, waiting_bytes


def state_on_host(program: Program, positions: Collection[int]) -> Program:
    """The program with the inputs at these positions in host memory, and the results that replace them there."""
    arguments = [program.inputs[position] for position in sorted(positions)]
    return _Moving(program, arguments).program() if arguments else program


_ON_DEVICE = 4
"""The most batches that a device holds at once: two as they were, and their new values."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Arguments that are read together, with the operations that depend on them, the results of products and loops
    that these wait for, and the operation, by index, behind which all of those are there."""

    arguments: list[int]
    operations: list[int] = field(default_factory=list)
    ties: tuple[int, ...] = ()
    ready: int = -1


class _Moving:
    """The operations so far, and the values that are read in the place of others."""

    def __init__(self, program: Program, arguments: Sequence[int]) -> None:
        self._program, self._arguments = program, frozenset(arguments)
        self._values: list[Value] = list(program.values)
        for value in arguments:
            self._values[value] = replace(self._values[value], memory_kind=_jax.HOST_MEMORY)
        self._operations: list[Operation] = []
        self._added = set[int]()
        self._now: dict[int, int] = {}  # the copies of arguments on the devices, and what has passed a barrier
        self._on_host: dict[int, int] = {value: value for value in arguments}  # arguments and new values
        ties = program.ties.items()
        replaced = ((program.outputs[n], program.inputs[position]) for n, position in ties)
        new = {output for output, value in replaced if isinstance(output, int) and value in self._arguments}
        self._leaving = {value for value in new if self._values[value].memory_kind is None}
        self._units: dict[int, list[Operation]] = {}  # an operation with those inside of it
        inner = list[Operation]()
        for operation in program.operations:
            inner.append(operation)
            if not operation.region:
                self._units[operation.index] = inner
                inner = []
        self._ties = _ties(program)
        self._batches = _batches(program, arguments, self._ties)
        self._late = {index for batch in self._batches for index in batch.operations}
        self._fetched = 0  # batches
        self._sent: list[list[int]] = []  # the new values of each batch

    def program(self) -> Program:
        """The program, with all copies."""
        old, done = self._program, 0
        for value in sorted(self._leaving - old.makers.keys()):
            self._send(value, old.operations[old.regions[0].operations[0]])
        for index in old.regions[0].operations:
            if index not in self._late:
                self._add([index])
            while done < len(self._batches) and self._batches[done].ready <= index:
                self._add_batch(done, index)
                done += 1
        outputs = tuple(self._output(number, output) for number, output in enumerate(old.outputs))
        regions = (replace(old.regions[0], outputs=outputs), *old.regions[1:])
        values, operations = tuple(self._values), tuple(self._operations)
        return prune(replace(old, values=values, operations=operations, outputs=outputs, regions=regions))

    def _output(self, number: int, output: int | Constant) -> int | Constant:
        if not isinstance(output, int):
            return output
        position = self._program.ties.get(number)
        if position is not None and self._program.inputs[position] in self._arguments and output in self._on_host:
            return self._on_host[output]
        if output in self._arguments and output not in self._now and self._operations:
            self._fetch(output, self._operations[-1])
        return self._now.get(output, output)

    def _add_batch(self, number: int, index: int) -> None:
        """Adds a batch, and before it the arguments of the next one, where its gradients are there already: these are
        on their way while this one is computed."""
        batches = self._batches
        for one in (number, number + 1):
            if one == self._fetched < len(batches) and (one == number or batches[one].ready <= index):
                self._fetch_batch(one)
        sent = [r for i in batches[number].operations for r in self._program.operations[i].results]
        self._add(batches[number].operations)
        self._sent.append([value for value in sent if value in self._leaving])

    def _fetch_batch(self, number: int) -> None:
        """Adds the copies of a batch's arguments, and the barrier that they wait for."""
        batch, waiting = self._batches[number], self._sent[number - 2] if number >= 2 else []
        reader = self._program.operations[batch.operations[0]]
        on_host = (*batch.arguments, *waiting)
        if batch.ties or waiting:
            passed = [*map(self._on_host.__getitem__, on_host), *(self._now.get(tie, tie) for tie in batch.ties)]
            behind = self._barrier(passed, reader)
            self._on_host |= zip(on_host, behind, strict=False)
            self._now |= zip(batch.ties, behind[len(on_host) :], strict=True)
        for value in batch.arguments:
            self._fetch(value, reader)
        self._fetched += 1

    def _add(self, operations: Iterable[int]) -> None:
        """Adds operations, and before them those that they need."""
        needed, stack, makers = set[int](), [*operations], self._program.makers
        while stack:
            index = stack.pop()
            if index not in self._added and index not in needed:
                needed.add(index)
                stack += [makers[o].index for o in self._program.operations[index].read if o in makers]
        self._added |= needed
        for index in sorted(needed):
            operation = self._program.operations[index]
            for value in dict.fromkeys(o for o in operation.read if o in self._arguments and o not in self._now):
                self._fetch_for(value, operation)
            operands = tuple(self._now.get(o, o) if isinstance(o, int) else o for o in operation.operands)
            self._operations += [*self._units[index][:-1], replace(operation, operands=operands)]
            for result in operation.results:
                if result in self._leaving:
                    self._send(result, operation)

    def _fetch_for(self, value: int, reader: Operation) -> None:
        """Adds the copy of a single argument, late: it waits for the last product that its reader depends on."""
        tie = self._ties.get(reader.index)
        if tie is not None and self._program.values[value].shape:
            self._on_host[value], self._now[tie] = self._barrier([value, self._now.get(tie, tie)], reader)
        self._fetch(value, reader)

    def _fetch(self, value: int, reader: Operation) -> None:
        self._now[value] = self._moved(self._on_host[value], reader, None)

    def _send(self, value: int, maker: Operation) -> None:
        self._on_host[value] = self._moved(self._now.get(value, value), maker, _jax.HOST_MEMORY)

    def _moved(self, value: int, near: Operation, kind: str | None) -> int:
        new = self._new(value, kind)
        primitive, params = _jax.move_between_memories, _jax.params_of_move(kind)
        made = replace(near, primitive=primitive, params=params, operands=(value,), results=(new,), bodies=())
        self._operations.append(made)
        return new

    def _barrier(self, passed: Sequence[int], near: Operation) -> list[int]:
        results = [self._new(value, self._values[value].memory_kind) for value in passed]
        primitive, operands = _jax.optimization_barrier, tuple(passed)
        made = replace(near, primitive=primitive, params={}, operands=operands, results=tuple(results), bodies=())
        self._operations.append(made)
        return results

    def _new(self, value: int, kind: str | None) -> int:
        new = len(self._values)
        self._values.append(replace(self._values[value], index=new, name=None, memory_kind=kind))
        return new


def _ties(program: Program) -> dict[int, int]:
    """Per operation of the whole program, by index, the result of the last product or loop that it depends on."""
    found, makers = dict[int, int](), program.makers
    for index in program.regions[0].operations:
        reached = list[int]()
        for operand in program.operations[index].read:
            maker = makers.get(operand)
            if maker is not None and (maker.bodies or is_product(program, maker)):
                reached.append(operand)
            elif maker is not None and maker.index in found:
                reached.append(found[maker.index])
        if reached:
            found[index] = max(reached, key=lambda value: makers[value].index)
    return found


def _batches(program: Program, arguments: Sequence[int], ties: dict[int, int]) -> list[_Group]:
    """Groups in the order in which their gradients are made, several in one where they are small.

    Only what the forward part does not read is in a group. Operations with effects stay where they are, and so does
    all that they would have to wait for."""
    if program.effects or not program.operations:
        return []
    readers, early = readers_in(program), _needed_for(program, border(program))
    late = [v for v in arguments if v in readers and v not in early and program.values[v].shape]
    groups = sorted(_groups(program, late, ties), key=lambda group: (group.ready, group.operations[0]))
    sizes = [sum(program.values[value].total_bytes for value in group.arguments) for group in groups]
    found, room = list[_Group](), 0
    for group, size in zip(groups, sizes, strict=True):
        if found and size <= room:
            last = found[-1]
            found[-1] = _Group(
                [*last.arguments, *group.arguments],
                sorted([*last.operations, *group.operations]),
                (*dict.fromkeys((*last.ties, *group.ties)),),
                group.ready,
            )
            room -= size
        else:
            found.append(group)
            room = max(sizes) - size
    own = {index for group in groups for index in group.operations}
    return [_late(program, found[0], own, _ON_DEVICE * max(sizes)), *found[1:]] if found else []


def _needed_for(program: Program, index: int) -> set[int]:
    """The values that an operation depends on."""
    found, stack = set[int](), [program.operations[index]]
    while stack:
        read = {*stack.pop().read} - found
        found |= read
        stack += [program.makers[value] for value in read if value in program.makers]
    return found


def _late(program: Program, group: _Group, own: Collection[int], size: int) -> _Group:
    """A group that waits for gradients, and in addition for a later product, behind which so many bytes of residuals
    wait no longer, or for the last one; ``own``: the operations that depend on what is moved."""
    waiting, ends, found = waiting_bytes(program), border(program), group
    for index in program.regions[0].operations if group.ties else ():
        if index <= ends or index in own:
            continue
        operation = program.operations[index]
        if waiting[ends] - waiting[max(index, found.ready)] >= size:
            break
        if index > found.ready and (operation.bodies or is_product(program, operation)):
            found = replace(group, ties=(*group.ties, operation.results[0]), ready=index)
    return found


def _groups(program: Program, arguments: Sequence[int], ties: dict[int, int]) -> list[_Group]:
    """Arguments in one group where an operation depends on both."""
    first = {value: value for value in arguments}  # the first of a group, by links

    def find(value: int) -> int:
        while first[value] != value:
            value = first[value]
        return value

    depends = dict[int, int]()  # values on an argument of their group
    operations = dict[int, int]()
    for index in program.regions[0].operations:
        operation = program.operations[index]
        read = {find(depends.get(o, o)) for o in operation.read if o in depends or o in first}
        if read:
            one = min(read)
            first |= dict.fromkeys(read, one)
            depends |= dict.fromkeys(operation.results, one)
            operations[index] = one
    found = dict[int, _Group]()
    for value in arguments:
        found.setdefault(find(value), _Group([])).arguments.append(value)
    for index, value in operations.items():
        found[find(value)].operations.append(index)
    return [_with_tie(program, group, ties) for group in found.values()]


def _with_tie(program: Program, group: _Group, ties: dict[int, int]) -> _Group:
    """A group with the products outside of it that it depends on."""
    own, makers = {*group.operations}, program.makers
    reached = {ties[index] for index in own if index in ties}
    outside = [value for value in reached if makers[value].index not in own]
    if not outside:
        return replace(group, ready=group.operations[0] - 1)
    return replace(group, ties=tuple(sorted(outside)), ready=max(makers[value].index for value in outside))
