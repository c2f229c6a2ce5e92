"""Everything of the core that touches JAX internals: the next JAX is this one file's work.

Tracing goes through the public ``jax.jit(...).trace``; what is internal here is reading equations (their bodies, source
lines and name stacks) and binding them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax._src import core as jax_core
from jax._src import source_info_util
from jax.extend import core as jex_core

ClosedJaxpr = jex_core.ClosedJaxpr
DropVar = jex_core.DropVar
Equation = jex_core.JaxprEqn
Jaxpr = jex_core.Jaxpr
Literal = jex_core.Literal
Primitive = jex_core.Primitive
Tracer = jax.core.Tracer

# Call-like primitives: the parameter that holds the body, which is inlined. Both `ClosedJaxpr` and `Jaxpr` bodies occur.
_CALL_BODIES = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}
_REMATERIALISED = frozenset({"remat", "remat2", "checkpoint"})


def call_body(equation: Equation) -> tuple[Jaxpr, tuple[Any, ...]] | None:
    """The body of a call-like equation with its constants, or None where the equation is an operation of its own."""
    parameter = _CALL_BODIES.get(equation.primitive.name)
    if parameter is None:
        return None
    body = equation.params.get(parameter)
    if isinstance(body, ClosedJaxpr):
        return body.jaxpr, tuple(body.consts)
    if isinstance(body, Jaxpr) and not body.constvars:
        return body, ()
    return None


def barrier_mask(equation: Equation) -> tuple[bool, ...]:
    """Which operands of a call-like equation pass an optimization barrier, as JAX's own lowering of a rematerialised
    region does: without it the compiler would merge the recomputation with the forward pass."""
    prevent = equation.params.get("prevent_cse", True)
    if equation.primitive.name not in _REMATERIALISED or not equation.params.get("differentiated"):
        return (False,) * len(equation.invars)
    return tuple(prevent) if isinstance(prevent, tuple) else (bool(prevent),) * len(equation.invars)


optimization_barrier: Primitive = jax.lax.optimization_barrier_p


def without_empty_shardings(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters without shardings over no mesh at all, which some of JAX's own transposes leave behind."""
    empty = {
        name: None
        for name, value in params.items()
        if isinstance(value, jax.sharding.NamedSharding) and not value.mesh.axis_names
    }
    return params | empty if empty else params


def source_line(equation: Equation) -> str:
    """``file:line (function)`` of the user's code that an equation comes from."""
    frame = source_info_util.user_frame(equation.source_info.traceback)
    if frame is None:
        return "unknown source"
    name = frame.file_name.rsplit("/", 1)[-1]
    return f"{name}:{frame.start_line} ({frame.function_name})"


@contextmanager
def _context(equation: Equation, scope: str) -> Iterator[None]:
    info = equation.source_info
    name_stack = source_info_util.current_name_stack() + info.name_stack
    with (
        source_info_util.user_context(info.traceback, name_stack=name_stack),
        equation.ctx.manager,
        jax.named_scope(scope),
    ):
        yield


def bind_again(
    equation: Equation, primitive: Primitive, params: dict[str, Any], operands: Sequence[Any], scope: str
) -> tuple[Any, ...]:
    """Binds a traced equation's primitive to new operands, under its name stack and one more ``scope``."""
    with _context(equation, scope):
        results = primitive.bind(*operands, **primitive.get_bind_params(params))
    return tuple(results) if primitive.multiple_results else (results,)


def trace(fn: Callable[..., Any], static_argnums: tuple[int, ...], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``jax.jit(fn).trace(*args, **kwargs)`` outside of any explicit mesh: a ``jax.stages.Traced``."""
    with no_context_mesh():
        return jax.jit(fn, static_argnums=static_argnums).trace(*args, **kwargs)


@contextmanager
def no_context_mesh() -> Iterator[None]:
    """Out of the user's ``jax.set_mesh``: a step is traced and run on the plan's own mesh."""
    empty = jax.sharding.AbstractMesh((), ())
    if jax.sharding.get_abstract_mesh() == empty:
        yield
    else:
        with jax.sharding.use_abstract_mesh(empty):
            yield


def is_array_type(aval: Any) -> bool:
    """Whether an abstract value is a plain or keyed array, which can be laid out (not a token or a reference)."""
    return isinstance(aval, jax_core.ShapedArray)


def item_bytes(dtype: Any) -> int:
    """Bytes of one element; for PRNG keys, of the whole key."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return int(np.dtype(np.uint32).itemsize) * 2
    return int(np.dtype(dtype).itemsize)


def shape_of(value: Any) -> jax.ShapeDtypeStruct:
    """What ``jax.jit(...).lower`` takes for a value of a shape and dtype."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=value.weak_type)


def is_float(dtype: Any) -> bool:
    """Whether a dtype is a real floating-point type, the narrow ones included."""
    return bool(jax.dtypes.issubdtype(dtype, np.floating))
