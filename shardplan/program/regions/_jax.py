"""JAX internals of ``shard_map``: its parameters and its lowering, which may change between versions."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import jax
from jax._src import core as jax_core
from jax._src.interpreters import mlir, partial_eval
from jax._src.lax import parallel
from jax._src.pjit import sharding_constraint_p

from shardplan import _jax
from shardplan.rules._jax import take_as_ours


@dataclass(frozen=True, slots=True)
class ShardMapSpecs:
    """The specs of a ``shard_map``: its mesh axes with sizes, its ``PartitionSpec``s with the manual axes, and its
    body.
    """

    axes: dict[str, int]
    manual: frozenset[str]
    operands: tuple[jax.sharding.PartitionSpec, ...]
    results: tuple[jax.sharding.PartitionSpec, ...]
    body: _jax.Jaxpr


def shard_map_specs(equation: _jax.Equation) -> ShardMapSpecs | None:
    """The specs of a ``shard_map``, None for every other equation."""
    params = equation.params
    if equation.primitive.name != "shard_map":
        return None
    axes, manual = dict(params["mesh"].shape), frozenset(params[_manual_axes(params)])
    return ShardMapSpecs(axes, manual, tuple(params["in_specs"]), tuple(params["out_specs"]), params["jaxpr"])


def _manual_axes(params: dict[str, Any]) -> str:
    """The parameter of a ``shard_map`` that lists its manual axes."""
    return "newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"


REGION = _jax.Primitive("shard_map_region")
"""A traced ``shard_map`` in which all mesh axes are manual, also those that its specs leave out."""
REGION.multiple_results = True


def _types_of_region(*_: Any, equation: _jax.Equation, **__: Any) -> tuple[list[Any], Any]:
    return _jax.result_types(equation), equation.effects


def _lower_region(ctx: Any, *operands: Any, equation: _jax.Equation, **params: Any) -> Any:
    """JAX's own lowering of a ``shard_map``, except for the axes that are not manual."""
    overridden: list[tuple[Any, Any]] = [(sharding_constraint_p, lambda _, operand, **__: [operand])]
    overridden += [(primitive, _lower_reduction) for primitive in _WITH_REDUCERS]
    settings = replace(ctx.module_context.lowering_parameters, override_lowering_rules=tuple(overridden))
    inside = ctx.replace(module_context=ctx.module_context.replace(lowering_parameters=settings))
    lowered = _jax.lowering_of(equation.primitive)(inside, *operands, **params)
    ctx.tokens_out = inside.tokens_out
    return lowered


_WITH_REDUCERS = [
    getattr(parallel, f"{name}_p")
    for name in ("pmax", "pmin", "psum", "psum_invariant", "reduce_scatter")
    if hasattr(parallel, f"{name}_p")
]


def _lower_reduction(ctx: Any, *operands: Any, **params: Any) -> Any:
    """A reduction without constraints in its reducer: XLA:CPU aborts on narrow sums with a constraint there."""
    mesh = jax.sharding.get_abstract_mesh()
    by_hand = dict.fromkeys(mesh.axis_names, jax.sharding.AxisType.Manual)
    with jax.sharding.use_abstract_mesh(mesh.update_axis_types(by_hand)):
        types = [jax_core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
        return _jax.lowering_of(ctx.primitive)(ctx.replace(avals_in=types), *operands, **params)


REGION.def_effectful_abstract_eval(_types_of_region)
mlir.register_lowering(REGION, _lower_region)
take_as_ours(REGION)


def scopes_of_region(equation: _jax.Equation) -> list[str]:
    """The scopes inside a ``shard_map``, empty for every other equation."""
    specs = shard_map_specs(equation)
    return [] if specs is None else list(_scopes(specs.body))


def _scopes(jaxpr: _jax.Jaxpr) -> Iterator[str]:
    yield from filter(None, map(_jax.module_path, jaxpr.eqns))
    for inner in jax_core.subjaxprs(jaxpr):
        yield from _scopes(inner)


def has_region(jaxpr: _jax.Jaxpr) -> bool:
    """Whether a jaxpr has a ``shard_map``."""
    names = {equation.primitive.name for equation in jaxpr.eqns}
    return "shard_map" in names or any(map(has_region, jax_core.subjaxprs(jaxpr)))


def manual_region(equation: _jax.Equation) -> tuple[_jax.Primitive, dict[str, Any]]:
    """A `REGION` that computes a ``shard_map`` on the devices of the step.

    Each device computes all of it along the axes that are not manual. XLA's partitioner would split along these: it
    sends bytes that no plan predicts, and fails for some collectives (narrow sums on CPUs, sums in loops). A
    ``shard_map`` that has another one over these axes inside is left to XLA.
    """
    params = equation.params | {"mesh": equation.params["mesh"].abstract_mesh}
    if has_region(params["jaxpr"]):
        return equation.primitive, params
    return REGION, params | {_manual_axes(params): frozenset(params["mesh"].axis_names), "equation": equation}


def without_unused(jaxpr: _jax.Jaxpr) -> list[_jax.Equation]:
    """The equations of a jaxpr, each ``shard_map`` without its unread results and their equations."""
    used = {atom for one in jaxpr.eqns for atom in one.invars if not isinstance(atom, _jax.Literal)}
    used |= {atom for atom in jaxpr.outvars if not isinstance(atom, _jax.Literal)}
    return [_without_unused(equation, used) for equation in jaxpr.eqns]


def _without_unused(equation: _jax.Equation, used: Collection[Any]) -> _jax.Equation:
    if equation.primitive.name != "shard_map":
        return equation
    wanted = [var in used for var in equation.outvars]
    rule: Any = partial_eval.dce_rules[equation.primitive]
    live = ([True] * len(equation.invars),) * (len(signature(rule).parameters) - 2)  # JAX 0.12 asks for live inputs
    return rule(wanted, *live, equation)[1] or equation
