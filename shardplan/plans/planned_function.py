"""Functions that run by an existing plan, for ``Plan.apply`` and ``Plan.bind``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardplan import _jax
from shardplan.common.checks import check_function
from shardplan.frameworks import adapt_call
from shardplan.plans.explicit_types import axis_types_of
from shardplan.plans.pipeline import rebuild
from shardplan.plans.plan_data import PlanData
from shardplan.plans.planned_call import calls_of, checked_call, traced_for
from shardplan.plans.runner import Runner
from shardplan.program.call_arguments import Call, name_of


class PlannedFunction:
    """The function of ``Plan.apply``: it runs by one plan, and refuses other arguments.

    The first call traces the function and compares it with the plan.
    """

    def __init__(self, fn: Callable[..., Any], plan: PlanData) -> None:
        check_function("fn", fn)
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._plan = fn, plan
        self._calls = calls_of(fn, plan.recipe.options)
        self._bound: dict[Any, Runner[PlanData]] = {}

    def __repr__(self) -> str:
        return f"<{name_of(self._fn)} as {self._plan!r} splits it>"

    @_jax.api_boundary
    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The planned step, lowered like ``jax.jit(fn).lower``."""
        runner = self._runner(adapt_call(self._calls.take(args, kwargs)), args, kwargs)
        return runner.plan.lower(runner.mesh)

    @_jax.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = adapt_call(self._calls.take(args, kwargs))
        return call.finished(self._runner(call, args, kwargs)(call))

    def _runner(self, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Runner[PlanData]:
        key = call.key()
        if key not in self._bound:
            self._calls.check(args, kwargs)
            plan = rebuild(self._plan, traced_for(self._plan, call))
            self._bound[key] = Runner(plan, self._plan.mesh, axis_types_of(call, self._plan.mesh))
        return self._bound[key]


def bind_plan(plan: PlanData, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> PlanData:
    """A plan over ``fn``, traced again. Raises PlanMismatchError for another program."""
    options = plan.recipe.options
    return rebuild(plan, traced_for(plan, checked_call(fn, args, kwargs, options)))
