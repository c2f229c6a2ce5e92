"""Sharding rules: a plan's layouts as a short list of path patterns, and as logical axis rules.

A rule is a glob of paths and a ``PartitionSpec``. `*` stands for any characters, slashes included, as in pins. The
first rule that matches a path has its layout:

>>> layouts = {f"0/layer_{n}/kernel": PartitionSpec(None, "data") for n in range(12)} | {"0/step": PartitionSpec()}
>>> sharding_rules(layouts)
[('*/kernel', P(None, 'data')), ('*', P())]

A logical axis rule gives the name of a dimension its mesh axes. Names are those of the user's model:

>>> logical_rules({"w": PartitionSpec(None, "data")}, {"w": PartitionSpec("embed", "mlp")})
[('mlp', 'data')]
"""

from __future__ import annotations

import functools
import glob
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import translate
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardplan.errors import ArgumentError
from shardplan.layout.layout import axes_of
from shardplan.plans.plan_data import PlanData
from shardplan.plans.result_layouts import entries_of
from shardplan.program.tracing import path_name

Rules = list[tuple[str, PartitionSpec]]
Entries = tuple[Any, ...]
LogicalRules = list[tuple[str, str | tuple[str, ...] | None]]

_MAX_TAIL = 4
"""The most components of a pattern after a `*` in the place of all components before them."""

_MAX_LISTED = 6


def specs_of(plan: PlanData) -> tuple[Any, Any]:
    """The ``PartitionSpec``s of arguments and results in their structures. Those of arguments are a tuple of the
    positional ones, or a pair ``(args, kwargs)`` where the step has keyword arguments."""

    def spec(sharding: Any) -> PartitionSpec:
        found: PartitionSpec = sharding.spec
        return found

    return jax.tree.map(spec, plan.in_shardings), jax.tree.map(spec, plan.out_shardings)


def result_layouts(plan: PlanData) -> dict[str, PartitionSpec]:
    """The ``PartitionSpec`` of every result leaf, by its tree path."""
    shardings = jax.tree.leaves(plan.out_shardings)
    return {name: one.spec for name, one in zip(plan.program.output_names, shardings, strict=True)}


def sharding_rules(layouts: Mapping[str, PartitionSpec]) -> Rules:
    """A short list of rules from which every layout follows: the shorter one of two greedy lists."""
    if not layouts:
        return []
    specs: dict[Entries, PartitionSpec] = {}
    having: dict[Entries, int] = {}
    for number, spec in enumerate(layouts.values()):
        entries = entries_of(spec)
        specs.setdefault(entries, spec)
        having[entries] = having.get(entries, 0) | 1 << number
    covers = _covers(list(layouts))
    chosen = min((_special_first(covers, having), _general_first(covers, having)), key=len)
    return [(pattern, specs[entries]) for pattern, entries in chosen]


def _special_first(covers: dict[str, int], having: dict[Entries, int]) -> list[tuple[str, Entries]]:
    """The list that grows at its end: each pattern says the layouts of the most paths without a rule so far, and errs
    for none of them."""
    left, found = functools.reduce(operator.or_, having.values()), []
    while left:
        sound = (
            (-(cover & left).bit_count(), len(pattern), pattern, entries)
            for entries, held in having.items()
            for pattern, cover in covers.items()
            if cover & left and not cover & left & ~held
        )
        _, _, pattern, entries = min(sound, key=lambda one: one[:3])
        found.append((pattern, entries))
        left &= ~covers[pattern]
    return found


def _general_first(covers: dict[str, int], having: dict[Entries, int]) -> list[tuple[str, Entries]]:
    """The list that grows at its start, from the most frequent layout for all paths: each rule corrects the most
    paths."""
    usual = max(having, key=lambda entries: having[entries].bit_count())
    right, found = having[usual], [("*", usual)]
    while any(held & ~right for held in having.values()):
        corrections = (
            ((cover & right & ~held).bit_count() - (cover & held & ~right).bit_count(), len(pattern), pattern, entries)
            for entries, held in having.items()
            for pattern, cover in covers.items()
        )
        _, _, pattern, entries = min(corrections, key=lambda one: one[:3])
        found.insert(0, (pattern, entries))
        right = right & ~covers[pattern] | covers[pattern] & having[entries]
    return found


def _covers(paths: Sequence[str]) -> dict[str, int]:
    """The paths that match each pattern that one of them suggests. A set is a number with a bit for each path."""
    found = {}
    for pattern in dict.fromkeys(pattern for path in paths for pattern in _patterns_of(path)):
        matches = re.compile(translate(pattern)).match
        found[pattern] = sum(1 << number for number, path in enumerate(paths) if matches(path))
    return found


def _patterns_of(path: str) -> Iterator[str]:
    """Patterns that match a path, from general to special: by its end, by its start, by its numbers, itself."""
    yield "*"
    parts = [glob.escape(part) for part in path.split("/")]
    free = [re.sub(r"\d+", "*", part) for part in parts]
    for count in range(1, min(len(parts), _MAX_TAIL + 1)):
        yield "/".join(["*", *free[-count:]])
        yield "/".join(["*", *parts[-count:]])
        yield "/".join([parts[0], "*", *free[-count:]])
    for count in range(1, len(parts)):
        yield "/".join([*parts[:count], "*"])
        yield "/".join([parts[0], *free[1:count], "*"])
    for last in range(1, len(parts)):
        for middle in {*parts[1:last]} - {*free[1:last]} | {*free[1:last]}:
            yield "/".join(["*", middle, "*", *free[last:]])
    yield "/".join([parts[0], *free[1:]])
    yield "/".join(parts)


def logical_rules(layouts: Mapping[str, PartitionSpec], names: Any) -> LogicalRules:
    """Logical axis rules, as Flax and MaxText read them, from which every layout of a tree of logical names follows.

    ``names``: a tree whose leaves are ``PartitionSpec``s of logical names, at the paths of the layouts. A rule gives a
    name its mesh axes, in every tensor whose earlier rules leave these axes free. The list grows by rules that err for
    no tensor. Raises ArgumentError where no list of rules gives these layouts.
    """
    found: LogicalRules = []
    leaves = _names_by_path(names)
    tensors = [_Named(path, tuple(of_path), _entries(layouts, path, of_path)) for path, of_path in leaves]
    while any(tensor.unsaid() for tensor in tensors):
        wanted = {(name, axes) for tensor in tensors for name, axes in tensor.unsaid().items()}
        sound = [rule for rule in sorted(wanted) if all(tensor.allows(*rule) for tensor in tensors)]
        if not sound:
            raise _no_logical_rules(tensors)
        name, axes = sound[0]
        found.append((name, axes[0] if len(axes) == 1 else axes or None))
        for tensor in tensors:
            tensor.apply(name, axes)
    return found


class _Named:
    """A tensor with a logical name for each dimension, under rules that come one after another."""

    def __init__(self, path: str, names: Sequence[str | None], wanted: Sequence[tuple[str, ...]]) -> None:
        self.path = path
        self._wanted = {name: axes for name, axes in zip(names, wanted, strict=True) if name is not None}
        self._said: dict[str, tuple[str, ...]] = {}

    def unsaid(self) -> dict[str, tuple[str, ...]]:
        """The split dimensions without a rule so far: name to mesh axes."""
        return {name: axes for name, axes in self._wanted.items() if axes and name not in self._said}

    def allows(self, name: str, axes: tuple[str, ...]) -> bool:
        """Whether a rule, as the next one, gives this tensor nothing wrong."""
        return not self._takes(name, axes) or self._wanted[name] == axes

    def apply(self, name: str, axes: tuple[str, ...]) -> None:
        if self._takes(name, axes):
            self._said[name] = axes

    def _takes(self, name: str, axes: tuple[str, ...]) -> bool:
        taken = {axis for said in self._said.values() for axis in said}
        return name in self._wanted and name not in self._said and taken.isdisjoint(axes)


def _names_by_path(names: Any) -> Iterator[tuple[str, PartitionSpec]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(names, is_leaf=lambda one: isinstance(one, PartitionSpec)):
        if not isinstance(leaf, PartitionSpec):
            raise ArgumentError(f"`names` is a tree with a PartitionSpec of names at each leaf, got `{leaf!r}`")
        yield path_name(path), leaf


def _entries(layouts: Mapping[str, PartitionSpec], path: str, names: PartitionSpec) -> list[tuple[str, ...]]:
    """The mesh axes of each named dimension. Raises ArgumentError for names that do not fit the layouts."""
    if path not in layouts:
        near = ", ".join(f"`{known}`" for known in list(layouts)[:_MAX_LISTED])
        raise ArgumentError(f"`{path}` has logical names and no layout in the plan, whose paths are {near}, ...")
    found = [axes_of(entry) for entry in layouts[path]]
    if any(found[len(names) :]) or any(axes and name is None for axes, name in zip(found, names, strict=False)):
        raise ArgumentError(f"`{path}` is split as {layouts[path]}, along a dimension without a name in {names}")
    return [*found, *[()] * (len(names) - len(found))][: len(names)]


def _no_logical_rules(tensors: Sequence[_Named]) -> ArgumentError:
    """The error of layouts that differ for equal names."""
    left = [(tensor.path, name, axes) for tensor in tensors for name, axes in tensor.unsaid().items()]
    listed = "; ".join(f"`{path}` has `{name}` over {', '.join(axes)}" for path, name, axes in left[:_MAX_LISTED])
    return ArgumentError(
        f"no logical axis rules give the plan's layouts: equal names have other layouts elsewhere ({listed}). Name "
        "these dimensions apart, or take the rules by path of plan.to_rules()"
    )
