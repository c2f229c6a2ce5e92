"""The data of a plan: the chosen layouts and strategies, with their evidence, and the planned step.

`shardplan.plans.plan.Plan` adds the methods for users. The modules that make, save or print plans only need this one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.apply.replay import Replay
from shardplan.errors import PlanMismatchError
from shardplan.layout.layout import to_spec
from shardplan.layout.mesh import mesh_axes, with_auto_axes
from shardplan.options import Options
from shardplan.plans.argument_placement import place_captured
from shardplan.plans.result_layouts import of_type
from shardplan.problem.schedule import Schedule
from shardplan.program.blocks import Blocks
from shardplan.program.call_arguments import type_text
from shardplan.program.missing_libraries import check_libraries
from shardplan.program.program import Program
from shardplan.program.recompute import Offloaded
from shardplan.timing.step_time import StepTime, step_time

PINNED = "pin"
"""What ``offloaded`` says in the place of a primitive of arguments that pins put into host memory."""


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """One collective of the plan.

    ``axes`` are mesh axis names. ``bytes`` are sent by one device in one execution, and ``times`` are the executions
    per step. ``operation`` is the maker or the reader of the tensor, by its name in the compiled program's metadata.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    times: int
    tensor: str
    operation: str
    source: str


@dataclass(frozen=True, slots=True)
class PlannedArgument:
    """One leaf of the arguments: tree path, whole shape and layout. ``fed_back``: whether a result replaces it.

    ``memory_kind`` is that of JAX (``pinned_host``), or None for the memory of the devices. ``is_ref``: whether it is a
    reference (``jax.new_ref``), which a step changes in place.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    total_bytes: int
    spec: PartitionSpec
    fed_back: bool
    memory_kind: str | None = None
    is_ref: bool = False

    @property
    def type_text(self) -> str:
        """Its type as text for messages."""
        return type_text(self.shape, self.dtype, memory_kind=self.memory_kind, is_ref=self.is_ref)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The inputs that rebuild a plan's schedule from its program: the options, and a choice per network variable.

    ``network`` is a digest of these variables. ``fingerprint`` is that of the user's own program, if it is missing or
    was rewritten."""

    options: Options
    choices: tuple[int, ...] = field(repr=False)
    network: str
    fingerprint: str | None = None
    recomputed: tuple[int, ...] | None = None
    """The values of the user's own program that are computed again (`shardplan.program.recompute`), None where it is
    planned as it is."""
    offloaded: tuple[Offloaded, ...] = ()
    """Those that wait in host memory."""
    blocks: tuple[Blocks, ...] = ()
    """What runs in blocks to fit, one rewriting after another, of the program that computes these values again."""


class ScheduleToBe:
    """The schedule of a traced program, built on its first use."""

    def __init__(self, program: Program, make: Callable[[], Schedule]) -> None:
        self.program = program
        self._make = make

    @functools.cached_property
    def schedule(self) -> Schedule:
        return self._make()


@dataclass(frozen=True, eq=False, repr=False)
class PlanData:
    """The split of one program over one mesh.

    ``objective``, ``lower_bound`` and ``gap`` are of the whole objective (bytes sent and work repeated).
    ``communication_bytes`` are the bytes that one device sends per step. ``peak_bytes`` is predicted, or compiled for a
    ``verified`` plan. ``layouts`` maps the path of every argument leaf to its ``PartitionSpec``. ``statistics`` has
    counts and seconds of the stages. ``donated`` are positions among the dynamic arguments. ``host_bytes`` is the peak
    of a device's blocks of tensors in host memory, which ``peak_bytes`` excludes.
    """

    mesh: Mesh | AbstractMesh
    objective: float
    lower_bound: float
    peak_bytes: float
    collectives: tuple[PlannedCollective, ...]
    statistics: Mapping[str, Any]
    arguments: tuple[PlannedArgument, ...] = field(repr=False)
    recipe: Recipe = field(repr=False)
    built: Schedule | ScheduleToBe | None = field(repr=False)
    donated: tuple[int | str, ...] = ()
    host_bytes: float = 0.0
    executable: jax.stages.Compiled | None = field(default=None, repr=False)
    """The compiled step of a plan that was verified on the devices of its mesh."""
    held: Mapping[int, float] = field(default_factory=dict, repr=False)
    """The bytes that the compiled step of a verified plan holds at each operation. Files do not have them."""
    unlimited: PlanData | None = field(default=None, repr=False)
    """While planning: the plan without a limit, where that exceeds it."""

    @property
    def verified(self) -> Mapping[str, Any] | None:
        """The compiler of ``peak_bytes``: the ``target``, the version of ``jaxlib``, and a row per plan of the
        ``rounds`` (predicted and compiled peak, bytes sent, seconds to compile). None for a predicted peak."""
        return self.statistics.get("verified")

    @property
    def recomputed(self) -> tuple[Mapping[str, Any], ...]:
        """What is computed again to fit, a row for each ``module`` and primitive (``made_by``).

        ``count``: of the values; ``bytes``: of a device that no longer wait for the backward part; ``flops`` and
        ``seconds``: that a device works longer, by the hardware profile. Nothing where the step fits as it is."""
        return tuple(self.statistics.get("recomputed", ()))

    @property
    def offloaded(self) -> tuple[Mapping[str, Any], ...]:
        """What waits in host memory: to fit, a row for each ``module`` and primitive (``made_by``), or as asked for, a
        row for each pin (``made_by`` is `pin`).

        ``count``: of the values; ``bytes``: of a device that wait there, and not in its memory; ``seconds``: that a
        device waits for the copies, by the hardware profile."""
        return tuple(self.statistics.get("offloaded", ()))

    @property
    def blocks(self) -> tuple[Mapping[str, Any], ...]:
        """What runs in blocks, a row for each loop.

        ``index``: a dimension of an argument, as `1/tokens[0]`, or of what a module makes; ``count``: of blocks of each
        index; ``module``: where most operations are; ``operations``: their number. ``bytes``: of a device that the
        loops free, and ``seconds``: that a device works longer, as estimated, in the first row of those that were
        chosen; None where they were asked for."""
        return tuple(self.statistics.get("blocks", ()))

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
        """The largest possible distance to the optimum of the cost model: 0.001 is a tenth of a percent."""
        if self.objective <= self.lower_bound:
            return 0.0
        return (self.objective - self.lower_bound) / self.objective

    @property
    def step_time(self) -> StepTime:
        """The parts of a step's time: its work, the collectives that it waits for, those that work hides.

        They are estimated by the rates of the hardware profile. The objective "time" is ``step_time.seconds``.
        """
        return step_time(self.schedule)

    @property
    def schedule(self) -> Schedule:
        """The routes of every tensor through the program."""
        built = self._built
        return built.schedule if isinstance(built, ScheduleToBe) else built

    @property
    def program(self) -> Program:
        return self._built.program

    @property
    def _built(self) -> Schedule | ScheduleToBe:
        if self.built is None:
            raise PlanMismatchError(
                "this plan was read from a file and knows no program yet: give it its function and arguments, "
                "plan.bind(fn, *args), or run it by plan.apply(fn)"
            )
        return self.built

    @property
    def fingerprint(self) -> str:
        """A digest of the planned program, the same on every machine."""
        return self.recipe.fingerprint or self.program.fingerprint()

    @property
    def layouts(self) -> dict[str, PartitionSpec]:
        """The ``PartitionSpec`` of every argument leaf, by its tree path."""
        return {argument.path: argument.spec for argument in self.arguments}

    @property
    def in_shardings(self) -> Any:
        """``NamedSharding``s in the structure of the arguments."""
        args, kwargs = self._in_shardings(self.mesh)
        return args if not kwargs else (args, kwargs)

    @property
    def out_shardings(self) -> Any:
        """``NamedSharding``s in the structure of the results."""
        return self._out_shardings(with_auto_axes(self.mesh))

    def trace(self, mesh: Mesh | None = None) -> jax.stages.Traced:
        """The planned step, traced for the plan's own mesh or another one of the same axes and sizes.

        Raises PlanMismatchError for a mesh of other axes, and for one without devices.
        """
        shardings = self.leaf_shardings(self._with_devices(mesh))
        leaves: list[Any] = []
        for position, (index, sharding) in enumerate(zip(self.program.inputs, shardings, strict=True)):
            value, is_ref = self.program.values[index], position in self.program.refs
            type_of_ref = _jax.ref_type(value.shape, value.dtype, value.weak_type)
            leaves.append(type_of_ref if is_ref else _jax.shape_of(value, sharding))
        args, kwargs = jax.tree.unflatten(self.program.in_tree, leaves)
        return self.jitted(mesh).trace(*args, **kwargs)

    def lower(self, mesh: Mesh | None = None) -> jax.stages.Lowered:
        """The planned step, lowered for the plan's own mesh or another one of the same axes and sizes.

        Raises PlanMismatchError for a mesh of other axes, and for one without devices.
        """
        shardings, kinds = self.leaf_shardings(self._with_devices(mesh)), [one.memory_kind for one in self.arguments]
        lowered = self.trace(mesh).lower()
        dropped = any(kind and kind != s.memory_kind for kind, s in zip(kinds, shardings, strict=True))
        return _jax.with_memory_kinds(lowered, kinds) if dropped else lowered

    def jitted(self, mesh: Mesh | None = None) -> Any:
        """The planned step as a ``jax.jit`` function of the planned arguments, without the static ones.

        Results are over ``mesh``, with its axes of type Explicit too, unless `retyped` has other shardings.
        ``jax.jit`` takes no shardings of keyword arguments. With these, all arguments must have their planned layouts.
        """
        concrete = self._with_devices(mesh)
        program = self.program
        place_captured(program.captured_refs.values(), concrete)

        def planned(*args: Any, **kwargs: Any) -> Any:
            check_libraries(program)
            leaves = jax.tree.leaves((args, kwargs))
            refs = {program.inputs[position]: leaves[position] for position in program.refs} | program.captured_refs
            with _jax.automatic_mesh():
                arrays = [leaf[...] if position in program.refs else leaf for position, leaf in enumerate(leaves)]
                results = Replay(self.schedule, concrete)(arrays)
                for number, value in program.written.items():
                    refs[value][...] = results[number]
            return jax.tree.unflatten(program.out_tree, results[: len(program.results)])

        planned.__name__ = planned.__qualname__ = program.name
        args, kwargs = self._in_shardings(concrete)
        options = self.recipe.options
        return jax.jit(
            planned,
            in_shardings=None if kwargs else args,
            out_shardings=self._out_shardings(concrete if self.retyped(mesh) else mesh or concrete),
            donate_argnums=[position for position in self.donated if isinstance(position, int)],
            donate_argnames=[name for name in self.donated if isinstance(name, str)],
            keep_unused=options.keep_unused,
            compiler_options=dict(options.compiler_options or {}) or None,
        )

    def retyped(self, mesh: Mesh | None = None) -> Any:
        """The shardings of results with the axis types of ``mesh``. None where they need no change.

        A program that is lowered for its devices only takes a mesh with axes of type Auto, also in the executable.
        """
        if mesh is None or with_auto_axes(mesh) == mesh:
            return None
        for_devices = self.executable is not None or any(
            _jax.is_lowered_for_devices(o.equation) for o in self.program.operations
        )
        return self._out_shardings(mesh) if for_devices else None

    def leaf_shardings(self, mesh: Mesh | AbstractMesh | None = None) -> tuple[NamedSharding, ...]:
        """The sharding of every argument leaf, in the order of the flattened arguments."""
        chosen = with_auto_axes(self.mesh if mesh is None else mesh)
        return tuple(NamedSharding(chosen, one.spec, memory_kind=one.memory_kind) for one in self.arguments)

    def check_program(self, program: Program) -> None:
        """Raises PlanMismatchError if ``program`` is not the planned one."""
        if program.fingerprint() == self.fingerprint:
            return
        found = {}
        for position, value in enumerate(program.values[index] for index in program.inputs):
            kind, is_ref = value.memory_kind, position in program.refs
            found[value.name or ""] = type_text(value.shape, value.dtype, memory_kind=kind, is_ref=is_ref)
        different = self.other_arguments(found)
        what = different or "another function or version of JAX"
        raise PlanMismatchError(f"the plan was made for another program ({self.fingerprint[:12]}), {what}")

    def other_arguments(self, found: Mapping[str, str]) -> str:
        """The differences of arguments (types by path) from the planned ones, as text. Empty for equal ones."""
        planned = {argument.path: argument.type_text for argument in self.arguments}
        different = [
            f"\n  `{path}` was planned as {planned.get(path, 'no argument')} and is {found.get(path, 'no argument')}"
            for path in dict.fromkeys((*planned, *found))
            if planned.get(path) != found.get(path)
        ]
        more = f"\n  and {len(different) - 8} more" if len(different) > 8 else ""
        return f"other arguments:{''.join(different[:8])}{more}" if different else ""

    def __copy__(self) -> PlanData:
        return self

    def __deepcopy__(self, memo: Any) -> PlanData:
        return self

    def _with_devices(self, mesh: Mesh | None) -> Mesh:
        chosen = self.mesh if mesh is None else mesh
        if not isinstance(chosen, (Mesh, AbstractMesh)):
            raise PlanMismatchError(f"a jax.sharding.Mesh of devices was expected, got `{chosen!r}`")
        if not isinstance(chosen, Mesh):
            raise PlanMismatchError(
                f"the plan's mesh {self.mesh_axes} has no devices of its own, and of the {self.device_count} that it "
                f"takes {len(jax.devices())} are here: pass a mesh of devices of the same axes, such as "
                "jax.make_mesh(sizes, names) or shardplan.gpu_mesh('h100', sizes, names)"
            )
        if mesh_axes(chosen) != mesh_axes(self.mesh):
            raise PlanMismatchError(
                f"the plan is for the mesh {self.mesh_axes}, got {dict(chosen.shape)}: plan again for it"
            )
        return with_auto_axes(chosen)

    def _in_shardings(self, mesh: Mesh | AbstractMesh) -> Any:
        return jax.tree.unflatten(self.program.in_tree, self.leaf_shardings(mesh))

    def _out_shardings(self, mesh: Mesh | AbstractMesh) -> Any:
        axes, values, found = mesh_axes(self.mesh), self.program.values, []
        for number, output in enumerate(self.program.results):
            spec = to_spec(axes, self.schedule.layout_of_output(number))
            spec = of_type(spec, (self.recipe.options.results or {}).get(self.program.output_names[number]), mesh)
            kind = values[output].kind_as_result if isinstance(output, int) else None
            found.append(NamedSharding(mesh, spec, memory_kind=kind))
        return jax.tree.unflatten(self.program.out_tree, found)
