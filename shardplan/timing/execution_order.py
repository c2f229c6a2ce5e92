"""The execution order of a program's operations, as XLA's memory schedulers choose it.

XLA does not always keep the order of the program. It has several schedulers and keeps the schedule with the lowest
peak. One of them works backwards from the results, and runs an operation shortly before its first reader. The gradient
of a weight, which only its update reads, is then computed late, and an activation stays in memory until then. Results
that one kernel computes from the same values, such as a parameter and its moments, are adjacent. Their gradient is
freed before the next one is computed.

>>> import jax
>>> from shardplan.program.tracing import trace_program
>>> def step(x, w):
...     late = x.T @ x
...     return (x @ w) @ w, late
>>> square = jax.ShapeDtypeStruct((8, 8), "float32")
>>> program = trace_program(step, (square, square), {})
>>> [operation.primitive.name for operation in program.operations]
['transpose', 'dot_general', 'dot_general', 'dot_general']
>>> execution_order(program)
[2, 3, 0, 1]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from shardplan.memoize import memoize
from shardplan.program.program import Operation, Program

_MAX_PREDECESSORS = 32
"""About the most operations that a kernel waits for. Longer chains, such as a residual stream, are cut."""


def execution_order(program: Program, fused: Collection[int] = frozenset()) -> list[int]:
    """The indices of all operations in the order in which they run. A loop's body comes before the loop.

    ``fused`` are the operations that are fused into their readers.
    """
    makers = program.makers
    leading = _predecessors(program, makers, frozenset(fused))
    order: list[int] = []
    _append_region(program, 0, makers, leading, order)
    return order


def operands_first(
    program: Program, index: int, done: set[int], before: Mapping[int, Sequence[int]] | None = None
) -> Iterator[Operation]:
    """An operation after its operands' operations in the same region, without those in ``done``. Adds them to ``done``.

    ``before`` has, by index, the predecessors of some operations in the place of their operands. An index above those
    of all operations stands for its own predecessors. A cycle among these is cut at one operation."""
    operations, own, stack, opened = program.operations, operands_made(program), [index], set[int]()
    while stack:
        here = stack[-1]
        if here in done or here in opened:
            stack.pop()
            if here not in done:
                done.add(here)
                if here < len(operations):
                    yield operations[here]
            continue
        opened.add(here)
        waiting = own[here] if before is None or here not in before else before[here]
        stack += [other for other in reversed(waiting) if other not in done and other not in opened]


@memoize
def operands_made(program: Program) -> list[tuple[int, ...]]:
    """Per operation, the operations of its region that make its operands, by index, in the order of the operands."""
    makers = program.makers
    found = []
    for operation, values in zip(program.operations, operands_in_order(program), strict=True):
        read = (makers.get(value) for value in values)
        found.append(tuple([m.index for m in read if m is not None and m.region == operation.region]))
    return found


@memoize
def operands_in_order(program: Program) -> list[tuple[int, ...]]:
    """Per operation, the values that it reads, in the order of the parameters of XLA's kernel.

    Of numbers that one kernel computes from others, those computed inside it come last. The sum of all gradients'
    squares is therefore visited from the last gradient on."""
    counted: set[int] = set()  # single numbers computed from single numbers
    found = []
    for operation in program.operations:
        read = [operand for operand in operation.operands if isinstance(operand, int)]
        values = [program.values[value] for value in (*read, *operation.results)]
        if not operation.bodies and all(value.elements == 1 for value in values):
            read.sort(key=counted.__contains__)
            counted.update(operation.results)
        found.append(tuple(read))
    return found


def _predecessors(
    program: Program, makers: Mapping[int, Operation], fused: frozenset[int]
) -> dict[int, frozenset[int]]:
    """Per value, the operations outside of its kernel that make the kernel's operands."""
    leading: dict[int, frozenset[int]] = {}
    for operation in program.operations:
        found = frozenset[int]()
        read = [o for o in operation.operands if isinstance(o, int) and o in makers]
        if operation.index in fused:
            found = found.union(*(leading.get(o, frozenset()) for o in read))
        if operation.index not in fused or len(found) > _MAX_PREDECESSORS:
            found = frozenset({operation.index})
        leading |= dict.fromkeys(operation.results, found)
    return leading


def _grouped_by_waits(outputs: Iterable[object], leading: dict[int, frozenset[int]]) -> list[int]:
    """Outputs, grouped by the operations that they wait for."""
    groups: dict[frozenset[int], list[int]] = {}
    for output in outputs:
        if isinstance(output, int):
            groups.setdefault(leading.get(output, frozenset()), []).append(output)
    return [output for group in groups.values() for output in group]


def _append_region(
    program: Program,
    region: int,
    makers: Mapping[int, Operation],
    leading: dict[int, frozenset[int]],
    order: list[int],
) -> None:
    """Appends a region's operations, each after its operands and as late as possible."""
    here, read = program.regions[region], operands_in_order(program)
    done: set[int] = set()
    others = [o for index in here.operations for o in program.operations[index].results]
    for wanted in (*_grouped_by_waits(here.outputs, leading), *others):
        stack = [wanted]
        while stack:
            maker = makers.get(stack[-1])
            if maker is None or maker.region != region or maker.index in done:
                stack.pop()
                continue
            missing = [value for value in read[maker.index] if _is_missing(value, makers, region, done)]
            if missing:
                stack.append(missing[0])
                continue
            stack.pop()
            done.add(maker.index)
            for body in maker.bodies:
                _append_region(program, body, makers, leading, order)
            order.append(maker.index)
    for index in here.operations:
        if index not in done:  # it has an effect and no result
            for body in program.operations[index].bodies:
                _append_region(program, body, makers, leading, order)
            order.append(index)


def _is_missing(value: int, makers: Mapping[int, Operation], region: int, done: set[int]) -> bool:
    maker = makers.get(value)
    return maker is not None and maker.region == region and maker.index not in done
