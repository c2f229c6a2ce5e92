"""A planned step written out as Python: its program with all layouts and collectives, which needs JAX alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from shardplan import _jax
from shardplan.apply.replay import Replay
from shardplan.compiled.program import operation_of
from shardplan.layout.mesh import mesh_axes, with_auto_axes
from shardplan.pages.places import places_of
from shardplan.plans.plan_data import PlanData
from shardplan.source.equations import body_of
from shardplan.source.literals import array_text, quoted
from shardplan.source.writer import RESERVED, Names, Writer


def program_text(plan: PlanData) -> str:
    """The functions of the step, and the function `step` of the user's arguments."""
    closed = _traced(plan)
    writer = Writer(_Places(plan))
    body = body_of(closed, writer.place_of)
    paths = [one.path for one in plan.arguments]
    names = parameters_of(plan)
    inputs = {
        variable: f"given[{quoted(_named(path, names))}]" for variable, path in zip(body.inputs, paths, strict=True)
    }
    hints = {variable: _hint(path, names) for variable, path in zip(body.inputs, paths, strict=True)}
    lines = writer.step(body, inputs, hints, names)
    result = _tree_text(plan.program.out_tree, _Leaves(plan.program.output_names), names, plan.program.in_tree)
    head = [f"def step({', '.join(names)}):", f'    """{plan.program.name}, as planned."""']
    given = ", ".join(f"{name}={name}" for name in names)
    tail = [f"    given = by_path({given})", *(f"    {line}" for line in lines), f"    return {result}"]
    constants = [f"CONSTANT_{n} = {array_text(one)}" for n, one in enumerate(writer.constants.values())]
    return "\n\n\n".join([*constants, *writer.texts(), "\n".join([*head, *tail])]) + "\n"


def _traced(plan: PlanData) -> Any:
    """The planned step as a jaxpr, over a mesh without devices."""
    axes = mesh_axes(plan.mesh)
    mesh: Any = with_auto_axes(AbstractMesh(axes.sizes, axes.names))  # a trace needs no devices
    values = [plan.program.values[index] for index in plan.program.inputs]
    shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype, weak_type=one.weak_type) for one in values]
    with _jax.automatic_mesh():
        return jax.make_jaxpr(lambda *arrays: Replay(plan.schedule, mesh)(arrays))(*shapes)


class _Places:
    """The phase and the modules of an equation of the applied program."""

    def __init__(self, plan: PlanData) -> None:
        self._places = places_of(plan.program)

    def __call__(self, equation: Any) -> str:
        number = operation_of(_jax.module_path(equation))
        if number is None or number >= len(self._places):
            return ""
        place = self._places[number]
        return f"{place.phase} {'/'.join(place.modules)}".strip()


def _named(path: str, parameters: Sequence[str]) -> str:
    """The path of an argument's leaf, with the name of the parameter in the place of its number.

    >>> _named("0/params/kernel", ["state"])
    'state/params/kernel'
    """
    number, slash, rest = path.partition("/")
    return parameters[int(number)] + slash + rest


def _hint(path: str, parameters: Sequence[str]) -> str:
    """A name for an argument: the last parts of its path, without numbers, or that of the parameter.

    >>> _hint("0/params/layers/11/attention/key/kernel", ["state", "images"]), _hint("1", ["state", "images"])
    ('attention_key_kernel', 'images')
    """
    words = [word for word in re.findall(r"[A-Za-z_]+", path) if word.strip("_")]
    return "_".join(words[-3:]) or parameters[int(path.split("/")[0])]


def parameters_of(plan: PlanData) -> list[str]:
    """A name for each positional argument: that of the user's parameter, unless the text needs it."""
    count = len(jax.tree.unflatten(plan.program.in_tree, range(len(plan.arguments)))[0])
    wanted = plan.program.parameters[:count]
    names = Names(Counter(RESERVED))
    return [names.new(name) for name in (*wanted, *(f"argument_{number}" for number in range(len(wanted), count)))]


class _Leaves:
    """The leaves of results that a text has taken so far. ``paths`` are those of all."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths
        self.taken = 0

    def some(self, count: int) -> str:
        self.taken += count
        return f"leaves[{self.taken - count}:{self.taken}]"

    def one(self) -> str:
        self.taken += 1
        return f"leaves[{self.taken - 1}]"

    def by_name(self, count: int, depth: int) -> str:
        """A dictionary of some leaves, by the ends of their paths."""
        ends = ["/".join(path.split("/")[depth:]) for path in self.paths[self.taken : self.taken + count]]
        return f"{{{', '.join(f'{quoted(end)}: {self.one()}' for end in ends)}}}"


def _tree_text(tree: Any, leaves: _Leaves, names: Sequence[str], in_tree: Any, depth: int = 0) -> str:
    """A tree of results as text. Objects of classes have the structure of an argument that they replace, and are
    dictionaries elsewhere."""
    if jax.tree_util.treedef_is_leaf(tree) and tree.num_leaves:
        return leaves.one()
    for name, argument in zip(names, in_tree.children()[0].children(), strict=True):
        if argument == tree and tree.num_leaves:
            return f"jax.tree.unflatten(jax.tree.structure({name}), {leaves.some(tree.num_leaves)})"
    kind, data = tree.node_data() or (type(None), None)
    if kind in (tuple, list, dict):
        inside = [_tree_text(child, leaves, names, in_tree, depth + 1) for child in tree.children()]
        if kind is dict:
            return f"{{{', '.join(f'{key!r}: {one}' for key, one in zip(data or (), inside, strict=True))}}}"
        comma = "," if kind is tuple and len(inside) == 1 else ""
        return f"({', '.join(inside)}{comma})" if kind is tuple else f"[{', '.join(inside)}]"
    return "None" if kind is type(None) else leaves.by_name(tree.num_leaves, depth)
