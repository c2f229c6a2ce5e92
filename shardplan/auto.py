"""``shardplan.auto`` and ``shardplan.plan``: the planned function in the place of ``jax.jit``, and its plan."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any, overload

import jax
from jax.sharding import AbstractMesh, Mesh

from shardplan import _jax
from shardplan.audits.refine import refined
from shardplan.common.progress import LOG
from shardplan.errors import (
    ArgumentError,
    EnclosingTraceError,
    InfeasibleError,
    warn,
)
from shardplan.frameworks import adapt_call
from shardplan.hardware import HardwareProfile
from shardplan.layout.mesh import GivenMesh, NoMesh, as_mesh, mesh_of_context
from shardplan.options import FITS, Options, Pin
from shardplan.plans import planned_call, processes, result_layouts, runner
from shardplan.plans.explicit_types import axis_types_of
from shardplan.plans.jit_options import with_options_of
from shardplan.plans.like import as_pins, layouts_kept, layouts_like
from shardplan.plans.plan import Plan
from shardplan.plans.planned_call import NO_MESH, calls_of, plan_call, resolved_call
from shardplan.plans.processes import planning_alone
from shardplan.plans.report import mesh_text
from shardplan.plans.runner import Runner
from shardplan.program import call_arguments, program
from shardplan.program.call_arguments import Call, name_of
from shardplan.program.program import Program

for _module in (call_arguments, program, planned_call, processes, result_layouts, runner, _jax):
    _jax.hide_from_tracebacks(__file__, str(_module.__file__))


@overload
def auto(fn: Callable[..., Any], mesh: GivenMesh | NoMesh = NO_MESH, **options: Any) -> AutoFunction: ...
@overload
def auto(fn: None = None, mesh: GivenMesh | NoMesh = NO_MESH, **options: Any) -> Callable[..., AutoFunction]: ...
def auto(
    fn: Callable[..., Any] | None = None,
    mesh: GivenMesh | NoMesh = NO_MESH,
    *,
    memory_limit: float | str | None = None,
    objective: str = "bytes",
    hardware: HardwareProfile | str | os.PathLike[str] | None = None,
    pins: Mapping[str, Pin] | None = None,
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
    fit: Sequence[str] = FITS,
    blocks: Mapping[str, int] | None = None,
    host_memory: Any = None,
    **unknown: Any,
) -> Any:
    """``fn``, planned over ``mesh`` and compiled, in the place of ``jax.jit(fn)``.

    The first call with new shapes plans and compiles. Arguments in other layouts are resharded at each call.

    Args:
        fn: any function of pytrees of arrays, typically a training step ``(state, batch) -> (state, loss)``. A function
            of ``jax.jit`` keeps its options. Without a function, this is a decorator with options.
        mesh: a ``jax.sharding.Mesh``, an ``AbstractMesh`` (runs on the first devices here), text such as
            ``"data=2,model=4"``, or a number of devices or ``"2x8"`` hosts by devices (the best mesh of these). By
            default that of ``jax.set_mesh``, or all devices. Results have the types of ``jax.jit`` under a
            ``jax.set_mesh`` with axes of type Explicit, or with an argument on such axes, and else no typed layouts.
        memory_limit: bytes of one device, as a number or as ``"11GB"``.
        objective: ``"bytes"`` (sent per device and step) or ``"time"`` (seconds by the hardware profile).
        hardware: a profile or its name. By default that of the mesh's devices, or ``"h100"`` without devices.
        pins: path globs of arguments to their ``PartitionSpec``s, to ``"pinned_host"`` for arguments that wait in host
            memory outside of their use (``plan.offloaded``), or to a ``NamedSharding`` with both. Arguments also keep
            typed layouts over axes of type Explicit.
        like: a planned step, or a plan, that shares its state with some arguments, matched by path or by tree. They
            keep their layouts there, and nothing moves between the two (`shardplan.plans.like`). Further plans of one
            function keep the state's layouts of its first plan in any case, where memory allows it.
        donate_argnums, donate_argnames: arguments whose memory results may take, as in ``jax.jit``, by default none.
            The plan prints what a donation would save (``plan.donatable_bytes``).
        static_argnums, static_argnames: arguments that are compiled into the program, as in ``jax.jit``.
        in_shardings, out_shardings: pins of positional arguments and of results, as in ``jax.jit``: trees, or prefixes
            of them, of ``NamedSharding`` or ``PartitionSpec``, and None where the plan decides.
        keep_unused, compiler_options: as in ``jax.jit``.
        reduce_dtype: a narrower float type for sums of gradients over devices, such as ``"bfloat16"``. ``"float16"``
            ends at 65504 and gets a warning. 8-bit types are refused.
        time_limit: seconds of the search, with its memory counts, met within a second. The best plan by then is kept,
            with its true bound. Tracing, the problem's construction and compiling are extra. Each plan of ``refine``
            and each mesh of a number of devices has the whole limit.
        refine: the number of plans to make and compile for GPUs (which need not be there). The best one is kept.
            ``plan.statistics["refined"]`` has a row for each. Needs the extra ``audit``.
        islands: False leaves every reduction to XLA, also where it sends more than planned reductions would.
        verify: whether to compile a plan near the memory limit, and to plan again if the compiled peak exceeds the
            limit (`shardplan.plans.feedback`). None: for a mesh of real GPUs of one process.
        fit: the means to fit a step that exceeds the memory limit in every layout. ``("recompute",)`` computes values
            of the forward part again in the backward part (``plan.recomputed``). ``"blocks"`` runs parts of the step
            in blocks of an index, as gradient accumulation and chunked losses do (``plan.blocks``). ``"host"`` has
            values wait in host memory (``plan.offloaded``). With ``()`` such a step is refused.
        blocks: what is to run in blocks whether it fits or not: the number of blocks by the path of an argument, whose
            first dimension is divided, or by a path and a dimension, ``1/image[2]``. ``"batch"`` stands for the
            largest argument that is no state.
        host_memory: bytes of a device's share of host memory for what waits there, as a number or as ``"64GB"``. By
            default as much as a device has.

    Returns:
        A callable with ``.plan(*args)`` and ``.lower(*args)``.

    Raises:
        ArgumentError: an option or the mesh is wrong. Raised before any work starts.
        InfeasibleError: no plan is within the memory limit.
    """
    if unknown:
        raise _no_option(unknown)
    chosen = {name: value for name, value in locals().items() if name not in ("fn", "mesh", "unknown")}
    if fn is None:
        return partial(auto, mesh=mesh, **chosen)
    return AutoFunction(fn, mesh, Options(**chosen))


@_jax.api_boundary
def plan(fn: Callable[..., Any], mesh: GivenMesh, *args: Any, **options: Any) -> Plan:
    """The plan of ``fn`` for arguments, which may be ``jax.ShapeDtypeStruct``s. ``auto`` documents the options."""
    chosen = options_from(options)
    chosen.check()
    function = AutoFunction(fn, as_mesh(mesh), replace(chosen, verify=bool(chosen.verify)))
    with nullcontext() if isinstance(mesh, Mesh) else planning_alone():
        return function.plan(*args)


class AutoFunction:
    """The callable of ``auto``: called like ``jax.jit(fn)``, with a plan per shapes of the arguments."""

    def __init__(self, fn: Callable[..., Any], mesh: GivenMesh | NoMesh, options: Options) -> None:
        if not callable(fn):
            raise ArgumentError(f"a function was expected, got `{fn!r}` of type `{type(fn).__name__}`")
        options.check()
        functools.update_wrapper(self, fn, updated=())
        self.__wrapped__ = fn
        self._fn = fn
        self._given_mesh = mesh if isinstance(mesh, NoMesh) else as_mesh(mesh)
        self.options = with_options_of(fn, options)
        self._calls = calls_of(_jax.inside_of_jit(fn), self.options)
        self._planned: dict[Any, Runner[Plan]] = {}

    @functools.cached_property
    def mesh(self) -> GivenMesh:
        """The given mesh, or the default one at this time."""
        return mesh_of_context() if isinstance(self._given_mesh, NoMesh) else self._given_mesh

    def __repr__(self) -> str:
        mesh, count = self._given_mesh, len(self._planned)
        text = f"({mesh_text({**mesh.shape})})" if isinstance(mesh, (Mesh, AbstractMesh)) else mesh
        text = "of all devices" if isinstance(mesh, NoMesh) else text
        return f"<shardplan.auto of {name_of(self._fn)} over mesh {text}, {count} plan{'s' * (count != 1)}>"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds a method: the instance is the first argument, as for ``jax.jit``."""
        return self if instance is None else types.MethodType(self, instance)

    @_jax.api_boundary
    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes (arrays or ``jax.ShapeDtypeStruct``s)."""
        return self._runner(adapt_call(self._calls.take(args, kwargs)), args, kwargs).plan

    @_jax.api_boundary
    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The planned step, lowered like ``jax.jit(fn).lower``."""
        runner = self._runner(adapt_call(self._calls.take(args, kwargs)), args, kwargs)
        return runner.plan.lower(runner.mesh)

    @_jax.api_boundary
    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The planned step, traced like ``jax.jit(fn).trace``. ``jax.export.export`` takes this function too."""
        runner = self._runner(adapt_call(self._calls.take(args, kwargs)), args, kwargs)
        return runner.plan.trace(runner.mesh)

    @_jax.api_boundary
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and types of the results, without a plan, like ``jax.jit(fn).eval_shape``."""
        self._calls.check(args, kwargs)
        call = adapt_call(self._calls.take(args, kwargs))
        shapes, named = call.shapes()
        return call.finished(_jax.trace(call.fn, shapes, named).out_info, of_shapes=True)

    def clear_cache(self) -> None:
        """Forgets the plans and the compiled steps of this function."""
        self._planned.clear()

    @_jax.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, _jax.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            return self._unplanned(args, kwargs)
        call = adapt_call(self._calls.take(args, kwargs))
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
            self._planned[key] = Runner(self._plan_with_state(call, types is not None), self.mesh, types)
        return self._planned[key]

    def _plan_with_state(self, call: Call, typed: bool) -> Plan:
        """The plan of a call, with the state in the layouts of the function's first plan, if memory allows it."""
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
        """The program for arguments of these shapes, without a plan, and its resolved options."""
        self._calls.check(args, kwargs)
        return resolved_call(adapt_call(self._calls.take(args, kwargs)), self.mesh, self.options, typed=False)

    @property
    def first_plan(self) -> Plan | None:
        """The first plan of this function, whose state further plans share. None before the first call."""
        return next((runner.plan for runner in self._planned.values()), None)


def _plan_of(like: Any) -> Plan:
    """The plan of the option ``like``."""
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
        raise _no_option(given) from None


def _no_option(given: Iterable[str]) -> ArgumentError:
    """The error of names among which one is no option, with the nearest that is one."""
    known = [name for name in Options.__dataclass_fields__ if name not in ("results", "on_host")]
    unknown = next(name for name in given if name not in known)
    nearest = get_close_matches(unknown, known, n=1)
    meant = f": did you mean `{nearest[0]}`?" if nearest else "."
    return ArgumentError(
        f"there is no option `{unknown}`{meant} There are {', '.join(known)}. Arguments of the step are given by "
        "position"
    )
