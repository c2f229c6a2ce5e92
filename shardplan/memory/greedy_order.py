"""The order of XLA's list scheduler: next runs what frees the most memory, less what its results take.

It is one of the orders among which XLA keeps the one with the lowest peak, see `shardplan.memory.order`. Where a copy
of an operand has to be made first (with rows of neighbours, for a convolution), an operation waits until nothing better
is left.

What comes after hides collectives behind work: from the end of a program, whatever can run beside one. Weights'
gradients can, since nothing but their reductions waits for them. So they run last, and the activations that they are
computed from stay until then.

>>> import jax
>>> from shardplan.tracing import trace_program
>>> def step(x, w):
...     late = x @ w
...     return jax.lax.sort(w), (x @ x).sum(), late
>>> square = jax.ShapeDtypeStruct((8, 8), "float32")
>>> program = trace_program(step, (square, square), {})
>>> [operation.primitive.name for operation in program.operations]
['dot_general', 'sort', 'dot_general', 'reduce_sum']
>>> greedy_order(program, fused=(), stored=())
[2, 3, 0, 1]
>>> greedy_order(program, fused=(), stored=(), copied={(0, 0): 2.0})
[2, 3, 1, 0]
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from shardplan.groups import RAGGED
from shardplan.memory.convolutions import CONVOLUTION
from shardplan.memory.order import operands_first
from shardplan.memory.products import PRODUCT
from shardplan.program import Program

_MOST_SOURCES = 64
"""Values that one kernel reads, about: what is computed from more (a long chain of additions) counts as stored."""


def greedy_order(
    program: Program,
    fused: Collection[int],
    stored: Collection[int],
    copied: Mapping[tuple[int, int], float] | None = None,
    last: Collection[int] = (),
) -> list[int]:
    """The indices of all operations in the order in which they run; a loop's body stands before the loop.

    ``fused`` are the operations that become part of the kernels which read them, but for those whose results are
    ``stored``. Operands that are ``copied`` for an operation, by its index and their position, are so many times as
    large as the value: the copy is made before anything is freed. What comes ``last`` waits until nothing else can run.
    """
    order: list[int] = []
    graph = _Graph(program, frozenset(fused), frozenset(stored), copied or {})
    graph.last = frozenset(last)
    _append_region(graph, 0, order)
    return order


def weights_gradients(program: Program) -> frozenset[int]:
    """The products, convolutions and loops, by index, on whose results no other one depends."""
    leading: set[int] = set()  # values that one of them depends on
    found = set()
    for operation in reversed(program.operations):
        leads = not leading.isdisjoint(operation.results)
        long = bool(operation.bodies) or operation.primitive.name in (PRODUCT, RAGGED, CONVOLUTION)
        if long and not leads:
            found.add(operation.index)
        if leads or long:
            leading.update(o for o in operation.operands if isinstance(o, int))
    return frozenset(found)


@dataclass(slots=True)
class _Node:
    """An operation that makes values in memory: the values that it reads, and the bytes that it makes."""

    reads: frozenset[int]
    made: float
    waits_for: int = 0
    freed: float = 0.0
    readers: int = field(default=0)


class _Graph:
    """The kernels of a program and what they read: operations by their index, copies of operands by its complement."""

    def __init__(
        self,
        program: Program,
        fused: frozenset[int],
        stored: frozenset[int],
        copied: Mapping[tuple[int, int], float],
    ) -> None:
        self.program = program
        self.last: frozenset[int] = frozenset()
        self.makers = program.makers
        self.sizes = {value.index: float(value.total_bytes) for value in program.values}
        self.nodes: dict[int, _Node] = {}
        self.reading: dict[int, list[int]] = {}
        sources: dict[int, frozenset[int]] = {}
        for operation in program.operations:
            read: dict[bool, frozenset[int]] = {False: frozenset(), True: frozenset()}
            copy = 0.0
            for position, operand in enumerate(operation.operands):
                if isinstance(operand, int):
                    times = copied.get((operation.index, position), 0.0)
                    read[times > 0] |= sources.get(operand, frozenset((operand,)))
                    copy += times * self.sizes[operand]
            in_memory = operation.index not in fused or not stored.isdisjoint(operation.results)
            if not in_memory and len(read[False]) <= _MOST_SOURCES:
                sources |= dict.fromkeys(operation.results, read[False])
                continue
            if copy:  # values are numbered from 0, so that the copy has a number of its own
                self._add(~operation.index, read[True], copy)
                self.sizes[~operation.index] = copy
                read[False] |= {~operation.index}
            self._add(operation.index, read[False], sum(self.sizes[result] for result in operation.results))

    def _add(self, kernel: int, read: frozenset[int], made: float) -> None:
        self.nodes[kernel] = _Node(read, made)
        for value in read:
            self.reading.setdefault(value, []).append(kernel)

    def region(self, kernel: int) -> int:
        return self.program.operations[max(kernel, ~kernel)].region

    def results(self, kernel: int) -> Iterable[int]:
        return self.program.operations[kernel].results if kernel >= 0 else (kernel,)

    def here(self, kernel: int) -> Iterator[int]:
        """The values that a kernel reads and that its own region makes."""
        for value in self.nodes[kernel].reads:
            maker = self.makers.get(value)
            if value < 0 or (maker is not None and maker.region == self.region(kernel)):
                yield value


def _append_region(graph: _Graph, region: int, order: list[int]) -> None:
    """Appends a region's operations: the greedy ones, each after the fused ones that it computes on the way."""
    operations, nodes = graph.program.operations, graph.nodes
    here = graph.program.regions[region]
    kept = {o for o in here.outputs if isinstance(o, int)}
    left: dict[int, int] = {}  # per value, kernels that still have to read it
    ready: list[tuple[bool, float, int, int, int]] = []
    done: set[int] = set()

    def push(kernel: int) -> None:
        node = nodes[kernel]
        index = max(kernel, ~kernel)
        heapq.heappush(ready, (index in graph.last, node.made - node.freed, -node.readers, index, kernel))

    def read_once_more(value: int) -> None:
        """Once one kernel is left that reads a value, running it frees the value."""
        if value in kept or left[value] != 1:
            return
        for reader in graph.reading[value]:
            if reader not in run and graph.region(reader) == region:
                nodes[reader].freed += graph.sizes[value]
                if not nodes[reader].waits_for:
                    push(reader)

    run: set[int] = set()
    kernels = [kernel for index in here.operations for kernel in (~index, index) if kernel in nodes]
    for kernel in kernels:
        for value in graph.here(kernel):
            left[value] = left.get(value, 0) + 1
            nodes[kernel].waits_for += 1
        nodes[kernel].readers = sum(len(graph.reading.get(result, ())) for result in graph.results(kernel))
    for value in list(left):
        read_once_more(value)
    for kernel in kernels:
        if not nodes[kernel].waits_for:
            push(kernel)
    while ready:
        kernel = heapq.heappop(ready)[-1]
        if kernel in run:
            continue
        run.add(kernel)
        if kernel >= 0:
            _append_with_fused(graph, kernel, order, done)
        for value in graph.here(kernel):
            left[value] -= 1
            read_once_more(value)
        for result in graph.results(kernel):
            for reader in graph.reading.get(result, ()):
                if graph.region(reader) == region:
                    nodes[reader].waits_for -= 1
                    if not nodes[reader].waits_for:
                        push(reader)
    for index in here.operations:
        if operations[index].index not in done:
            _append_with_fused(graph, index, order, done)


def _append_with_fused(graph: _Graph, index: int, order: list[int], done: set[int]) -> None:
    """Appends an operation after the fused ones of its region that it is computed from, and that nothing needed yet."""
    for operation in operands_first(graph.program, index, done):
        for body in operation.bodies:
            _append_region(graph, body, order)
        order.append(operation.index)
