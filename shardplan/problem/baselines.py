"""Baselines: the usual ways to split a training step, as hard layouts that the planner completes.

The rules alone follow the dimension of the examples through the program: from the batch through every operation that
splits along it, up to the sums over all examples. Tensors with this dimension, and operations on it, are split over all
devices by examples. A baseline also fixes layouts of the state. The remaining layouts are the best completion, priced
as any plan.

| baseline | parameters | optimizer state | sums over examples |
|---|---|---|---|
| `data_parallel` | whole | whole | whole (all-reduced at once) |
| `zero1` | whole | split | as in the completion |
| `fsdp` (ZeRO 3) | split | split | as in the completion |
| `tensor_parallel` | over all mesh axes but the first | likewise | as in the completion |

The first three split the examples over all devices. `tensor_parallel` splits them over the first of several mesh axes.
The completion chooses the splits over the other axes (or the only one): Megatron's is one choice. A split tensor is
split on its largest dimension that the devices divide. The state is the arguments that results replace. Parameters are
the state that the other results (the loss) depend on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np

from shardplan import rules
from shardplan.errors import ArgumentError
from shardplan.layout.layout import Layout, MeshAxes, replicated
from shardplan.problem.cost_network import Problem
from shardplan.problem.strategy import Strategy
from shardplan.program.control_flow import Links, links_of
from shardplan.program.program import Operation, Program, operand_type


@dataclass(frozen=True, slots=True)
class Examples:
    """The dimension of the examples: ``dims`` maps values to it, ``sums`` are sums over all examples."""

    axes: tuple[int, ...]
    dims: dict[int, int] = field(default_factory=dict)
    sums: set[int] = field(default_factory=set)


def data_parallel(problem: Problem) -> None:
    """Data parallelism: the state is whole on every device, examples are split, and gradients are all-reduced."""
    examples = _split_examples(problem)
    for value in _state(problem.program):
        _fix(problem, value, replicated(_rank(problem.program, value)))
    for value in examples.sums:  # whole, or still a partial sum that is added to others first
        _keep_layouts(problem, value, lambda layout, rank: layout[len(layout) - rank :] == replicated(rank))


def zero1(problem: Problem) -> None:
    """ZeRO stage 1: data parallelism with the optimizer's state split."""
    _split_examples(problem)
    parameters = parameters_of(problem.program)
    for value in _state(problem.program):
        whole = replicated(_rank(problem.program, value))
        _fix(problem, value, whole if value in parameters else _split_largest(problem, value))


def fsdp(problem: Problem) -> None:
    """ZeRO stage 3, fully sharded data parallelism: the whole state split, the activations split by examples."""
    _split_examples(problem)
    for value in _state(problem.program):
        _fix(problem, value, _split_largest(problem, value))


def tensor_parallel(problem: Problem) -> None:
    """Tensor parallelism: examples split over the first of several mesh axes, tensors over the others."""
    axes = problem.space.mesh.splitting
    first = axes[:1] if len(axes) > 1 else ()
    examples = follow_examples(problem.program, problem.space.mesh)
    if not set(first) <= set(examples.axes):
        raise ArgumentError("the first mesh axis does not divide the batch")
    _split(problem, replace(examples, axes=first), alone=False)
    for value in _state(problem.program):
        _keep_layouts(problem, value, lambda layout, rank: not any(set(first) & set(group) for group in layout))


BASELINES: dict[str, Callable[[Problem], None]] = {
    "data_parallel": data_parallel,
    "zero1": zero1,
    "fsdp": fsdp,
    "tensor_parallel": tensor_parallel,
}
"""Baselines by name: each excludes the other choices of a problem."""


def follow_examples(program: Program, mesh: MeshAxes) -> Examples:
    """Follows the leading dimension of the batch: the largest argument that no result replaces.

    Raises ArgumentError without a batch, or if no mesh axis divides it.
    """
    state = set(_state(program))
    batch = [i for i in program.inputs if i not in state and program.values[i].shape and program.values[i].elements]
    if not state:
        raise ArgumentError("the step replaces no argument, so that state and batch cannot be told apart")
    if not batch:
        raise ArgumentError("the step replaces all its arguments: none is a batch of examples")
    size = program.values[max(batch, key=lambda i: program.values[i].stored_bytes)].shape[0]
    examples = Examples(_dividing(mesh, size))
    if not examples.axes:
        raise ArgumentError(f"no mesh axis divides the batch of {size} examples")
    examples.dims.update({i: 0 for i in batch if program.values[i].shape[0] == size})
    known = -1
    while known < len(examples.dims):  # a loop's carries are known only after its end
        known = len(examples.dims)
        for operation in program.operations:
            if operation.bodies:
                _follow_links(links_of(program, operation), examples)
            elif any(o in examples.dims for o in operation.operands if isinstance(o, int)):
                _follow(program, operation, examples, mesh.degree(examples.axes))
    return examples


def _follow_links(links: Links, examples: Examples) -> None:
    """Follows the examples into, round and out of a loop or a branch. Slices lack the leading dimension of stacks."""
    for link in (*links.enter, *links.inside):
        dim = examples.dims.get(link.source) if isinstance(link.source, int) else None
        if dim is not None:
            dim += {None: 0, "source": -1, "target": 1}[link.stacked]
            if dim >= 0:  # a loop over the examples themselves: their dimension ends here
                examples.dims.setdefault(link.target, dim)
    for result, carried in links.same.items():
        if carried in examples.dims:
            examples.dims[result] = examples.dims[carried]


def _follow(program: Program, operation: Operation, examples: Examples, count: int) -> None:
    """Follows the examples through one operation, to a dimension of its results or into sums."""
    operands = [operand_type(program, o) for o in operation.operands]
    results = [program.values[result] for result in operation.results]
    rule = rules.derive(operation.primitive, operation.params, operands, results)
    if not rule.known:
        return
    # Operands that do not come from the batch (masks, zeros) may be split along with those that do.
    wanted = {
        n: examples.dims[o] for n, o in enumerate(operation.operands) if isinstance(o, int) and o in examples.dims
    }
    for split in rule.splits(count):
        if all(split.operands[number].dim == dim for number, dim in wanted.items()):
            for result, slot in zip(operation.results, split.results, strict=True):
                if slot.dim is not None:
                    examples.dims[result] = slot.dim
                elif slot.reducer is not None:
                    examples.sums.add(result)
            return


def _split_examples(problem: Problem) -> Examples:
    """Splits tensors with examples, and every operation on them, over all devices by examples."""
    examples = follow_examples(problem.program, problem.space.mesh)
    _split(problem, examples, alone=True)
    return examples


def _split(problem: Problem, examples: Examples, alone: bool) -> None:
    """Splits examples over their axes. Other axes may split other dimensions, unless ``alone``."""
    for value, dim in examples.dims.items():
        rank = _rank(problem.program, value)
        wanted = tuple(examples.axes if d == dim else () for d in range(rank))
        if alone:
            _fix(problem, value, wanted)
        else:
            _keep_layouts(problem, value, _splitter(dim, examples.axes))
    for operation in problem.program.operations:
        variable = problem.variable_of_operation(operation.index)
        carrying = [n for n, o in enumerate(operation.operands) if isinstance(o, int) and o in examples.dims]
        followed = any(r in examples.dims or r in examples.sums for r in operation.results)
        if variable is not None and carrying and followed:
            strategies = problem.choices[operation.index].strategies
            kept = [s.possible and _by_examples(s, operation, carrying, examples) for s in strategies]
            _keep(problem, variable, kept)


def _splitter(dim: int, axes: tuple[int, ...]) -> Callable[[Layout, int], bool]:
    """A test for layouts that split a dimension over exactly these axes. A partial layout has the pending axes in
    front."""
    return lambda layout, rank: layout[len(layout) - rank + dim] == axes


def _by_examples(strategy: Strategy, operation: Operation, carrying: list[int], examples: Examples) -> bool:
    for number in carrying:
        layout, operand = strategy.operands[number], operation.operands[number]
        if isinstance(operand, int) and layout is not None and layout[examples.dims[operand]] != examples.axes:
            return False
    return True


def _fix(problem: Problem, value: int, layout: Layout) -> None:
    """Excludes every other layout of a value."""
    _keep_layouts(problem, value, lambda other, rank: other == layout)


def _keep_layouts(problem: Problem, value: int, kept: Callable[[Layout, int], bool]) -> None:
    variable = problem.variables_of(value)[0]
    if variable is not None:
        domain = problem.domain(value)
        _keep(problem, variable, [kept(layout, domain.rank) for layout in domain.layouts])


def _keep(problem: Problem, variable: int, kept: list[bool]) -> None:
    if any(kept):
        costs = problem.network.costs
        costs[variable] = np.where(kept, costs[variable], np.inf)


def _split_largest(problem: Problem, value: int) -> Layout:
    """A layout split on the largest of the dimensions that the most devices divide."""
    shape, mesh = problem.program.values[value].shape, problem.space.mesh
    options = [(mesh.degree(_dividing(mesh, size)), size, -dim) for dim, size in enumerate(shape)]
    if not options:
        return ()
    chosen = -max(options)[2]
    return tuple(_dividing(mesh, size) if dim == chosen else () for dim, size in enumerate(shape))


def _dividing(mesh: MeshAxes, size: int) -> tuple[int, ...]:
    """The mesh axes that together split a dimension over the most devices."""
    axes = mesh.splitting
    groups = [group for count in range(len(axes), -1, -1) for group in combinations(axes, count)]
    return max((g for g in groups if size and size % mesh.degree(g) == 0), key=mesh.degree, default=())


def _state(program: Program) -> list[int]:
    return [program.inputs[position] for position in program.ties.values()]


def parameters_of(program: Program) -> set[int]:
    """The state that results other than the new state depend on, or all of it if there are none."""
    makers = program.makers
    waiting: list[Any] = [o for n, o in enumerate(program.outputs) if n not in program.ties and isinstance(o, int)]
    reached: set[int] = set()
    while waiting:
        value = waiting.pop()
        if value not in reached:
            reached.add(value)
            waiting += [o for o in makers[value].operands if isinstance(o, int)] if value in makers else []
    state = set(_state(program))
    return state & reached or state


def _rank(program: Program, value: int) -> int:
    return len(program.values[value].shape)
