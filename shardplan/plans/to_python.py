"""A plan as Python text: the user's function under ``jax.jit``, with the plan's layouts at its boundaries.

The text needs JAX alone. Layouts inside of the step are XLA's choice there, so that it may send other bytes than the
plan. With the function and the extra ``audit``, the text is compiled for a GPU, and says what it sends.
"""

from __future__ import annotations

from collections.abc import Callable
from pprint import pformat
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardplan.common.tables import size_text
from shardplan.compiled.program import measure
from shardplan.compiled.rematerialization import caught_rematerializations
from shardplan.compiled.target import TargetNotInstalledError, gpu_mesh, only_described
from shardplan.errors import ArgumentError
from shardplan.plans.plan_data import PlanData
from shardplan.plans.report import mesh_text
from shardplan.plans.sharding_rules import Rules, result_layouts, sharding_rules

TOLERANCE = 0.02
"""The difference of bytes, as a fraction, up to which the text keeps a plan."""

_TEXT = '''"""The layouts of {name} over the mesh ({mesh}), planned by shardplan. This file needs JAX alone.

    step = sharded({name}, make_mesh(), {parameters})  # arguments are arrays or jax.ShapeDtypeStructs

{evidence}
"""

from fnmatch import fnmatchcase

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

MESH = {axes}

# The first pattern that matches the path of a leaf has its layout. "*" matches slashes too.
ARGUMENTS = {arguments}

RESULTS = {results}


def make_mesh(devices=None):
    """The mesh of the plan, over the first devices that are there."""
    sizes, names = tuple(MESH.values()), tuple(MESH)
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


def shardings(mesh, tree, rules):
    """The shardings of a tree's leaves by their paths, such as "0/params/layer_0/kernel"."""

    def of_leaf(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, next(spec for pattern, spec in rules if fnmatchcase(name, pattern)))

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def sharded(step, mesh, *arguments):
    """The step as a function of jax.jit for arguments of these shapes, split over the mesh."""
    return jax.jit(
        step,
        in_shardings=shardings(mesh, arguments, ARGUMENTS),
        out_shardings=shardings(mesh, jax.eval_shape(step, *arguments), RESULTS),
        donate_argnums={donated},
    )
'''


def python_text(plan: PlanData, fn: Callable[..., Any] | None, target: str) -> str:
    """The text of ``Plan.to_python``."""
    _check(plan)
    if fn is None:
        return _written(plan, "What XLA sends with these layouts was not checked: plan.to_python(fn) compiles it.")
    return _written(plan, _checked(plan, fn, target, _written(plan, "")))


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


def _written(plan: PlanData, evidence: str) -> str:
    count = len(jax.tree.unflatten(plan.program.in_tree, range(len(plan.arguments)))[0])
    return _TEXT.format(
        name=plan.program.name,
        mesh=mesh_text(plan.mesh_axes),
        parameters=", ".join(f"argument_{number}" for number in range(count)),
        evidence=evidence,
        axes=pformat(plan.mesh_axes, sort_dicts=False),
        arguments=_rules_text(sharding_rules(plan.layouts)),
        results=_rules_text(sharding_rules(result_layouts(plan))),
        donated=tuple(plan.donated),
    )


def _rules_text(rules: Rules) -> str:
    """A list of rules, one a line."""
    lines = "".join(f"    ({_quoted(pattern)}, {_spec_text(spec)}),\n" for pattern, spec in rules)
    return f"[\n{lines}]" if rules else "[]"


def _quoted(text: str) -> str:
    return repr(text) if '"' in text or "\\" in text or not text.isprintable() else f'"{text}"'


def _spec_text(spec: PartitionSpec) -> str:
    return f"P({', '.join(map(repr, spec))})".replace("'", '"')


def _checked(plan: PlanData, fn: Callable[..., Any], target: str, text: str) -> str:
    """A sentence or two on the bytes of the compiled text and of the plan."""
    try:
        mesh = gpu_mesh(target, tuple(plan.mesh_axes.values()), tuple(plan.mesh_axes))
    except TargetNotInstalledError:
        return "What XLA sends with these layouts was not checked: the extra `audit` is not installed."
    values = [plan.program.values[index] for index in plan.program.inputs]
    leaves = [jax.ShapeDtypeStruct(one.shape, one.dtype, weak_type=one.weak_type) for one in values]
    arguments, _ = jax.tree.unflatten(plan.program.in_tree, leaves)
    namespace: dict[str, Any] = {}
    exec(compile(text, "<plan.to_python()>", "exec"), namespace)
    with only_described(), caught_rematerializations():  # the bytes say what XLA's log warns of
        report = measure(namespace["sharded"](fn, mesh, *arguments).lower(*arguments), plan.mesh_axes)
    return sentence(plan, report.communication_bytes, target)


def sentence(plan: PlanData, compiled: float, target: str) -> str:
    """The verdict on the bytes that a text was compiled to."""
    planned = plan.communication_bytes
    sent = f"Compiled for {target}, a device sends {size_text(compiled)} per step with these layouts"
    if abs(compiled - planned) <= TOLERANCE * planned:
        return f"{sent}, as planned ({size_text(planned)})."
    return (
        f"{sent}.\nThe plan also has layouts inside of the step, which plan.apply(fn) keeps and this file does not. "
        f"With them it\nsends {size_text(planned)}."
    )
