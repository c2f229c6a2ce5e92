"""Recomputation: the program in which some residuals are made again for their late readers, or wait on the host.

A late operation that reads such a value reads a clone of it, made from values that are kept, or a copy of it from host
memory. Four things have XLA run clones and copies late, and let go of what it has read:

- The kept values that clones read pass a barrier: else XLA merges clones with their originals.
- The barrier waits for the gradient that has reached its first reader, the *tie*: else clones run at once.
- The barrier waits for the gradients of weights before it, the *release*: else XLA leaves them to the end of the step,
  and keeps what they read.
- A later value waits in a barrier for a copy to the host: else XLA begins it as late as it can.

>>> import jax, jax.numpy as jnp
>>> from shardplan.program.residuals import residuals
>>> from shardplan.program.tracing import trace_program
>>> def loss(w, x):
...     return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) @ w)
>>> program = trace_program(jax.grad(loss), (jnp.ones((8, 8)), jnp.ones((64, 8))))
>>> hidden = residuals(program)[:2]
>>> names = [o.primitive.name for o in recomputing(program, frozenset(hidden)).operations]
>>> names.count("optimization_barrier"), names.count("tanh")
(2, 3)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardplan import _jax
from shardplan.memoize import memoize
from shardplan.program.offloaded_stacks import offloading_stacks
from shardplan.program.operation_kinds import is_product
from shardplan.program.program import Constant, Operation, Program, Value
from shardplan.program.prune import prune
from shardplan.program.recompute_scans import StackingMore, is_fixed, recomputing_stacks, remakeable, stacking_more
from shardplan.program.residuals import early, is_fused, materialised, residuals

_LITTLE = 1 / 64
"""Clones of earlier stages pass a barrier if they take at most so much of what is made behind it: keys, statistics. In
a barrier, a larger one would be in memory, which kernels compute on the way else."""


@dataclass(frozen=True, slots=True)
class Offloaded:
    """A residual that waits in host memory. The value ``away`` waits for the copy to the host, and the gradient
    ``back`` has the copy from there begin, where nothing needs it before. Both are the value itself for what a scan
    stacks, whose slices are copied in the iterations that make and read them."""

    value: int
    away: int
    back: int


def recomputing(program: Program, values: frozenset[int], offloaded: tuple[Offloaded, ...] = ()) -> Program:
    """The program that makes `recomputable` values again for their late readers, and copies others from the host; with
    none, releases alone.

    Of the values, those that are `stackable` are stacked for others to be made of."""
    return _rewritten(program, values, offloaded)[0]


def origins(program: Program, values: frozenset[int], offloaded: tuple[Offloaded, ...] = ()) -> Mapping[int, int]:
    """The values of the program by those that stand for them where some are recomputed: clones, copies in either
    memory, and what has passed a barrier."""
    return _rewritten(program, values, offloaded)[1]


@memoize
@memoize
def _rewritten(
    program: Program, values: frozenset[int], offloaded: tuple[Offloaded, ...]
) -> tuple[Program, Mapping[int, int]]:
    more = _stacking_more(program)
    slices = frozenset(remakeable(more.program))
    stacked, origins = program, dict[int, int]()
    if not values.isdisjoint(slices):
        stacked, again = recomputing_stacks(more.program, (values & slices) ^ more.added)
        origins = {**more.origins, **{value: more.origins.get(origin, origin) for value, origin in again.items()}}
    if on_host := [one.value for one in offloaded if one.value in slices]:
        stacked, copies = offloading_stacks(stacked, on_host)
        origins |= {value: origins.get(origin, origin) for value, origin in copies.items()}
    rewriting = _Rewriting(stacked, values - slices, [one for one in offloaded if one.value not in slices])
    rewritten = rewriting.program()
    late = {value: origins.get(origin, origin) for value, origin in rewriting.origins.items()}
    return rewritten, {**origins, **late}


def recomputable(program: Program) -> frozenset[int]:
    """The values that can be made again: residuals, and what scans stack for later ones; and what these could stack
    in addition, which `recomputing` stacks where it is asked for it."""
    return frozenset((*residuals(program), *remakeable(_stacking_more(program).program)))


def stackable(program: Program) -> frozenset[int]:
    """The stacks that slices could be made of, which scans do not make unless they are asked to."""
    return _stacking_more(program).added


@memoize
def _stacking_more(program: Program) -> StackingMore:
    return stacking_more(program, lambda program, operation: not is_fused(program, operation))


@memoize
def followers(program: Program, values: frozenset[int]) -> frozenset[int]:
    """The values of the forward part that late operations read from clones: those that are recomputed, and what is
    computed of them element by element."""
    found, made = set(values), materialised(program)
    for index in sorted(early(program)):
        operation = program.operations[index]
        if not is_fixed(operation) and not found.isdisjoint(operation.read):
            found.update(result for result in operation.results if result not in made)
    return frozenset(found)


def kept_for_effects(program: Program) -> tuple[int, ...]:
    """The values of the forward part that late operations need and that are never made again: effects make them."""
    forward = early(program)
    late = {o for operation in program.operations if operation.index not in forward for o in operation.read}
    made = (program.operations[index] for index in sorted(forward))
    values = (result for operation in made if operation.equation.effects for result in operation.results)
    return tuple(value for value in values if not late.isdisjoint(followers(program, frozenset([value]))))


def chain(program: Program, recomputed: Collection[int], value: int, known: Collection[int] = ()) -> list[Operation]:
    """The operations that make a value again from what is kept, or ``known``, in the order of the program."""
    found, stack = dict[int, Operation](), [value]
    while stack:
        operation = program.makers[stack.pop()]
        if operation.index not in found:
            found[operation.index] = operation
            stack += [o for o in operation.read if o not in known and is_cloned(program, recomputed, o)]
    return [found[index] for index in sorted(found)]


def is_cloned(program: Program, recomputed: Collection[int], operand: int) -> bool:
    """Whether a chain makes an operand again: it is recomputed, or part of kernels that read it."""
    maker = program.makers.get(operand)
    if maker is None or is_fixed(maker) or maker.index not in early(program):
        return False
    if operand in materialised(program):
        return operand in recomputed
    return operand not in _from_nothing(program)


@memoize
def _from_nothing(program: Program) -> frozenset[int]:
    """The values that no tensor has a part in: kernels make them where they need them."""
    found = set[int]()
    for index in program.regions[0].operations:
        operation = program.operations[index]
        if not is_fixed(operation) and found.issuperset(operation.read):
            found.update(operation.results)
    return frozenset(found)


@memoize
def ties(program: Program) -> dict[int, int]:
    """Per late operation, by index, the gradient that it waits for: the last product or result of a loop, or where
    there is none the first materialised value. A reduction is none: a barrier behind it would cut a softmax in two, and
    what its two parts share would be stored."""
    found, makers, made, forward = dict[int, int](), program.makers, materialised(program), early(program)
    last = dict[int, int]()  # of each late value
    for index in program.regions[0].operations:
        if index in forward:
            continue
        operation = program.operations[index]
        reached = [last[operand] for operand in operation.read if operand in last]
        if reached:
            found[index] = max(reached, key=lambda value: makers[value].index)
        for result in operation.results:
            if operation.bodies or is_product(program, operation) or (result in made and not reached):
                last[result] = result
            elif reached:
                last[result] = found[index]
    return found


class _Rewriting:
    """The operations so far, and the values that late operations read in the place of others."""

    def __init__(self, program: Program, recomputed: frozenset[int], offloaded: Sequence[Offloaded]) -> None:
        self._program, self._recomputed = program, recomputed
        self._values: list[Value] = list(program.values)
        self._operations: list[Operation] = []
        self._offloaded = {one.value: one for one in offloaded}
        self._cloned = followers(program, recomputed.union(self._offloaded))
        self._clones: dict[int, int] = {}
        self.origins: dict[int, int] = {}
        self._now: dict[int, int] = {}  # what has passed a barrier, by what it was
        self._on_host: dict[int, int] = {}  # the copies in host memory
        self._early = set[int]()  # what is back from there before its first reader
        self._pending: list[int] = []  # the gradients of weights since the last barrier
        self._continuing, self._ends = _continuing(program), frozenset(ending(program))
        self._waiting: dict[int, list[Operation]] = {}  # by the gradient that they wait for
        for index, tie in ties(program).items():
            self._waiting.setdefault(tie, []).append(program.operations[index])

    def program(self) -> Program:
        """The program, with everything rewritten."""
        old, forward, inner = self._program, early(self._program), list[Operation]()
        stages = {*self._waiting, *(o for one in self._offloaded.values() for o in (one.away, one.back))}
        for operation in old.operations:
            if operation.region:
                inner.append(operation)
                continue
            read = self._passed if operation.index in forward else self._read
            own = replace(operation, operands=tuple(map(read, operation.operands)))
            self._operations += [*inner, own]
            inner.clear()
            self._pending += [result for result in operation.results if result in self._ends]
            for result in operation.results:
                if result in self._offloaded:
                    self._on_host[result] = self._moved(operation, result, _jax.HOST_MEMORY)
                if result in stages:
                    self._begin_stage(result)
        outputs = tuple(map(self._passed, old.outputs))
        whole = replace(old.regions[0], outputs=outputs)
        regions = (whole, *old.regions[1:])
        values, operations = tuple(self._values), tuple(self._operations)
        return prune(replace(old, values=values, operations=operations, outputs=outputs, regions=regions))

    def _passed(self, operand: int | Constant) -> int | Constant:
        return self._now.get(operand, operand) if isinstance(operand, int) else operand

    def _read(self, operand: int | Constant) -> int | Constant:
        return self._clones.get(operand, self._passed(operand)) if isinstance(operand, int) else operand

    def _begin_stage(self, tie: int) -> None:
        """Adds what begins with a value: a barrier that waits for it and for copies to the host, copies from there, and
        the clones that operations which wait for it read first.

        All that reads the value reads it behind the barrier: XLA leaves out of a barrier what nobody reads there.
        """
        wanted = [o for reader in self._waiting.get(tie, ()) for o in reader.read if o in self._cloned]
        remade, known = [v for v in wanted if v not in self._offloaded], {*self._clones, *self._offloaded}
        made = {o.index: o for v in remade for o in chain(self._program, self._recomputed, v, known)}
        operations = [made[index] for index in sorted(made) if made[index].results[0] not in self._clones]
        needed = {*wanted, *(o for operation in operations for o in operation.read)}
        returning = [v for v, one in self._offloaded.items() if v in self._on_host and (v in needed or one.back == tie)]
        returning = [v for v in returning if v not in self._clones]
        leaving = [v for v in self._on_host if self._offloaded[v].away == tie]
        makers = self._program.makers
        held = any(is_product(self._program, makers[value]) for value in self._pending)
        releases = held and makers[tie].index in self._continuing
        if not (operations or returning or leaving or releases):
            return
        behind = self._barrier(operations, tie, {*returning, *leaving}, needed)
        for value in returning:
            self._clones[value] = self._moved(makers[value], self._on_host[value], None)
        self._early.update(set(returning) - needed)
        for operation in operations:
            operands = tuple(behind.get(o, self._read(o)) if isinstance(o, int) else o for o in operation.operands)
            results = tuple(self._new(result) for result in operation.results)
            self._clones |= zip(operation.results, results, strict=True)
            self._operations.append(replace(operation, operands=operands, results=results, again=True))

    def _barrier(
        self, operations: Sequence[Operation], tie: int, on_host: Collection[int], needed: Collection[int]
    ) -> dict[int, int]:
        """Adds the barrier before some clones and copies; gives what clones read behind it, by what it was."""
        guarded, made, values = dict[int, None](), set[int](), self._program.values
        little = _LITTLE * max((values[r].total_bytes for o in operations for r in o.results), default=0)
        for operation in operations:
            guarded |= dict.fromkeys(self._guarded(operation, made, guarded, little))
            made.update(operation.results)
        here = [value for value in self._early if value in needed]
        now = {value: self._now.get(value, value) for value in (tie, *self._pending)}
        now |= {value: self._clones.get(value, self._now.get(value, value)) for value in guarded}
        moved = {self._clones[value]: value for value in here} | {self._on_host[value]: value for value in on_host}
        passing = tuple(dict.fromkeys((*now.values(), *moved)))
        results = tuple(self._new(value) for value in passing)
        behind = dict(zip(passing, results, strict=True))
        primitive, params = _jax.optimization_barrier, dict[str, object]()
        reader = self._program.makers[tie]
        self._operations.append(
            replace(reader, primitive=primitive, params=params, operands=passing, results=results, bodies=())
        )
        self._now |= {value: behind[now[value]] for value in (tie, *self._pending)}
        self._clones |= {value: behind[self._clones[value]] for value in here}
        self._on_host |= {value: behind[self._on_host[value]] for value in on_host}
        self._pending.clear()
        self._early.difference_update(here)
        return {value: behind[now[value]] for value in guarded}

    def _guarded(self, operation: Operation, made: set[int], guarded: Collection[int], little: float) -> Iterator[int]:
        """What a clone reads behind the barrier: all that is kept. Where it reads arguments and clones of earlier
        stages alone, the smallest, if that is an argument or at most ``little``; ``made``: of this stage."""
        read = [o for o in operation.read if o not in _from_nothing(self._program) and o not in self._offloaded]
        kept = [o for o in read if o in self._program.makers and o not in made and o not in self._clones]
        yield from kept
        if not kept and read and made.isdisjoint(read) and not any(o in guarded for o in read):
            least = min(read, key=lambda value: self._program.values[value].total_bytes)
            if least not in self._clones or self._program.values[least].total_bytes <= little:
                yield least

    def _moved(self, maker: Operation, value: int, kind: str | None) -> int:
        """A copy of a value in another memory, which this adds."""
        new = self._new(value)
        self._values[new] = replace(self._values[new], memory_kind=kind)
        primitive, params = _jax.move_between_memories, _jax.params_of_move(kind)
        moved = replace(
            maker, primitive=primitive, params=params, operands=(value,), results=(new,), again=kind is None
        )
        self._operations.append(moved)
        return new

    def _new(self, value: int) -> int:
        new = len(self._values)
        self._values.append(replace(self._values[value], index=new, name=None))
        self.origins[new] = self.origins.get(value, value)
        return new


def _reads_residual(program: Program, operation: Operation) -> bool:
    makers, forward = program.makers, early(program)
    read = (makers[o].index for o in operation.read if o in makers)
    return any(index in forward for index in read)


@memoize
def _continuing(program: Program) -> frozenset[int]:
    """The late operations, by index, that lead to a further reader of residuals, or are one."""
    needed, found = set[int](), set[int]()
    for index in reversed(program.regions[0].operations):
        operation = program.operations[index]
        if index in early(program):
            continue
        if not needed.isdisjoint(operation.results):
            found.add(index)
        if index in found or _reads_residual(program, operation):
            needed.update(operation.read)
    return frozenset(found)


def ending(program: Program) -> Iterator[int]:
    """The late materialised values that lead to no further reader of residuals, the first of each chain: gradients of
    weights."""
    forward, leading, behind = early(program), _continuing(program), set[int]()
    for index in program.regions[0].operations:
        operation = program.operations[index]
        if index in forward or index in leading:
            continue
        read = [o for o in operation.read if o in program.makers]
        if read and behind.issuperset(read):
            behind.update(operation.results)
        elif not is_fixed(operation) and not materialised(program).isdisjoint(operation.results):
            behind.update(operation.results)
            yield from operation.results
