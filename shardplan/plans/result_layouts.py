"""The layouts that a user requests for the results of a function.

They are constraints on the results in the trace of the function. A result that replaces an argument in the next step
normally has that argument's layout. Here the argument is pinned to the layout of the result. If it is pinned to another
layout, the next step reshards it.

>>> program, _ = trace_with_layouts(lambda s: {"w": 2 * s["w"]}, ({"w": jax.ShapeDtypeStruct((8,), "float32")},), {},
...                          lambda results: {"w": PartitionSpec("x")})
>>> program.output_names, list(program.constraints.values()), pin_results(program, {"w": PartitionSpec("x")}, None)[1]
(('w',), [P('x',)], {'0/w': P('x',)})
"""

from __future__ import annotations

import functools
import glob
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.layout.layout import axes_of
from shardplan.program.program import Program
from shardplan.program.tracing import path_name, trace_program

_OPEN = PartitionSpec.UNCONSTRAINED

Specs = Mapping[str, PartitionSpec]
"""Layouts by the paths of arguments or results."""


def trace_with_layouts(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    wanted: Callable[[Any], Specs] | None,
    on_host: Collection[int] = (),
) -> tuple[Program, dict[str, PartitionSpec]]:
    """The program of a function whose results have the layouts of ``wanted(results)``, and these layouts. ``on_host``
    as for `trace_program`."""
    if wanted is None:
        return trace_program(fn, args, kwargs, on_host), {}
    found: dict[str, PartitionSpec] = {}

    @functools.wraps(fn)
    def constrained(*args: Any, **kwargs: Any) -> Any:
        results = fn(*args, **kwargs)
        found.update(wanted(results))
        return jax.tree_util.tree_map_with_path(lambda path, leaf: laid_out(leaf, found.get(path_name(path))), results)

    return trace_program(constrained, args, kwargs, on_host), found


def laid_out(leaf: Any, spec: PartitionSpec | None) -> Any:
    """A traced result with a constraint, which only names mesh axes: those of the plan."""
    if spec is None or not jax.numpy.ndim(leaf):
        return leaf
    names = tuple(dict.fromkeys(axis for entry in spec for axis in axes_of(_named(entry)))) or ("whole",)
    mesh = AbstractMesh((1,) * len(names), names, axis_types=(AxisType.Auto,) * len(names))
    kind = _jax.memory_kind(jax.typeof(leaf))
    return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec, memory_kind=kind))


def pin_results(program: Program, results: Specs, pins: Specs | None) -> tuple[Program, Specs | None]:
    """The program and the pins that give each result its requested layout, also where it is fed back."""
    ties, found, names = dict(program.ties), dict(pins or {}), dict(enumerate(program.output_names))
    for number, position in program.ties.items():
        wanted = results.get(names[number]) if number in names else None  # not the final value of a reference
        name = program.values[program.inputs[position]].name or ""
        pinned = [spec for pattern, spec in found.items() if fnmatchcase(name, pattern)]
        if wanted is None:
            continue
        if not pinned:
            found[glob.escape(name)] = wanted
        elif any(entries_of(spec) != entries_of(wanted) for spec in pinned):
            del ties[number]
    return program if ties == program.ties else replace(program, ties=ties), found or pins


def entries_of(spec: PartitionSpec) -> tuple[Any, ...]:
    """The axes of each dimension, without whole ones at the end.

    >>> entries_of(PartitionSpec("x", ("y",), None))
    (('x',), ('y',))
    """
    entries = [entry if entry is _OPEN else axes_of(entry) for entry in spec]
    while entries and entries[-1] == ():
        entries.pop()
    return tuple(entries)


def of_type(planned: PartitionSpec, wanted: PartitionSpec | None, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The layout of a result by its type. Axes of type Auto split the dimensions that the type leaves open.

    >>> mesh = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))
    >>> of_type(PartitionSpec(("y", "x")), PartitionSpec(PartitionSpec.UNCONSTRAINED), mesh)
    P('y',)
    """
    if wanted is None or AxisType.Explicit not in mesh.axis_types:
        return planned
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    pairs = zip(planned, (*wanted, *[None] * len(planned)), strict=False)
    kept = [
        tuple(axis for axis in axes_of(entry) if types[axis] == AxisType.Auto) if asked is _OPEN else entry
        for entry, asked in pairs
    ]
    return PartitionSpec(*(None if entry == () else entry for entry in kept))


def _named(entry: Any) -> Any:
    return None if entry is _OPEN else entry
