"""Joint planning of several programs with a shared state, for one layout of the state.

A joint network combines the networks of the programs, with costs times the number of runs, and ties the variables of
shared arguments. Its layouts of the shared arguments are the pins of each program's plan. The bound is that of the
joint network: no layout of the state, and no plans with it, have a lower total cost.

>>> import jax, jax.numpy as jnp
>>> def train(w, x):
...     return {"w": w["w"] - x.T @ (x @ w["w"])}
>>> w, x = {"w": jax.ShapeDtypeStruct((64, 64), "float32")}, jax.ShapeDtypeStruct((8, 64), "float32")
>>> programs = {"train": (train, (w, x), 100), "eval": (lambda w, x: x @ w["w"], (w, x), 1)}
>>> plans = plan_together(programs, jax.sharding.AbstractMesh((8,), ("data",)))
>>> plans["train"].layouts["0/w"] == plans["eval"].layouts["0/w"], plans.gap < 1e-6
(True, True)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from shardplan.auto import AutoFunction, options_from
from shardplan.common.tables import size_cell, text_table
from shardplan.errors import ArgumentError, InfeasibleError
from shardplan.layout.layout import to_spec
from shardplan.layout.mesh import GivenMesh, as_mesh, with_auto_axes
from shardplan.options import Options
from shardplan.plans.like import as_pins, matched
from shardplan.plans.pipeline import build_problem
from shardplan.plans.plan import Plan
from shardplan.plans.processes import plain_of_first
from shardplan.plans.report import above_text, objective_text
from shardplan.problem.cost_network import Problem
from shardplan.search import Network, solve


class PlansTogether(dict[str, Plan]):
    """Plans by the names of their programs.

    ``objective`` is the sum of theirs, times the number of runs (``times``). ``lower_bound`` is a bound of all plans
    with one layout of the state."""

    def __init__(self, plans: Mapping[str, Plan], times: Mapping[str, float], lower_bound: float) -> None:
        super().__init__(plans)
        self.times = dict(times)
        self.objective = sum(times[name] * plan.objective for name, plan in plans.items())
        self.lower_bound = min(lower_bound, self.objective)

    @property
    def gap(self) -> float:
        """The largest possible distance to the least cost, as a share of the cost."""
        return 0.0 if self.objective <= self.lower_bound else (self.objective - self.lower_bound) / self.objective

    def __str__(self) -> str:
        rows = [
            (name, f"{self.times[name]:g}", size_cell(plan.communication_bytes), objective_text(plan, plan.objective))
            for name, plan in self.items()
        ]
        table = text_table(("program", "times", "MB sent", "objective"), rows, numbers=(1, 2, 3))
        return f"Plans with one state, {above_text(self.objective, self.lower_bound)}\n{table}"


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the programs: ``function`` plans it, ``first`` is its first variable in the joint network."""

    name: str
    function: AutoFunction
    args: tuple[Any, ...]
    times: float
    problem: Problem
    options: Options
    first: int

    def inputs(self) -> dict[str, int]:
        """The values of its arguments by their paths."""
        return {self.problem.program.values[index].name or "": index for index in self.problem.program.inputs}

    def leaves(self) -> dict[str, Any]:
        """The arguments by their paths."""
        return dict(zip(self.inputs(), jax.tree.leaves(self.args), strict=True))

    def types(self) -> dict[str, Any]:
        values = self.problem.program.values
        return {path: (values[i].shape, values[i].dtype, values[i].memory_kind) for path, i in self.inputs().items()}

    def state(self) -> dict[str, Any]:
        """The types of the arguments that its results replace. Of all arguments, for a program without any."""
        paths, types = list(self.types()), self.types()
        tied = {paths[position] for position in self.problem.program.ties.values()}
        return {path: types[path] for path in paths if path in tied} or types


_EXPECTED = "plan_together takes programs by name, {'train': (step, (state, batch), 1000)}"


def plan_together(programs: Mapping[str, tuple[Any, ...]], mesh: GivenMesh, **options: Any) -> PlansTogether:
    """Plans programs that share a state, with its layout of the least total cost.

    Args:
        programs: by name, ``(function, arguments, times)``, with the relative number of its runs. A dictionary of its
            own options may follow. An array, or shape, in two programs is one shared tensor. Other arguments are
            matched to the state of an earlier program by path or by tree (`shardplan.plans.like`), so the training
            step comes first.
        mesh, options: as for ``shardplan.plan``.

    Raises:
        ArgumentError: a program or an option is wrong. Raised before any work starts.
        InfeasibleError: no plan is within the memory limit.
    """
    common, mesh = options_from(options), as_mesh(mesh)
    if not isinstance(programs, Mapping):
        raise ArgumentError(f"{_EXPECTED}, got `{type(programs).__name__}`")
    taken = {name: _taken(name, entry) for name, entry in programs.items()}
    if not taken:
        raise ArgumentError(f"{_EXPECTED}, got none")
    if isinstance(mesh, (int, str)):  # the best mesh for the program that runs most
        fn, args, _, own = max(taken.values(), key=lambda entry: entry[2])
        mesh = AutoFunction(fn, mesh, replace(options_from({**options, **own}), verify=False)).plan(*args).mesh
    network, parts = Network(), list[_Part]()
    for name, (fn, args, times, own) in taken.items():
        chosen = replace(options_from({**options, **own}), verify=False)
        function = AutoFunction(fn, mesh, chosen)
        program, resolved = function.traced(*args)
        problem = build_problem(program, with_auto_axes(mesh), resolved)
        parts.append(_Part(name, function, args, times, problem, resolved, _add(network, problem.network, times)))
    shared = list(_tied(network, parts))
    choices, bound = plain_of_first(mesh, lambda: _solved(network, common.time_limit), common.time_limit)
    pins = _layouts(parts, shared, np.array(choices))
    try:
        plans = {part.name: _planned(part, pins[part.name]) for part in parts}
    except InfeasibleError:
        plans = _plans_around_the_costliest(parts, shared)
    counts = {part.name: part.times for part in parts}
    return PlansTogether(plans, counts, bound)


def _solved(network: Network, time_limit: float) -> tuple[list[int], float]:
    """The choices of the joint network, and a lower bound."""
    solution = solve(network, time_limit=time_limit)
    if not np.isfinite(solution.cost):
        raise InfeasibleError("the hard layouts of pins and constraints exclude each other: no layout has them all")
    return list(map(int, solution.choices)), float(min(solution.lower_bound, solution.cost))


def _taken(name: str, entry: Any) -> tuple[Callable[..., Any], tuple[Any, ...], float, dict[str, Any]]:
    if not isinstance(entry, tuple) or len(entry) not in (3, 4) or not isinstance(entry[1], (tuple, list)):
        raise ArgumentError(f"the program `{name}` is (function, arguments as a tuple, times), got `{entry!r}`")
    fn, args, times = entry[:3]
    if isinstance(times, bool) or not isinstance(times, (int, float)) or not 0 < times < math.inf:
        raise ArgumentError(f"the program `{name}` runs a number of times above 0, got `{times!r}`")
    return fn, tuple(args), float(times), dict(entry[3]) if len(entry) == 4 else {}


def _add(network: Network, other: Network, times: float) -> int:
    """Adds the variables and tables of another network, with scaled costs. Returns the id of the first variable."""
    first = len(network)
    for costs, name, multiplicity in zip(other.costs, other.names, other.multiplicities, strict=True):
        network.add_variable(times * costs, name, multiplicity)
    tables = [times * table for table in other.tables]
    for u, v, table in other.edges:
        network.add_edge(first + u, first + v, tables[table])
    for u, v in other.ties:
        network.add_tie(first + u, first + v)
    return first


def _tied(network: Network, parts: list[_Part]) -> Iterator[tuple[tuple[int, str], tuple[int, str]]]:
    """Ties the arguments that programs share. Yields both ends of each tie, as program number and path."""
    for number, part in enumerate(parts):
        left = part.types()
        for earlier, other in enumerate(parts[:number]):
            same = {id(leaf): path for path, leaf in other.leaves().items() if hasattr(leaf, "shape")}
            found = {path: same[id(leaf)] for path, leaf in part.leaves().items() if path in left and id(leaf) in same}
            others = {path: kind for path, kind in left.items() if path not in found}
            for path, place in (found | matched(other.state(), others)).items():
                del left[path]
                _tie(network, other, place, part, path)
                yield (number, path), (earlier, place)


def _tie(network: Network, one: _Part, path: str, other: _Part, place: str) -> None:
    sides = [(part, part.inputs()[at]) for part, at in ((one, path), (other, place))]
    layouts = [part.problem.domain(value).layouts for part, value in sides]
    first, second = (part.first + part.problem.variables.values[value] for part, value in sides)
    table = np.array([[0.0 if a == b else np.inf for b in layouts[1]] for a in layouts[0]])
    network.add_edge(first, second, table)


def _layouts(parts: list[_Part], shared: list[Any], choices: Any) -> dict[str, dict[str, PartitionSpec]]:
    """The layouts of the shared arguments, by program and path."""
    found: dict[str, dict[str, PartitionSpec]] = {part.name: {} for part in parts}
    for number, path in dict.fromkeys(place for pair in shared for place in pair):
        part = parts[number]
        value = part.inputs()[path]
        variable = part.first + part.problem.variables.values[value]
        layout = part.problem.domain(value).layouts[choices[variable]]
        found[part.name][path] = to_spec(part.problem.space.mesh, layout)
    return found


def _planned(part: _Part, layouts: Mapping[str, PartitionSpec]) -> Plan:
    options = replace(part.function.options, pins=as_pins(layouts, part.options.pins))
    return AutoFunction(part.function.__wrapped__, part.function.mesh, options).plan(*part.args)


def _plans_around_the_costliest(parts: list[_Part], shared: list[Any]) -> dict[str, Plan]:
    """The plans with the layouts of the program that costs most, planned within its memory."""
    alone = {part.name: _planned(part, {}) for part in parts}
    leader = max(range(len(parts)), key=lambda n: parts[n].times * alone[parts[n].name].objective)
    layouts = alone[parts[leader].name].layouts
    found: dict[str, dict[str, PartitionSpec]] = {part.name: {} for part in parts}
    for group in _groups(shared):
        led = [path for number, path in group if number == leader]
        spec = layouts[led[0]] if led else alone[parts[group[0][0]].name].layouts[group[0][1]]
        for number, path in group:
            found[parts[number].name][path] = spec
    return {part.name: _planned(part, found[part.name]) for part in parts}


def _groups(shared: list[Any]) -> list[list[Any]]:
    """The groups of places of one argument, with the first place first."""
    groups: dict[Any, list[Any]] = {}
    for place, first in shared:
        group = groups.setdefault(first, [first])
        group.append(place)
        groups[place] = group
    return list({id(group): group for group in groups.values()}.values())
