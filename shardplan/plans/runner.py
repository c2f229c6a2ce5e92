"""The runner of a plan: its compiled step on its devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from shardplan import _jax
from shardplan.common.progress import LOG
from shardplan.common.tables import size_text
from shardplan.errors import ArgumentError, warn
from shardplan.layout.mesh import GivenMesh, can_run, memory_for_arrays, with_auto_axes, with_axis_types
from shardplan.plans.argument_placement import place_captured, place_references, put
from shardplan.plans.pipeline import RESERVED_MEMORY
from shardplan.plans.plan_data import PlanData
from shardplan.plans.processes import check_plan
from shardplan.plans.report import bytes_on_device
from shardplan.program.call_arguments import Call, name_of
from shardplan.program.missing_libraries import name_missing_library

_SECOND = 2


Made = TypeVar("Made", bound=PlanData)


class Runner(Generic[Made]):
    """A plan with its compiled step and its devices.

    The mesh axes of results have the types ``axis_types``, or type Auto for None (`shardplan.plans.explicit_types`).
    """

    def __init__(self, plan: Made, mesh: GivenMesh, axis_types: tuple[AxisType, ...] | None = None) -> None:
        self.plan = plan
        self.mesh = with_auto_axes(mesh) if isinstance(mesh, Mesh) else devices_for(plan)
        if self.mesh is not None and axis_types is not None:
            self.mesh = with_axis_types(self.mesh, axis_types)
        self._jitted: Callable[..., Any] | None = None
        self._shardings: tuple[NamedSharding, ...] = ()
        self._captured_refs: list[Any] = []
        self._retyped: Any = None
        self._calls = 0

    def __call__(self, call: Call) -> Any:
        with _jax.automatic_mesh():
            if self._jitted is None:
                self._jitted = self._compile(call)
            place_captured(self._captured_refs, self.mesh or self.plan.mesh)
            if not self._shardings:
                with name_missing_library(self.plan.program):
                    return self._jitted(*call.args, **call.kwargs)
            leaves, structure = jax.tree.flatten((call.args, call.kwargs))
            call.check_alive(leaves)
            self._calls += 1
            if self._calls == _SECOND:
                self._log_moved_arguments(call.name, leaves)
            refs = self.plan.program.refs
            call.check_single(leaves, refs, self._captured_refs)
            with place_references(leaves, self._shardings, refs) as there:
                args, kwargs = jax.tree.unflatten(structure, there)
                with name_missing_library(self.plan.program):
                    results = self._jitted(*args, **kwargs)
            return results if self._retyped is None else jax.tree.map(put, results, self._retyped)

    def _compile(self, call: Call) -> Callable[..., Any]:
        if isinstance(self.mesh, Mesh) and not all(map(can_run, self.mesh.local_devices)):
            raise ArgumentError(
                f"the devices of the mesh {dict(self.mesh.shape)} are there to compile for, nothing runs on them: pass "
                "a mesh of jax.devices() to run, or use lower(), shardplan.plan and shardplan.audit"
            )
        ordered = [effect for effect in self.plan.program.effects if _jax.is_ordered_for_one_device(effect)]
        if not ordered or self.plan.device_count == 1:
            check_plan(self.plan, self.mesh)
            self._warn_of_memory()
            self._shardings = self.plan.leaf_shardings(self.mesh)
            self._captured_refs = [*self.plan.program.captured_refs.values()]
            self._retyped = self.plan.retyped(self.mesh)
            return self.plan.executable or self.plan.jitted(self.mesh)
        warn(
            f"`{name_of(call.fn)}` has effects whose order JAX keeps on one device alone (`{ordered[0]}`): it runs "
            "unplanned. Use ordered=False to run it on all devices."
        )
        return jax.jit(
            call.fn,
            donate_argnums=[place for place in call.donated if isinstance(place, int)],
            donate_argnames=[place for place in call.donated if isinstance(place, str)],
        )

    def _log_moved_arguments(self, name: str, leaves: Sequence[Any]) -> None:
        """Logs the arguments in other layouts on the mesh. Those of the second call recur at each call."""
        moved = [
            one
            for one, leaf, sharding in zip(self.plan.arguments, leaves, self._shardings, strict=True)
            if isinstance(getattr(leaf, "sharding", None), NamedSharding)
            and leaf.sharding.device_set == sharding.device_set
            and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        ]
        if moved:
            size = size_text(sum(bytes_on_device(one, self.plan.mesh_axes) for one in moved))
            LOG.warning(
                "%s moves %d of %d arguments at each call, up to %s per device, on top of what its plan sends: `%s` is "
                "one. Plan it with like=, or shardplan.plan_together, to leave them where they lie",
                *(name, len(moved), len(leaves), size, moved[0].path),
            )

    def _warn_of_memory(self) -> None:
        """Warns of a peak above the memory that JAX preallocates, three quarters of the device's. Otherwise only XLA
        fails, after the compilation."""
        given = memory_for_arrays(self.mesh) if isinstance(self.mesh, Mesh) else None
        if given is not None and self.plan.peak_bytes > given:
            warn(
                f"the plan takes {self.plan.peak_bytes / 1e9:.2f} GB of each device, of which JAX may give out "
                f"{given / 1e9:.2f} GB: set XLA_PYTHON_CLIENT_MEM_FRACTION={1 - RESERVED_MEMORY:.2f} before JAX is "
                f"imported, which is what plans count on (the default is 0.75), or plan with memory_limit={given}."
            )


def devices_for(plan: PlanData) -> Mesh | None:
    """The devices for a plan over a number of devices. None for a mesh with its own ones."""
    if not isinstance(plan.mesh, AbstractMesh):
        return None
    sizes = tuple(plan.mesh_axes.values())
    if plan.device_count > len(jax.devices()):
        return None
    automatic = (jax.sharding.AxisType.Auto,) * len(sizes)
    devices = jax.devices()[: plan.device_count]
    return jax.make_mesh(sizes, tuple(plan.mesh_axes), axis_types=automatic, devices=devices)
