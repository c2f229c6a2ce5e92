"""The plan: the chosen layouts and strategies, with their evidence.

A plan says what is sent (`collectives`, `communication_bytes`), what it needs (`peak_bytes`), and how near the optimum
of the cost model it is (`lower_bound`, `gap`). It can be asked (`explain`), compared (`diff`), kept (`save`, `load`),
and applied (`apply`, `lower`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.errors import PlanMismatchError
from shardplan.layout import Layout, to_spec
from shardplan.mesh import mesh_axes, with_auto_axes
from shardplan.program import Program
from shardplan.replay import Replay
from shardplan.schedule import Schedule


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """One collective of the plan.

    ``axes`` are mesh axis names; ``bytes`` is what one device sends each time, ``times`` how often per step;
    ``operation`` names the operation that makes or reads the tensor, as the compiled program's metadata does.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    times: int
    tensor: str
    operation: str
    source: str


@dataclass(frozen=True, eq=False)
class Plan:
    """How one program is split over one mesh.

    ``objective``, ``lower_bound`` and ``gap`` speak of the whole objective (bytes sent and work repeated);
    ``communication_bytes`` is what one device sends per step. ``layouts`` maps the path of every argument leaf to its
    ``PartitionSpec``. ``statistics`` holds counts and seconds of the stages. ``donated`` are positions among the arguments
    that are not static.
    """

    mesh: Mesh | AbstractMesh
    objective: float
    lower_bound: float
    peak_bytes: float
    collectives: tuple[PlannedCollective, ...]
    statistics: Mapping[str, Any]
    schedule: Schedule = field(repr=False)
    donated: tuple[int, ...] = ()

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Mesh axis names and sizes."""
        axes = mesh_axes(self.mesh)
        return dict(zip(axes.names, axes.sizes, strict=True))

    @property
    def device_count(self) -> int:
        return mesh_axes(self.mesh).device_count

    @property
    def communication_bytes(self) -> float:
        """Bytes that one device sends per step."""
        return float(sum(c.bytes * c.times for c in self.collectives))

    @property
    def gap(self) -> float:
        """How far above the optimum of the cost model the plan can be: 0.001 is a tenth of a percent."""
        if self.objective <= self.lower_bound:
            return 0.0
        return (self.objective - self.lower_bound) / self.objective

    @property
    def program(self) -> Program:
        return self.schedule.program

    @property
    def layouts(self) -> dict[str, PartitionSpec]:
        """The ``PartitionSpec`` of every argument leaf, by its tree path."""
        shardings = self.leaf_shardings()
        return {self.program.values[i].name or "": s.spec for i, s in zip(self.program.inputs, shardings, strict=True)}

    @property
    def in_shardings(self) -> Any:
        """``NamedSharding``s in the structure of the arguments."""
        args, kwargs = self._in_shardings(self.mesh)
        return args if not kwargs else (args, kwargs)

    @property
    def out_shardings(self) -> Any:
        """``NamedSharding``s in the structure of the results."""
        return self._out_shardings(self.mesh)

    def lower(self, mesh: Mesh | None = None) -> jax.stages.Lowered:
        """The planned step, lowered for the plan's own mesh or another one of the same axes and sizes.

        Raises PlanMismatchError where the mesh is another one, or has no devices.
        """
        leaves = [_jax.shape_of(self.program.values[i]) for i in self.program.inputs]
        args, kwargs = jax.tree.unflatten(self.program.in_tree, leaves)
        return self.jitted(mesh).lower(*_call_arguments(args, kwargs))

    def jitted(self, mesh: Mesh | None = None) -> Any:
        """The planned step as a ``jax.jit`` function of the arguments that were planned, without the static ones.

        Keyword arguments are taken as one dictionary, which comes last.
        """
        concrete = self._with_devices(mesh)
        program = self.program

        def planned(*arguments: Any) -> Any:
            results = Replay(self.schedule, concrete)(jax.tree.leaves(arguments))
            return jax.tree.unflatten(program.out_tree, results)

        args, kwargs = self._in_shardings(concrete)
        return jax.jit(
            planned,
            in_shardings=_call_arguments(args, kwargs),
            out_shardings=self._out_shardings(concrete),
            donate_argnums=self.donated,
        )

    def leaf_shardings(self, mesh: Mesh | None = None) -> tuple[NamedSharding, ...]:
        """The sharding of every argument leaf, in the order of the flattened arguments."""
        return self._shardings(self.mesh if mesh is None else mesh, self._input_layouts())

    def check_program(self, program: Program) -> None:
        """Raises PlanMismatchError where ``program`` is not the one that was planned."""
        if program.fingerprint() != self.program.fingerprint():
            raise PlanMismatchError(
                "the plan was made for another program: other shapes, another function, another version"
            )

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn`` as this plan splits it: a function of the planned arguments' shapes, like ``shardplan.auto``.

        Raises PlanMismatchError when it is called with arguments that make another program.
        """
        from shardplan.auto import PlannedFunction

        return PlannedFunction(fn, self)

    def _with_devices(self, mesh: Mesh | None) -> Mesh:
        chosen = self.mesh if mesh is None else mesh
        if not isinstance(chosen, Mesh):
            raise PlanMismatchError(
                f"the plan's mesh {self.mesh_axes} has no devices: pass a mesh of devices of the same axes, such as "
                "jax.make_mesh(sizes, names) or shardplan.target.gpu_mesh('h100', sizes, names)"
            )
        if mesh_axes(chosen) != mesh_axes(self.mesh):
            raise PlanMismatchError(
                f"the plan is for the mesh {self.mesh_axes}, got {dict(chosen.shape)}: plan anew for it"
            )
        return with_auto_axes(chosen)  # type: ignore[return-value]

    def _input_layouts(self) -> list[Layout]:
        return [self.schedule.assignment.values[i] for i in self.program.inputs]

    def _output_layouts(self) -> list[Layout]:
        layouts = []
        for number, output in enumerate(self.program.outputs):
            tied = self.program.ties.get(number)
            if tied is not None:
                layouts.append(self.schedule.assignment.values[self.program.inputs[tied]])
            else:
                layouts.append(self.schedule.output_layout(output) if isinstance(output, int) else ())
        return layouts

    def _shardings(self, mesh: Mesh | AbstractMesh, layouts: Sequence[Layout]) -> tuple[NamedSharding, ...]:
        axes = mesh_axes(self.mesh)
        mesh = with_auto_axes(mesh)
        return tuple(NamedSharding(mesh, to_spec(axes, layout)) for layout in layouts)

    def _in_shardings(self, mesh: Mesh | AbstractMesh) -> Any:
        return jax.tree.unflatten(self.program.in_tree, self._shardings(mesh, self._input_layouts()))

    def _out_shardings(self, mesh: Mesh | AbstractMesh) -> Any:
        return jax.tree.unflatten(self.program.out_tree, self._shardings(mesh, self._output_layouts()))


def _call_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return (*args, kwargs) if kwargs else args
