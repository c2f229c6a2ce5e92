"""shardplan plans how a JAX program is split over a mesh of GPUs.

step = shardplan.auto(train_step, mesh)      # instead of jax.jit(train_step)
state, loss = step(state, batch)

Public names are imported on their first use, so that ``import shardplan`` takes no time.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardplan.common.quiet_imports import without_cuda_notice

if TYPE_CHECKING:
    from shardplan.audits.audit import audit as audit
    from shardplan.audits.calibrate import calibrate as calibrate
    from shardplan.auto import auto as auto
    from shardplan.auto import plan as plan
    from shardplan.compare import Comparison as Comparison
    from shardplan.compare import compare as compare
    from shardplan.compiled.target import gpu_mesh as gpu_mesh
    from shardplan.errors import ArgumentError as ArgumentError
    from shardplan.errors import CallError as CallError
    from shardplan.errors import InfeasibleError as InfeasibleError
    from shardplan.errors import PlanMismatchError as PlanMismatchError
    from shardplan.errors import ShardplanError as ShardplanError
    from shardplan.errors import ShardplanWarning as ShardplanWarning
    from shardplan.plans.plan import Plan as Plan
    from shardplan.plans.simulate import simulate as simulate
    from shardplan.program.control_flow import trip_count as trip_count
    from shardplan.rules import describe as describe
    from shardplan.timing.simulator import Simulation as Simulation
    from shardplan.together import plan_together as plan_together

_MODULES = {
    "audit": "audits.audit",
    "auto": "auto",
    "plan": "auto",
    "calibrate": "audits.calibrate",
    "Comparison": "compare",
    "compare": "compare",
    "trip_count": "program.control_flow",
    "ArgumentError": "errors",
    "CallError": "errors",
    "InfeasibleError": "errors",
    "PlanMismatchError": "errors",
    "ShardplanError": "errors",
    "ShardplanWarning": "errors",
    "Plan": "plans.plan",
    "describe": "rules",
    "gpu_mesh": "compiled.target",
    "Simulation": "timing.simulator",
    "simulate": "plans.simulate",
    "plan_together": "together",
}
"""The module of each public name."""


class _Package(ModuleType):
    """The package, whose public names stay functions after the import of a module of the same name."""

    def __getattr__(self, name: str) -> Any:
        if name not in _MODULES:
            return self._submodule(name)
        with without_cuda_notice():
            found = getattr(importlib.import_module(f"shardplan.{_MODULES[name]}"), name)
        self.__dict__[name] = found
        return found

    def _submodule(self, name: str) -> ModuleType:
        whole = f"shardplan.{name}"
        try:
            if not name.startswith("__"):
                return importlib.import_module(whole)
        except ModuleNotFoundError as error:
            if error.name != whole:
                raise
        raise AttributeError(f"module `shardplan` has no attribute `{name}`; there are {', '.join(_MODULES)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _MODULES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_MODULES})


sys.modules[__name__].__class__ = _Package
