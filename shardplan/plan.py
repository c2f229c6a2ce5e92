"""The plan: the chosen layouts and strategies, with their evidence.

A plan says what is sent (`collectives`, `communication_bytes`), what it needs (`peak_bytes`), and how near the optimum
of the cost model it is (`lower_bound`, `gap`). It can be asked (`explain`), compared (`diff`), kept (`save`, `load`),
and applied (`apply`, `lower`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from shardplan import planned_function, state
from shardplan.errors import no_plan
from shardplan.explain import explain_plan
from shardplan.plan_data import PlanData
from shardplan.plan_difference import PlanDifference, compare_plans
from shardplan.plan_file import document_of, load_plan, plan_of_document, save_plan
from shardplan.plan_report import donatable_bytes, plan_html, plan_line, plan_text
from shardplan.planned_function import PlannedFunction


@dataclass(frozen=True, eq=False, repr=False)
class Plan(PlanData):
    """How one program is split over one mesh; see `PlanData` for what it holds.

    A plan that was read from a file knows no program until it meets its function (``bind``, or the first call of what
    ``apply`` gives); until then what needs one raises PlanMismatchError and says so.
    """

    @classmethod
    def of(cls, data: PlanData) -> Plan:
        """The plan of what planning found."""
        return cls(**{one.name: getattr(data, one.name) for one in fields(data)})

    @property
    def donatable_bytes(self) -> dict[int | str, float]:
        """Bytes per device that donating an argument would save at most, by its position or name in a call: those that
        results replace. Arguments that are donated, or of which results replace nothing, are left out."""
        return donatable_bytes(self)

    @property
    def shardings(self) -> Any:
        """``NamedSharding``s over the mesh's devices, or the first ones here, in the structure of the arguments."""
        return state.shardings_of(self)

    @property
    def abstract(self) -> Any:
        """``jax.ShapeDtypeStruct``s with these shardings, as Orbax restores into: ``plan.abstract[0]`` is the state."""
        return state.abstract_of(self)

    def place(self, tree: Any) -> Any:
        """An argument, such as a batch, where the plan has it; of several processes, each may give its own rows.

        Raises ArgumentError for what has the structure and shapes of no argument.
        """
        return state.place(self, tree)

    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """What ``init_fn(*args)`` makes, an argument such as the state, made split as the plan has it.

        Raises ArgumentError where it makes no argument of the planned step.
        """
        return state.init(self, init_fn, args)

    def moving_bytes(self, tree: Any) -> int:
        """What all devices together receive where an argument, as it lies now, is brought to this plan."""
        return state.moving_bytes(self, tree)

    def bind(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
        """This plan over ``fn``, traced anew for arguments (arrays or ``jax.ShapeDtypeStruct``s).

        Raises PlanMismatchError where that is another program than the planned one. Values of literals and of
        closed-over arrays may differ: those of ``fn`` count.
        """
        return Plan.of(planned_function.bind_plan(self, fn, args, kwargs))

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn`` as this plan splits it: a function of the planned arguments' shapes, like ``shardplan.auto``.

        Raises PlanMismatchError when it is called with arguments that make another program.
        """
        return PlannedFunction(fn, self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, whole or not at all; raises ArgumentError where the path cannot be written."""
        save_plan(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str], mesh: Mesh | AbstractMesh | None = None) -> Plan:
        """Reads a plan that ``save`` wrote, for a mesh of its axes (default: one without devices).

        Raises PlanMismatchError where the file is torn, of another version, or for another mesh.
        """
        return Plan.of(load_plan(path, mesh))

    def explain(self, path: str, time_limit: float = 5.0) -> str:
        """Why an argument (a path glob) or an operation (``op12``, a glob of its source line or module) is laid out so.

        Its layout, what reads it, the collectives that it takes part in, and what other layouts would cost: those that
        can be searched anew within ``time_limit`` seconds exactly, the others at most.
        """
        return explain_plan(self, path, time_limit)

    def diff(self, other: PlanData) -> PlanDifference:
        """What ``other`` does in another way: layouts of arguments, collectives, objective, memory.

        Raises ArgumentError for what is no plan.
        """
        if not isinstance(other, PlanData):
            raise no_plan(other)
        return compare_plans(self, other)

    def __repr__(self) -> str:
        return f"<{plan_line(self)}>"

    def __reduce__(self) -> Any:
        """Pickled as ``save`` keeps it: without its program and devices."""
        return _unpickled, (document_of(self),)

    def __str__(self) -> str:
        return plan_text(self)

    def _repr_html_(self) -> str:
        return plan_html(self)


def _unpickled(document: Mapping[str, Any]) -> Plan:
    return Plan.of(plan_of_document(document))
