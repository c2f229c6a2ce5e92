"""A plan as Python text, which needs JAX alone.

A text has the layouts at the boundaries of the user's own function, or is the whole program with all layouts. At the
boundaries alone, XLA chooses the layouts inside, so that it may send other bytes than the plan. With the function and
the extra ``audit``, the text is compiled for a GPU, says what it sends, and is the shorter one that keeps the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from pprint import pformat
from typing import Any

import jax

from shardplan.common.checks import check_function
from shardplan.common.tables import size_text
from shardplan.compiled.program import measure
from shardplan.compiled.rematerialization import caught_rematerializations
from shardplan.compiled.target import TargetNotInstalledError, gpu_mesh, only_described
from shardplan.errors import ArgumentError
from shardplan.plans.plan_data import PlanData
from shardplan.plans.report import mesh_text
from shardplan.plans.sharding_rules import Rules, result_layouts, sharding_rules
from shardplan.plans.written_program import parameters_of, program_text
from shardplan.source.literals import literal, quoted
from shardplan.source.writer import RESERVED

TOLERANCE = 0.02
"""The difference of bytes, as a fraction, up to which the text keeps a plan."""

_HEAD = '''"""{title}

    step = sharded({step}make_mesh(), {parameters})  # arguments are arrays or jax.ShapeDtypeStructs

{evidence}
"""

from fnmatch import fnmatchcase

{imports}

MESH = {axes}

# The first pattern that matches the path of a leaf has its layout. "*" matches slashes too.
ARGUMENTS = {arguments}

RESULTS = {results}


def make_mesh(devices=None):
    """The mesh of the plan, over the first devices that are there."""
    sizes, names = tuple(MESH.values()), tuple(MESH)
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


def path_text(path):
    """The path of a leaf, such as "0/params/layer_0/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def shardings(mesh, tree, rules):
    """The shardings of a tree's leaves by their paths."""

    def of_leaf(path, leaf):
        return NamedSharding(mesh, next(spec for pattern, spec in rules if fnmatchcase(path_text(path), pattern)))

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


'''

_BOUNDARY = '''def sharded(step, mesh, *arguments):
    """The step as a function of jax.jit for arguments of these shapes, split over the mesh."""
    return jax.jit(
        step,
        in_shardings=shardings(mesh, arguments, ARGUMENTS),
        out_shardings=shardings(mesh, jax.eval_shape(step, *arguments), RESULTS),
        donate_argnums={donated},
    )
'''

_BOUNDARY_IMPORTS = """import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P"""

_WHOLE_IMPORTS = """import jax
import jax.extend.core.primitives as primitives
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P"""

_HELPERS = '''def split(x, *spec):
    """A tensor in this layout: the mesh axes of each dimension, none for those at the end."""
    return lax.with_sharding_constraint(x, NamedSharding(jax.sharding.get_abstract_mesh(), P(*spec)))


def island(blocks, in_specs, out_specs, axes=tuple(MESH), check_vma=False):
    """A function of each device's blocks of tensors in these layouts. It calls its collectives by name."""
    return jax.shard_map(
        blocks, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes), check_vma=check_vma
    )


def scanned(body, constants, carry, stacks, **options):
    """A loop over the slices of stacks. Its body takes constants, the carry and a slice of each stack."""

    def one(carry, slices):
        results = body(*constants, *carry, *slices)
        return results[: len(carry)], results[len(carry) :]

    carry, stacks = lax.scan(one, carry, stacks, **options)
    return *carry, *stacks


def by_path(**arguments):
    """The leaves of arguments by the names of these and their paths."""
    return {path_text(path): jnp.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(arguments)}


'''

_WHOLE = '''

def sharded(mesh, *arguments):
    """The step as a function of jax.jit for arguments of these shapes, split over the mesh."""
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(MESH))

    def {name}(*given):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return step(*given)

    return jax.jit(
        {name},
        in_shardings=shardings(mesh, arguments, ARGUMENTS),
        out_shardings=shardings(mesh, jax.eval_shape({name}, *arguments), RESULTS),
        donate_argnums={donated},
    )
'''


def python_text(plan: PlanData, fn: Callable[..., Any] | None, target: str, whole: bool | None) -> str:
    """The text of ``Plan.to_python``."""
    if fn is not None:
        check_function("fn", fn)
    if whole not in (None, True, False):
        raise ArgumentError(f"`whole` is True, False or None, got `{whole!r}`")
    _check(plan)
    if fn is None and not whole:
        evidence = "What XLA sends with these layouts was not checked: plan.to_python(fn) compiles it."
        return boundary_text(plan, evidence) if whole is False else whole_text(plan, _UNCHECKED)
    if fn is not None and not whole:
        sent = compiled_bytes(plan, boundary_text(plan, ""), target, fn)
        if whole is False or sent is None or _agree(plan, sent):
            return boundary_text(plan, sentence(plan, sent, target))
    sent = compiled_bytes(plan, whole_text(plan, ""), target)
    return whole_text(plan, _UNCHECKED if sent is None else sentence(plan, sent, target, whole=True))


_UNCHECKED = "All layouts and collectives of the plan are in the text. What XLA sends was not checked."
_MISSING = "What XLA sends with these layouts was not checked: the extra `audit` is not installed."


def _check(plan: PlanData) -> None:
    """Raises ArgumentError for a step that the text cannot call."""
    options = plan.recipe.options
    _, kwargs = jax.tree.unflatten(plan.program.in_tree, range(len(plan.arguments)))
    found = {
        "keyword arguments, of which jax.jit takes no shardings": bool(kwargs),
        "static arguments": bool(options.static or options.static_argnames),
        "references": any(one.is_ref for one in plan.arguments) or bool(plan.program.captured_refs),
        "tensors in host memory": any(one.memory_kind for one in plan.arguments),
    }
    for what, there in found.items():
        if there:
            raise ArgumentError(
                f"to_python() writes steps of positional arrays, and this one has {what}. Take plan.specs(), or run it "
                "by plan.apply(fn)"
            )


def boundary_text(plan: PlanData, evidence: str) -> str:
    """The layouts at the step's boundaries, for the user's own function."""
    title = f"The layouts of {plan.program.name} over the mesh ({mesh_text(plan.mesh_axes)}), planned by shardplan. "
    head = _head(plan, title + "This file needs JAX alone.", f"{plan.program.name}, ", _BOUNDARY_IMPORTS, evidence)
    return head + _BOUNDARY.format(donated=tuple(plan.donated))


def whole_text(plan: PlanData, evidence: str) -> str:
    """The whole program, with all layouts and collectives."""
    title = (
        f"{plan.program.name} over the mesh ({mesh_text(plan.mesh_axes)}), planned and written out by shardplan.\n\n"
    )
    head = _head(plan, title + "This file needs JAX alone.", "", _WHOLE_IMPORTS, evidence)
    taken = {*RESERVED, "mesh", "arguments"}
    name = plan.program.name if plan.program.name.isidentifier() and plan.program.name not in taken else "planned"
    return head + _HELPERS + program_text(plan) + _WHOLE.format(name=name, donated=tuple(plan.donated))


def _head(plan: PlanData, title: str, step: str, imports: str, evidence: str) -> str:
    return _HEAD.format(
        title=title,
        step=step,
        parameters=", ".join(parameters_of(plan)),
        evidence=evidence,
        imports=imports,
        axes=pformat(plan.mesh_axes, sort_dicts=False),
        arguments=_rules_text(sharding_rules(plan.layouts)),
        results=_rules_text(sharding_rules(result_layouts(plan))),
    )


def _rules_text(rules: Rules) -> str:
    """A list of rules, one a line."""
    lines = "".join(f"    ({quoted(pattern)}, {literal(spec)}),\n" for pattern, spec in rules)
    return f"[\n{lines}]" if rules else "[]"


def compiled_bytes(plan: PlanData, text: str, target: str, fn: Callable[..., Any] | None = None) -> float | None:
    """The bytes that a text is compiled to. None where the extra `audit` is not installed."""
    try:
        mesh = gpu_mesh(target, tuple(plan.mesh_axes.values()), tuple(plan.mesh_axes))
    except TargetNotInstalledError:
        return None
    values = [plan.program.values[index] for index in plan.program.inputs]
    leaves = [jax.ShapeDtypeStruct(one.shape, one.dtype, weak_type=one.weak_type) for one in values]
    arguments, _ = jax.tree.unflatten(plan.program.in_tree, leaves)
    namespace: dict[str, Any] = {}
    exec(compile(text, "<plan.to_python()>", "exec"), namespace)
    own = () if fn is None else (fn,)
    with only_described(), caught_rematerializations():  # the bytes say what XLA's log warns of
        lowered = namespace["sharded"](*own, mesh, *arguments).lower(*arguments)
        return measure(lowered, plan.mesh_axes).communication_bytes


def _agree(plan: PlanData, compiled: float) -> bool:
    return abs(compiled - plan.communication_bytes) <= TOLERANCE * plan.communication_bytes


def sentence(plan: PlanData, compiled: float | None, target: str, whole: bool = False) -> str:
    """The verdict on the bytes that a text was compiled to."""
    if compiled is None:
        return _MISSING
    planned = size_text(plan.communication_bytes)
    sent = f"Compiled for {target}, a device sends {size_text(compiled)} per step with these layouts"
    if _agree(plan, compiled):
        return f"{sent}, as planned ({planned})."
    if whole:
        return f"{sent}, and {planned} are planned."
    return (
        f"{sent}.\nThe plan also has layouts inside of the step, which plan.to_python(fn, whole=True) writes out, and "
        f"this file does\nnot have. With them it sends {planned}."
    )
