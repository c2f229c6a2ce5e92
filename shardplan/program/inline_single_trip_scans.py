"""Inlining of scans of one iteration: their bodies become part of the surrounding program, as in XLA.

XLA merges the operations that such a scan recomputes for its gradients with the first ones, as all equal operations
outside of loops. A stack of such a scan and the slice that another scan takes of it are the same value.

>>> import jax, shardplan
>>> def step(x):
...     return jax.lax.scan(lambda carry, one: (carry + one, carry * one), x, x[None])
>>> program = shardplan.plan(step, 1, jax.ShapeDtypeStruct((8,), "float32")).program
>>> [operation.primitive.name for operation in program.operations]
['add', 'mul', 'broadcast_in_dim']
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from shardplan import _jax
from shardplan.program.program import Constant, Operation


def body_of_single_trip(equation: _jax.Equation) -> _jax.CallBody | None:
    """The body of a scan of one iteration. None for other equations, and for scans with effects."""
    params = equation.params
    if equation.primitive.name != "scan" or params["length"] != 1 or equation.effects:
        return None
    entering = params["num_consts"] + params["num_carry"]
    run, carries = _jax.jaxpr_as_fun(params["jaxpr"]), params["num_carry"]

    def once(*operands: Any) -> list[Any]:
        results = run(*operands[:entering], *(jax.lax.squeeze(stack, (0,)) for stack in operands[entering:]))
        return [*results[:carries], *(jax.lax.expand_dims(one, (0,)) for one in results[carries:])]

    with _jax.automatic_mesh():
        body = jax.make_jaxpr(once)(*[_jax.shape_of(var.aval) for var in equation.invars])
    return _jax.CallBody(body.jaxpr, tuple(body.consts), tuple(range(len(equation.invars))))


def undone_by(
    equation: _jax.Equation, operands: Sequence[int | Constant], makers: Mapping[int, Operation]
) -> int | None:
    """The value that an equation recovers: it removes the dimension of one that only added this dimension."""
    maker = makers.get(operands[0]) if equation.primitive.name == "squeeze" and isinstance(operands[0], int) else None
    if maker is None or maker.primitive.name != "broadcast_in_dim" or len(maker.operands) > 1:
        return None
    [before], kept = maker.operands, {*maker.params["broadcast_dimensions"]}
    dropped = {*range(len(maker.params["shape"]))} - kept == {*equation.params["dimensions"]}
    types: list[Any] = [maker.equation.invars[0].aval, equation.outvars[0].aval]
    return before if isinstance(before, int) and dropped and types[0].shape == types[1].shape else None
