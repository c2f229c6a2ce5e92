"""Tracing: from a function and its arguments to a `Program`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from shardplan import _jax, rules
from shardplan.errors import EnclosingTraceError
from shardplan.program.call_arguments import memory_kind_of, name_of
from shardplan.program.clone_broadcasts import clone_broadcasts
from shardplan.program.control_flow import stated_trip_count, while_trip_count
from shardplan.program.hoist_conversions import hoist_conversions
from shardplan.program.inline_single_trip_scans import body_of_single_trip, undone_by
from shardplan.program.program import Constant, Operation, Program, Region, Value
from shardplan.program.prune import prune
from shardplan.program.regions._jax import without_unused
from shardplan.program.reuse_sums import reuse_results
from shardplan.program.shifted_slices import shift_slices
from shardplan.program.sink_broadcasts import sink_broadcasts
from shardplan.program.state_on_host import state_on_host


def trace_program(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    on_host: Collection[int] = (),
) -> Program:
    """Traces ``fn`` on arrays or ``ShapeDtypeStruct``s. Of its leaves, those at the positions ``on_host`` are in host
    memory, which ``fn`` does not know.

    Exceptions of ``fn`` reach the caller unchanged.
    """
    kwargs = kwargs or {}
    traced = _jax.trace(fn, args, kwargs)
    input_paths, in_tree = _paths(args, kwargs)
    output_paths, out_tree = jax.tree_util.tree_flatten_with_path(traced.out_info)
    builder = _Builder()
    closed, captured_refs, written = _jax.without_refs(traced.jaxpr)
    jaxpr, count = closed.jaxpr, len(traced.jaxpr.in_avals)
    names = [path_name(path) for path in input_paths]
    if count > len(names):
        raise EnclosingTraceError(
            f"`{name_of(fn)}` reads values of another function that is being traced (jit, grad, vmap, scan), or was: "
            "plan that function, or pass these values as arguments"
        )
    kinds = map(memory_kind_of, jax.tree.leaves((args, kwargs)))
    taken = zip(jaxpr.invars[:count], names, kinds, strict=True)
    inputs = [builder.new_value(var.aval, name, kind) for var, name, kind in taken]
    environment: dict[Any, int | Constant] = dict(zip(jaxpr.invars, inputs, strict=False))
    captured, values = {}, list(inputs)  # references that it closes over are its last inputs
    closed_over = zip((*jaxpr.constvars, *jaxpr.invars[count:]), (*closed.consts, *captured_refs), strict=True)
    for var, array in closed_over:
        environment[var] = value = builder.new_value(var.aval, None)
        captured[value] = _jax.without_typed_layout(array)
        values += [value] if isinstance(array, _jax.Ref) else []
    outputs = builder.inline(jaxpr, environment, captured)
    refs = {position for position, aval in enumerate(traced.jaxpr.in_avals) if _jax.is_ref_type(aval)}
    ties = _find_ties(input_paths, [path for path, _ in output_paths], inputs, outputs, builder, refs, on_host)
    ties |= {n: position for n, position in written.items() if position < count and isinstance(outputs[n], int)}
    program = prune(
        Program(
            values=tuple(builder.values),
            operations=tuple(builder.operations),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            captured=captured,
            ties=ties,
            regions=(Region(0, tuple(inputs), tuple(outputs), 1), *builder.regions[1:]),
            output_names=tuple(path_name(path) for path, _ in output_paths),
            in_tree=in_tree,
            out_tree=out_tree,
            refs=frozenset(refs),
            written={number: values[position] for number, position in written.items()},
        )
    )
    hoisted = hoist_conversions(prune(shift_slices(program)))
    cloned = clone_broadcasts(prune(reuse_results(prune(hoisted), every=builder.unrolled)))
    return state_on_host(prune(sink_broadcasts(prune(cloned))), on_host)


def retraced(program: Program, run: Callable[..., Any]) -> Program:
    """A program that computes the same in another way: ``run`` takes the inputs and captured arrays of ``program``, in
    their order, and gives its outputs. Names, ties and trees are those of ``program``."""
    captured = [value for value in program.captured if value not in program.inputs]
    taken = [program.values[value] for value in (*program.inputs, *captured)]
    closed = _jax.trace(run, [_jax.shape_of(value) for value in taken], {}).jaxpr
    builder, jaxpr = _Builder(), closed.jaxpr
    new = [
        builder.new_value(var.aval, value.name, value.memory_kind)
        for var, value in zip(jaxpr.invars, taken, strict=True)
    ]
    environment: dict[Any, int | Constant] = dict(zip(jaxpr.invars, new, strict=True))
    held = dict(zip(new[len(program.inputs) :], (program.captured[value] for value in captured), strict=True))
    for var, array in zip(jaxpr.constvars, closed.consts, strict=True):
        environment[var] = value = builder.new_value(var.aval, None)
        held[value] = array
    outputs = tuple(builder.inline(jaxpr, environment, held))
    inputs = tuple(new[: len(program.inputs)])
    whole = Region(0, inputs, outputs, 1)
    made = replace(
        program,
        values=tuple(builder.values),
        operations=tuple(builder.operations),
        inputs=inputs,
        outputs=outputs,
        captured=held,
        regions=(whole, *builder.regions[1:]),
    )
    return prune(clone_broadcasts(prune(made)))


_NAMING = "name"
"""What ``checkpoint_name`` leaves: its result is its operand. Checkpoint policies have read the names by now."""


class _Builder:
    """The values and operations of a jaxpr and of the jaxprs that it calls."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self.makers: dict[int, Operation] = {}
        self.unrolled = False  # whether any scan is one iteration
        self.regions: list[Region] = [Region(0, (), (), 1)]
        self.region = 0
        self.stated_trips: int | None = None
        self.called_from: str | None = None

    def new_value(self, aval: Any, name: str | None, kind: str | None = None) -> int:
        shape, kind = tuple(getattr(aval, "shape", ())), kind or _jax.memory_kind(aval)
        dtype = getattr(aval, "dtype", np.dtype(np.bool_))
        self.values.append(Value(len(self.values), shape, dtype, name, bool(getattr(aval, "weak_type", False)), kind))
        return len(self.values) - 1

    def new_operation(
        self,
        primitive: _jax.Primitive,
        params: dict[str, Any],
        operands: Sequence[int | Constant],
        equation: _jax.Equation,
        bodies: tuple[int, ...] = (),
    ) -> tuple[int, ...]:
        avals: list[Any] = [var.aval for var in equation.outvars]
        if primitive is _jax.optimization_barrier and equation.primitive is not primitive:
            avals = [self.values[o] if isinstance(o, int) else o.aval for o in operands]
        results = tuple(self.new_value(aval, None) for aval in avals)
        # JAX's own functions are traced once: only their call has the user's source line
        source, region = _jax.source_line(equation) or self.called_from or "unknown source", self.region
        number = len(self.operations)
        made = Operation(number, primitive, params, tuple(operands), results, source, equation, region, bodies)
        self.operations.append(made)
        self.makers |= dict.fromkeys(results, made)
        return results

    def inline(
        self, jaxpr: _jax.Jaxpr, environment: dict[Any, int | Constant], captured: dict[int, Any]
    ) -> list[int | Constant]:
        """Adds the operations of ``jaxpr``, whose arguments ``environment`` holds; returns its results."""

        def read(atom: Any) -> int | Constant:
            return Constant(atom.val, atom.aval) if isinstance(atom, _jax.Literal) else environment[atom]

        equations = [single for equation in without_unused(jaxpr) for single in _jax.one_by_one(equation)]
        again = [position for position, equation in enumerate(equations) if any(_jax.barrier_mask(equation))]
        for position, equation in enumerate(map(_jax.unbatched, equations)):
            operands = [read(atom) for atom in equation.invars]
            undone = undone_by(equation, operands, self.makers)
            once = body_of_single_trip(equation)
            self.unrolled |= once is not None
            body = once or _jax.call_body(equation) or _undescribed_body(equation)
            results: Sequence[int | Constant]
            if undone is not None:
                results = [undone]
            elif equation.primitive.name == _NAMING:
                results = operands
            elif body is None:
                params = _jax.without_empty_shardings(equation.params)
                bodies = self._bodies(equation, tuple(operands), captured)
                results = self.new_operation(equation.primitive, params, operands, equation, bodies)
            else:
                inner, guarded = body.jaxpr, self._after_barrier(operands, equation)
                taken = [guarded[position] for position in body.positions]
                inner_environment: dict[Any, int | Constant] = dict(zip(inner.invars, taken, strict=True))
                for var, array in zip(inner.constvars, body.constants, strict=True):
                    inner_environment[var] = value = self.new_value(var.aval, None)
                    captured[value] = _jax.without_typed_layout(array)
                with self._calling(equation, stated_trip_count(_jax.module_path(equation)) or self.stated_trips):
                    results = self.inline(inner, inner_environment, captured)
                if position in again[:-1]:
                    results = self._release_together(results, equation)
            environment.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _bodies(
        self, equation: _jax.Equation, operands: tuple[int | Constant, ...], captured: dict[int, Any]
    ) -> tuple[int, ...]:
        """Adds the regions of a loop or of branches, with their operations."""
        bodies = []
        for jaxpr, constants, trips in _jax.control_bodies(equation):
            if trips is None:
                trips = self._trips_of_while(equation, operands)
            inputs = tuple(self.new_value(var.aval, None) for var in jaxpr.invars)
            environment: dict[Any, int | Constant] = dict(zip(jaxpr.invars, inputs, strict=True))
            for var, array in zip(jaxpr.constvars, constants, strict=True):
                environment[var] = value = self.new_value(var.aval, None)
                captured[value] = _jax.without_typed_layout(array)
            outside, times = self.region, self.regions[self.region].times * (1 if trips is None else trips)
            self.region = len(self.regions)
            bodies.append(self.region)
            self.regions.append(Region(self.region, inputs, (), times, assumed=trips is None))
            with self._calling(equation, None):
                outputs = self.inline(jaxpr, environment, captured)
            self.regions[self.region] = replace(self.regions[self.region], outputs=tuple(outputs))
            self.region = outside
        return tuple(bodies)

    def _trips_of_while(self, equation: _jax.Equation, operands: tuple[int | Constant, ...]) -> int | None:
        """The trip count of a while loop: by its bounds, or as stated by the user, or None."""
        found = while_trip_count(equation.params, operands)
        stated = stated_trip_count(_jax.module_path(equation)) or self.stated_trips
        return stated if found is None else found

    @contextmanager
    def _calling(self, equation: _jax.Equation, trips: int | None) -> Iterator[None]:
        """Inlines the body of a call. The user's trip count around the call holds for the loops in it."""
        outside = self.stated_trips, self.called_from
        self.stated_trips, self.called_from = trips, _jax.source_line(equation) or self.called_from
        yield
        self.stated_trips, self.called_from = outside

    def _after_barrier(self, operands: list[int | Constant], equation: _jax.Equation) -> list[int | Constant]:
        return self._barrier(operands, _jax.barrier_mask(equation), equation)

    def _release_together(self, results: Sequence[int | Constant], equation: _jax.Equation) -> list[int | Constant]:
        """The results of a rematerialised region, behind a barrier that releases them together.

        The region's gradients of weights are needed only at the end of the step. Without the barrier XLA computes them
        there, and the recomputed activations of all layers are live at once.
        """
        return self._barrier(list(results), (len(results) > 1,) * len(results), equation)

    def _barrier(
        self, values: list[int | Constant], mask: Sequence[bool], equation: _jax.Equation
    ) -> list[int | Constant]:
        pairs = enumerate(zip(mask, values, strict=True))
        guarded = [position for position, (held, value) in pairs if held and isinstance(value, int)]
        if not guarded:
            return values
        results = self.new_operation(_jax.optimization_barrier, {}, [values[p] for p in guarded], equation)
        behind = list(values)
        for position, result in zip(guarded, results, strict=True):
            behind[position] = result
        return behind


def _undescribed_body(equation: _jax.Equation) -> _jax.CallBody | None:
    """The jaxpr of a primitive without a rule, if JAX lowers it as a function of other primitives."""
    primitive, params = equation.primitive, equation.params
    if not _jax.runs_a_function(primitive) or rules.is_without_rule(primitive):
        return None
    types = [[var.aval for var in side] for side in (equation.invars, equation.outvars)]
    return None if rules.derive(primitive, params, *types).known else _jax.body_of_function(equation)


def _paths(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    leaves, in_tree = jax.tree_util.tree_flatten_with_path((tuple(args), kwargs))
    # the first key tells positional from keyword arguments; names start behind it
    return [path[1:] for path, _ in leaves], in_tree


def path_name(path: Any) -> str:
    """The path of a leaf in a tree, as plans have it."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


# Operations of an update of the state, elementwise or in place.
_ELEMENTWISE = {"add", "sub", "mul", "div", "neg", "max", "min", "add_any", "select_n", "clamp", "integer_pow", "sqrt"}
_UNCHANGED = {"convert_element_type", "copy", "copy_p", "device_put", "optimization_barrier", "sharding_constraint"}
_UPDATES = _ELEMENTWISE | _UNCHANGED | {"scatter", "scatter-add", "dynamic_update_slice", "cond", "scan", "while"}


def _find_ties(
    input_paths: Sequence[Any],
    output_paths: Sequence[Any],
    inputs: Sequence[int],
    outputs: Sequence[int | Constant],
    builder: _Builder,
    refs: set[int],
    on_host: Collection[int],
) -> dict[int, int]:
    """Pairs each result with the input that it replaces in the next step, except for ``refs``, by position.

    The whole paths must agree (``step(params, x) -> params, loss``), or the paths after the argument's position
    (``step(state, x) -> state``). Shape, dtype and memory kind must agree as well; what replaces an input that waits
    ``on_host`` may be there already. An input is used once. Whole paths have precedence. For a short path (a bare
    array, or a part of it) the output must also be an update of the input: gradients have the paths of the parameters,
    but do not replace them.
    """
    ties: dict[int, int] = {}
    taken = set(refs)
    by_path = {tuple(path): position for position, path in enumerate(input_paths)}
    by_tail: dict[tuple[Any, ...], list[int]] = {}
    for position, path in enumerate(input_paths):
        if len(path) > 1:
            by_tail.setdefault(tuple(path[1:]), []).append(position)
    makers = {result: operation for operation in builder.operations for result in operation.results}

    def agrees(output: int | Constant, position: int) -> bool:
        if not isinstance(output, int) or position in taken:
            return False
        value, replaced = builder.values[output], builder.values[inputs[position]]
        same_type = value.shape == replaced.shape and value.dtype == replaced.dtype
        there = position in on_host and value.kind_as_result == _jax.HOST_MEMORY
        return same_type and (there or value.kind_as_result == replaced.memory_kind)

    def updates(output: int | Constant, position: int) -> bool:
        return isinstance(output, int) and inputs[position] in _updated(output, builder.values, makers)

    def tie(number: int, position: int) -> None:
        ties[number] = position
        taken.add(position)

    for number, path in enumerate(output_paths):
        found = by_path.get(tuple(path))
        if not path or found is None or not agrees(outputs[number], found):
            continue
        if len(path) > 1 or updates(outputs[number], found):
            tie(number, found)
    for number, path in enumerate(output_paths):
        if number in ties:
            continue
        for tail in (tuple(path), tuple(path[1:])):
            matches = [p for p in by_tail.get(tail, ()) if agrees(outputs[number], p)] if tail else []
            if len(matches) == 1 and updates(outputs[number], matches[0]):
                tie(number, matches[0])
                break
    return ties


def _updated(output: int, values: Sequence[Value], makers: dict[int, Operation]) -> set[int]:
    """The values of an output's shape that the output is an update of, itself included."""
    found = {output}
    waiting = [output]
    while waiting:
        operation = makers.get(waiting.pop())
        if operation is None or operation.primitive.name not in _UPDATES:
            continue
        for operand in operation.operands:
            if isinstance(operand, int) and operand not in found and values[operand].shape == values[output].shape:
                found.add(operand)
                waiting.append(operand)
    return found
