"""The plan: the chosen layouts and strategies, with their evidence.

A plan has the collectives (`collectives`, `communication_bytes`), the peak memory (`peak_bytes`), and the distance to
the optimum of the cost model (`lower_bound`, `gap`). Its methods explain it (`explain`), compare it (`diff`), save it
(`save`, `load`), and apply it (`apply`, `lower`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardplan.errors import no_plan
from shardplan.pages.page import write_page
from shardplan.plans import planned_function, state
from shardplan.plans.collectives_table import collectives_table
from shardplan.plans.diff import PlanDifference, compare_plans
from shardplan.plans.explain import explain_plan
from shardplan.plans.file import document_of, load_plan, plan_of_document, save_plan
from shardplan.plans.hotspots import hotspots_text
from shardplan.plans.page_head import Compared, notebook_page, plan_page
from shardplan.plans.plan_data import PlanData
from shardplan.plans.planned_function import PlannedFunction
from shardplan.plans.report import donatable_bytes, plan_html, plan_line, plan_text
from shardplan.plans.sharding_rules import logical_rules, result_layouts, sharding_rules, specs_of
from shardplan.plans.to_python import python_text


@dataclass(frozen=True, eq=False, repr=False)
class Plan(PlanData):
    """The split of one program over one mesh. `PlanData` documents its attributes.

    A plan from a file has no program before ``bind``, or before the first call of the function of ``apply``. Methods
    that need a program raise PlanMismatchError until then.
    """

    @classmethod
    def of(cls, data: PlanData) -> Plan:
        """The plan with the data of a planning."""
        return cls(**{one.name: getattr(data, one.name) for one in fields(data)})

    @property
    def donatable_bytes(self) -> dict[int | str, float]:
        """Bytes per device that the donation of an argument would save at most, by its position or name in a call.

        Only arguments that results replace and that are not donated are listed."""
        return donatable_bytes(self)

    @property
    def shardings(self) -> Any:
        """``NamedSharding``s over the mesh's devices, or the first local ones, in the structure of the arguments."""
        return state.shardings_of(self)

    @property
    def abstract(self) -> Any:
        """``jax.ShapeDtypeStruct``s with these shardings, for restores by Orbax: ``plan.abstract[0]`` is the state."""
        return state.abstract_of(self)

    def specs(self) -> tuple[Any, Any]:
        """The ``PartitionSpec``s of arguments and results, in their structures.

        Those of arguments are a tuple, or a pair ``(args, kwargs)`` for a step with keyword arguments.
        """
        return specs_of(self)

    def to_rules(self, results: bool = False) -> list[tuple[str, PartitionSpec]]:
        """A short list of (path pattern, ``PartitionSpec``), from which the layout of every argument follows.

        The first pattern that matches a path has its layout (``fnmatch.fnmatchcase``; `*` matches slashes too). With
        ``results``, the rules are those of the results.
        """
        return sharding_rules(result_layouts(self) if results else self.layouts)

    def to_logical_rules(self, names: Any) -> list[tuple[str, str | tuple[str, ...] | None]]:
        """Logical axis rules for ``flax.linen.logical_axis_rules`` and MaxText's ``logical_axis_rules``.

        ``names`` is a tree of the arguments, or of some of them, with ``PartitionSpec``s of logical names as leaves:
        ``({"params": flax.linen.get_partition_spec(variables)["params"]},)``. Raises ArgumentError where dimensions of
        one name have different layouts.
        """
        return logical_rules(self.layouts, names)

    def to_python(self, fn: Callable[..., Any] | None = None, target: str = "h100", whole: bool | None = None) -> str:
        """Python text that runs the step under ``jax.jit`` as planned. It needs JAX alone.

        With ``whole=True`` it is the program written out, with all layouts and collectives: ``sharded(mesh,
        *arguments)`` gives the step. With ``whole=False`` it has the layouts of arguments and results, for the user's
        own function: ``sharded(step, mesh, *arguments)``. XLA chooses those inside.

        By default the text is whole. With the planned function ``fn`` it is compiled for ``target`` (by the extra
        ``audit``): the layouts at the boundaries are enough where they give the plan's bytes within 2 %. The text
        states the compiled bytes.

        Raises ArgumentError for a step with keyword arguments, static ones, references, or tensors in host memory, and
        for operations without a public name in JAX.
        """
        return python_text(self, fn, target, whole)

    def place(self, tree: Any, argument: int | str | None = None) -> Any:
        """An argument, such as a batch, in its planned layout. Each of several processes may give its own rows.

        ``argument`` is its position or name, where several arguments have the same structure and shapes. Raises
        ArgumentError for a tree without the structure and shapes of any argument, or with those of several arguments
        in different layouts.
        """
        return state.place(self, tree, argument)

    def init(self, init_fn: Callable[..., Any], *args: Any, argument: int | str | None = None) -> Any:
        """The result of ``init_fn(*args)``, an argument such as the state, computed in its planned layout.

        ``argument`` and errors: see ``place``.
        """
        return state.init(self, init_fn, args, argument)

    def moving_bytes(self, tree: Any, argument: int | str | None = None) -> int:
        """The bytes that all devices together receive when an argument is resharded to its planned layout.

        ``argument`` and errors: see ``place``.
        """
        return state.moving_bytes(self, tree, argument)

    def bind(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
        """This plan over ``fn``, traced again for arguments (arrays or ``jax.ShapeDtypeStruct``s).

        Raises PlanMismatchError for another program than the planned one. Values of literals and of closed-over arrays
        may differ: the plan uses those of ``fn``.
        """
        return Plan.of(planned_function.bind_plan(self, fn, args, kwargs))

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, split by this plan: a function of the planned arguments' shapes, like ``shardplan.auto``.

        Its calls raise PlanMismatchError for arguments of another program.
        """
        return PlannedFunction(fn, self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, atomically. Raises ArgumentError for a path that cannot be written."""
        save_plan(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str], mesh: Mesh | AbstractMesh | None = None) -> Plan:
        """Reads a plan that ``save`` wrote, for a mesh of its axes (default: one without devices).

        Raises PlanMismatchError for a file that is torn, of another version, or for another mesh.
        """
        return Plan.of(load_plan(path, mesh))

    def explain(self, path: str, time_limit: float = 1.2) -> str:
        """The reasons for the layout of an argument (a path glob) or an operation (``op12``, or a glob of its source
        line or module).

        The text has its layout, readers and collectives, and the costs of other layouts. The three cheapest are exact
        where ``time_limit`` seconds of search suffice; the others are intervals. The first explanation of a plan also
        makes what the bounds of all variables have in common, which takes 2 to 4 seconds for 24 layers.
        ``time_limit=0`` searches neighbourhoods alone. Equal layers are one paragraph.

        Raises ArgumentError with the nearest paths if nothing matches.
        """
        return explain_plan(self, path, time_limit)

    def to_html(self, path: str | os.PathLike[str], comparison: Iterable[Compared] | None = None) -> None:
        """Writes the plan as one HTML page: tensors, collectives, memory, operations and the timeline of the step.

        The page needs no network. ``comparison`` is a result of ``shardplan.compare``, whose rows the page repeats.
        Raises ArgumentError for a path that cannot be written.
        """
        write_page(path, plan_page(self, comparison))

    def table(self, limit: int = 40) -> str:
        """The collectives, those that send most first: kind, mesh axes, tensor, operation, source line, bytes, share.

        Those of equal layers are one row.
        """
        return collectives_table(self, limit)

    def hotspots(self, count: int = 10) -> str:
        """The costliest transitions, those of equal layers as one, and the cheapest way to remove each.

        A way is the best of a search of some hundred choices around the transition. Its price is an upper bound.
        """
        return hotspots_text(self, count)

    def diff(self, other: PlanData) -> PlanDifference:
        """The differences of ``other``: layouts of arguments, collectives, objective, memory.

        Raises ArgumentError for an ``other`` that is no plan.
        """
        if not isinstance(other, PlanData):
            raise no_plan(other)
        return compare_plans(self, other)

    def __repr__(self) -> str:
        return f"<{plan_line(self)}>"

    def __reduce__(self) -> Any:
        """The pickle of a plan has the content of ``save``, without program and devices."""
        return _unpickled, (document_of(self),)

    def __str__(self) -> str:
        return plan_text(self)

    def _repr_html_(self) -> str:
        """A short form, and the page of ``to_html`` in a frame where the program has up to 2,000 operations."""
        return plan_html(self) + notebook_page(self)


def _unpickled(document: Mapping[str, Any]) -> Plan:
    return Plan.of(plan_of_document(document))
