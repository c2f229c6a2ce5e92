"""Replaying: the program run again with a constraint at every planned place, for XLA to compile.

Operands are constrained to what the strategy needs. Results are constrained twice: to the layout that the operation
itself gives, where partial results have been reduced, then to the planned one; with the planned one alone XLA was
measured to recompute large parts of the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from shardplan import _jax
from shardplan.layout import Layout, replicated, to_spec
from shardplan.program import Constant, Operation
from shardplan.schedule import REDUCTIONS, Schedule
from shardplan.strategy import Strategy
from shardplan.transition import Step


class Replay:
    """One run of a schedule under a trace of ``jax.jit``."""

    def __init__(self, schedule: Schedule, mesh: Mesh) -> None:
        self._schedule = schedule
        self._program = schedule.program
        self._mesh = mesh
        self._held: dict[tuple[int, Layout], Any] = {}
        self._makers = {result: o for o in self._program.operations for result in o.results}

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Runs the program on traced inputs; returns its results in the order of the flattened outputs."""
        values = self._schedule.assignment.values
        for index, array in (*zip(self._program.inputs, inputs, strict=True), *self._program.captured.items()):
            self._held[index, values[index]] = array
        for operation in self._program.operations:
            if operation.index in self._schedule.assignment.strategies:
                self._run(operation)
        return [self._output(number, output) for number, output in enumerate(self._program.outputs)]

    def _run(self, operation: Operation) -> None:
        strategy = self._schedule.assignment.strategies[operation.index]
        operands = [self._read(o, layout) for o, layout in zip(operation.operands, strategy.operands, strict=True)]
        travelling = self._schedule.island_dtype(operation)
        if travelling is None:
            results, done = self._bind(operation, operands), 0
        else:
            results, done = self._run_island(operation, strategy, operands, travelling)
        for position, (index, result) in enumerate(zip(operation.results, results, strict=True)):
            steps = self._schedule.result_steps(operation, position)[done:]
            held = result if done else self._constrain(result, strategy.results[position])
            for step in _ends(steps):
                if step.layout != strategy.results[position] or not strategy.pending[position]:
                    held = self._constrain(held, step.layout)
            self._held[index, self._schedule.assignment.values[index]] = held

    def _bind(self, operation: Operation, operands: Sequence[Any]) -> tuple[Any, ...]:
        return _jax.bind_again(operation.equation, operation.primitive, operation.params, operands, operation.scope)

    def _run_island(
        self, operation: Operation, strategy: Strategy, operands: Sequence[Any], travelling: Any
    ) -> tuple[tuple[Any, ...], int]:
        """Runs an operation block by block with explicit reductions; returns its results and how many steps are done."""
        mesh = self._schedule.space.mesh
        steps = [s for s in self._schedule.result_steps(operation, 0) if s.kind in REDUCTIONS]
        layouts = [strategy.results[0], *(step.layout for step in steps)]

        def blocks(*local: Any) -> Any:
            (whole,) = self._bind(operation, local)
            result = whole.astype(travelling)
            for step, before, after in zip(steps, layouts, layouts[1:]):
                names = tuple(mesh.names[axis] for axis in step.axes)
                if step.kind == "all-reduce":
                    result = jax.lax.psum(result, names)
                else:
                    dim = next(d for d, axes in enumerate(after) if axes != before[d])
                    result = jax.lax.psum_scatter(result, names, scatter_dimension=dim, tiled=True)
            return result.astype(whole.dtype)

        in_specs = tuple(to_spec(mesh, layout or ()) for layout in strategy.operands)
        with jax.named_scope(operation.scope):
            result = jax.shard_map(
                blocks, mesh=self._mesh, in_specs=in_specs, out_specs=to_spec(mesh, layouts[-1]), check_vma=False
            )(*operands)
        return (result,), len(steps)

    def _read(self, operand: int | Constant, layout: Layout | None) -> Any:
        if isinstance(operand, Constant):
            return operand.value
        if layout is None:
            layout = replicated(len(self._program.values[operand].shape))
        if (operand, layout) not in self._held:
            if operand in self._schedule.assignment.generated:
                self._held[operand, layout] = self._generate(operand, layout)
            else:
                self._fetch(operand, layout)
        return self._held[operand, layout]

    def _fetch(self, value: int, layout: Layout) -> None:
        route = self._schedule.route(value, layout)
        held = self._read(value, route.source)
        for step in _ends(route.steps):
            if (value, step.layout) not in self._held:
                self._held[value, step.layout] = self._constrain(held, step.layout)
            held = self._held[value, step.layout]

    def _generate(self, value: int, layout: Layout) -> Any:
        operation = self._makers[value]
        strategy = self._schedule.generating(operation, layout)
        operands = [self._read(o, wanted) for o, wanted in zip(operation.operands, strategy.operands, strict=True)]
        return self._constrain(self._bind(operation, operands)[0], layout)

    def _output(self, number: int, output: int | Constant) -> Any:
        if isinstance(output, Constant):
            return jax.numpy.asarray(output.value, dtype=output.aval.dtype)
        return self._read(output, self._schedule.layout_of_output(number))

    def _constrain(self, array: Any, layout: Layout) -> Any:
        if not _jax.is_array_type(jax.typeof(array)):
            return array
        spec = to_spec(self._schedule.space.mesh, layout)
        return jax.lax.with_sharding_constraint(array, NamedSharding(self._mesh, spec))


def _ends(steps: Sequence[Step]) -> list[Step]:
    """The steps at whose end a constraint stands: each collective, and the last of free slices in a row."""
    return [
        step
        for step, after in zip(steps, (*steps[1:], None))
        if step.fraction > 0 or after is None or after.fraction > 0
    ]
