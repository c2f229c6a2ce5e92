"""The order of XLA's last scheduler, which hides collectives, and every short wait, behind work that nothing waits for.

It goes through the program from its end. Next (which means: before all that is placed) comes an operation whose readers
are placed. An operation can start a microsecond after the one that it needs, by its model, and a collective takes
its time; what fills such a wait is placed first, and of that what fits the wait best. So weights' gradients and sums
for biases, whose merged reductions come last, are placed one by one behind the kernels of the backward pass, the last
ones first, whatever that holds in memory. Below, two kernels of a layer run between one weight's gradient and the next.

>>> import jax, jax.numpy as jnp, shardplan
>>> from shardplan.memory.recomputing import kernels_of
>>> def loss(weights, x, mixing):
...     for w in weights:
...         x = mixing @ (x @ w)
...     return jnp.sum(x)
>>> square, weights = jax.ShapeDtypeStruct((64, 64), "float32"), [jax.ShapeDtypeStruct((64, 64), "float32")] * 3
>>> x, mesh = jax.ShapeDtypeStruct((4096, 64, 64), "float32"), jax.sharding.AbstractMesh((2,), ("x",))
>>> pins = {"0/*": jax.P(), "1": jax.P("x", None, None), "2": jax.P()}
>>> plan = shardplan.plan(jax.grad(loss), mesh, weights, x, square, pins=pins)
>>> [late] = [[o.index for o in group] for group in combined_reductions(plan.schedule)]
>>> order = hiding_order(plan.schedule, kernels_of(plan.schedule.problem))
>>> [order.index(index) > index for index in late]
[True, False, False]
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from math import prod

from shardplan.layout import Layout
from shardplan.memory.accumulation import merged_in
from shardplan.memory.combining import combined_reductions, without_leading
from shardplan.memory.convolutions import CONVOLUTION
from shardplan.memory.fusion import REDUCTIONS as SUMS
from shardplan.memory.liveness import bytes_in, layout_left
from shardplan.memory.order import operands_first
from shardplan.memory.placing import Placing
from shardplan.memory.products import PRODUCT, is_multiplied, is_sum
from shardplan.memory.recomputing import Kernels
from shardplan.program import Constant, Operation
from shardplan.schedule import Schedule
from shardplan.strategy import operand_type

_CONVOLUTION = 10.0
"""Microseconds of any convolution, as it counts."""

_COLLECTIVE, _SENT = 33.0, 0.35e6
"""Microseconds that it counts for a small collective of eight H100s, and the bytes that one moves per microsecond."""

_BYTES = 3.35e6
"""Bytes that an H100 reads or writes per microsecond."""

_FLOPS = {2: 630e6, 4: 315e6}
"""Operations of a product per microsecond, by the bytes of an element, behind `_PRODUCT`."""

_PRODUCT = 6.5
"""Microseconds that a product takes besides, which it counts in proportion outside of `_MEASURED`."""

_MEASURED = (256, 4096)
"""Dimensions of the products that XLA's times were measured with; others take as much per operation as the next one."""

_MOST_SOURCES = 64
"""Values that one kernel reads, about: what is computed from more counts as stored."""


def hiding_order(schedule: Schedule, kernels: Kernels) -> list[int]:
    """The indices of all operations in the order in which they run; a loop's body stands before the loop.

    Bodies of loops and branches keep the order of the program.
    """
    merged = combined_reductions(schedule)
    for groups in (merged, without_leading(schedule, merged), []):
        graph = Graph(schedule, kernels, groups)
        if len(graph.in_order()) == len(graph.needs):  # else two merged reductions wait for each other
            break
    graph.join(kernels)
    graph.wait_for_slices(kernels)
    placed = Placing(graph).run()
    order: list[int] = []
    done: set[int] = set()
    operations = schedule.program.operations
    for first in (
        *(node for node in reversed(placed) if node < len(operations)),
        *schedule.program.regions[0].operations,
    ):
        for index in (first, *graph.joined.get(first, ())):
            graph.append(index, order, done)
    return order


class Graph:
    """The kernels of the program's own region, by the index of the operation that ends them, and its collectives,
    each a start and an end, numbered after all operations: what each needs, and how long it takes."""

    def __init__(self, schedule: Schedule, kernels: Kernels, combined: Sequence[Sequence[Operation]]) -> None:
        self.schedule, self.program = schedule, schedule.program
        self.needs: dict[int, set[int]] = {}
        self.takes: dict[int, float] = {}
        self.place: dict[int, float] = {}
        self.values: dict[int, set[int]] = {}  # those that each reads as they are made, or lie outside
        self.starts: dict[int, int] = {}  # per end of a collective, its start
        self.joined: dict[int, list[int]] = {}
        self.makers = {result: operation for operation in self.program.operations for result in operation.results}
        self._ends: dict[object, int] = {}
        self._reads: dict[int, frozenset[int]] = {}
        self._sources: dict[int, frozenset[int]] = {}
        self._products = {index: found.product for index, found in kernels.adding.items()}
        self.parts = {o.index for o in self.program.operations if self._is_part(o)}
        in_memory = kernels.stored | kernels.read
        for operation in self.program.operations:
            reads = frozenset[int]().union(
                *(self._sources.get(o, frozenset((o,))) for o in operation.operands if isinstance(o, int))
            )
            stored = not in_memory.isdisjoint(operation.results)
            if operation.index in kernels.fused and not stored and len(reads) <= _MOST_SOURCES:
                self._sources |= dict.fromkeys(operation.results, reads)
            elif operation.region == 0:
                self._reads[operation.index] = reads
        self._connect({o.index: number for number, group in enumerate(combined) for o in group})

    def _is_part(self, operation: Operation) -> bool:
        """Whether a library makes a result: together with the workspace, from which it is taken."""
        library = operation.primitive.name == CONVOLUTION or is_multiplied(self.program, operation)
        return library or operation.index in self._products

    def in_order(self) -> list[int]:
        """All nodes, each behind what it needs, else in the order of the program; fewer if there are cycles."""
        missing = {node: len(needs) for node, needs in self.needs.items()}
        readers: dict[int, list[int]] = {node: [] for node in self.needs}
        for node, needs in self.needs.items():
            for need in needs:
                readers[need].append(node)
        ready = [(self.place[node], node) for node, count in missing.items() if not count]
        heapq.heapify(ready)
        done: list[int] = []
        while ready:
            done.append(heapq.heappop(ready)[1])
            for reader in readers[done[-1]]:
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready, (self.place[reader], reader))
        return done

    def _size(self, value: int) -> float:
        layout = self.schedule.assignment.values.get(value)
        return 0.0 if layout is None else bytes_in(self.schedule, value, layout)

    def join(self, kernels: Kernels) -> None:
        """Lets reductions be part of a kernel before them, of as many elements, that reads or makes what is reduced,
        and what is computed element by element of one before it that reads the same and is as large: that one makes
        several results, and each is taken from them.

        What they need stands before that kernel, and what needs them behind, so that nothing waits for itself.
        """
        touching: dict[int, list[int]] = {}
        place = {node: number for number, node in enumerate(self.in_order())}
        owner: dict[int, int] = {}
        for index in sorted(self._reads):
            sums = self.program.operations[index].primitive.name in SUMS
            if not sums and index not in kernels.fused:
                continue
            other = self._joining(index, touching, place, owner)
            if other is not None:
                owner[index] = other
                self.joined.setdefault(other, []).append(index)
                self.parts |= set() if sums else {other}
            else:
                for value in {*self._reads[index], *self.program.operations[index].results}:
                    touching.setdefault(value, []).append(index)
        for index, other in self._joining_later(place, touching, owner).items():
            owner[index] = other
            self.joined.setdefault(other, []).append(index)
        for index, other in owner.items():
            self.needs[other] |= self.needs.pop(index) - {other}
            self.takes[other] += self.takes.pop(index)
            self.values[other] |= self.values.pop(index)
        for node, needed in self.needs.items():
            if not needed.isdisjoint(owner):
                self.needs[node] = {owner.get(need, need) for need in needed} - {node}

    def _joining(
        self,
        index: int,
        touching: Mapping[int, Sequence[int]],
        place: Mapping[int, int],
        owner: Mapping[int, int],
    ) -> int | None:
        """The kernel before an operation that takes it in, if there is one."""
        operation, values = self.program.operations[index], self.program.values
        sums, elements = operation.primitive.name in SUMS, self._elements(operation)
        reads = sorted(self._reads[index], key=lambda value: (-values[value].total_bytes, value))
        shared = reads[:1] if sums else [value for value in reads if prod(values[value].shape) == elements]
        needs = [(need, owner.get(need, need)) for need in self.needs[index]]
        for value in shared:
            for other in reversed(touching.get(value, [])[-_MOST_SOURCES:]):
                before = all(need == other or place[own] < place[other] for need, own in needs)
                alike = self._elements(self.program.operations[other]) == elements
                if alike and before and place[other] < place[index] and (sums or value in self._reads[other]):
                    return other
        return None

    def wait_for_slices(self, kernels: Kernels) -> None:
        """Lets a product that is added to one of merged products wait for the kernel that takes this one out of them:
        it is one with the first kernel as large that reads another one, such as a sum of many, where that can be."""
        owner = {part: node for node, parts in self.joined.items() for part in parts}
        operations = self.program.operations
        added = {found.onto: index for index, found in kernels.adding.items() if index in self.needs}
        reading: dict[int, list[int]] = {}
        for node in sorted(self._reads.keys() & kernels.fused):
            for value in self._reads[node]:
                reading.setdefault(value, []).append(node)
        for group in merged_in(self.schedule, operations):
            results = [operations[index].results[0] for index in group]
            nodes = sorted({node for result in results for node in reading.get(result, ())})
            for index in (added[result] for result in results if result in added):
                elements = self._elements(operations[index])
                alike = (owner.get(node, node) for node in nodes if self._elements(operations[node]) == elements)
                first = next(alike, None)
                if first is not None and not self._needs_any(first, index):
                    self.needs[index].add(first)

    def _needs_any(self, node: int, wanted: int) -> bool:
        """Whether a node needs another one, directly or not."""
        seen, stack = {node}, [node]
        while stack:
            for need in self.needs[stack.pop()]:
                if need == wanted:
                    return True
                if need not in seen:
                    seen.add(need)
                    stack.append(need)
        return False

    def through_values(self) -> dict[int, set[int]]:
        """What each node needs, arguments and what is taken from several results included: values, by their complement,
        each of which needs what makes it."""
        owner = {part: node for node, parts in self.joined.items() for part in parts}
        found = {node: {*needs} for node, needs in self.needs.items()}
        for node, values in self.values.items():
            for value in values:
                maker = self._maker(value)
                made = owner.get(maker, maker) if maker is not None else None
                if made is None or (made in self.parts and made != node):
                    found[node].add(~value)
                    found.setdefault(~value, set()).update(() if made is None else (made,))
        for node, needs in found.items():
            if node >= 0:
                needs.difference_update([made for need in needs if need < 0 for made in found[need]])
        return found

    def _joining_later(
        self, place: Mapping[int, int], touching: Mapping[int, Sequence[int]], owner: Mapping[int, int]
    ) -> dict[int, int]:
        """Reductions that no kernel before them takes in, with the next one that reads a value as large as what is
        reduced that they read too, where nothing before that one needs them: a loss is summed up in the kernel in which
        the backward pass begins."""
        needed: dict[int, int] = {}  # where a node is first needed
        for node, needs in self.needs.items():
            for need in needs:
                needed[need] = min(place[node], needed.get(need, len(place)))
        found = dict[int, int]()
        for index in sorted(self._reads.keys() - owner.keys() - self.joined.keys()):
            operation = self.program.operations[index]
            if operation.primitive.name not in SUMS or index in found.values():
                continue
            elements, until = self._elements(operation), needed.get(index, len(place))
            for value in sorted(self._reads[index]):
                if prod(self.program.values[value].shape) != elements:
                    continue
                later = (
                    other
                    for other in touching.get(value, ())
                    if place[index] < place[other] < until
                    and other not in owner
                    and other not in found
                    and self._elements(self.program.operations[other]) == elements
                )
                other = min(later, key=place.__getitem__, default=None)
                if other is not None:
                    found[index] = other
                    break
        return found

    def _elements(self, operation: Operation) -> int:
        """How many elements a kernel goes through."""
        value = (operation.operands if operation.primitive.name in SUMS else operation.results)[:1]
        return sum(prod(self.program.values[v].shape) for v in value if isinstance(v, int))

    def _connect(self, merged: Mapping[int, int]) -> None:
        sent: dict[int, int] = {}  # per value that collectives bring to its layout, their end
        for index in self._reads:
            operation = self.program.operations[index]
            strategy = self.schedule.assignment.strategies.get(index)
            self.needs[index], self.place[index], self.takes[index] = set(), index, self._time(operation)
            self.values[index] = set()
            for position, result in enumerate(operation.results if strategy is not None else ()):
                steps = self.schedule.result_steps(operation, position)
                if strategy is not None and any(step.kind != "slice" for step in steps):
                    left = layout_left(self.schedule.problem, operation, strategy, position)
                    size = bytes_in(self.schedule, result, left)
                    end = self._collective(merged.get(index, ("result", result)), size, index)
                    self.needs[self.starts[end]].add(index)
                    self.values[self.starts[end]].add(result)
                    sent[result] = end
        for index in self._reads:
            moved = dict(self._moved(index, sent))
            for value in self._reads[index]:
                maker = self._maker(value)
                need = moved.get(value, sent.get(value, maker))
                if need is not None:
                    self.needs[index].add(need)
                if need == maker:
                    self.values[index].add(value)

    def _maker(self, value: int) -> int | None:
        maker = self.makers.get(value)
        return maker.index if maker is not None and maker.index in self._reads else None

    def _moved(self, index: int, sent: dict[int, int]) -> list[tuple[int, int]]:
        """The values that an operation reads in another layout, with the ends of the collectives that bring them."""
        found, values = list[tuple[int, int]](), self.schedule.assignment.values
        pairs: list[tuple[int | Constant, Layout | None]] = []
        for part in (self._products.get(index, index), index)[index not in self._products :]:
            strategy = self.schedule.assignment.strategies.get(part)
            if strategy is not None:
                pairs += zip(self.program.operations[part].operands, strategy.operands, strict=True)
        for operand, layout in pairs:
            if not isinstance(operand, int) or layout is None or values.get(operand, layout) == layout:
                continue
            if all(step.kind == "slice" for step in self.schedule.route(operand, layout).steps):
                continue
            end = self._collective((operand, layout), bytes_in(self.schedule, operand, layout), index - 1)
            for value in self._sources.get(operand, frozenset((operand,))):
                maker = self._maker(value)
                if maker is not None:
                    self.needs[self.starts[end]].add(sent.get(value, maker))
                if value not in sent:
                    self.values[self.starts[end]].add(value)
                found.append((value, end))
        return found

    def _collective(self, key: object, size: float, place: int) -> int:
        """The end of a collective, which is made where there is none yet, or grows."""
        if key not in self._ends:
            start = len(self.program.operations) + 2 * len(self._ends)
            self._ends[key] = start + 1
            self.starts[start + 1], self.needs[start], self.needs[start + 1] = start, set(), {start}
            self.takes[start], self.takes[start + 1] = 0.0, _COLLECTIVE
            self.values[start], self.values[start + 1] = set(), set()
        end = self._ends[key]
        self.takes[end] += size / _SENT
        self.place[end - 1], self.place[end] = place + 0.3, place + 0.6
        return end

    def _time(self, operation: Operation) -> float:
        """Microseconds that a kernel takes on one device."""
        if operation.primitive.name == CONVOLUTION:
            return _CONVOLUTION
        reads = self._reads.get(operation.index, frozenset())
        if operation.index in self._products:  # as long as without what it is added to
            operation = self.program.operations[self._products[operation.index]]
            reads = frozenset(o for o in operation.operands if isinstance(o, int))
        moved = sum(map(self._size, (*reads, *operation.results))) / _BYTES
        if operation.primitive.name != PRODUCT or is_sum(self.program, operation):
            return moved
        return self._product_time(operation)

    def _product_time(self, operation: Operation) -> float:
        value = self.program.values[operation.results[0]]
        width = value.total_bytes // max(1, prod(value.shape))
        flops, measured = 1.0, 1.0
        for count, size in enumerate(self._product_sizes(operation)):
            flops *= size
            measured *= min(max(size, _MEASURED[0]), _MEASURED[1]) if count else min(size, 4)
        return flops / measured * (_PRODUCT + 2 * measured / _FLOPS.get(width, _FLOPS[4]))

    def _product_sizes(self, operation: Operation) -> tuple[float, ...]:
        """Of a product on one device: its batches, what it adds up, and what else each side has."""
        strategy, sizes = self.schedule.assignment.strategies[operation.index], list[tuple[float, ...]]()
        degrees = self.schedule.space.mesh.sizes
        numbers = zip(*operation.params["dimension_numbers"], strict=True)
        for operand, layout, dims in zip(operation.operands, strategy.operands, numbers, strict=True):
            shape = operand_type(self.program, operand).shape
            axes = layout[-len(shape) :] if layout is not None else ((),) * len(shape)
            left = [size / prod(degrees[axis] for axis in split) for size, split in zip(shape, axes, strict=True)]
            contracted, batch = (prod(left[dim] for dim in some) for some in dims)
            sizes.append((batch, contracted, prod(left) / max(1e-9, batch * contracted)))
        return *sizes[0], sizes[1][2]

    def append(self, index: int, order: list[int], done: set[int]) -> None:
        """Appends an operation after all that it is computed from, and a loop after its body."""
        for operation in operands_first(self.program, self.makers, index, done):
            for body in operation.bodies:
                for inner in self.program.regions[body].operations:
                    self.append(inner, order, done)
            order.append(operation.index)
