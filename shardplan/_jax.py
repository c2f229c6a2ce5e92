"""All uses of JAX internals in the core. A new version of JAX only changes this file.

Tracing goes through the public ``jax.jit(...).trace``. The internals are for reading equations (their bodies, source
lines and name stacks) and binding them again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import config, dispatch, distributed, effects, source_info_util, traceback_util
from jax._src import core as jax_core
from jax._src.cudnn import fused_attention_stablehlo
from jax._src.interpreters import mlir, pxla
from jax._src.lax import lax as lax_internal
from jax._src.sharding_impls import UnspecifiedValue
from jax._src.state.types import AbstractRef, RefEffect
from jax.extend import core as jex_core
from jax.extend.core import primitives as jex_primitives
from jax.extend.random import threefry2x32_p
from jaxlib.mlir import ir

ClosedJaxpr = jex_core.ClosedJaxpr
DropVar = jex_core.DropVar
Equation = jex_core.JaxprEqn
Jaxpr = jex_core.Jaxpr
Literal = jex_core.Literal
Primitive = jex_core.Primitive
Ref = jax.ref.Ref
Tracer = jax.core.Tracer
jaxpr_as_fun = jex_core.jaxpr_as_fun

# Call-like primitives, whose body is inlined. The parameters below may have it, as a `ClosedJaxpr` or a `Jaxpr`.
_CALLS = frozenset(
    {
        *("call", "closed_call", "composite", "core_call", "custom_jvp_call", "custom_vjp_call"),
        *("custom_vjp_call_jaxpr", "custom_vmap_call", "eval_jaxpr", "jit", "linear_call", "pjit", "remat", "remat2"),
        *("checkpoint", "xla_metadata_call"),
    }
)
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "callee")
_PLATFORMS = ("cpu", "cuda", "rocm")
"""The platforms of planned steps."""
_LOWERED_FUNCTION = mlir.lower_fun(lambda: ()).__code__
"""The code of all lowering rules that run a function."""
_REMATERIALISED = frozenset({"remat", "remat2", "checkpoint"})


@dataclass(frozen=True, slots=True)
class CallBody:
    """The body of a call-like equation, its constants, and the positions of its operands."""

    jaxpr: Jaxpr
    constants: tuple[Any, ...]
    positions: tuple[int, ...]


def call_body(equation: Equation) -> CallBody | None:
    """The body of a call-like equation, or None for an operation of its own."""
    name, params = equation.primitive.name, equation.params
    positions = tuple(range(len(equation.invars)))
    if name == "custom_linear_solve":  # products and transposes are for derivatives, which are traced already
        lengths = params["const_lengths"]
        start = lengths.matvec + lengths.vecmat
        stop = start + lengths.solve
        body, positions = params["jaxprs"].solve, positions[start:stop] + positions[stop + lengths.transpose_solve :]
    elif name == "cond":
        body, positions = _branch_of_platforms(params), positions[1:]
    else:
        body = next((params[held] for held in _BODIES if held in params), None) if name in _CALLS else None
    if isinstance(body, ClosedJaxpr):
        return CallBody(body.jaxpr, tuple(body.consts), positions)
    if isinstance(body, Jaxpr) and not body.constvars:
        return CallBody(body, (), positions)
    return None


def runs_a_function(primitive: Primitive) -> bool:
    """Whether JAX lowers a primitive as a function of other operations (``mlir.lower_fun``), on every platform.

    Primitives of Equinox, and of libraries on top of it (Diffrax, Lineax), are lowered in this way."""
    of_platform = getattr(mlir, "_platform_specific_lowerings", {})
    own = any(primitive in of_platform.get(platform, {}) for platform in _PLATFORMS)
    return not own and getattr(lowering_of(primitive), "__code__", None) is _LOWERED_FUNCTION


def lowering_of(primitive: Primitive) -> Any:
    """The lowering rule of a primitive on every platform, or None."""
    entry = getattr(mlir, "_lowerings", {}).get(primitive)
    return getattr(entry, "rule", entry)


def body_of_function(equation: Equation) -> CallBody | None:
    """The body of a primitive that `runs_a_function`. None for non-array operands, and for side effects."""
    types: list[Any] = [var.aval for var in equation.invars]
    if equation.effects or not all(map(is_array_type, types)):
        return None
    run = inspect.getclosurevars(lowering_of(equation.primitive)).nonlocals["fun"]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in types]
    try:
        with automatic_mesh():
            body = jax.make_jaxpr(functools.partial(run, **equation.params))(*shapes)
    except Exception:  # a foreign function: its error recurs when JAX lowers the step
        return None
    given, wanted = ([(a.shape, a.dtype) for a in avals] for avals in (body.out_avals, result_types(equation)))
    is_pure_match = given == wanted and not body.effects
    return CallBody(body.jaxpr, tuple(body.consts), tuple(range(len(types)))) if is_pure_match else None


def result_types(equation: Equation) -> list[Any]:
    return [var.aval for var in equation.outvars]


def _branch_of_platforms(params: dict[str, Any]) -> ClosedJaxpr | None:
    """The branch for every platform (`jax.lax.platform_dependent`, as in `jnp.diag`), the only one in JAX's lowering.

    None where a value selects the branch, or platforms differ."""
    listed = params.get("branches_platforms") or ()
    taken = {
        next((number for number, names in enumerate(listed) if names is None or platform in names), None)
        for platform in _PLATFORMS
    }
    found = taken.pop()
    return None if taken or found is None else params["branches"][found]


def control_bodies(equation: Equation) -> list[tuple[Jaxpr, tuple[Any, ...], int | None]]:
    """The bodies of a loop or of branches, with their constants and trip counts. None for an unknown trip count.

    Empty for every other equation. A while loop's condition comes before its body.
    """
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        bodies: list[tuple[ClosedJaxpr, int | None]] = [(params["jaxpr"], int(params["length"]))]
    elif name == "while":
        bodies = [(params["cond_jaxpr"], None), (params["body_jaxpr"], None)]
    elif name == "cond":
        bodies = [(branch, 1) for branch in params["branches"]]
    else:
        return []
    return [(body.jaxpr, tuple(body.consts), trips) for body, trips in bodies]


_REDUCTIONS = {"psum": jax.lax.reduce_sum_p, "pmax": jax.lax.reduce_max_p, "pmin": jax.lax.reduce_min_p}


def one_by_one(equation: Equation) -> list[Equation]:
    """An equation that moves arrays (``jax.device_put`` of a tree), as one equation for each array. Others unchanged.

    Each only has the target's memory kind. Devices and shardings are the plan's."""
    if equation.primitive.name != "device_put":
        return [equation]
    found = []
    copies = equation.params["copy_semantics"]
    moved: Any = zip(equation.invars, equation.outvars, copies, strict=True)
    for operand, result, copy in moved:
        space = result.aval.memory_space
        to = None if operand.aval.memory_space is space else space
        params = {"devices": (to,), "srcs": (None,), "copy_semantics": (copy,)}
        found.append(equation.replace(invars=[operand], outvars=[result], params=params))
    return found


HOST_MEMORY = "pinned_host"
"""The only memory kind in types other than the devices' own."""


def memory_kind(aval: Any) -> str | None:
    """The memory kind of an array type, None for the devices' own."""
    return HOST_MEMORY if getattr(aval, "memory_space", None) is jax.memory.Space.Host else None


def moved(array: Any, kind: str | None) -> Any:
    """A traced array in a memory kind, or itself if it is there already."""
    space = jax.memory.Space.Host if kind == HOST_MEMORY else jax.memory.Space.Device
    return array if jax.typeof(array).memory_space is space else jax.device_put(array, space)


move_between_memories: Primitive = jex_primitives.device_put_p


def params_of_move(kind: str | None) -> dict[str, Any]:
    """The parameters of `move_between_memories` to a memory kind."""
    space = jax.memory.Space.Host if kind == HOST_MEMORY else jax.memory.Space.Device
    return {"devices": (space,), "srcs": (None,), "copy_semantics": (dispatch.ArrayCopySemantics.REUSE_INPUT,)}


def without_layout(kind: str) -> jax.sharding.NamedSharding:
    """A sharding with the memory kind of an argument, and without a layout."""
    return jax.sharding.NamedSharding(jax.sharding.AbstractMesh((), ()), jax.sharding.PartitionSpec(), memory_kind=kind)


def with_memory_kinds(lowered: Any, kinds: Sequence[str | None]) -> Any:
    """A lowered program whose arguments have these memory kinds. JAX drops them from shardings over compile-only
    devices, whose memories it does not know."""
    module, constants = lowered.compiler_ir(), len(lowered._lowering.const_args)
    places = sorted(lowered._lowering.compile_args["kept_var_idx"])  # constants come first
    [main] = [one for one in module.body.operations if "main" in str(one.attributes["sym_name"])]
    with module.context:
        attributes = [{entry.name: entry.attr for entry in one} for one in main.arg_attrs]
        for own, place in zip(attributes, places, strict=False):
            if place >= constants and (kind := kinds[place - constants]) is not None:
                own["mhlo.memory_kind"] = ir.StringAttr.get(kind)
        main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(own) for own in attributes])
    return lowered


def unbatched(equation: Equation) -> Equation:
    """The usual form of an equation that ``vmap`` has changed. Others unchanged.

    A collective over a named axis of ``vmap``, such as a batch norm's mean, is a reduction.
    """
    name, params = equation.primitive.name, equation.params
    if "ft_in" in params:  # a scan since JAX 0.11, with the tree of its operands
        constants, carry, _ = params["ft_in"].unpack()
        return equation.replace(params=params | {"num_consts": len(constants), "num_carry": len(carry)})
    axes = params.get("axes", ())
    if name not in _REDUCTIONS or params.get("axis_index_groups") or not all(isinstance(axis, int) for axis in axes):
        return _with_one_predicate(equation)
    return equation.replace(primitive=_REDUCTIONS[name], params={"axes": tuple(axes), "out_sharding": None})


def _with_one_predicate(equation: Equation) -> Equation:
    """A while loop under ``vmap``, as JAX lowers it. Other equations unchanged.

    Its predicate is an array, which ``jax.lax.while_loop`` does not take. The lowered loop continues while any element
    of it is true, and only changes these elements."""
    params = equation.params
    if equation.primitive.name != "while" or not params["cond_jaxpr"].out_avals[0].shape:
        return equation
    first, second = params["cond_nconsts"], params["body_nconsts"]
    test, step = jaxpr_as_fun(params["cond_jaxpr"]), jaxpr_as_fun(params["body_jaxpr"])

    def any_continues(*operands: Any) -> Any:
        return jax.numpy.any(test(*operands)[0])

    def continuing_elements(*operands: Any) -> list[Any]:
        carry = operands[first + second :]
        (going,) = test(*operands[:first], *carry)
        after = step(*operands[first:])
        masks = (jax.lax.broadcast_in_dim(going, a.shape, range(going.ndim)) for a in after)
        return [jax.lax.select(mask, new, old) for mask, new, old in zip(masks, after, carry, strict=True)]

    avals = [var.aval for var in equation.invars]
    merged = {
        "cond_jaxpr": jax.make_jaxpr(any_continues)(*avals[:first], *avals[first + second :]),
        "body_jaxpr": jax.make_jaxpr(continuing_elements)(*avals),
        "body_nconsts": first + second,
    }
    return equation.replace(invars=[*equation.invars[:first], *equation.invars], params=params | merged)


def barrier_mask(equation: Equation) -> tuple[bool, ...]:
    """The operands of a call-like equation behind an optimization barrier, as JAX lowers rematerialised regions.

    Without the barrier the compiler would merge the recomputation with the forward pass."""
    prevent = equation.params.get("prevent_cse", True)
    if equation.primitive.name not in _REMATERIALISED or not equation.params.get("differentiated"):
        return (False,) * len(equation.invars)
    return tuple(prevent) if isinstance(prevent, tuple) else (bool(prevent),) * len(equation.invars)


HOST_CALLS = frozenset({"debug_callback", "debug_print", "io_callback", "pure_callback"})
"""Primitives that run Python on the host, which cannot be split."""


def is_lowered_for_devices(equation: Equation) -> bool:
    """Whether an equation's lowering depends on the devices (callbacks, cuDNN's attention, custom partitioning).

    JAX requires the same mesh, with the same axis types, in all shardings of such programs."""
    if equation.primitive in dispatch.prim_requires_devices_during_lowering:
        return True
    return any(map(dispatch.jaxpr_has_prim_requiring_devices, jax_core.jaxprs_in_params(equation.params)))


SHARDING_CONSTRAINT = "sharding_constraint"


def wanted_spec(equation: Equation) -> jax.sharding.PartitionSpec | None:
    """The spec of a user's ``with_sharding_constraint``. None for other equations and for shardings without a spec.

    Open dimensions are ``PartitionSpec.UNCONSTRAINED``.
    """
    if equation.primitive.name != SHARDING_CONSTRAINT:
        return None
    spec = getattr(equation.params["sharding"], "spec", None)
    if spec is None:
        return None
    rank = len(equation.invars[0].aval.shape)  # type: ignore[attr-defined]
    entries = tuple(spec) + (None,) * (rank - len(spec))
    free = equation.params["unconstrained_dims"]
    open_dim = jax.sharding.PartitionSpec.UNCONSTRAINED
    return jax.sharding.PartitionSpec(*(open_dim if d in free else entry for d, entry in enumerate(entries)))


optimization_barrier: Primitive = jax.lax.optimization_barrier_p


def without_empty_shardings(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters without shardings over an empty mesh, which some of JAX's transposes leave."""
    empty = {
        name: None
        for name, value in params.items()
        if isinstance(value, jax.sharding.NamedSharding) and not value.mesh.axis_names
    }
    return params | empty if empty else params


def source_line(equation: Equation) -> str | None:
    """``file:line (function)`` of an equation in the user's code. None where JAX has no record of it."""
    frame = source_info_util.user_frame(equation.source_info.traceback)
    if frame is None or frame.file_name.endswith(
        "shardplan/program/inline_single_trip_scans.py"
    ):  # the line is that of its scan
        return None
    name = frame.file_name.rsplit("/", 1)[-1]
    return f"{name}:{frame.start_line} ({frame.function_name})"


def call_chain(equation: Equation) -> tuple[str, ...]:
    """The functions of the user's code in which an equation was traced, by their qualified names, outermost first.

    The traced function is the first one. An operation of the backward pass has those of its forward operation.
    """
    names: list[str] = []
    for frame in source_info_util.user_frames(equation.source_info.traceback):
        if frame.file_name.endswith("shardplan/program/tracing.py"):
            break
        names.append(frame.function_name)
    return tuple(reversed(names))


def module_path(equation: Equation) -> str:
    """The modules and transformations of an equation, as ``transpose(jvp(GPT))/layer_0/mlp``."""
    return str(equation.source_info.name_stack)


def bind_again(
    equation: Equation, primitive: Primitive, params: dict[str, Any], operands: Sequence[Any]
) -> tuple[Any, ...]:
    """Binds a traced primitive to new operands in the mesh of its trace or of an island, under its name stack."""
    if primitive.name == SHARDING_CONSTRAINT:  # a hard layout of its result: the plan has a constraint of its own there
        return tuple(operands)
    info, mesh = equation.source_info, jax.sharding.get_abstract_mesh()
    name_stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=name_stack), equation.ctx.manager:
        island = jax.sharding.AxisType.Manual in mesh.axis_types
        with jax.sharding.use_abstract_mesh(mesh) if island else nullcontext():
            results = primitive.bind(*operands, **primitive.get_bind_params(params))
    return tuple(results) if primitive.multiple_results else (results,)


def bind_as_traced(
    equation: Equation, primitive: Primitive, params: dict[str, Any], operands: Sequence[Any]
) -> tuple[Any, ...]:
    """Binds a traced primitive to new operands, under its name stack and with its place in the source."""
    info = equation.source_info
    name_stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=name_stack), equation.ctx.manager:
        results = primitive.bind(*operands, **primitive.get_bind_params(params))
    return tuple(results) if primitive.multiple_results else (results,)


@contextmanager
def traced_as(equation: Equation) -> Iterator[None]:
    """Operations that are traced inside have the place in the source and the name stack of an equation."""
    info = equation.source_info
    name_stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=name_stack):
        yield


def run_without_types(closed: ClosedJaxpr, operands: Sequence[Any], laid_out: Callable[[Any, Any], Any]) -> list[Any]:
    """Runs a program that was traced on mesh axes of type Explicit on arrays without typed layouts.

    Arrays get the layouts that the program requests by ``laid_out(array, spec)``. Layouts derived from those of
    arguments are left out."""
    values = dict(zip(closed.jaxpr.constvars, map(without_typed_layout, closed.consts), strict=True))
    values |= dict(zip(closed.jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in closed.jaxpr.eqns:
        info, given = equation.source_info, [read(atom) for atom in equation.invars]
        name_stack = source_info_util.current_name_stack() + info.name_stack
        with source_info_util.user_context(info.traceback, name_stack=name_stack):
            results = _run_without_types(equation, given, laid_out)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


_LAYOUTS = ("out_sharding", "sharding", "dst_sharding")
_LAYOUT_CHANGES = ("reshard", "mesh_cast")


def _run_without_types(equation: Equation, operands: Sequence[Any], laid_out: Callable[[Any, Any], Any]) -> Any:
    params, name = equation.params, equation.primitive.name
    said = [params[key] for key in _LAYOUTS if isinstance(params.get(key), jax.sharding.NamedSharding)]
    if name in _LAYOUT_CHANGES:
        return [laid_out(operands[0], said[0].spec)]
    if name in ("jit", "pjit"):
        return run_without_types(params["jaxpr"], operands, laid_out)
    if name == SHARDING_CONSTRAINT:
        return [laid_out(operands[0], params["sharding"].spec)]
    if name == "shard_map":  # its body has layouts of its own
        mesh = params["mesh"]
        bare = params | {"mesh": mesh.update(axis_types=(jax.sharding.AxisType.Auto,) * len(mesh.axis_names))}
    else:
        bare = {key: None if key in _LAYOUTS else _bodies_without_types(one, laid_out) for key, one in params.items()}
    results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(bare))
    results = results if equation.primitive.multiple_results else [results]
    return [laid_out(result, said[0].spec) if said else result for result in results]


def _bodies_without_types(param: Any, laid_out: Callable[[Any, Any], Any]) -> Any:
    """A parameter of an equation, whose programs have no typed layouts."""
    if isinstance(param, tuple) and any(isinstance(one, (ClosedJaxpr, Jaxpr)) for one in param):
        return tuple(_bodies_without_types(one, laid_out) for one in param)
    if not isinstance(param, (ClosedJaxpr, Jaxpr)):
        return param
    closed = param if isinstance(param, ClosedJaxpr) else ClosedJaxpr(param, ())
    shapes = [shape_of(var.aval) if is_array_type(var.aval) else var.aval for var in closed.jaxpr.invars]
    found = jax.make_jaxpr(lambda *given: run_without_types(closed, given, laid_out))(*shapes)
    return found if isinstance(param, ClosedJaxpr) else found.jaxpr


def options_of_jit(fn: Any) -> dict[str, Any]:
    """The ``jax.jit`` options of a function that differ from the defaults. Empty for other functions."""
    info = getattr(fn, "_jit_info", None)
    if info is None:
        return {}
    names = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "keep_unused")
    found = {name: getattr(info, name) for name in names}
    found["compiler_options"] = dict(info.compiler_options_kvs)
    for side in ("in_shardings", "out_shardings"):
        leaves = getattr(info, f"{side}_leaves")
        said = [None if isinstance(leaf, UnspecifiedValue) else leaf for leaf in leaves]
        if any(leaf is not None for leaf in said):
            found[side] = jax.tree.unflatten(getattr(info, f"{side}_treedef"), said)
    return {name: value for name, value in found.items() if value}


def inside_of_jit(fn: Any) -> Any:
    """The function inside a function of ``jax.jit``. Others unchanged."""
    return getattr(fn, "__wrapped__", fn) if hasattr(fn, "_jit_info") else fn


api_boundary = traceback_util.api_boundary
"""The wrapper of functions such as ``jax.jit``: tracebacks of user errors show the user's frames."""


def hide_from_tracebacks(*files: str) -> None:
    """Leaves the frames of source files out of tracebacks that pass an ``api_boundary``, as JAX does for its own."""
    for file in files:
        traceback_util.register_exclusion(file)


def trace(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``jax.jit(fn).trace(*args, **kwargs)`` outside of any explicit mesh: a ``jax.stages.Traced``."""
    with automatic_mesh(), _without_cudnn():
        return jax.jit(fn).trace(*args, **kwargs)


def without_refs(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Ref], dict[int, int]]:
    """A program over references as a program over arrays, with their final values as further results.

    Returns the program, its closed-over references, which are its last arguments, and per further result the position
    of its reference among the arguments.
    """
    inside = jax_core.internal_mutable_array_effect in closed.effects
    if not inside and not any(isinstance(one, RefEffect) for one in closed.effects):
        return closed, [], {}
    arrays, _, mutated = pxla._discharge_refs(closed)
    jaxpr = arrays.jaxpr
    every = zip(jaxpr.outvars, mutated.out_mut, strict=True)
    ends = [(var, position) for var, position in every if position is None or var is not jaxpr.invars[position]]
    written = {number: position for number, (_, position) in enumerate(ends) if position is not None}
    changed = jaxpr.replace(outvars=[var for var, _ in ends], debug_info=jaxpr.debug_info.with_unknown_names())
    return arrays.replace(jaxpr=changed), list(mutated.in_mut), written


def is_ref_type(aval: Any) -> bool:
    """Whether an abstract value is that of a reference (``jax.new_ref``)."""
    return isinstance(aval, AbstractRef)


def is_ref(leaf: Any) -> bool:
    """Whether an argument is a reference, or the type of one."""
    return isinstance(leaf, (AbstractRef, Ref))


def ref_type(shape: tuple[int, ...], dtype: Any, weak_type: bool = False) -> AbstractRef:
    """The type of a reference to an array, without a layout."""
    return AbstractRef(jax_core.ShapedArray(shape, dtype, weak_type))


def ref_to(array: jax.Array) -> Ref:
    """A reference to this very array, not to a copy."""
    aval = AbstractRef(jax.typeof(array))
    return Ref(aval, jax_core.ArrayRefImpl(aval, array))


def array_in(ref: Ref) -> Any:
    """The array in a reference, not a copy."""
    return ref._refs._buf


def put_in(ref: Ref, array: Any) -> None:
    """Puts this very array into a reference."""
    ref._refs._buf = array


def has_cudnn() -> bool:
    """Whether cuDNN is installed."""
    try:
        return bool(_CUDNN_VERSION())
    except RuntimeError:
        return False


_CUDNN_VERSION = fused_attention_stablehlo.check_cudnn_version


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Allows traces of cuDNN's attention without cuDNN, as for its newest version on the newest GPU.

    JAX asks for both during a trace, although only the compilation needs them."""
    if has_cudnn():
        yield
        return
    module = fused_attention_stablehlo
    capable = module.check_compute_capability
    module.check_cudnn_version, module.check_compute_capability = lambda: 10**6, lambda capability: True
    try:
        yield
    finally:
        module.check_cudnn_version, module.check_compute_capability = _CUDNN_VERSION, capable


def asks_for_cudnn(equation: Equation) -> bool:
    """Whether an equation is cuDNN's attention, or contains it."""
    if equation.primitive.name.startswith("dot_product_attention_"):
        return True
    return any(asks_for_cudnn(inner) for body in jax_core.jaxprs_in_params(equation.params) for inner in body.eqns)


def targets_of(equation: Equation) -> set[str]:
    """The names of the ``jax.ffi.ffi_call`` targets of an equation and of its bodies."""
    bodies = jax_core.jaxprs_in_params(equation.params)
    inside = (targets_of(inner) for body in bodies for inner in body.eqns)
    return {str(equation.params.get("target_name"))}.union(*inside)


@contextmanager
def automatic_mesh() -> Iterator[None]:
    """The user's ``jax.set_mesh`` with axes of type Auto, for traces and runs of a step.

    So constraints by a mere ``PartitionSpec`` keep their mesh, and types have no layouts that a plan would change.
    """
    mesh = jax.sharding.get_abstract_mesh()
    typed = any(kind != jax.sharding.AxisType.Auto for kind in mesh.axis_types)
    types = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    with jax.sharding.use_abstract_mesh(mesh.update(axis_types=types)) if typed else nullcontext():
        yield


def trace_context() -> Any:
    """The settings of JAX that a trace depends on, from the keys of ``jax.jit``: default precision, x64, mesh."""
    return config.trace_context()


def public_name(primitive: Primitive) -> str | None:
    """The public name of a primitive, such as ``lax.select_and_scatter_add_p``. None where JAX has none."""
    for module, place in ((jax.lax, "lax"), (jex_primitives, "primitives"), (jax.lax.linalg, "lax.linalg")):
        name = next((name for name in dir(module) if getattr(module, name, None) is primitive), None)
        if name is not None:
            return f"{place}.{name}"
    return None


def is_array_type(aval: Any) -> bool:
    """Whether an abstract value is a plain or keyed array, which can have a layout (not a token or a reference)."""
    return isinstance(aval, jax_core.ShapedArray)


def is_ordered_for_one_device(effect: Any) -> bool:
    """Whether an effect orders steps, which JAX supports on one device only."""
    return effects.ordered_effects.contains(effect) and not effects.shardable_ordered_effects.contains(effect)


@functools.cache
def stored_dtype(dtype: Any) -> Any:
    """The element type of a stored tensor: that of the words for PRNG keys, else its own."""
    return np.dtype(np.uint32) if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else dtype


@functools.cache
def item_bytes(dtype: Any) -> int:
    """Bytes of one element. For PRNG keys, of the whole key."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return 4 * int(np.prod(dtype._impl.key_shape))
    return int(np.dtype(dtype).itemsize)


def shape_of(value: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """The ``jax.jit(...).lower`` argument of a value, or an abstract value, with its memory kind."""
    kind = memory_kind(value) if isinstance(value, jax_core.AbstractValue) else value.memory_kind
    if sharding is None and kind is not None:
        sharding = without_layout(kind)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=value.weak_type, sharding=sharding)


def array_of_type(value: Any, aval: Any) -> Any:
    """A literal as an array of a type, with its weak type."""
    return lax_internal._convert_element_type(value, aval.dtype, weak_type=aval.weak_type)


def typed_layout(leaf: Any) -> Any:
    """The layout in the type of an argument, with its mesh. None where no axis is of type Explicit."""
    sharding = getattr(leaf, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return None
    entries = (*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec)))  # type: ignore[union-attr]
    return entries, tuple(mesh.shape.items()), tuple(mesh.axis_types)


def has_typed_layout(array: jax.Array) -> bool:
    """Whether an array's layout is part of its type: its mesh has axes other than type Auto."""
    mesh = getattr(array.sharding, "mesh", None)
    return mesh is not None and any(kind != jax.sharding.AxisType.Auto for kind in mesh.axis_types)


def without_typed_layout(array: Any) -> Any:
    """The same array, on a mesh of the same devices with axes of type Auto."""
    if not isinstance(array, jax.Array) or isinstance(array, Tracer) or not has_typed_layout(array):
        return array
    typed = array.sharding
    types = (jax.sharding.AxisType.Auto,) * len(typed.mesh.axis_names)  # type: ignore[attr-defined]
    mesh = jax.sharding.Mesh(typed.mesh.devices, typed.mesh.axis_names, axis_types=types)  # type: ignore[attr-defined]
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, typed.spec))  # type: ignore[attr-defined]


@functools.cache
def key_value_store() -> Any:
    """The key-value store of the processes of ``jax.distributed``. None for one process."""
    return distributed.global_state.client


def is_inexact(dtype: Any) -> bool:
    """Whether a dtype is a real or a complex floating-point type, the narrow ones included."""
    return bool(jax.dtypes.issubdtype(dtype, np.inexact))


@functools.cache
def is_float(dtype: Any) -> bool:
    """Whether a dtype is a real floating-point type, the narrow ones included."""
    return bool(jax.dtypes.issubdtype(dtype, np.floating))


def threefry_bits(key: Any, numbers: Any, bit_width: int) -> Any:
    """The random bits that a threefry key gives the elements of these numbers, as `jax.random.bits` does for a tensor
    of less than 2**32 elements."""
    first, second = threefry2x32_p.bind(*jax.random.key_data(key), jax.numpy.zeros_like(numbers), numbers)
    return (first ^ second).astype(f"uint{bit_width}")


def bits_follow_from_numbers() -> bool:
    """Whether an element's random bits depend on its number alone, and not on the shape of the tensor."""
    return bool(jax.config.jax_threefry_partitionable)  # type: ignore[attr-defined]
