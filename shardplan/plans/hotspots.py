"""The costliest transitions of a plan, and what would remove each.

A transition is an edge of the problem's network: between the layouts of a value and of its reader's operand, of an
operation's result and the stored value, or of a value and its shared copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardplan import _jax
from shardplan.common.checks import check_count
from shardplan.layout.layout import to_spec
from shardplan.plans.alternatives import priced_network, without_transition
from shardplan.plans.plan_data import PlanData
from shardplan.plans.report import glob_of, objective_text
from shardplan.problem.strategy import Strategy


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a transition: the name of a variable, its place, and its planned layout or split."""

    name: str
    place: str
    layout: str

    def __str__(self) -> str:
        return f"{self.name} {self.layout}" + (f", {self.place}" if self.place else "")

    @property
    def folded(self) -> tuple[str, ...]:
        """What ends of equal layers have in common."""
        kind = self.name.split(" ")[-1] if self.place else glob_of(self.name)
        return ("value" if self.name.startswith("value ") else kind, glob_of(self.place), self.layout)


def hotspots_text(plan: PlanData, count: int) -> str:
    """The text of ``Plan.hotspots``."""
    check_count("count", count)
    network, choices = priced_network(plan), plan.recipe.choices
    costs = np.array([network.tables[table][choices[u], choices[v]] for u, v, table in network.edges])
    described = _Described(plan)
    groups: dict[Any, list[int]] = {}
    for number in np.argsort(-costs, kind="stable").tolist():
        if costs[number] <= 0:
            break
        u, v, _ = network.edges[number]
        groups.setdefault((described.end(u).folded, described.end(v).folded, float(costs[number])), []).append(number)
    largest = sorted(groups.values(), key=lambda group: -costs[group].sum())
    if not largest:
        return "no transition sends anything"
    return "\n\n".join(described.hotspot(group, float(costs[group].sum())) for group in largest[:count])


class _Described:
    """Variables of a plan's network as text."""

    def __init__(self, plan: PlanData) -> None:
        self._plan, self._problem, self._program = plan, plan.schedule.problem, plan.program
        self._mesh = plan.schedule.space.mesh
        variables = self._problem.variables
        self._values: Mapping[int, int] = {
            number: value for of in (variables.values, variables.copies) for value, number in reversed(of.items())
        }
        self._operations = {number: index for index, number in variables.operations.items()}
        self._ends: dict[int, _End] = {}

    def end(self, variable: int) -> _End:
        """A variable with its planned choice."""
        if variable not in self._ends:
            choice = self._plan.recipe.choices[variable]
            name = self._problem.variables.names[variable]
            self._ends[variable] = _End(name, self._place(variable), self._choice(variable, choice))
        return self._ends[variable]

    def hotspot(self, equal: Sequence[int], cost: float) -> str:
        """The text on a transition, an edge of the network, and those of equal layers."""
        network, plan = priced_network(self._plan), self._plan
        u, v, _ = network.edges[equal[0]]
        layers = f", in {len(equal)} equal layers" if len(equal) > 1 else ""
        lines = [
            f"{objective_text(plan, cost)} ({100 * cost / plan.objective:.1f} %){layers}",
            f"  from        {self.end(u)}",
            f"  to          {self.end(v)}",
            f"  removed by  {self._removal(u, v, without_transition(network, plan.recipe.choices, equal[0]))}",
        ]
        return "\n".join(lines)

    def _removal(self, u: int, v: int, found: tuple[float, dict[int, int]] | None) -> str:
        """The changed choices at the ends of a transition, and their price for one layer."""
        if found is None:
            return "nothing near it: no other choices go together"
        price, choices = found
        changed = [
            f"{self.end(end).name} {self._choice(end, choices[end])}"
            for end in (u, v)
            if choices[end] != self._plan.recipe.choices[end]
        ]
        return f"{' and '.join(changed)}, for +{objective_text(self._plan, price)} each"

    def _place(self, variable: int) -> str:
        """The source line and the modules of an operation."""
        index = self._operations.get(variable)
        if index is None:
            return ""
        operation = self._program.operations[index]
        modules = _jax.module_path(operation.equation)
        return f"{operation.source} in {modules}" if modules else operation.source

    def _choice(self, variable: int, choice: int) -> str:
        index = self._operations.get(variable)
        if index is not None:
            return self._split(self._problem.choices[index].strategies[choice])
        value = self._values[variable]
        layout = self._problem.domain(value).layouts[choice]
        rank = len(self._program.values[value].shape)
        partial = layout[0] if len(layout) > rank else ()
        summed = f" as a sum over {', '.join(self._mesh.names[axis] for axis in partial)}" if partial else ""
        return f"{to_spec(self._mesh, layout[len(layout) - rank :])}{summed}"

    def _split(self, strategy: Strategy) -> str:
        """The layouts that an operation reads and makes."""
        reads = ", ".join(str(to_spec(self._mesh, one)) for one in strategy.operands if one is not None)
        makes = []
        for layout, pending in zip(strategy.results, strategy.pending, strict=True):
            partial = f" partial over {', '.join(self._mesh.names[axis] for axis in pending)}" if pending else ""
            makes.append(f"{to_spec(self._mesh, layout)}{partial}")
        return f"{reads} -> {', '.join(makes)}"
