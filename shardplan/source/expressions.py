"""Each primitive as an expression of public functions of JAX: `jax.lax`, `jax.numpy`, `jax.random`.

An expression has `§0§`, `§1§`, ... in the places of its operands. A primitive without a public function is bound by its
public name (`jax.extend.core.primitives`, `jax.lax`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shardplan import _jax
from shardplan.errors import ArgumentError
from shardplan.source.literals import dtype_text, literal, quoted, spec_text


@dataclass(frozen=True, slots=True)
class Expression:
    """The text of an operation. ``wraps``: whether operands that are no call need parentheses. ``tight``: whether the
    text itself needs none. ``typed``: whether numbers among the operands must say their types."""

    text: str
    wraps: bool = False
    tight: bool = True
    typed: bool = True


Params = dict[str, Any]
Types = Sequence[Any]
"""The types of operands, or of results."""

_INFIX = {
    **{"add": "+", "add_any": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"},
    **{"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
}

_NAMES = """
abs acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex cos cosh digamma erf erfc
exp exp2 expm1 floor igamma igamma_grad_a igammac imag is_finite lgamma log log1p logistic max min nextafter polygamma
population_count pow random_gamma_grad real regularized_incomplete_beta rem rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh zeta
"""

_CALLS = frozenset(_NAMES.split())
"""Functions of `jax.lax` with the name of their primitive, whose operands are all that they need."""


def expression(name: str, params: Params, operands: Types, results: Types, primitive: Any) -> Expression:
    """The expression of a primitive without bodies. Raises ArgumentError where it has no public form."""
    places = [f"§{number}§" for number in range(len(operands))]
    if name in _INFIX:
        return Expression(f"§0§ {_INFIX[name]} §1§", wraps=True, tight=False, typed=False)
    if name == "div" and jax.numpy.issubdtype(operands[0].dtype, np.inexact):
        return Expression("§0§ / §1§", wraps=True, tight=False, typed=False)
    if name == "neg":
        return Expression("-§0§", wraps=True, tight=False)
    if name in _TABLE:
        return _TABLE[name](params, operands, results)
    if name == "div" or (name in _CALLS and not params.get("accuracy")):
        return Expression(f"lax.{name}({', '.join(places)})")
    return _bound(primitive, params, places)


def _bound(primitive: Any, params: Params, places: Sequence[str]) -> Expression:
    """The general form: a primitive that is bound by its public name."""
    name = _jax.public_name(primitive)
    if name is not None:
        given = ", ".join([*places, *(f"{key}={literal(value)}" for key, value in params.items())])
        return Expression(f"{name}.bind({given})")
    raise ArgumentError(f"to_python() cannot write the operation `{primitive.name}`, which JAX has no public name for")


def _more(**options: Any) -> str:
    """Further arguments, without those that are None or False."""
    return "".join(
        f", {key}={literal(value)}" for key, value in options.items() if value is not None and value is not False
    )


def _cast(params: Params, operands: Types, results: Types) -> Expression:
    dtype = dtype_text(params["new_dtype"])
    if jax.numpy.issubdtype(operands[0].dtype, np.complexfloating):
        return Expression(f"lax.convert_element_type(§0§, {dtype})")
    return Expression(f"§0§.astype({dtype})", wraps=True)


def _broadcast(params: Params, operands: Types, results: Types) -> Expression:
    shape, dims = literal(tuple(params["shape"])), literal(tuple(params["broadcast_dimensions"]))
    if len(operands) > 1:
        raise ArgumentError("to_python() writes arrays of fixed shapes")
    if operands[0].ndim:
        return Expression(f"lax.broadcast_in_dim(§0§, {shape}, {dims})")
    return Expression(f"jnp.full({shape}, §0§, {dtype_text(operands[0].dtype)})", typed=False)


def _dot(params: Params, operands: Types, results: Types) -> Expression:
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    dims = literal(((tuple(left), tuple(right)), (tuple(left_batch), tuple(right_batch))))
    wide = params["preferred_element_type"]
    usual = jax.numpy.promote_types(operands[0].dtype, operands[1].dtype)
    wide = None if wide is None or np.dtype(wide) == usual else np.dtype(wide)
    return Expression(
        f"lax.dot_general(§0§, §1§, {dims}{_more(precision=params['precision'], preferred_element_type=wide)})"
    )


def _ragged_dot(params: Params, operands: Types, results: Types) -> Expression:
    numbers = literal(params["ragged_dot_dimension_numbers"])
    more = _more(precision=params["precision"], preferred_element_type=params["preferred_element_type"])
    return Expression(f"lax.ragged_dot_general(§0§, §1§, §2§, {numbers}{more})")


def _convolution(params: Params, operands: Types, results: Types) -> Expression:
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers")
    more = {name: params[name] if params[name] != 1 else None for name in ("feature_group_count", "batch_group_count")}
    given = ", ".join(f"{name}={literal(params[name])}" for name in names)
    more |= {name: params[name] for name in ("precision", "preferred_element_type")}
    return Expression(f"lax.conv_general_dilated(§0§, §1§, {given}{_more(**more)})")


def _gather(params: Params, operands: Types, results: Types) -> Expression:
    fills = params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    more = _more(
        unique_indices=params["unique_indices"],
        indices_are_sorted=params["indices_are_sorted"],
        mode=params["mode"],
        fill_value=params["fill_value"] if fills else None,
    )
    return Expression(
        f"lax.gather(§0§, §1§, {literal(params['dimension_numbers'])}, {literal(params['slice_sizes'])}{more})"
    )


def _scatter(function: str) -> Callable[[Params, Types, Types], Expression]:
    def written(params: Params, operands: Types, results: Types) -> Expression:
        names = ("indices_are_sorted", "unique_indices", "mode")
        more = _more(**{name: params[name] for name in names})
        return Expression(f"lax.{function}(§0§, §1§, §2§, {literal(params['dimension_numbers'])}{more})")

    return written


def _reduction(function: str) -> Callable[[Params, Types, Types], Expression]:
    return lambda params, operands, results: Expression(f"lax.{function}(§0§, {literal(tuple(params['axes']))})")


def _cumulative(function: str) -> Callable[[Params, Types, Types], Expression]:
    return lambda params, operands, results: Expression(
        f"lax.{function}(§0§, {params['axis']}{_more(reverse=params['reverse'])})"
    )


_LEAST = {"sum": "0", "max": "-np.inf", "min": "np.inf"}


def _windows(function: str) -> Callable[[Params, Types, Types], Expression]:
    def written(params: Params, operands: Types, results: Types) -> Expression:
        dtype = operands[0].dtype
        if function == "sum":
            start = f"{dtype_text(dtype)}(0)"
        elif jax.numpy.issubdtype(dtype, np.floating):
            start = f"{dtype_text(dtype)}({_LEAST[function]})"
        else:
            start = f"{dtype_text(dtype)}(jnp.iinfo({dtype_text(dtype)}).{'min' if function == 'max' else 'max'})"
        reducer = {"sum": "lax.add", "max": "lax.max", "min": "lax.min"}[function]
        names = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")
        sizes = ", ".join(literal(tuple(params[name])) for name in names)
        return Expression(f"lax.reduce_window(§0§, {start}, {reducer}, {sizes})")

    return written


def _many(function: str, after: Callable[[Params], str]) -> Callable[[Params, Types, Types], Expression]:
    """A function of a list of operands."""

    def written(params: Params, operands: Types, results: Types) -> Expression:
        listed = ", ".join(f"§{number}§" for number in range(len(operands)))
        return Expression(f"{function}([{listed}]{after(params)})")

    return written


def _sort(params: Params, operands: Types, results: Types) -> Expression:
    listed = ", ".join(f"§{number}§" for number in range(len(operands)))
    more = f"dimension={params['dimension']}, is_stable={params['is_stable']}, num_keys={params['num_keys']}"
    one = len(operands) == 1
    return Expression(f"lax.sort({'§0§' if one else f'({listed})'}, {more})")


def _moved(params: Params, operands: Types, results: Types) -> Expression:
    [space] = params["devices"]
    if not isinstance(space, jax.memory.Space):
        raise ArgumentError(f"to_python() cannot write a device_put to `{space!r}`")
    return Expression(f"jax.device_put(§0§, jax.memory.Space.{space.name})")


def _barrier(params: Params, operands: Types, results: Types) -> Expression:
    listed = ", ".join(f"§{number}§" for number in range(len(operands)))
    return Expression(f"lax.optimization_barrier({'§0§' if len(operands) == 1 else f'({listed})'})")


def _dynamic_slice(params: Params, operands: Types, results: Types) -> Expression:
    starts = "".join(f"§{number}§, " for number in range(1, len(operands)))
    return Expression(f"lax.dynamic_slice(§0§, ({starts.strip()}), {literal(tuple(params['slice_sizes']))})")


def _dynamic_update(params: Params, operands: Types, results: Types) -> Expression:
    starts = "".join(f"§{number}§, " for number in range(2, len(operands)))
    return Expression(f"lax.dynamic_update_slice(§0§, §1§, ({starts.strip()}))")


def _slice(params: Params, operands: Types, results: Types) -> Expression:
    strides = "" if params["strides"] is None else f", {literal(tuple(params['strides']))}"
    first, last = literal(tuple(params["start_indices"])), literal(tuple(params["limit_indices"]))
    return Expression(f"lax.slice(§0§, {first}, {last}{strides})")


def _key_bits(params: Params, operands: Types, results: Types) -> Expression:
    dtype = dtype_text(f"uint{params['bit_width']}")
    return Expression(f"jax.random.bits(§0§, {literal(tuple(params['shape']))}, {dtype})")


def _impl(params: Params) -> str:
    return quoted(str(getattr(params["impl"], "name", params["impl"])))


def _collective(function: str) -> Callable[[Params, Types, Types], Expression]:
    def written(params: Params, operands: Types, results: Types) -> Expression:
        listed = "§0§" if len(operands) == 1 else f"({', '.join(f'§{n}§' for n in range(len(operands)))})"
        more = _more(axis_index_groups=params.get("axis_index_groups"))
        return Expression(f"lax.{function}({listed}, {literal(tuple(params['axes']))}{more})")

    return written


def _named(function: str, *names: str) -> Callable[[Params, Types, Types], Expression]:
    """A function of one operand with arguments of these names, by the parameters of the same names."""

    def written(params: Params, operands: Types, results: Types) -> Expression:
        return Expression(f"{function}(§0§{''.join(f', {name}={literal(params[name])}' for name in names)})")

    return written


def _placed(function: str, *names: str) -> Callable[[Params, Types, Types], Expression]:
    """A function of one operand with these parameters in order."""

    def written(params: Params, operands: Types, results: Types) -> Expression:
        return Expression(f"{function}(§0§{''.join(f', {literal(params[name])}' for name in names)})")

    return written


def _constraint(params: Params, operands: Types, results: Types) -> Expression:
    said = spec_text(params["sharding"].spec)
    return Expression(f"split(§0§{', ' if said else ''}{said})")


_TABLE: dict[str, Callable[[Params, Types, Types], Expression]] = {
    "all_gather": lambda p, o, r: Expression(
        f"lax.all_gather(§0§, {literal(p['axis_name'])}, axis={p['all_gather_dimension']}, tiled={p['tiled']}"
        f"{_more(axis_index_groups=p['axis_index_groups'])})"
    ),
    "all_to_all": lambda p, o, r: Expression(
        f"lax.all_to_all(§0§, {literal(p['axis_name'])}, {p['split_axis']}, {p['concat_axis']}, tiled={p['tiled']}"
        f"{_more(axis_index_groups=p['axis_index_groups'])})"
    ),
    "argmax": lambda p, o, r: Expression(f"lax.argmax(§0§, {p['axes'][0]}, {dtype_text(p['index_dtype'])})"),
    "argmin": lambda p, o, r: Expression(f"lax.argmin(§0§, {p['axes'][0]}, {dtype_text(p['index_dtype'])})"),
    "axis_index": lambda p, o, r: Expression(f"lax.axis_index({literal(p['axis_name'])})"),
    "bitcast_convert_type": _placed("lax.bitcast_convert_type", "new_dtype"),
    "broadcast_in_dim": _broadcast,
    "concatenate": _many("lax.concatenate", lambda p: f", {p['dimension']}"),
    "conj": lambda p, o, r: Expression("lax.conj(§0§)"),
    "conv_general_dilated": _convolution,
    "convert_element_type": _cast,
    "copy": lambda p, o, r: Expression("jnp.copy(§0§)"),
    "copy_p": lambda p, o, r: Expression("jnp.copy(§0§)"),
    "cumlogsumexp": _cumulative("cumlogsumexp"),
    "cummax": _cumulative("cummax"),
    "cummin": _cumulative("cummin"),
    "cumprod": _cumulative("cumprod"),
    "cumsum": _cumulative("cumsum"),
    "device_put": _moved,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "erf_inv": lambda p, o, r: Expression("lax.erf_inv(§0§)"),
    "fft": _placed("lax.fft", "fft_type", "fft_lengths"),
    "gather": _gather,
    "integer_pow": _placed("lax.integer_pow", "y"),
    "iota": lambda p, o, r: Expression(
        f"lax.broadcasted_iota({dtype_text(p['dtype'])}, {literal(tuple(p['shape']))}, {p['dimension']})"
    ),
    "layout_constraint": _placed("with_layout_constraint", "layout"),
    "not": lambda p, o, r: Expression("~§0§", wraps=True, tight=False),
    "optimization_barrier": _barrier,
    "pad": lambda p, o, r: Expression(f"lax.pad(§0§, §1§, {literal(tuple(map(tuple, p['padding_config'])))})"),
    "pmax": _collective("pmax"),
    "pmin": _collective("pmin"),
    "ppermute": _named("lax.ppermute", "axis_name", "perm"),
    "psum": _collective("psum"),
    "ragged_dot_general": _ragged_dot,
    "random_bits": _key_bits,
    "random_fold_in": lambda p, o, r: Expression("jax.random.fold_in(§0§, §1§)"),
    "random_seed": lambda p, o, r: Expression(f"jax.random.key(§0§, impl={_impl(p)})"),
    "random_split": lambda p, o, r: Expression(f"jax.random.split(§0§, {literal(tuple(p['shape']))})"),
    "random_unwrap": lambda p, o, r: Expression("jax.random.key_data(§0§)"),
    "random_wrap": lambda p, o, r: Expression(f"jax.random.wrap_key_data(§0§, impl={_impl(p)})"),
    "reduce_precision": _named("lax.reduce_precision", "exponent_bits", "mantissa_bits"),
    "reduce_scatter": lambda p, o, r: Expression(
        f"lax.psum_scatter(§0§, {literal(p['axis_name'])}, scatter_dimension={p['scatter_dimension']}, "
        f"tiled={p['tiled']}{_more(axis_index_groups=p['axis_index_groups'])})"
    ),
    "reduce_window_max": _windows("max"),
    "reduce_window_min": _windows("min"),
    "reduce_window_sum": _windows("sum"),
    "reshape": lambda p, o, r: Expression(f"§0§.reshape({literal(tuple(p['new_sizes']))})", wraps=True),
    "rev": lambda p, o, r: Expression(f"lax.rev(§0§, {literal(tuple(p['dimensions']))})"),
    "round": _placed("lax.round", "rounding_method"),
    "scatter": _scatter("scatter"),
    "scatter-add": _scatter("scatter_add"),
    "scatter-max": _scatter("scatter_max"),
    "scatter-min": _scatter("scatter_min"),
    "scatter-mul": _scatter("scatter_mul"),
    "scatter-sub": _scatter("scatter_sub"),
    "sharding_constraint": _constraint,
    "slice": _slice,
    "sort": _sort,
    "split": lambda p, o, r: Expression(f"lax.split(§0§, {literal(tuple(p['sizes']))}, {p['axis']})"),
    "squeeze": lambda p, o, r: Expression(f"lax.squeeze(§0§, {literal(tuple(p['dimensions']))})"),
    "stack": _many("jnp.stack", lambda p: f", {p['axis']}"),
    "stop_gradient": lambda p, o, r: Expression("lax.stop_gradient(§0§)"),
    "top_k": lambda p, o, r: Expression(f"lax.top_k(§0§, {p['k']}{_more(axis=p.get('axis'))})"),
    "transpose": lambda p, o, r: Expression(f"lax.transpose(§0§, {literal(tuple(p['permutation']))})"),
    "unstack": lambda p, o, r: Expression(f"lax.unstack(§0§, {p['axis']})"),
    **{f"reduce_{one}": _reduction(f"reduce_{one}") for one in ("sum", "max", "min", "prod", "and", "or", "xor")},
}
