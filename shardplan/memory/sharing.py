"""Which values a kernel overwrites with its result.

XLA gives the result of a kernel the memory of a value that the kernel reads element by element and for the last time,
where another kernel has made that value and nothing else. A library's result comes with its workspace, a loop's with
the other carries, a stored value with what its kernel computes from it besides, and a scatter's memory is already that
of what it scatters into: these are not overwritten. So a product and what is computed from it lie side by side. Nor is
anything where a kernel writes its result in another order of dimensions as well, for a product.

>>> import jax, jax.numpy as jnp, shardplan
>>> from shardplan.memory.liveness import Lifetimes
>>> def overwritten_by(step):
...     square = jax.ShapeDtypeStruct((512, 512), "float32")
...     problem = shardplan.plan(step, 1, square).schedule.problem
...     lifetimes = Lifetimes(problem, range(len(problem.program.operations)))
...     makers = {o.results[0]: o.primitive.name for o in lifetimes.order}
...     return [makers[value] for value, span in lifetimes.held.items() if span.end < lifetimes.reads[value][1]]
>>> overwritten_by(lambda x: jnp.tanh(jnp.exp(x) @ x) @ x)
[]
>>> def weighted(x):
...     e = jnp.exp(x)
...     return (e * (e @ x)) @ x  # the last kernel to read `e` is the last to read the product as well
>>> overwritten_by(weighted)
['exp']
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set

from shardplan import _jax
from shardplan.memory.fusion import fuses_operands, readers_in
from shardplan.memory.recomputing import Kernels
from shardplan.problem import Problem
from shardplan.program import Operation

UPDATES = frozenset({"scatter", "scatter-add", "scatter_add", "dynamic_update_slice"})

_VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "stop_gradient"})

_LOOKED_AT = 64
"""Operations of a kernel that are looked at."""


def overwritten(
    problem: Problem,
    order: Sequence[Operation],
    kernels: Kernels,
    held: Mapping[int, tuple[int, int]],
    together: Collection[Sequence[int]] | None,
    apart: Collection[int] = (),
) -> Iterator[tuple[int, tuple[int, int]]]:
    """From where to where values are held, if it is not as ``held`` says: where kernels with several results
    (``together``, the operations of each, if they are known) hold all that they make, and read last, while they run;
    and where the memory of a value is a later result's, which is not made by the operations ``apart``."""
    place, makers = {operation.index: number for number, operation in enumerate(order)}, problem.program.makers
    kernels_places = [sorted(place[index] for index in kernel) for kernel in together or ()]
    since = {number: places[0] for places in kernels_places for number in places}
    until = {number: places[-1] for places in kernels_places for number in places}
    spans = dict(held)
    for value, (start, end) in held.items() if since else ():
        made = place[makers[value].index] if value in makers else start
        spans[value] = min(start, since.get(made, made)), until.get(end, end)
        if spans[value] != (start, end):
            yield value, spans[value]
    if together is None:
        merged = _made_with_others(problem, order, kernels)
    else:
        merged = frozenset(result for number in until for result in order[number].results)
    for value, number in _overwritten_values(problem, order, kernels, spans, until, merged, apart):
        yield value, (spans[value][0], since.get(number, number) - 1)


def _overwritten_values(
    problem: Problem,
    order: Sequence[Operation],
    kernels: Kernels,
    held: Mapping[int, tuple[int, int]],
    until: Mapping[int, int],
    merged: Collection[int],
    apart: Collection[int],
) -> Iterator[tuple[int, int]]:
    """The values whose memory a later result takes, with the place in the order of the operation that makes it.

    ``held`` says of each value in memory from which place to which; ``until``, of operations' places, the last one of
    their kernel, where that has several results; ``merged`` are values that are made with others. Of several results
    one may take the memory of a value that all of them read element by element, if they read it.
    """
    fused, makers = kernels.fused, problem.program.makers
    taken: set[int] = set()
    together: dict[int, list[int]] = {}
    for place, last in until.items():
        together.setdefault(last, []).append(place)
    made = (value for value in held if value in makers and makers[value].index in fused and value not in merged)
    ending = {held[value][1] for value in made}
    for place, operation in enumerate(order):
        if not operation.results or operation.results[0] not in held:
            continue
        updates = operation.primitive.name in UPDATES
        anything = updates or operation.index in kernels.adding
        if updates:
            candidates = [o for o in operation.operands[:1] if isinstance(o, int) and _fits(problem, o, operation)]
        elif operation.index in kernels.adding:
            added = kernels.adding[operation.index]
            candidates = [added.onto] if added.in_place and _fits(problem, added.onto, operation) else []
        elif operation.index in fused and operation.index not in apart and until.get(place, place) in ending:
            others = [order[other] for other in together.get(until.get(place, -1), ())]
            read = [read_in_kernel(problem, fused, held, other) for other in others]
            candidates = list(_overwritable(problem, fused, held, operation))
            candidates = [value for value in candidates if all(found.get(value, True) for found in read)]
        else:
            continue
        for value in candidates:
            start, end = held.get(value, (place, place))
            ends = start < place and end == until.get(place, place)
            if ends and value not in taken and (anything or value not in merged):
                taken.add(value)
                yield value, place
                break


def _made_with_others(problem: Problem, order: Sequence[Operation], kernels: Kernels) -> frozenset[int]:
    """Values that are made in one kernel with what is first computed from them: it writes several results."""
    values, read, fused = problem.program.values, set[int](), kernels.fused
    apart = fused | kernels.adding.keys()
    found = set()
    for operation in order:
        for operand in operation.operands:
            if not isinstance(operand, int) or operand in read:
                continue
            read.add(operand)
            if operation.index in fused:
                if values[operation.results[0]].elements == values[operand].elements:
                    found.add(operand)
            elif operation.index not in apart and fuses_operands(problem, operation):
                found.add(operand)
    in_memory = kernels.read | kernels.stored
    return frozenset(v for v in found if v not in kernels.stored or read_by_several(problem, fused, in_memory, v))


def read_by_several(problem: Problem, fused: Collection[int], in_memory: Set[int], value: int) -> bool:
    """Whether several kernels read a value: one alone does not make it as well."""
    readers, kernels, stack = readers_in(problem.program), set[int](), [value]
    while stack and len(kernels) < 2:
        for reader in readers.get(stack.pop(), ()):
            on_the_way = reader.index in fused and in_memory.isdisjoint(reader.results)
            stack += reader.results if on_the_way else ()
            kernels |= set() if on_the_way else {reader.index}
    return len(kernels) > 1


def _fits(problem: Problem, value: int, operation: Operation) -> bool:
    """Whether a value has as many elements, of as many bytes, as what an operation makes."""
    own, made = problem.program.values[value], problem.program.values[operation.results[0]]
    return own.total_bytes == made.total_bytes and _jax.item_bytes(own.dtype) == _jax.item_bytes(made.dtype)


def _overwritable(
    problem: Problem,
    fused: Collection[int],
    held: Collection[int],
    operation: Operation,
) -> Iterator[int]:
    """The values in memory that the kernel of an operation may overwrite, if it is the last to read them."""
    for value in read_by_element(problem, fused, held, operation):
        maker = problem.program.makers.get(value)
        alone = maker is not None and maker.index in fused and len(maker.results) == 1
        if alone and value in held and _fits(problem, value, operation):
            yield value


def read_by_element(
    problem: Problem,
    fused: Collection[int],
    in_memory: Collection[int],
    operation: Operation,
) -> list[int]:
    """The values that the kernel of an operation reads at the place of each element that it makes, and nowhere else."""
    return [value for value, here in read_in_kernel(problem, fused, in_memory, operation).items() if here]


def read_in_kernel(
    problem: Problem,
    fused: Collection[int],
    in_memory: Collection[int],
    operation: Operation,
) -> dict[int, bool]:
    """The values that the kernel of an operation goes through, each with whether it is read at the place of each
    element that the kernel makes, and nowhere else."""
    makers, kernel, stack = problem.program.makers, {operation.index: operation}, [operation]
    while stack and len(kernel) <= _LOOKED_AT:
        for operand in stack.pop().operands:
            maker = makers.get(operand) if isinstance(operand, int) and operand not in in_memory else None
            if maker is not None and maker.index in fused and maker.index not in kernel:
                kernel[maker.index] = maker
                stack.append(maker)
    values, elements = problem.program.values, problem.program.values[operation.results[0]].elements
    elsewhere, found = set[int](), dict[int, None]()
    for part in (kernel[index] for index in sorted(kernel, reverse=True)):
        choices = problem.choices.get(part.index)
        apart = not (choices and choices.pointwise) and part.primitive.name not in _VIEWS
        apart |= not elsewhere.isdisjoint(part.results)
        updates = part.primitive.name in UPDATES and elsewhere.isdisjoint(part.results)
        for operand in part.operands:
            if isinstance(operand, int):
                found[operand] = None
                if updates and operand == part.operands[0]:  # where nothing is written, it stays
                    continue
                if apart or values[operand].elements != elements:
                    elsewhere.add(operand)
    return {value: value not in elsewhere for value in found}
