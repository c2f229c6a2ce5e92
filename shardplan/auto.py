"""``shardplan.auto``: one line instead of ``jax.jit``."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, overload

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardplan import _jax
from shardplan.audits.refine import refined
from shardplan.common.progress import LOG
from shardplan.errors import (
    ArgumentError,
    EnclosingTraceError,
    InfeasibleError,
    warn,
)
from shardplan.frameworks import adapted
from shardplan.hardware import HardwareProfile
from shardplan.layout.mesh import GivenMesh, Unsaid, as_mesh, mesh_of_context
from shardplan.options import Options
from shardplan.plans import planned_call, processes, result_layouts, runner
from shardplan.plans.explicit_types import axis_types_of
from shardplan.plans.jit_options import with_options_of
from shardplan.plans.like import as_pins, layouts_kept, layouts_like
from shardplan.plans.plan import Plan
from shardplan.plans.planned_call import UNSAID, calls_of, plan_call, resolved_call
from shardplan.plans.processes import planning_alone
from shardplan.plans.report import mesh_text
from shardplan.plans.runner import Runner
from shardplan.program import call_arguments, program
from shardplan.program.call_arguments import Call, name_of
from shardplan.program.program import Program

for _module in (call_arguments, program, planned_call, processes, result_layouts, runner, _jax):
    _jax.hide_from_tracebacks(__file__, str(_module.__file__))


@overload
def auto(fn: Callable[..., Any], mesh: GivenMesh | Unsaid = UNSAID, **options: Any) -> AutoFunction: ...
@overload
def auto(fn: None = None, mesh: GivenMesh | Unsaid = UNSAID, **options: Any) -> Callable[..., AutoFunction]: ...
def auto(  # type: ignore[misc]
    fn: Callable[..., Any] | None = None,
    mesh: GivenMesh | Unsaid = UNSAID,
    *,
    memory_limit: float | str | None = None,
    objective: str = "bytes",
    hardware: HardwareProfile | str | os.PathLike[str] | None = None,
    pins: Mapping[str, PartitionSpec] | None = None,
    like: AutoFunction | Plan | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    keep_unused: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    reduce_dtype: Any = None,
    time_limit: float = 60.0,
    refine: int = 1,
    islands: bool = True,
    verify: bool | None = None,
    fit: Sequence[str] = ("recompute",),
) -> Any:
    """``fn``, planned over ``mesh`` and compiled, in the place of ``jax.jit(fn)``.

    The first call with new shapes plans and compiles; further ones run. Arguments that lie elsewhere are placed.

    Args:
        fn: any function of pytrees of arrays; typically a training step ``(state, batch) -> (state, loss)``. That of
            ``jax.jit`` keeps the options that it was made with. Without a function, this is a decorator with options.
        mesh: a ``jax.sharding.Mesh`` with axes of any type, an ``AbstractMesh`` (plans, but cannot run), or a number of
            devices or ``"2x8"`` hosts by devices (the best mesh of the first so many devices is used), or text such as
            ``"data=2,model=4"``. By default that of ``jax.set_mesh``, or all devices. Results have the
            types that ``jax.jit`` gives where an argument is on axes of type Explicit, or ``jax.set_mesh`` holds such
            a mesh; in all other calls types without layouts.
        memory_limit: bytes that one device may hold, as a number or as ``"11GB"``.
        objective: ``"bytes"`` (sent per device and step) or ``"time"`` (seconds by the hardware profile).
        hardware: a profile or its name; that of the mesh's devices where none is given, ``"h100"`` for meshes without.
        pins: path globs of arguments to ``PartitionSpec``s that they must have. Arguments that axes of type Explicit
            split keep that layout too: it is part of their types.
        like: a planned step, or a plan, whose state some arguments are, matched by path or by tree: they keep the
            layouts that it has there, so that nothing moves between the two (`shardplan.plans.like`). A function's own
            state keeps that of its first plan in any case, where memory allows it.
        donate_argnums, donate_argnames: arguments whose memory the results may take, as in ``jax.jit``: none where
            nothing is said. What donating would save is printed with the plan (``plan.donatable_bytes``).
        static_argnums, static_argnames: arguments that are compiled into the program, as in ``jax.jit``.
        in_shardings, out_shardings: layouts of arguments that are given by position, and of results, as in ``jax.jit``:
            trees, or prefixes of them, of ``NamedSharding`` or ``PartitionSpec``, and None where the plan decides. They
            are pins: the plan keeps them, and is made around them.
        keep_unused, compiler_options: as in ``jax.jit``.
        reduce_dtype: a narrower float type in which gradients may be summed over devices, ``"bfloat16"`` above all:
            ``"float16"`` ends at 65504, which is said, and 8-bit types are refused.
        time_limit: seconds that the search may take, within a second; the best plan by then is taken, with its true
            bound. Counting the memory of what is searched is part of it, tracing and stating the problem are not, nor
            is compiling. Each plan of ``refine``, and each mesh of a number of devices, has the limit to itself.
        refine: plans made in so many ways and compiled for GPUs (which need not be there); the best one is kept. What
            each gave stands in ``plan.statistics["refined"]``. Needs the extra ``audit``.
        islands: False leaves every reduction to XLA, also where it sends more than planned reductions would.
        verify: whether a plan whose predicted peak comes near the memory limit is compiled, and planned again where the
            compiled peak exceeds the limit (`shardplan.plans.feedback`). None: where the mesh has GPUs that are there,
            all of one process.
        fit: what may make a step fit that exceeds the memory limit: ``("recompute",)``, values of the forward part are
            computed again in the backward part in the place of being kept (``plan.recomputed``). ``()`` refuses it.

    Returns:
        A callable with ``.plan(*args)`` and ``.lower(*args)``.

    Raises:
        ArgumentError: an option or the mesh is wrong; before any work starts.
        InfeasibleError: nothing keeps within the memory limit.
    """
    chosen = {name: value for name, value in locals().items() if name not in ("fn", "mesh")}
    if fn is None:
        return partial(auto, mesh=mesh, **chosen)
    return AutoFunction(fn, mesh, Options(**chosen))


@_jax.api_boundary
def plan(fn: Callable[..., Any], mesh: GivenMesh, *args: Any, **options: Any) -> Plan:
    """The plan of ``fn`` for arguments, which may be ``jax.ShapeDtypeStruct``s; see ``auto`` for the options."""
    chosen = options_from(options)
    function = AutoFunction(fn, as_mesh(mesh), replace(chosen, verify=bool(chosen.verify)))
    with nullcontext() if isinstance(mesh, Mesh) else planning_alone():
        return function.plan(*args)


class AutoFunction:
    """What ``auto`` returns: called like ``jax.jit(fn)``, with a plan per shapes of the arguments."""

    def __init__(self, fn: Callable[..., Any], mesh: GivenMesh | Unsaid, options: Options) -> None:
        if not callable(fn):
            raise ArgumentError(f"a function was expected, got `{fn!r}` of type `{type(fn).__name__}`")
        options.check()
        functools.update_wrapper(self, fn, updated=())
        self.__wrapped__ = fn
        self._fn = fn
        self._given_mesh = mesh if isinstance(mesh, Unsaid) else as_mesh(mesh)
        self.options = with_options_of(fn, options)
        self._calls = calls_of(_jax.inside_of_jit(fn), self.options)
        self._planned: dict[Any, Runner[Plan]] = {}

    @functools.cached_property
    def mesh(self) -> GivenMesh:
        """The mesh, which is looked for when it is needed where none was given."""
        return mesh_of_context() if isinstance(self._given_mesh, Unsaid) else self._given_mesh

    def __repr__(self) -> str:
        mesh, count = self._given_mesh, len(self._planned)
        text = f"({mesh_text({**mesh.shape})})" if isinstance(mesh, (Mesh, AbstractMesh)) else mesh
        text = "of all devices" if isinstance(mesh, Unsaid) else text
        return f"<shardplan.auto of {name_of(self._fn)} over mesh {text}, {count} plan{'s' * (count != 1)}>"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method of a class, the instance is the first argument, as for ``jax.jit``."""
        return self if instance is None else types.MethodType(self, instance)

    @_jax.api_boundary
    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes (arrays or ``jax.ShapeDtypeStruct``s)."""
        return self._runner(adapted(self._calls.take(args, kwargs)), args, kwargs).plan

    @_jax.api_boundary
    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The planned step, lowered as ``jax.jit(fn).lower`` does it."""
        runner = self._runner(adapted(self._calls.take(args, kwargs)), args, kwargs)
        return runner.plan.lower(runner.mesh)

    @_jax.api_boundary
    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The planned step, traced as ``jax.jit(fn).trace`` does it; ``jax.export.export`` takes this function too."""
        runner = self._runner(adapted(self._calls.take(args, kwargs)), args, kwargs)
        return runner.plan.trace(runner.mesh)

    @_jax.api_boundary
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and types of the results, without a plan, as ``jax.jit(fn).eval_shape`` does it."""
        self._calls.check(args, kwargs)
        call = adapted(self._calls.take(args, kwargs))
        shapes, named = call.shapes()
        return call.finished(_jax.trace(call.fn, shapes, named).out_info, of_shapes=True)

    def clear_cache(self) -> None:
        """Forgets the plans and the compiled steps of this function."""
        self._planned.clear()

    @_jax.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, _jax.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            return self._unplanned(args, kwargs)
        call = adapted(self._calls.take(args, kwargs))
        try:
            runner = self._runner(call, args, kwargs)
        except EnclosingTraceError:
            return self._unplanned(args, kwargs)
        return call.finished(runner(call))

    def _unplanned(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        warn(
            f"`{name_of(self._fn)}` is called while another function is traced (jit, grad, vmap): it is not "
            "planned here. Differentiate and transform first, plan last: shardplan.auto(jax.grad(f), mesh)."
        )
        return self._fn(*args, **kwargs)

    def _runner(self, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Runner[Plan]:
        key = call.key()
        if key not in self._planned:
            self._calls.check(args, kwargs)
            types = axis_types_of(call, self.mesh)
            self._planned[key] = Runner(self._plan_beside(call, types is not None), self.mesh, types)
        return self._planned[key]

    def _plan_beside(self, call: Call, typed: bool) -> Plan:
        """The plan of a call, with the state of the function's first plan where that is, if memory allows it."""
        options = self.options
        if options.like is not None:
            like = layouts_like(_plan_of(options.like), call, self.mesh)
            options = replace(options, pins=as_pins(like, options.pins))
        kept = layouts_kept(next(iter(self._planned.values())).plan, call) if self._planned else {}
        if kept:
            try:
                return self._made(call, replace(options, pins=as_pins(kept, options.pins)), typed)
            except InfeasibleError:
                LOG.warning("%s: the state does not fit where it lies with these arguments, and is moved", call.name)
        return self._made(call, options, typed)

    def _made(self, call: Call, options: Options, typed: bool) -> Plan:
        return Plan.of(plan_call(call, self.mesh, options, typed, refined))

    def traced(self, *args: Any, **kwargs: Any) -> tuple[Program, Options]:
        """The program for arguments of these shapes, before anything is planned, and the options that it is for."""
        self._calls.check(args, kwargs)
        return resolved_call(adapted(self._calls.take(args, kwargs)), self.mesh, self.options, typed=False)

    @property
    def first_plan(self) -> Plan | None:
        """The first plan of this function, whose state others share; None before there is one."""
        return next((runner.plan for runner in self._planned.values()), None)


def _plan_of(like: Any) -> Plan:
    """The plan that another function's arguments are to lie like."""
    found = like.first_plan if isinstance(like, AutoFunction) else like
    if found is None:
        raise ArgumentError(f"like is {like!r}, which has no plan yet: call it first, or plan it by its .plan(*args)")
    if not isinstance(found, Plan):
        raise ArgumentError(f"like is a planned step or a plan, got `{like!r}`")
    return found


def options_from(given: dict[str, Any]) -> Options:
    try:
        return Options(**given)
    except TypeError:
        known = ", ".join(Options.__dataclass_fields__)
        unknown = ", ".join(f"`{name}`" for name in given if name not in Options.__dataclass_fields__)
        raise ArgumentError(
            f"there is no option {unknown}; there are {known}. Arguments of the step itself are given by position"
        ) from None
