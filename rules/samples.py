"""Samples for the coverage document: one example of every primitive that is not elementwise.

Operands are written as ``f32[8,4]``. Elementwise primitives need no example: any shape and any dtype that they take
serves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardplan.rules._jax import Primitive, convertible_extended_dtype, experimental, lowered_primitives
from shardplan.rules.registry import Description, register

_DTYPES: Mapping[str, Any] = {
    "f32": np.float32,
    "bf16": jnp.bfloat16,
    "f8": jnp.float8_e4m3fn,
    "e8": jnp.float8_e8m0fnu,
    "i32": np.int32,
    "u32": np.uint32,
    "u8": np.uint8,
    "bool": np.bool_,
    "c64": np.complex64,
}


@dataclass(frozen=True, slots=True)
class Sample:
    """A function that is one application of the primitive (or that contains one), and its operands."""

    function: Callable[..., Any]
    operands: tuple[Any, ...]


def spec(text: str) -> Any:
    """``f32[8,4]`` as a ``jax.ShapeDtypeStruct``; ``key[8]`` for random keys."""
    name, _, shape = text.rstrip("]").partition("[")
    dims = tuple(int(size) for size in shape.split(",") if size)
    dtype = jax.eval_shape(lambda: jax.random.key(0)).dtype if name == "key" else _DTYPES[name]
    return jax.ShapeDtypeStruct(dims, dtype)


def _sample(function: Callable[..., Any], operands: str = "f32[8,8]") -> Sample:
    return Sample(function, tuple(spec(text) for text in operands.split()))


@cache
def _primitives() -> dict[str, Primitive]:
    return {primitive.name: primitive for primitive in lowered_primitives()}


def _bind(primitive_name: str, operands: str, /, **params: Any) -> Sample:
    """An example of a primitive without a public function, or of one that only some platforms have."""

    def run(*given: Any) -> Any:
        primitive = _primitives()[primitive_name]
        return primitive.bind(*given, **primitive.get_bind_params(params))

    return _sample(run, operands)


def _reshard_in_place(x: jax.Array) -> Any:
    """A reshard to the value's own layout."""
    return _primitives()["reshard"].bind(x, dst_sharding=jax.typeof(x).sharding, concrete_mesh=None)


def _contractions() -> dict[str, Sample]:
    scaled = (((2,), (2,)), ((0,), (0,)))
    return {
        "dot_general": _sample(lambda x, y: jnp.einsum("bik,bkj->bij", x, y), "f32[8,16,32] f32[8,32,64]"),
        "ragged_dot_general": _sample(lax.ragged_dot, "f32[32,16] f32[4,16,8] i32[4]"),
        "scaled_dot": _sample(
            lambda x, y, s, t: lax.scaled_dot(x, y, lhs_scale=s, rhs_scale=t, dimension_numbers=scaled),
            "f8[4,8,64] f8[4,16,64] e8[4,8,2] e8[4,16,2]",
        ),
        **{
            name: _bind(
                name, "f8[4,8,64] f8[4,16,64] e8[4,8,2] e8[4,16,2]", preferred_element_type=np.dtype(np.float32)
            )
            for name in ("scaled_matmul", "scaled_matmul_wrapper")
        },
        "conv_general_dilated": _sample(
            lambda x, w: lax.conv_general_dilated(x, w, (2,), "SAME", dimension_numbers=("NCW", "OIW", "NCW")),
            "f32[8,4,32] f32[16,4,3]",
        ),
    }


def _attention() -> dict[str, Sample]:
    heads, absent = "bf16[4,32,8,16]", "bf16[0] i32[0] i32[0] i32[0] i32[0] i32[0] i32[0]"
    plain = {
        "scale": 1.0,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": 0,
        "layout": 0,
        "sliding_window_length": 0,
    }
    eight = {"scale": 1.0, "use_causal_mask": False, "layout": 0}
    qkv, scales = " ".join([heads] * 3), "f32[1,1,1,1] "
    qkv8 = qkv.replace("bf16", "f8")
    found: dict[str, Sample] = {}
    for suffix in ("", "_wrapper"):
        found |= {
            f"dot_product_attention_fwd{suffix}": _bind(
                f"dot_product_attention_fwd{suffix}", f"{qkv} {absent}", is_training=True, **plain
            ),
            f"dot_product_attention_bwd{suffix}": _bind(
                f"dot_product_attention_bwd{suffix}", f"{qkv} {absent} f32[4,8,32] {heads} {heads}", **plain
            ),
            f"dot_product_attention_fp8_fwd{suffix}": _bind(
                f"dot_product_attention_fp8_fwd{suffix}", f"{qkv8} {scales * 6}", is_training=True, **eight
            ),
            f"dot_product_attention_fp8_bwd{suffix}": _bind(
                f"dot_product_attention_fp8_bwd{suffix}",
                f"{qkv8} f8[4,32,8,16] f8[4,32,8,16] f32[4,8,32] {scales * 12}",
                **eight,
            ),
        }
    return found


def _reductions() -> dict[str, Sample]:
    def own(a: Any, b: Any) -> Any:
        return a * b + a

    window, strides, padding = (1, 3), (1, 2), ((0, 0), (1, 0))
    windows = {"window_dimensions": window, "window_strides": strides, "padding": padding}

    def pool(x: Any, kind: Any, initial: float) -> Any:
        return lax.reduce_window(x, initial, kind, window, strides, padding)

    found = {
        "argmax": _sample(lambda x: lax.argmax(x, 1, np.int32)),
        "argmin": _sample(lambda x: lax.argmin(x, 1, np.int32)),
        "reduce": _sample(lambda x: lax.reduce(x, 0.0, own, (1,))),
        "reduce_window": _sample(lambda x: pool(x, own, 0.0)),
        "reduce_window_sum": _sample(lambda x: pool(x, lax.add, 0.0)),
        "reduce_window_max": _sample(lambda x: pool(x, lax.max, -np.inf)),
        "reduce_window_min": _sample(lambda x: pool(x, lax.min, np.inf)),
        "select_and_scatter_add": _sample(
            lambda x, t: jax.vjp(lambda x: pool(x, lax.max, -np.inf), x)[1](t), "f32[8,8] f32[8,4]"
        ),
        "select_and_gather_add": _sample(
            lambda x, t: jax.jvp(lambda x: pool(x, lax.max, -np.inf), (x,), (t,))[1], "f32[8,8] f32[8,8]"
        ),
    }
    for name in ("sum", "prod", "max", "min"):
        found[f"reduce_{name}"] = _sample(partial(getattr(jnp, name), axis=1))
    found["reduce_and"] = _sample(lambda x: jnp.all(x, 1), "bool[8,8]")
    found["reduce_or"] = _sample(lambda x: jnp.any(x, 1), "bool[8,8]")
    found["reduce_xor"] = _sample(lambda x: lax.reduce_xor(x, (1,)), "i32[8,8]")
    for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
        found[name] = _sample(partial(getattr(lax, name), axis=1))
    one = dict.fromkeys(("select_consts", "scatter_consts"), ()) | dict.fromkeys(("select_jaxpr", "scatter_jaxpr"))
    found["select_and_scatter"] = _bind("select_and_scatter", "f32[8,8] f32[8,4] f32[]", **windows, **one)
    return found


def _moves() -> dict[str, Sample]:
    rows = lax.GatherDimensionNumbers((1,), (0,), (0,))
    found = {
        "reshape": _sample(lambda x: x.reshape(8, 32), "f32[8,4,8]"),
        "broadcast_in_dim": _sample(lambda x: lax.broadcast_in_dim(x, (4, 8), (1,)), "f32[8]"),
        "transpose": _sample(lambda x: x.T, "f32[8,4]"),
        "squeeze": _sample(lambda x: lax.squeeze(x, (0,)), "f32[1,8]"),
        "rev": _sample(lambda x: lax.rev(x, (1,)), "f32[8,4]"),
        "slice": _sample(lambda x: x[:, 2:6], "f32[8,8]"),
        "pad": _sample(lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, -1, 0)))),
        "concatenate": _sample(lambda x, y: lax.concatenate((x, y), 1), "f32[8,8] f32[8,4]"),
        "split": _sample(lambda x: lax.split(x, (4, 4), 1)),
        "stack": _sample(lambda x, y: jnp.stack([x, y]), "f32[8,8] f32[8,8]"),
        "unstack": _sample(lambda x: jnp.unstack(x), "f32[2,8]"),
        "tile": _sample(lambda x: jnp.tile(x, (1, 2)), "f32[8,4]"),
        "iota": Sample(lambda: lax.broadcasted_iota(np.int32, (8, 4), 0), ()),
        "empty": Sample(lambda: lax.empty((8, 4), np.float32), ()),
        "bitcast_convert_type": _sample(lambda x: lax.bitcast_convert_type(x, np.uint8), "i32[8,4]"),
        "optimization_barrier": _sample(lambda x, y: lax.optimization_barrier((x, y)), "f32[8] f32[4,2]"),
        "empty2": _bind("empty2", "", dtype=np.dtype(np.float32), memory_space=jax.memory.Space.Device),
        "platform_index": _bind("platform_index", "", platforms=(("cuda",), None)),
        "layout_constraint": _bind("layout_constraint", "f32[8,8]", layout=None),
        "sharding_constraint": _bind(
            "sharding_constraint", "f32[8,8]", sharding=None, layout=None, context_mesh=None, unconstrained_dims=None
        ),
        "reshard": _sample(_reshard_in_place),
        "with_memory_space_constraint": _bind(
            "with_memory_space_constraint", "f32[8,8]", memory_space=jax.memory.Space.Device
        ),
        "device_put": _sample(lambda x: jax.device_put(x)),
        "gather": _sample(lambda x, i: lax.gather(x, i, rows, (1, 4), mode="clip"), "f32[64,4] i32[8,1]"),
        "scatter": _sample(lambda x, i, u: x.at[i].set(u), "f32[64,4] i32[8] f32[8,4]"),
        "scatter-sub": _sample(lambda x, i, u: x.at[i].subtract(u), "f32[64,4] i32[8] f32[8,4]"),
        "dynamic_slice": _sample(lambda x, i: lax.dynamic_slice(x, (i, 0), (4, 8)), "f32[8,8] i32[]"),
        "dynamic_update_slice": _sample(
            lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), "f32[8,8] f32[4,8] i32[]"
        ),
        "sort": _sample(lambda x: lax.sort(x, dimension=1)),
        "top_k": _sample(lambda x: lax.top_k(x, 4)),
        "approx_top_k": _sample(lambda x: lax.approx_max_k(x, 4)),
        "fft": _sample(lambda x: lax.fft(x, "FFT", (8,)), "c64[8,8]"),
    }
    for kind, name in (("add", "add"), ("mul", "multiply"), ("min", "min"), ("max", "max")):
        found[f"scatter-{kind}"] = _sample(
            lambda x, i, u, name=name: getattr(x.at[i], name)(u), "f32[64,4] i32[8] f32[8,4]"
        )
    return found


def _random() -> dict[str, Sample]:
    extended = convertible_extended_dtype()
    return {
        "random_bits": _sample(lambda k: jax.random.bits(k, (8, 4)), "key[]"),
        "random_split": _sample(lambda k: jax.random.split(k, 8), "key[]"),
        "random_fold_in": _sample(jax.vmap(jax.random.fold_in), "key[8] u32[8]"),
        "random_seed": _sample(jax.vmap(jax.random.key), "u32[8]"),
        "random_clone": _sample(jax.random.clone, "key[8]"),
        "random_gamma": _sample(jax.random.gamma, "key[] f32[8,4]"),
        "to_edtype": _bind("to_edtype", "i32[8,4]", edtype=extended),
        "from_edtype": Sample(
            lambda x: _primitives()["from_edtype"].bind(x, dtype=np.dtype(np.int32)),
            (jax.ShapeDtypeStruct((8, 4), extended),),
        ),
        "random_wrap": _sample(jax.random.wrap_key_data, "u32[8,2]"),
        "random_unwrap": _sample(jax.random.key_data, "key[8]"),
        "rng_bit_generator": _sample(lambda k: lax.rng_bit_generator(k, (8, 4)), "u32[4]"),
        "rng_uniform": _bind("rng_uniform", "f32[] f32[]", shape=(8, 4)),
        "iota_2x32_shape": _bind("iota_2x32_shape", "", shape=(8, 4)),
        "philox4x32": _bind("philox4x32", " ".join(["u32[8,4]"] * 6)),
        "philox2x32": _bind("philox2x32", "u32[8,4] u32[8,4] u32[8,4]"),
    }


def _linear_algebra() -> dict[str, Sample]:
    linalg, square = lax.linalg, "f32[8,4,4]"
    plain = {
        name: _sample(getattr(linalg, name), square)
        for name in ("cholesky", "eig", "eigh", "hessenberg", "lu", "qr", "schur", "svd", "tridiagonal")
    }
    return plain | {
        "cholesky_update": _sample(linalg.cholesky_update, "f32[4,4] f32[4]"),
        "geqrf": _bind("geqrf", square),
        "geqp3": _bind("geqp3", f"{square} i32[8,4]", use_magma=None),
        "householder_product": _sample(linalg.householder_product, f"{square} f32[8,4]"),
        "ormqr": _bind("ormqr", f"{square} f32[8,4] f32[8,4,2]", left=True, transpose=False),
        "lu_pivots_to_permutation": _sample(lambda p: linalg.lu_pivots_to_permutation(p, 4), "i32[8,4]"),
        "triangular_solve": _sample(lambda a, b: linalg.triangular_solve(a, b, left_side=True), f"{square} f32[8,4,2]"),
        "tridiagonal_solve": _sample(linalg.tridiagonal_solve, "f32[8,4] f32[8,4] f32[8,4] f32[8,4,2]"),
        "symmetric_product": _sample(
            lambda a, c: linalg.symmetric_product(a, c, symmetrize_output=False), "f32[8,4,6] f32[8,4,4]"
        ),
    }


def _elements() -> dict[str, Sample]:
    """Elementwise primitives that have parameters."""
    return {
        "convert_element_type": _sample(lambda x: lax.convert_element_type(x, jnp.bfloat16)),
        "integer_pow": _sample(lambda x: lax.integer_pow(x, 3)),
        "reduce_precision": _sample(lambda x: lax.reduce_precision(x, 5, 10)),
        "name": _sample(lambda x: checkpoint_name(x, "name")),
        "xla_metadata_value": _bind("xla_metadata_value", "f32[8,8]", xla_metadata_kvs=()),
        "broadcast_to": _bind("broadcast_to", "f32[8,1]", shape=(8, 4)),
    }


def _calls() -> dict[str, Sample]:
    def centred(x: Any) -> Any:
        return x - x.sum(1, keepdims=True)

    closed = jax.make_jaxpr(centred)(spec("f32[8,8]"))
    own_jvp, own_vjp = jax.custom_jvp(centred), jax.custom_vjp(centred)
    own_jvp.defjvp(lambda primals, tangents: (centred(*primals), centred(*tangents)))
    own_vmap = jax.custom_batching.custom_vmap(centred)
    own_vmap.def_vmap(lambda size, batched, x: (centred(x), True))
    own_vjp.defvjp(lambda x: (centred(x), None), lambda _, t: (centred(t),))

    def solved(a: Any, b: Any) -> Any:
        return lax.custom_linear_solve(
            lambda x: a @ x, b, lambda _, y: lax.linalg.triangular_solve(a, y, left_side=True)
        )

    return {
        "jit": _sample(jax.jit(centred)),
        "call": _bind("call", "f32[8,8]", call_jaxpr=closed.jaxpr),
        "closed_call": _bind("closed_call", "f32[8,8]", call_jaxpr=closed),
        "composite": _sample(lax.composite(centred, "example.centred")),
        "cond": _sample(lambda p, x: lax.cond(p, centred, lambda x: x * 2, x), "bool[] f32[8,8]"),
        "cudnn_fusion": _bind("cudnn_fusion", "f32[8,8]", name="centred", jaxpr=closed),
        "custom_jvp_call": _sample(own_jvp),
        "custom_vjp_call": _sample(own_vjp),
        "custom_vmap_call": _sample(own_vmap),
        "custom_linear_solve": _sample(solved, "f32[4,4] f32[4,8]"),
        "eval_jaxpr": _bind("eval_jaxpr", "f32[8,8]", call_jaxpr=closed),
        "linear_call": _sample(
            lambda x: jax.custom_derivatives.linear_call(lambda _, y: y.sum(1), lambda _, t: t[:, None], (), x)
        ),
        "remat2": _sample(jax.checkpoint(centred)),
        "xla_metadata_call": _bind("xla_metadata_call", "f32[8,8]", jaxpr=closed, xla_metadata=(), ad_metadata=()),
    }


_TARGET = "an_example"


def _copy_block(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...]


def _foreign() -> dict[str, Sample]:
    pl, partitioning = experimental("pallas"), experimental("custom_partitioning")
    block = pl.BlockSpec((2, 8), lambda g: (g, 0))
    kernel = pl.pallas_call(_copy_block, spec("f32[8,8]"), grid=(4,), in_specs=[block], out_specs=block, name="kernel")

    @partitioning.custom_partitioning
    def custom(x: Any) -> Any:
        return x.sum(1)

    custom.def_partition(partition=lambda *_: None, sharding_rule="b i -> b", reduction_factors=("i",))
    register(_TARGET, Description("b :, : j -> b j"), replace=True)
    return {
        "pallas_call": _sample(kernel),
        "custom_partitioning": _sample(custom),
        "ffi_call": _sample(jax.ffi.ffi_call(_TARGET, spec("f32[8,4]")), "f32[8,6] f32[6,4]"),
    }


def samples() -> dict[str, Sample]:
    """All examples by the name of their primitive, for the primitives of this JAX."""
    families = (_contractions, _attention, _reductions, _moves, _random, _linear_algebra, _foreign, _elements, _calls)
    found = {name: sample for family in families for name, sample in family().items()}
    return {name: sample for name, sample in found.items() if name in _primitives()}
