"""The program: a traced function as a flat list of operations over values.

Tracing flattens the jaxpr. Call-like equations (``jit``, ``custom_jvp_call``, ``remat``, ...) are inlined. Equations
without readers are dropped. Every value has its place in the source.

>>> import jax.numpy as jnp
>>> from shardplan.program.tracing import trace_program
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
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from jax.sharding import PartitionSpec

from shardplan import _jax
from shardplan.memoize import memoize
from shardplan.program.fingerprint import stable_text
from shardplan.program.regions._jax import scopes_of_region


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of the program: its position, shape, dtype, and for arguments their tree path.

    ``memory_kind`` is that of JAX (``pinned_host``), None for the memory of the devices.
    """

    index: int
    shape: tuple[int, ...]
    dtype: Any
    name: str | None = None
    weak_type: bool = False
    memory_kind: str | None = None
    stored_bytes: int = field(init=False, repr=False, compare=False)
    """Bytes of the whole tensor, before it is split."""
    total_bytes: int = field(init=False, repr=False, compare=False)
    """Those of them that are in the memory of the devices: none where the tensor is in host memory."""
    elements: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        elements = prod(self.shape)
        object.__setattr__(self, "elements", elements)
        object.__setattr__(self, "stored_bytes", elements * _jax.item_bytes(self.dtype))
        object.__setattr__(self, "total_bytes", 0 if self.memory_kind else self.stored_bytes)

    @property
    def kind_as_result(self) -> str | None:
        """The kind of memory in which a caller gets it: other kinds than that of types end in the devices' own."""
        return self.memory_kind if self.memory_kind == _jax.HOST_MEMORY else None


@dataclass(frozen=True, slots=True)
class Constant:
    """An operand that is a literal of the program, of rank 0."""

    value: Any
    aval: Any


@dataclass(frozen=True, slots=True)
class Operation:
    """One equation: a primitive with parameters, its operands (value indices or constants) and results.

    ``bodies`` are the regions of a loop or of branches. ``region`` is the region of the operation. ``again`` marks a
    clone that makes a residual again (`shardplan.program.recompute`)."""

    index: int
    primitive: _jax.Primitive
    params: dict[str, Any]
    operands: tuple[int | Constant, ...]
    results: tuple[int, ...]
    source: str
    equation: _jax.Equation = field(repr=False)
    region: int = 0
    bodies: tuple[int, ...] = ()
    again: bool = False

    @property
    def read(self) -> list[int]:
        """The operands that are values."""
        return [operand for operand in self.operands if isinstance(operand, int)]

    @property
    def scope(self) -> str:
        """The name of the operation in the compiled program's metadata."""
        return f"op{self.index}"

    @property
    def scopes(self) -> str:
        """The scopes that it runs in: its own, and a mark where it makes a residual again."""
        return f"{self.scope}/again" if self.again else self.scope


@dataclass(frozen=True, slots=True)
class Region:
    """The whole program (region 0), the body of a loop, or a branch, with its executions per step (``times``).

    ``operations`` are those directly in it, by index. Operations of inner regions come before the operation that holds
    these regions. ``assumed`` marks an unknown trip count, which counts as one.
    """

    index: int
    inputs: tuple[int, ...]
    outputs: tuple[int | Constant, ...]
    times: int
    operations: tuple[int, ...] = ()
    assumed: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """A traced function.

    ``inputs`` and ``outputs`` are value indices in the order of the flattened arguments and results. A literal output
    is a `Constant`. ``captured`` maps the values of closed-over arrays to the arrays. ``ties`` maps an output position
    to the input position that it is fed back to: a step's new state to its old state.

    ``refs`` are the positions of inputs that are references (``jax.new_ref``) to arrays. ``written`` maps the outputs
    that are left in references to the values that these had before. These outputs come after the results.
    """

    values: tuple[Value, ...]
    operations: tuple[Operation, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | Constant, ...]
    captured: dict[int, Any]
    ties: dict[int, int]
    regions: tuple[Region, ...]
    output_names: tuple[str, ...]
    in_tree: Any
    out_tree: Any
    refs: frozenset[int] = frozenset()
    written: Mapping[int, int] = field(default_factory=dict)
    name: str = "planned"
    """The name of the user's function, which the compiled module has too."""
    parameters: tuple[str, ...] = ()
    """The names of its first positional parameters, static ones left out."""
    devices: int = 1
    """The number of devices: the compiler sees large operations split over as many."""
    memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Memoised results of functions of the program, see `shardplan.memoize`."""

    @property
    def captured_refs(self) -> dict[int, Any]:
        """The closed-over references, by their values."""
        return {value: held for value, held in self.captured.items() if isinstance(held, _jax.Ref)}

    @property
    def results(self) -> tuple[int | Constant, ...]:
        """The outputs that the function returns."""
        return self.outputs[: self.out_tree.num_leaves]

    def on(self, devices: int) -> Program:
        """The same program for so many devices."""
        return self if devices == self.devices else _on(self, devices)

    @property
    def effects(self) -> set[Any]:
        """The effects of all operations, as JAX names them."""
        return {effect for operation in self.operations for effect in operation.equation.effects}

    @property
    def leaving(self) -> frozenset[int]:
        """The values that the caller gets, without the new state, which is fed back."""
        return frozenset(o for n, o in enumerate(self.outputs) if isinstance(o, int) and n not in self.ties)

    @property
    def replaced(self) -> Mapping[int, int]:
        """Per output that is fed back or left in a reference, the value that it replaces."""
        return _replaced(self)

    @property
    def makers(self) -> Mapping[int, Operation]:
        """The operation that makes each value, for all results of operations."""
        return _makers(self)

    @property
    def read(self) -> frozenset[int]:
        """The values that operations read."""
        return frozenset(o for operation in self.operations for o in operation.operands if isinstance(o, int))

    @property
    def constraints(self) -> dict[int, PartitionSpec]:
        """The user's own sharding constraints, by their results."""
        found = ((o.results[0], _jax.wanted_spec(o.equation)) for o in self.operations if len(o.results) == 1)
        return {value: spec for value, spec in found if spec is not None}

    def trips(self, loop: Operation) -> int | None:
        """The trip count of a loop's body each time, None if it is unknown."""
        body = self.regions[loop.bodies[-1]]
        return None if body.assumed else body.times // max(self.regions[loop.region].times, 1)

    def times_of_values(self) -> dict[int, int]:
        """The number of times per step that each value is made."""
        found = {value: region.times for region in self.regions for value in region.inputs}
        found |= dict.fromkeys(self.captured, 1)
        return found | {result: self.regions[o.region].times for o in self.operations for result in o.results}

    def regions_left_out(self, spent: Mapping[int, float]) -> set[int]:
        """The branches that other branches exceed in cost, with all inner regions: one branch of each operation counts.

        ``spent`` are the bytes or seconds of the operations directly in a region, by its index. Inner regions count
        too.
        """
        total = {region.index: spent.get(region.index, 0.0) for region in self.regions}
        left_out: set[int] = set()
        holders = [operation for operation in self.operations if operation.bodies]
        for operation in holders:  # inner ones come first
            running = operation.bodies
            if operation.primitive.name == "cond":
                running = (max(running, key=lambda body: total[body]),)
            left_out |= {*operation.bodies} - {*running}
            total[operation.region] += sum(total[body] for body in running)
        for operation in reversed(holders):
            if operation.region in left_out:
                left_out |= {*operation.bodies}
        return left_out

    def fingerprint(self) -> str:
        """A digest of names, shapes and operations with parameters, equal for equal programs on every machine."""
        digest = hashlib.sha256()
        for value in self.values:
            digest.update(f"{value.shape}{value.dtype}{value.name}{value.memory_kind or ''};".encode())
        for operation in self.operations:
            params = stable_text(operation.params)
            operands = [o if isinstance(o, int) else str(o.aval) for o in operation.operands]
            scopes = scopes_of_region(operation.equation)  # which say how often its loops run
            digest.update(f"{operation.primitive.name}{params}{operands}{operation.results}{scopes};".encode())
        digest.update(repr((self.inputs, [o for o in self.outputs if isinstance(o, int)], self.ties)).encode())
        digest.update(repr([region.times for region in self.regions]).encode())
        digest.update(repr((sorted(self.refs), self.written)).encode() if self.refs or self.written else b"")
        return digest.hexdigest()


@memoize
def _on(program: Program, devices: int) -> Program:
    return replace(program, devices=devices)


@memoize
def _makers(program: Program) -> dict[int, Operation]:
    return {result: operation for operation in program.operations for result in operation.results}


@memoize
def _replaced(program: Program) -> dict[int, int]:
    return {number: program.inputs[position] for number, position in program.ties.items()} | {**program.written}


def operand_type(program: Program, operand: int | Constant) -> Any:
    """The shape and dtype of an operand, as a value or an abstract value."""
    return program.values[operand] if isinstance(operand, int) else operand.aval
