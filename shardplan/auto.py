"""``shardplan.auto``: one line instead of ``jax.jit``."""

from __future__ import annotations

import functools
import inspect
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.errors import ArgumentError, CallError, ShardplanWarning
from shardplan.hardware import HardwareProfile
from shardplan.mesh import GivenMesh, check_mesh
from shardplan.options import Options
from shardplan.plan import Plan
from shardplan.planning import make_plan, rebuild
from shardplan.program import Program, trace_program


def auto(
    fn: Callable[..., Any],
    mesh: GivenMesh,
    *,
    memory_limit: float | None = None,
    objective: str = "bytes",
    hardware: HardwareProfile | str | None = None,
    pins: Mapping[str, PartitionSpec] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] = (),
    reduce_dtype: Any = None,
    time_limit: float = 60.0,
) -> AutoFunction:
    """``fn``, planned over ``mesh`` and compiled, in the place of ``jax.jit(fn)``.

    The first call with new shapes plans and compiles; further ones run. Arguments that lie elsewhere are placed.

    Args:
        fn: any function of pytrees of arrays; typically a training step ``(state, batch) -> (state, loss)``.
        mesh: a ``jax.sharding.Mesh`` with axes of any type, an ``AbstractMesh`` (plans, but cannot run), or a number of
            devices (the best mesh of the first so many devices is used).
        memory_limit: bytes that one device may hold.
        objective: ``"bytes"`` (sent per device and step) or ``"time"`` (seconds by the hardware profile).
        hardware: a profile or its name; ``"h100"`` where none is given.
        pins: path globs of arguments to ``PartitionSpec``s that they must have.
        donate_argnums: positions of arguments whose memory the results may take, as in ``jax.jit``.
        static_argnums: positions of arguments that are compiled into the program, as in ``jax.jit``.
        reduce_dtype: a narrower float type in which gradients may be summed over devices.
        time_limit: seconds that the search may take; the best plan by then is taken, with its true bound.

    Returns:
        A callable with ``.plan(*args)`` and ``.lower(*args)``.

    Raises:
        ArgumentError: an option or the mesh is wrong; before any work starts.
        InfeasibleError: nothing keeps within the memory limit.
    """
    options = Options(memory_limit, objective, hardware, pins, donate_argnums, static_argnums, reduce_dtype, time_limit)
    return AutoFunction(fn, mesh, options)


def plan(fn: Callable[..., Any], mesh: GivenMesh, *args: Any, **options: Any) -> Plan:
    """The plan of ``fn`` for arguments, which may be ``jax.ShapeDtypeStruct``s; see ``auto`` for the options."""
    chosen = _options(options)
    check_mesh(mesh)
    chosen.check()
    return _plan_call(fn, mesh, args, {}, chosen)


class AutoFunction:
    """What ``auto`` returns: called like ``jax.jit(fn)``, with a plan per shapes of the arguments."""

    def __init__(self, fn: Callable[..., Any], mesh: GivenMesh, options: Options) -> None:
        check_mesh(mesh)
        options.check()
        if not callable(fn):
            raise ArgumentError(f"a function was expected, got `{fn!r}` of type `{type(fn).__name__}`")
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._mesh = mesh
        self._options = options
        self._planned: dict[Any, _Runner] = {}

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes (arrays or ``jax.ShapeDtypeStruct``s)."""
        return self._runner(args, kwargs).plan

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The planned step, lowered as ``jax.jit(fn).lower`` does it."""
        runner = self._runner(args, kwargs)
        return runner.plan.lower(runner.mesh)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, _jax.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            warnings.warn(
                f"`{_name(self._fn)}` is called while another function is traced (jit, grad, vmap): it is not planned here. "
                "Differentiate and transform first, plan last: shardplan.auto(jax.grad(f), mesh).",
                ShardplanWarning,
                stacklevel=2,
            )
            return self._fn(*args, **kwargs)
        runner = self._runner(args, kwargs)
        return runner(_dynamic(args, self._options.static), kwargs)

    def _runner(self, args: Sequence[Any], kwargs: dict[str, Any]) -> _Runner:
        key = _signature(self._fn, args, kwargs, self._options.static)
        if key not in self._planned:
            self._planned[key] = _Runner(_plan_call(self._fn, self._mesh, args, kwargs, self._options))
        return self._planned[key]


class PlannedFunction:
    """What ``Plan.apply`` returns: a function that runs as one plan says, and refuses other arguments.

    The first call traces the function and holds it against the plan.
    """

    def __init__(self, fn: Callable[..., Any], plan: Plan) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._plan = plan
        self._static = plan.recipe.options.static
        self._bound: dict[Any, _Runner] = {}

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The planned step, lowered as ``jax.jit(fn).lower`` does it."""
        runner = self._runner(args, kwargs)
        return runner.plan.lower(runner.mesh)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._runner(args, kwargs)(_dynamic(args, self._static), kwargs)

    def _runner(self, args: Sequence[Any], kwargs: dict[str, Any]) -> _Runner:
        key = _signature(self._fn, args, kwargs, self._static)
        if key not in self._bound:
            self._bound[key] = _Runner(bind_plan(self._plan, self._fn, args, kwargs))
        return self._bound[key]


def bind_plan(plan: Plan, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Plan:
    """A plan over ``fn``, traced anew; raises PlanMismatchError where that is another program."""
    return rebuild(plan, _trace_call(fn, args, kwargs, plan.recipe.options.static))


class _Runner:
    """A plan with its compiled step and the devices that it runs on."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.mesh = _devices_for(plan)
        self._jitted: Callable[..., Any] | None = None
        self._shardings: tuple[NamedSharding, ...] = ()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _jax.no_context_mesh():
            if self._jitted is None:
                self._jitted = self.plan.jitted(self.mesh)
                self._shardings = self.plan.leaf_shardings(self.mesh)
            arguments = (*args, kwargs) if kwargs else args
            leaves, structure = jax.tree.flatten(arguments)
            placed = [_place(leaf, sharding) for leaf, sharding in zip(leaves, self._shardings, strict=True)]
            return self._jitted(*jax.tree.unflatten(structure, placed))


def _place(leaf: Any, sharding: NamedSharding) -> Any:
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    return jax.device_put(leaf, sharding)


def _devices_for(plan: Plan) -> Mesh | None:
    """The devices for a plan that was made for a number of them; None where the plan's mesh has its own."""
    if not isinstance(plan.mesh, AbstractMesh):
        return None
    sizes = tuple(plan.mesh_axes.values())
    if plan.device_count > len(jax.devices()):
        return None
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, tuple(plan.mesh_axes), axis_types=types, devices=jax.devices()[: plan.device_count])


def _options(given: dict[str, Any]) -> Options:
    try:
        return Options(**given)
    except TypeError:
        known = ", ".join(Options.__dataclass_fields__)
        unknown = ", ".join(f"`{name}`" for name in given if name not in Options.__dataclass_fields__)
        raise ArgumentError(f"there is no option {unknown}; there are {known}") from None


def _plan_call(
    fn: Callable[..., Any], mesh: GivenMesh, args: Sequence[Any], kwargs: dict[str, Any], options: Options
) -> Plan:
    started = time.perf_counter()
    program = _trace_call(fn, args, kwargs, options.static)
    return make_plan(program, mesh, options, time.perf_counter() - started)


def _trace_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], static: tuple[int, ...]
) -> Program:
    """Checks the arguments of a call, then traces it."""
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        raise CallError(f"`{_name(fn)}` cannot be called with these arguments: {error}") from None
    except ValueError:  # a builtin without a signature: tracing will tell
        pass
    shapes = tuple(arg if position in static else _shapes(arg) for position, arg in enumerate(args))
    return trace_program(fn, shapes, _shapes(kwargs), static)


def _shapes(tree: Any) -> Any:
    """Arguments as shapes and dtypes alone, so that where they lie does not enter the trace."""

    def shape(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        aval = _leaf_type(path, leaf)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))

    return jax.tree_util.tree_map_with_path(shape, tree)


def _leaf_type(path: Any, leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    try:
        return jax.typeof(leaf)
    except TypeError:
        where = jax.tree_util.keystr(path, simple=True, separator="/") or "an argument"
        raise CallError(
            f"`{where}` is `{leaf!r}` of type `{type(leaf).__name__}`: arguments are arrays, numbers or pytrees of them; "
            "list others in static_argnums"
        ) from None


def _signature(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], static: tuple[int, ...]) -> Any:
    """What two calls share that run by the same plan: structure, shapes, dtypes and static values."""
    constants = tuple(args[position] for position in static if position < len(args))
    try:
        hash(constants)
    except TypeError as error:
        raise CallError(
            f"a static argument of `{_name(fn)}` cannot be hashed ({error}): static arguments are compared between calls; "
            "pass a tuple instead of a list, a frozen dataclass instead of a dictionary"
        ) from None
    leaves, structure = jax.tree_util.tree_flatten_with_path((_dynamic(args, static), kwargs))
    types = []
    for path, leaf in leaves:
        aval = _leaf_type(path[1:], leaf)
        types.append((aval.shape, aval.dtype, getattr(aval, "weak_type", False)))
    return structure, tuple(types), constants


def _dynamic(args: Sequence[Any], static: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(arg for position, arg in enumerate(args) if position not in static)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
