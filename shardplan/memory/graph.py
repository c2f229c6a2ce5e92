"""The dependency graph of a region, as XLA's latency-hiding scheduler sees it: kernels, and starts and ends of
collectives.

A node reads *items* and makes items: a materialised value, a partial result, a resharded copy, or an operand copy of a
library call. The items define the dependencies of nodes and the live ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import TopologicalSorter
from typing import NamedTuple

from shardplan import _jax
from shardplan.layout.collectives import CollectiveKind, Step
from shardplan.layout.layout import Layout
from shardplan.memory.convolutions import ConvolutionCopy, convolution_copies
from shardplan.memory.gpu import H100
from shardplan.memory.kernels import Kernels
from shardplan.memory.operations import (
    computes_operand,
    fusible_operations,
    merged_scatters,
    pointwise_operations,
)
from shardplan.memory.products import ProductOperand, product_operands
from shardplan.problem.device_bytes import bytes_in, layout_left
from shardplan.problem.schedule import Route, Schedule
from shardplan.program.control_flow import Link
from shardplan.program.operation_kinds import POOLING_GRADIENT, REDUCTIONS, UPDATES, is_view, moves_between_memories
from shardplan.program.program import Operation
from shardplan.program.residuals import early


class Item(NamedTuple):
    """A tensor in memory. Its forms are:

    | form | memory |
    |---|---|
    | `stored` | the value in its own layout |
    | `left` | a result in its operation's own layout, until it is reduced |
    | `copy` | the value in another layout, only for the operation ``reader`` if that is not -1 |
    | `slice` | a part of the value, for the library call ``reader`` |
    | `operand` | the copy of operand ``reader`` for a library call, ``times`` as large, in dimension order ``order`` |
    | `windows` | the positions of the largest elements of a pooling's windows |
    """

    value: int
    form: str
    layout: Layout = ()
    reader: int = -1
    order: tuple[int, ...] = ()
    times: float = 1.0


@dataclass(slots=True)
class Node:
    """A kernel, a loop, or the start or the end of a collective.

    ``place`` is the last operation of a kernel, or the operation of a collective, by index. ``reads`` has each item,
    and whether its read is elementwise. ``inside`` are the fused operations. ``sends`` is the kind of a collective:
    XLA merges those of one kind. ``library``: whether this is a library call.
    """

    place: int
    kind: str = "kernel"
    reads: dict[Item, bool] = field(default_factory=dict)
    makes: list[Item] = field(default_factory=list)
    needs: set[int] = field(default_factory=set)
    inside: list[int] = field(default_factory=list)
    takes: float = 0.0
    sends: tuple[object, ...] = ()
    bytes: float = 0.0
    elements: int = 0
    library: bool = False
    other: int = -1
    """The start of an end, and the end of a start."""


class Graph:
    """The nodes of a region. Only `shardplan.memory.merging` changes them after the construction."""

    def __init__(
        self, schedule: Schedule, kernels: Kernels, region: int, alias: dict[int, Item | None] | None = None
    ) -> None:
        self.schedule, self.kernels, self.region = schedule, kernels, region
        self.program, self.problem = schedule.program, schedule.problem
        self.nodes: list[Node] = []
        self.makers: dict[Item, int] = {}
        """The node that makes an item."""
        self.alias: dict[int, Item | None] = {} if alias is None else alias
        """Values that alias other items: operands of barriers, and inputs of loops. None for carries and slices."""
        self._barriers: dict[int, int] = {}
        self._copies: dict[int, list[Item]] = {}
        self._products = product_operands(self.program)
        self._convolutions = convolution_copies(self.program)
        self._scatters = merged_scatters(self.problem)
        self._fusible = fusible_operations(self.problem)
        self._pointwise = pointwise_operations(self.problem)
        self._build()

    def _build(self) -> None:
        for index in self.program.regions[self.region].operations:
            operation = self.program.operations[index]
            if operation.bodies:
                self._add_loop(operation)
            elif operation.primitive is _jax.optimization_barrier:
                self._add_barrier(operation)
            elif self._is_repeated(operation):
                continue
            elif index not in self.kernels.fused and self.problem.generated.isdisjoint(operation.results):
                self._add_kernel(operation)
        for number, output in enumerate(self.program.outputs if not self.region else ()):
            if isinstance(output, int) and output in self.schedule.assignment.values:
                layout = self.schedule.layout_of_output(number)
                if layout != self.schedule.assignment.values[output]:
                    self.item_of(output, layout, None)

    def _is_repeated(self, operation: Operation) -> bool:
        return bool(operation.results) and self.kernels.same.keys() >= {*operation.results}

    def outputs(self) -> list[int]:
        """The values that leave the region, in order."""
        return [output for output in self.program.regions[self.region].outputs if isinstance(output, int)]

    # ---- nodes

    def size(self, item: Item) -> float:
        layout = self.schedule.assignment.values.get(item.value) if item.form == "stored" else item.layout
        parts = self.problem.domain(item.value).parts
        return self.program.values[item.value].total_bytes / parts[layout] if layout in parts else 0.0

    def _time(self, node: Node) -> float:
        """The microseconds of a kernel, bound by memory, or by the FLOPs of a library call."""
        if node.kind != "kernel":
            return node.takes
        operation, index = self.program.operations[node.place], node.place
        if node.library and index in self.problem.choices and node.inside and operation.results:
            degree = self.schedule.assignment.strategies[index].degree
            wide = _jax.item_bytes(self.program.values[operation.results[0]].dtype) >= 4
            calls, flops = H100.products, self.problem.choices[index].flops / degree
            speed = calls.flops_per_microsecond if wide else calls.flops_per_microsecond_narrow
            return calls.call_microseconds + flops / speed
        return sum(map(self.size, (*node.reads, *node.makes))) / H100.reading.bytes_per_microsecond

    def add(self, node: Node) -> int:
        node.takes = self._time(node)
        self.nodes.append(node)
        for item in node.makes:
            self.makers[item] = len(self.nodes) - 1
        node.needs.update(self.makers[item] for item in node.reads if item in self.makers)
        return len(self.nodes) - 1

    def _add_control_dependency(self, node: Node, value: object) -> None:
        """Adds the dependency of a node on the barrier of a value that it reads."""
        if isinstance(value, int) and value in self._barriers:
            node.needs.add(self._barriers[value])

    def _add_kernel(self, operation: Operation) -> None:
        index = operation.index
        node = Node(index, elements=self._iteration_elements(operation))
        node.library = index not in self._fusible and not computes_operand(self.problem, operation, 0)
        if operation.primitive.name == POOLING_GRADIENT:
            self._add_windows(node, operation)
        self._read_all(node, operation)
        node.library |= any(one in self._scatters for one in node.inside)
        sent = list[tuple[int, Item, tuple[Step, ...]]]()
        strategy = self.schedule.assignment.strategies.get(index)
        for position, result in enumerate(operation.results):
            steps = self.schedule.result_steps(operation, position) if strategy is not None else ()
            if any(step.fraction > 0 for step in steps):
                assert strategy is not None
                item = Item(result, "left", layout_left(self.problem, operation, strategy, position))
                sent.append((result, item, steps))
            else:
                item = Item(result, "stored")
            node.makes.append(item)
        self.add(node)
        for result, item, steps in sent:
            assert strategy is not None
            reducer = strategy.reducers[operation.results.index(result)] or "sum"
            self._send(item, Item(result, "stored"), Route(item.layout, steps), index, reducer)

    def _iteration_elements(self, operation: Operation) -> int:
        """The number of elements that a kernel iterates over: those it reduces, or those it makes."""
        read = operation.operands[0] if operation.primitive.name in REDUCTIONS else None
        values = operation.results if not isinstance(read, int) else (read,)
        return max((self.program.values[value].elements for value in values), default=0)

    def _add_windows(self, node: Node, operation: Operation) -> None:
        """Adds the kernel before a pooling's gradient, which finds the largest element of each window."""
        found = Node(operation.index, elements=node.elements)
        position, image = 1, operation.operands[1]
        if isinstance(image, int):
            found.reads = dict.fromkeys(self._items_read(operation, position, image), False)
        item = Item(operation.results[0], "windows")
        found.makes.append(item)
        self.add(found)
        node.reads[item] = False

    def _add_loop(self, operation: Operation) -> None:
        node = Node(operation.index, kind="loop")
        links = self.problem.links[operation.index]
        carried = {link.target for link in links.inside}
        for link in links.enter:
            self._add_control_dependency(node, link.source)
            item = self._item_entering(link, operation)
            if link.stacked is None and link.target not in carried:
                self.alias[link.target] = item
            else:
                self.alias[link.target] = None
            if item is not None:
                node.reads[item] = False
        node.makes += [Item(result, "stored") for result in operation.results]
        self.add(node)

    def _item_entering(self, link: Link, operation: Operation) -> Item | None:
        if not isinstance(link.source, int) or link.source in self.problem.generated:
            return None
        return self.item_of(link.source, self.schedule.link_layout(link), operation)

    def _add_barrier(self, operation: Operation) -> None:
        """Adds a barrier, whose results alias its operands and depend on all of them."""
        node, strategy = Node(operation.index, kind="barrier", takes=0.0), self.schedule.assignment.strategies
        layouts = strategy[operation.index].operands
        for operand, result, layout in zip(operation.operands, operation.results, layouts, strict=True):
            if isinstance(operand, int) and operand not in self.problem.generated and layout is not None:
                self._add_control_dependency(node, operand)
                item = self.item_of(operand, layout, operation)
                node.reads[item] = True
                node.reads |= self._on_the_way(operand, operation)
                self.alias[result] = item
        number = self.add(node)
        self._barriers |= dict.fromkeys(operation.results, number)

    def _on_the_way(self, value: int, barrier: Operation) -> dict[Item, bool]:
        """What is copied to the host for a value: it is there until the forward part waits for the copy."""
        maker = self.program.makers.get(value)
        if maker is None or self.program.values[value].memory_kind is None or barrier.index not in early(self.program):
            return {}
        moved = moves_between_memories(self.program, maker)
        return {item: True for item in self.nodes[self.makers[Item(value, "stored")]].reads} if moved else {}

    # ---- what is read

    def _read_all(self, node: Node, ending: Operation) -> None:
        """Adds the items that a kernel reads, and the operations that are fused into it."""
        inside, stack, read = {ending.index: ending}, [ending], list[tuple[Item, int]]()
        while stack:
            operation = stack.pop()
            for position, operand in enumerate(operation.operands):
                if not isinstance(operand, int) or operand in self.problem.generated:
                    continue
                operand = self.kernels.same.get(operand, operand)
                maker = self.program.makers.get(operand)
                if maker is not None and self._is_computed(operation, position, maker):
                    if maker.index not in inside:
                        inside[maker.index] = maker
                        stack.append(maker)
                else:
                    read += [(item, operand) for item in self._items_read(operation, position, operand)]
                self._add_control_dependency(node, operand)
        node.inside += inside
        moved = self._values_read_elsewhere(node.elements, [inside[index] for index in sorted(inside, reverse=True)])
        for item, operand in read:
            node.reads[item] = node.reads.get(item, True) and operand not in moved

    def _values_read_elsewhere(self, elements: int, operations: Sequence[Operation]) -> set[int]:
        """The values that a kernel of so many elements reads at other positions than that of its own element."""
        moved, values = set[int](), self.program.values
        for number, operation in enumerate(operations):
            aligned = operation.index in self._pointwise or is_view(self.program, operation)
            aligned |= not number and operation.primitive.name in REDUCTIONS
            aligned &= moved.isdisjoint(operation.results)
            updates = operation.primitive.name in UPDATES and moved.isdisjoint(operation.results)
            for position, operand in enumerate(operation.operands):
                if not isinstance(operand, int) or (updates and position == 0):
                    continue
                if not aligned or values[operand].elements != elements:
                    moved.add(self.kernels.same.get(operand, operand))
        return moved

    def _is_computed(self, operation: Operation, position: int, maker: Operation) -> bool:
        return (
            maker.index in self.kernels.fused
            and maker.region == operation.region
            and computes_operand(self.problem, operation, position)
        )

    def _items_read(self, operation: Operation, position: int, operand: int) -> Iterator[Item]:
        strategy = self.schedule.assignment.strategies.get(operation.index)
        layout = strategy.operands[position] if strategy is not None else None
        layout = self.schedule.assignment.values[operand] if layout is None else layout
        key = operation.index, position
        copy = self._products.get(key) or self._convolutions.get(key)
        if copy is not None and copy.copied:
            yield self._operand_copy(operation, operand, copy, layout)
        elif operand in self.kernels.stored or operand not in self.program.makers:
            yield self.item_of(operand, layout, operation)
        else:  # a library call that transposes the operand itself
            maker = self.program.makers[operand]
            for at, inner in enumerate(maker.operands):
                if isinstance(inner, int) and inner not in self.problem.generated:
                    yield from self._items_read(maker, at, inner)

    def _operand_copy(
        self, operation: Operation, operand: int, read: ProductOperand | ConvolutionCopy, layout: Layout
    ) -> Item:
        """The transpose copy of an operand for a library call, which a kernel makes before the first reader."""
        same = self.kernels.same
        operand = same.get(operand, operand)
        value = same.get(read.value, read.value)
        item = next(
            (one for one in self._copies.get(value, ()) if one[2:3] + one[4:] == (layout, read.order, read.times)), None
        )
        if item is None:
            reader = next(o for o in operation.operands if isinstance(o, int) and same.get(o, o) == operand)
            item = Item(value, "operand", layout, reader, read.order, read.times)
            self._copies.setdefault(value, []).append(item)
            node = Node(operation.index, elements=self.program.values[read.value].elements)
            maker = self.program.makers.get(operand)
            if maker is not None and self._is_read_through(operand, maker, operation):
                self._read_all(node, maker)
            else:
                node.reads[self.item_of(operand, layout, operation)] = False
                self._add_control_dependency(node, operand)
            node.makes.append(item)
            self.add(node)
        return item

    def _is_read_through(self, operand: int, maker: Operation, reader: Operation) -> bool:
        fused = maker.index in self.kernels.fused and maker.region == reader.region
        return fused and operand not in self.kernels.stored

    def item_of(self, value: int, layout: Layout, reader: Operation | None) -> Item:
        """The item of a value in a layout, for a reader. Adds the collectives that make it."""
        value = self.kernels.same.get(value, value)
        known = self.alias.get(value)
        if known is not None and self.schedule.assignment.values.get(value) == layout:
            return known
        stored = self.schedule.assignment.values.get(value)
        if stored is None or layout == stored:
            return known or Item(value, "stored")
        route = self.schedule.route(value, layout)
        source = (known or Item(value, "stored")) if route.source == stored else self._shared(value, reader)
        if not any(step.fraction > 0 for step in route.steps):
            return self._slice(source, value, layout, reader) if route.steps and reader is not None else source
        shared = layout == self.schedule.copy(value)
        alone = reader is not None and not shared and not reader.bodies and self.schedule.is_regathered(value, layout)
        item = Item(value, "copy", layout, reader.index if alone and reader is not None else -1)
        if item not in self.makers:
            place = reader.index if reader is not None else len(self.program.operations)
            self._send(source, item, route, place)
        return item

    def _slice(self, source: Item, value: int, layout: Layout, reader: Operation) -> Item:
        """A part of an item, copied for a library call."""
        position = reader.operands.index(value) if value in reader.operands else 0
        if reader.bodies or computes_operand(self.problem, reader, position):
            return source
        item = Item(value, "slice", layout, reader.index)
        if item not in self.makers:
            self.add(Node(reader.index, reads={source: False}, makes=[item]))
        return item

    def _shared(self, value: int, reader: Operation | None) -> Item:
        return self.item_of(value, self.schedule.copy(value), reader)

    # ---- collectives

    def _send(self, source: Item, target: Item, route: Route, place: int, reducer: str = "sum") -> None:
        """Adds the collectives that reshard an item, one after another."""
        steps = [step for step in route.steps if step.fraction > 0]
        layouts, before = [route.source, *(step.layout for step in route.steps)], source
        for number, step in enumerate(steps):
            last = step is steps[-1]
            layout = layouts[route.steps.index(step)] if step.kind == CollectiveKind.REDUCE_SCATTER else step.layout
            made = target if last else Item(target.value, f"step {number}", step.layout, target.reader)
            dtype = self.program.values[target.value].dtype
            size = bytes_in(self.schedule, target.value, layout)
            takes = H100.collectives.latency_microseconds + size / H100.collectives.bytes_per_microsecond
            begin = Node(place, "start", {before: True}, [made], takes=takes, bytes=size)
            begin.sends = (step.kind, step.axes, str(dtype), reducer)
            start = self.add(begin)
            end = Node(place, "end", {before: True}, [], {start}, takes=takes, other=start)
            self.nodes[start].other = len(self.nodes)
            self.nodes.append(end)
            self.makers[made] = len(self.nodes) - 1
            before = made

    def has_path(self, first: int, last: int, most: int = 600) -> bool:
        """Whether a node depends on another one. True for one that depends on at least ``most`` nodes."""
        return bool(self._ancestors[last] >> first & 1) or self._ancestors[last].bit_count() >= most

    @cached_property
    def _ancestors(self) -> dict[int, int]:
        """Per node, those that it depends on, as the bits of a number."""
        found: dict[int, int] = {}
        for number in TopologicalSorter({n: node.needs for n, node in enumerate(self.nodes)}).static_order():
            above = 0
            for need in self.nodes[number].needs:
                above |= found[need] | 1 << need
            found[number] = above
        return found
