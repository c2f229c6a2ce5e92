"""The program: a traced function as a flat list of operations over values.

Tracing flattens the jaxpr: call-like equations (``jit``, ``custom_jvp_call``, ``remat``, ...) are inlined, equations
whose results nobody reads are dropped, and every value keeps where it comes from.

>>> import jax.numpy as jnp
>>> def step(state, x):
...     return {"w": state["w"] - x @ state["w"]}, jnp.sum(x)
>>> program = trace_program(step, ({"w": jnp.ones((4, 4))}, jnp.ones((4, 4))))
>>> [operation.primitive.name for operation in program.operations]
['dot_general', 'sub', 'reduce_sum']
>>> [program.values[i].name for i in program.inputs], program.ties
(['0/w', '1'], {0: 0})
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from shardplan import _jax
from shardplan.fingerprint import stable_text


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of the program: its position, shape, dtype, and for arguments their tree path."""

    index: int
    shape: tuple[int, ...]
    dtype: Any
    name: str | None = None
    weak_type: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole tensor, before it is split."""
        return int(np.prod(self.shape, dtype=np.int64)) * _jax.item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Constant:
    """An operand that is a literal of the program, of rank 0."""

    value: Any
    aval: Any


@dataclass(frozen=True, slots=True)
class Operation:
    """One equation: a primitive with parameters, its operands (value indices or constants) and results.

    A result that is not an array (a token) is None in ``results``.
    """

    index: int
    primitive: _jax.Primitive
    params: dict[str, Any]
    operands: tuple[int | Constant, ...]
    results: tuple[int, ...]
    source: str
    equation: _jax.Equation = field(repr=False)

    @property
    def scope(self) -> str:
        """The name that the operation carries in the compiled program's metadata."""
        return f"op{self.index}"


@dataclass(frozen=True, slots=True)
class Program:
    """A traced function.

    ``inputs`` and ``outputs`` are value indices in the order of the flattened arguments and results (an output that is
    a literal is a `Constant`); ``captured`` maps the values of closed-over arrays to the arrays. ``ties`` maps an
    output position to the input position that it will be fed back to: a step's new state to its old state.
    """

    values: tuple[Value, ...]
    operations: tuple[Operation, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | Constant, ...]
    captured: dict[int, Any]
    ties: dict[int, int]
    output_names: tuple[str, ...]
    in_tree: Any
    out_tree: Any

    @property
    def effects(self) -> set[Any]:
        """The effects of all operations, as JAX names them."""
        return {effect for operation in self.operations for effect in operation.equation.effects}

    @property
    def constraints(self) -> dict[int, PartitionSpec]:
        """The user's own sharding constraints, by the value that each gives."""
        found = ((o.results[0], _jax.wanted_spec(o.equation)) for o in self.operations if len(o.results) == 1)
        return {value: spec for value, spec in found if spec is not None}

    def fingerprint(self) -> str:
        """A digest of names, shapes and operations with parameters: equal for equal programs, on every machine."""
        digest = hashlib.sha256()
        for value in self.values:
            digest.update(f"{value.shape}{value.dtype}{value.name};".encode())
        for operation in self.operations:
            params = stable_text(operation.params)
            operands = [o if isinstance(o, int) else str(o.aval) for o in operation.operands]
            digest.update(f"{operation.primitive.name}{params}{operands}{operation.results};".encode())
        digest.update(repr((self.inputs, [o for o in self.outputs if isinstance(o, int)], self.ties)).encode())
        return digest.hexdigest()


def trace_program(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
) -> Program:
    """Traces ``fn`` on arrays or ``ShapeDtypeStruct``s.

    What ``fn`` itself raises while it is traced reaches the caller unchanged.
    """
    kwargs = kwargs or {}
    traced = _jax.trace(fn, args, kwargs)
    input_paths, in_tree = _paths(args, kwargs)
    output_paths, out_tree = jax.tree_util.tree_flatten_with_path(traced.out_info)
    builder = _Builder()
    jaxpr = traced.jaxpr.jaxpr
    names = [_path_name(path) for path in input_paths]
    environment: dict[Any, int | Constant] = {}
    inputs = [builder.new_value(var.aval, name) for var, name in zip(jaxpr.invars, names, strict=True)]
    environment.update(zip(jaxpr.invars, inputs, strict=True))
    captured = {}
    for var, array in zip(jaxpr.constvars, traced.jaxpr.consts, strict=True):
        environment[var] = value = builder.new_value(var.aval, None)
        captured[value] = array
    outputs = builder.inline(jaxpr, environment, captured)
    ties = _find_ties(
        input_paths, [path for path, _ in output_paths], [builder.values[i] for i in inputs], outputs, builder
    )
    return _prune(
        Program(
            values=tuple(builder.values),
            operations=tuple(builder.operations),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            captured=captured,
            ties=ties,
            output_names=tuple(_path_name(path) for path, _ in output_paths),
            in_tree=in_tree,
            out_tree=out_tree,
        )
    )


class _Builder:
    """Collects the values and operations of a jaxpr and of what it calls."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.operations: list[Operation] = []

    def new_value(self, aval: Any, name: str | None) -> int:
        shape = tuple(getattr(aval, "shape", ()))
        dtype = getattr(aval, "dtype", np.dtype(np.bool_))
        self.values.append(Value(len(self.values), shape, dtype, name, bool(getattr(aval, "weak_type", False))))
        return len(self.values) - 1

    def new_operation(
        self,
        primitive: _jax.Primitive,
        params: dict[str, Any],
        operands: Sequence[int | Constant],
        equation: _jax.Equation,
    ) -> tuple[int, ...]:
        avals = [var.aval for var in equation.outvars]
        if primitive is _jax.optimization_barrier and equation.primitive is not primitive:
            avals = [self.values[o] if isinstance(o, int) else o.aval for o in operands]
        results = tuple(self.new_value(aval, None) for aval in avals)
        self.operations.append(
            Operation(
                len(self.operations), primitive, params, tuple(operands), results, _jax.source_line(equation), equation
            )
        )
        return results

    def inline(
        self, jaxpr: _jax.Jaxpr, environment: dict[Any, int | Constant], captured: dict[int, Any]
    ) -> list[int | Constant]:
        """Adds the operations of ``jaxpr``, whose arguments ``environment`` holds; returns its results."""

        def read(atom: Any) -> int | Constant:
            return Constant(atom.val, atom.aval) if isinstance(atom, _jax.Literal) else environment[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            body = _jax.call_body(equation)
            results: Sequence[int | Constant]
            if body is None:
                params = _jax.without_empty_shardings(equation.params)
                results = self.new_operation(equation.primitive, params, operands, equation)
            else:
                inner, constants = body
                operands = self._behind_barrier(operands, equation)
                inner_environment: dict[Any, int | Constant] = dict(zip(inner.invars, operands, strict=True))
                for var, array in zip(inner.constvars, constants, strict=True):
                    inner_environment[var] = value = self.new_value(var.aval, None)
                    captured[value] = array
                results = self.inline(inner, inner_environment, captured)
            environment.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _behind_barrier(self, operands: list[int | Constant], equation: _jax.Equation) -> list[int | Constant]:
        mask = _jax.barrier_mask(equation)
        guarded = [position for position, (held, o) in enumerate(zip(mask, operands)) if held and isinstance(o, int)]
        if not guarded:
            return operands
        results = self.new_operation(_jax.optimization_barrier, {}, [operands[p] for p in guarded], equation)
        behind = list(operands)
        for position, result in zip(guarded, results, strict=True):
            behind[position] = result
        return behind


def _prune(program: Program) -> Program:
    """Drops operations whose results nobody reads and that have no effect."""
    needed = {output for output in program.outputs if isinstance(output, int)}
    kept = []
    for operation in reversed(program.operations):
        if operation.equation.effects or needed.intersection(operation.results):
            kept.append(operation)
            needed.update(o for o in operation.operands if isinstance(o, int))
    operations = tuple(
        Operation(number, o.primitive, o.params, o.operands, o.results, o.source, o.equation)
        for number, o in enumerate(reversed(kept))
    )
    captured = {value: array for value, array in program.captured.items() if value in needed}
    return Program(
        program.values,
        operations,
        program.inputs,
        program.outputs,
        captured,
        program.ties,
        program.output_names,
        program.in_tree,
        program.out_tree,
    )


def _paths(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    leaves, in_tree = jax.tree_util.tree_flatten_with_path((tuple(args), kwargs))
    # the first key tells positional from keyword arguments; names start behind it
    return [path[1:] for path, _ in leaves], in_tree


def _path_name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _find_ties(
    input_paths: Sequence[Any],
    output_paths: Sequence[Any],
    inputs: Sequence[Value],
    outputs: Sequence[int | Constant],
    builder: _Builder,
) -> dict[int, int]:
    """Pairs each output with the input that it replaces in the next step.

    The paths must agree whole (``step(params, x) -> params, loss``) or behind the argument's position
    (``step(state, x) -> state``), and so must shape and dtype. An input is used once; whole agreement goes first.
    """
    ties: dict[int, int] = {}
    taken: set[int] = set()
    by_path = {tuple(path): position for position, path in enumerate(input_paths)}
    by_tail: dict[tuple[Any, ...], list[int]] = {}
    for position, path in enumerate(input_paths):
        if len(path) > 1:
            by_tail.setdefault(tuple(path[1:]), []).append(position)

    def agrees(output: int | Constant, position: int) -> bool:
        if not isinstance(output, int) or position in taken:
            return False
        value = builder.values[output]
        return value.shape == inputs[position].shape and value.dtype == inputs[position].dtype

    def tie(number: int, position: int) -> None:
        ties[number] = position
        taken.add(position)

    for number, path in enumerate(output_paths):
        found = by_path.get(tuple(path))
        if path and found is not None and agrees(outputs[number], found):
            tie(number, found)
    for number, path in enumerate(output_paths):
        if number in ties:
            continue
        for tail in (tuple(path), tuple(path[1:])):
            matches = [p for p in by_tail.get(tail, ()) if agrees(outputs[number], p)] if tail else []
            if len(matches) == 1:
                tie(number, matches[0])
                break
    return ties
