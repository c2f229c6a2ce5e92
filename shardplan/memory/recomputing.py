"""What XLA:GPU computes once and stores, though each kernel that reads it could compute it anew.

XLA fuses a value into the kernels that read it where that makes all of them quicker together. It estimates the time of
a kernel from the bytes that it reads and writes, and from its operations, which run beside that. A sum of two products
is quick to compute: it is stored only where many kernels would read both products instead. A hyperbolic tangent, or
what random bits become, takes longer to compute than to read: the backward pass finds what the forward pass has stored.

>>> import jax, jax.numpy as jnp, shardplan
>>> def stored(function):
...     square = jax.ShapeDtypeStruct((512, 512), "bfloat16")
...     problem = shardplan.plan(jax.grad(function), 1, square, square).schedule.problem
...     makers = {operation.results[0]: operation.primitive.name for operation in problem.program.operations}
...     return [makers[value] for value in kernels_of(problem).stored]
>>> stored(lambda w, x: jnp.sum(jax.nn.relu(x @ w) @ w)), stored(lambda w, x: jnp.sum(jax.nn.gelu(x @ w) @ w))
([], ['tanh'])
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod

from shardplan.memory.convolutions import CONVOLUTION, rectifiers_of_poolings, spread_images, unreversed
from shardplan.memory.fusion import fused_operations, fuses_operands, pointwise_operations, readers_of
from shardplan.memory.products import product_operands
from shardplan.problem import Problem
from shardplan.program import Operation

_CYCLES = {
    "sin": 970, "cos": 970, "tan": 970, "pow": 510, "tanh": 400, "atan2": 431, "erf": 300, "erfc": 400, "erf_inv": 400,
    "random_bits": 360, "log1p": 229, "expm1": 190, "cbrt": 178, "log": 166, "logistic": 105, "exp": 79, "exp2": 79,
    "rsqrt": 75, "sqrt": 75, "div": 19,
}  # fmt: skip
"""Clock cycles that an H100 takes for one element in float32, as XLA's performance model counts them. What XLA puts
together from other operations (an error function, random bits) counts as these do together. A hyperbolic tangent,
467 there, was compiled stored in bfloat16 and computed anew in float32: 400 is chosen between what these two say."""

_OTHER_CYCLES = 5
_CYCLES_PER_BYTE = 20.0
"""What an H100 computes in the time in which it reads or writes one byte."""

_BESIDE = 0.95
"""How much of the shorter one of computing and of reading and writing runs beside the longer one."""

_MOST_TOGETHER = 64
"""Operations of a kernel that are told apart."""

_MOST_ASKED = 64
"""Kernels that are asked what reading a value would save them. Where more would compute it, as all layers would that
follow a residual, so many of them speak for the others."""

_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
_SPREADING = frozenset({"reshape", "broadcast_in_dim", "stop_gradient", "max", "div", "copy", "convert_element_type"})
_PARTS = frozenset({"slice", "dynamic_slice", "split", "gather", "squeeze"})


@dataclass(frozen=True, slots=True)
class Kernels:
    """What XLA:GPU makes of a program: the operations ``fused`` into the kernels that read them, by index; the values
    that kernels ``read`` from memory or that leave; those that are ``stored`` though each kernel could compute them;
    the operands that convolutions read from ``copied`` memory of their own.
    """

    fused: frozenset[int]
    read: frozenset[int]
    stored: frozenset[int]
    copied: frozenset[tuple[int, int]] = frozenset()


def kernels_of(problem: Problem, copied: Collection[tuple[int, int]] = ()) -> Kernels:
    """What XLA:GPU fuses, and what it stores.

    ``copied`` are operands that an operation reads from a copy of its own, by its index and their position.
    """
    spread = {(index, 0) for index in spread_images(problem.program, problem.program.operations, copied)}
    fused, read = fused_operations(problem), _read_from_memory(problem, spread | {*copied})
    read |= {first.results[0] for first, *_ in rectifiers_of_poolings(problem.program).values()}
    within = fused | _normalising(problem)
    stored = _dearer_anew(problem, within, read, frozenset())
    # once others are stored, fewer kernels compute a value
    stored = _dearer_anew(problem, within, read, stored) if stored else stored
    return Kernels(fused, read, stored, frozenset(copied))


def _dearer_anew(
    problem: Problem, fused: frozenset[int], needed: frozenset[int], before: frozenset[int]
) -> frozenset[int]:
    """Values that are quicker read than computed anew, where those ``before`` are stored; of these, if any."""
    operations = problem.program.operations
    kernels, readers = _kernels_reading(problem, fused, needed | before), readers_of(operations)
    walk = _Walk(problem, fused, needed | before)
    ends = {operation.index: walk.follow(operation) for operation in operations}
    walk.begin_again(needed)
    stored: set[int] = set()
    for operation in operations:
        own = walk.follow(operation)
        result = operation.results[0] if len(operation.results) == 1 else None
        if operation.index not in fused or result is None or result in needed or (before and result not in before):
            continue
        reading = {reader.index: reader for reader in readers.get(result, ())}
        found = kernels.get(result, frozenset())
        if len(reading) < 2 or len(found) < 2:
            continue
        asked = sorted(found)[:: -(-len(found) // _MOST_ASKED)]
        saved = sum(walk.gained(ends[kernel], own, result, reading) for kernel in asked)
        if saved * len(found) / len(asked) > walk.time(own):
            stored.add(result)
            walk.store(result)
    return frozenset(stored)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """What a kernel computes, up to one operation, and the values that it reads from memory."""

    operations: frozenset[int]
    sources: frozenset[int]
    written: float


class _Walk:
    """A walk along a program, which knows of each value how a kernel computes it from values in memory."""

    def __init__(self, problem: Problem, fused: frozenset[int], needed: frozenset[int]) -> None:
        self._problem, self._fused, self._needed = problem, fused, needed
        self._values = problem.program.values
        self._makers = {result: o.index for o in problem.program.operations for result in o.results}
        self._bytes = [value.total_bytes for value in self._values]
        self._elements = [prod(value.shape) for value in self._values]
        self._read = [self._operands(operation) for operation in problem.program.operations]
        self._cycles: dict[int, float] = {}
        self._fusing: dict[int, _Kernel] = {}

    def begin_again(self, needed: frozenset[int]) -> None:
        """Goes back to the start of the program, from where other values are in memory."""
        self._fusing, self._needed = {}, needed

    def follow(self, operation: Operation) -> _Kernel:
        """The kernel that would end with this operation, after the walk has come to it."""
        operands = self._read[operation.index]
        fusing = [self._fusing[o] for o in operands if o in self._fusing]
        together = frozenset((operation.index,)).union(*[kernel.operations for kernel in fusing])
        read = [o for o in operands if o not in self._fusing]
        sources = frozenset(read).union(*[kernel.sources for kernel in fusing])
        elements = max([self._elements[v] for v in (*operands, *operation.results)], default=0)
        self._cycles[operation.index] = elements * _CYCLES.get(operation.primitive.name, _OTHER_CYCLES)
        if len(together) > _MOST_TOGETHER:  # what a long chain computes is kept as one sum
            self._cycles[operation.index] = sum(self._cycles[index] for index in together)
            together = frozenset((operation.index,))
        kernel = _Kernel(together, sources, self._moving(operation.results))
        if operation.index in self._fused and self._needed.isdisjoint(operation.results):
            self._fusing |= dict.fromkeys(operation.results, kernel)
        return kernel

    def _operands(self, operation: Operation) -> list[int]:
        return [o for o in operation.operands if isinstance(o, int) and o not in self._problem.generated]

    def store(self, value: int) -> None:
        """Lets a value be read from memory from now on."""
        del self._fusing[value]

    def time(self, kernel: _Kernel) -> float:
        """How long a kernel takes, in the time in which one byte is read."""
        return _time(self._computing(kernel.operations), self._moving(kernel.sources) + kernel.written)

    def gained(self, kernel: _Kernel, own: _Kernel, value: int, reading: Mapping[int, Operation]) -> float:
        """The time by which a kernel is quicker where it reads a value instead of computing it as ``own``."""
        program = self._problem.program
        others = kernel.operations - own.operations
        operations, sources = set(others), set[int]()
        for operation in (program.operations[index] for index in others):
            for operand in self._read[operation.index]:
                if operand == value or self._makers.get(operand) in others:
                    continue
                fusing = self._fusing.get(operand, _Kernel(frozenset(), frozenset((operand,)), 0.0))
                operations |= fusing.operations
                sources |= fusing.sources
        share = max((self._share(reading[index], value) for index in others & reading.keys()), default=1.0)
        computing, moving = self._computing(operations), self._moving(sources) + kernel.written
        more = share * self._computing(own.operations - operations), share * self._moving(own.sources - sources)
        anew = _time(computing + more[0], moving + more[1])
        return anew - _time(computing, moving + share * self._bytes[value])

    def _share(self, reader: Operation, value: int) -> float:
        """How much of a value an operation reads, where it takes a part of it."""
        if reader.primitive.name not in _PARTS:
            return 1.0
        largest = max((self._elements[result] for result in reader.results), default=0)
        return min(1.0, largest / max(1, self._elements[value]))

    def _computing(self, operations: Iterable[int]) -> float:
        return sum([self._cycles[index] for index in operations]) / _CYCLES_PER_BYTE

    def _moving(self, values: Iterable[int]) -> float:
        return float(sum([self._bytes[value] for value in values]))


def _time(computing: float, moving: float) -> float:
    return computing + moving - _BESIDE * min(computing, moving)


def _normalising(problem: Problem) -> frozenset[int]:
    """Reductions whose result meets again what was reduced, as in a softmax: XLA:GPU keeps a row in one kernel."""
    readers = readers_of(problem.program.operations)
    makers = {result: operation for operation in problem.program.operations for result in operation.results}
    found = set()
    for operation in problem.program.operations:
        if operation.primitive.name not in _REDUCTIONS:
            continue
        result, reduced = operation.results[0], operation.operands[0]
        meeting = {reduced} if isinstance(reduced, int) else set()
        meeting |= {o for value in meeting if value in makers for o in makers[value].operands if isinstance(o, int)}
        following = readers.get(result, [])
        while len(following) == 1 and following[0].primitive.name in _SPREADING:
            following = readers.get(following[0].results[0], [])
        if any(isinstance(o, int) and o in meeting for reader in following for o in reader.operands):
            found.add(operation.index)
    return frozenset(found)


def _read_from_memory(problem: Problem, copied: Collection[tuple[int, int]]) -> frozenset[int]:
    """Values that leave a region, or that an operation reads which computes neither operands nor their copies."""
    needed = {o for region in problem.program.regions for o in region.outputs if isinstance(o, int)}
    products, filters = product_operands(problem.program, pointwise_operations(problem)), unreversed(problem.program)
    for operation in problem.program.operations:
        convolves = operation.primitive.name == CONVOLUTION
        for position, operand in enumerate(operation.operands):
            if not fuses_operands(problem, operation, position):
                read = products.get((operation.index, position))
                if (
                    isinstance(operand, int)
                    and not (read and read.copied)
                    and (operation.index, position) not in copied
                ):
                    needed.add(read.value if read else filters.get(operand, operand) if convolves else operand)
    return frozenset(needed)


def _kernels_reading(problem: Problem, fused: frozenset[int], needed: Collection[int]) -> dict[int, frozenset[int]]:
    """Per value, the kernels that compute with it: operations outside of ``fused``, and those that make what is
    ``needed`` in memory."""
    kernels: dict[int, frozenset[int]] = {}
    in_memory = frozenset(needed)
    for operation in reversed(problem.program.operations):
        reading = frozenset((operation.index,))
        if operation.index in fused and in_memory.isdisjoint(operation.results):
            reading = frozenset[int]().union(*(kernels.get(result, frozenset()) for result in operation.results))
        for operand in operation.operands:
            if isinstance(operand, int):
                kernels[operand] = kernels.get(operand, frozenset()) | reading
    return kernels
