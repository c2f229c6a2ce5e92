"""Random operations that compute, family by family, for the proofs of the rules."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax import numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.random import threefry2x32_p

Case = tuple[Callable[..., Any], list[Any]]
SIZES = st.sampled_from([1, 2, 3, 4, 4, 6, 8, 8])


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Small whole numbers, so that sums are exact in any order."""
    noise = np.random.default_rng(sum(shape) + len(shape))
    if dtype == np.bool_:
        return noise.integers(0, 2, shape).astype(bool)
    return noise.integers(-4, 5, shape).astype(dtype)


@st.composite
def shapes(draw: Any, least: int = 1, most: int = 3) -> tuple[int, ...]:
    return tuple(draw(st.lists(SIZES, min_size=least, max_size=most)))


@st.composite
def dot_general(draw: Any) -> Case:
    b, i, j, k = (draw(shapes(0, 2)) for _ in range(4))
    if len(b) + len(i) + len(j) + len(k) == 0:
        i = (4,)
    lhs_order = draw(st.permutations(range(len(b + i + k))))
    rhs_order = draw(st.permutations(range(len(b + j + k))))
    lhs = numbers(*b, *i, *k).transpose(lhs_order)
    rhs = numbers(*b, *j, *k).transpose(rhs_order)

    def found(order: list[int], start: int, count: int) -> tuple[int, ...]:
        return tuple(order.index(dim) for dim in range(start, start + count))

    contract = (found(lhs_order, len(b + i), len(k)), found(rhs_order, len(b + j), len(k)))
    batch = (found(lhs_order, 0, len(b)), found(rhs_order, 0, len(b)))
    return (lambda x, y: lax.dot_general(x, y, (contract, batch))), [lhs, rhs]


@st.composite
def convolution(draw: Any) -> Case:
    rank = draw(st.integers(1, 2))
    groups = draw(st.sampled_from([("none", 1), ("none", 1), ("feature", 2), ("feature", 4), ("batch", 2)]))
    feature_groups, batch_groups = (groups[1], 1) if groups[0] == "feature" else (1, groups[1])
    co = draw(st.sampled_from([4, 8]))
    ci = draw(st.sampled_from([1, 2, 4]))
    batch = draw(st.sampled_from([2, 4])) * batch_groups
    space = [draw(st.sampled_from([4, 6, 8, 12, 16])) for _ in range(rank)]
    window = [draw(st.sampled_from([1, 2, 3, 4])) for _ in range(rank)]
    data, filters = numbers(batch, ci * feature_groups, *space), numbers(co, ci, *window)
    strides = [draw(st.integers(1, 3)) for _ in range(rank)]
    rhs_dilation = [draw(st.integers(1, 2)) for _ in range(rank)]
    lhs_dilation = [draw(st.integers(1, 2)) for _ in range(rank)]
    padding = draw(st.sampled_from(["SAME", "VALID", "some"]))
    if padding == "some" or max(lhs_dilation) > 1:
        padding = [(draw(st.integers(-1, 3)), draw(st.integers(-1, 3))) for _ in range(rank)]
    specs = [draw(st.permutations(list("NCHW"[: rank + 2]))) for _ in range(2)]
    filter_spec = draw(st.permutations(list("OIHW"[: rank + 2])))
    data = data.transpose(["NCHW".index(c) for c in specs[0]])
    filters = filters.transpose(["OIHW".index(c) for c in filter_spec])
    numbers_of = lax.conv_dimension_numbers(
        data.shape, filters.shape, ("".join(specs[0]), "".join(filter_spec), "".join(specs[1]))
    )

    def run(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x, w, strides, padding, lhs_dilation, rhs_dilation, numbers_of, feature_groups, batch_groups
        )

    return run, [data, filters]


@st.composite
def convolution_gradients(draw: Any) -> Case:
    run, operands = draw(convolution())
    result = jax.eval_shape(run, *operands)
    if 0 in result.shape:
        return run, operands
    cotangent = numbers(*result.shape)
    return (lambda x, w, t: jax.vjp(run, x, w)[1](t)), [*operands, cotangent]


@st.composite
def reduction(draw: Any) -> Case:
    shape = draw(shapes(1, 4))
    axes = tuple(sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))
    kind = draw(st.sampled_from(["sum", "max", "min", "prod", "and", "or", "xor", "argmax", "argmin", "own"]))
    if kind in ("argmax", "argmin"):
        return (lambda x: getattr(lax, kind)(x, axes[0], np.int32)), [numbers(*shape)]
    if kind == "own":
        return (lambda x, y: lax.reduce((x, y), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1] + a[0]), axes)), [
            numbers(*shape),
            numbers(*shape),
        ]
    dtype = draw(st.sampled_from([np.bool_, np.int32])) if kind in ("and", "or", "xor") else np.float32
    primitive = getattr(lax, f"reduce_{kind}_p")
    more = {"out_sharding": None} if kind == "sum" else {}
    return (lambda x: primitive.bind(x, axes=axes, **more)), [numbers(*shape, dtype=dtype)]


@st.composite
def cumulative(draw: Any) -> Case:
    shape = draw(shapes(1, 3))
    axis, reverse = draw(st.integers(0, len(shape) - 1)), draw(st.booleans())
    kind = draw(st.sampled_from([lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp]))
    return (lambda x: kind(x, axis, reverse)), [numbers(*shape)]


@st.composite
def windows(draw: Any) -> Case:
    shape = draw(shapes(1, 3))
    rank = len(shape)
    window = [draw(st.integers(1, min(3, size))) for size in shape]
    strides = [draw(st.integers(1, 3)) for _ in shape]
    padding = [(draw(st.integers(0, w - 1)), draw(st.integers(0, w - 1))) for w in window]
    kind = draw(st.sampled_from(["sum", "max", "min", "own", "gradient", "tangent", "average"]))
    base = [draw(st.integers(1, 2)) for _ in shape] if kind in ("sum", "max", "min") else [1] * rank
    dilation = [1] * rank
    functions: dict[str, Any] = {"sum": (0.0, lax.add), "max": (-np.inf, lax.max), "min": (np.inf, lax.min)}
    initial, reducer = functions.get(kind, functions["sum"] if kind == "average" else functions["max"])
    if kind == "own":
        initial, reducer = 0.0, lambda a, b: a + b * 1.0

    def run(x: Any) -> Any:
        return lax.reduce_window(x, initial, reducer, window, strides, padding, base, dilation)

    x = numbers(*shape) + np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 64
    result = jax.eval_shape(run, x)
    if kind in ("gradient", "average") and 0 not in result.shape:
        return (lambda x, t: jax.vjp(run, x)[1](t)), [x, numbers(*result.shape)]
    if kind == "tangent":
        return (lambda x, t: jax.jvp(run, (x,), (t,))[1]), [x, numbers(*shape)]
    return run, [x]


@st.composite
def linear_algebra(draw: Any) -> Case:
    batch = draw(st.lists(st.sampled_from([2, 4, 6, 8]), min_size=1, max_size=2))
    m, n = draw(st.sampled_from([2, 3, 4])), draw(st.sampled_from([2, 4, 6]))
    noise = np.random.default_rng(m + n)
    square = noise.normal(size=(*batch, m, m)).astype(np.float32) + 4 * np.eye(m, dtype=np.float32)
    tall = noise.normal(size=(*batch, m, n)).astype(np.float32)
    definite = square @ square.swapaxes(-1, -2)
    linalg = jax.lax.linalg
    diagonals = [noise.normal(size=(*batch, m)).astype(np.float32) + (4 if d == 1 else 0) for d in range(3)]
    diagonals[0][..., 0] = diagonals[2][..., -1] = 0
    cases: list[Case] = [
        (lambda a: linalg.cholesky(a, symmetrize_input=False), [definite]),
        (lambda a: linalg.qr(a, full_matrices=False), [tall]),
        (lambda a: linalg.svd(a, full_matrices=False), [tall]),
        (lambda a: linalg.eigh(a, symmetrize_input=False), [definite]),
        (lambda a: linalg.eig(a), [square]),
        (lambda a: linalg.lu(a), [tall]),
        (lambda a: linalg.schur(a), [square]),
        (lambda a: linalg.hessenberg(a), [square]),
        (lambda a: linalg.tridiagonal(a), [definite]),
        (lambda a: linalg.geqrf(a) if hasattr(linalg, "geqrf") else linalg.qr(a), [tall]),
        (lambda a, b: linalg.triangular_solve(a, b, left_side=True, lower=True), [square, tall]),
        (lambda a, b: linalg.triangular_solve(a, b, left_side=False), [square, tall.swapaxes(-1, -2).copy()]),
        (lambda a, b, c, d: linalg.tridiagonal_solve(a, b, c, d), [*diagonals, tall]),
        (lambda a, c: linalg.symmetric_product(a, c, alpha=2.0, beta=0.5, symmetrize_output=False), [tall, definite]),
        (lambda a, t: linalg.householder_product(a, t), [square, diagonals[1] / 4]),
        (lambda p: linalg.lu_pivots_to_permutation(p, m + 1), [np.zeros((*batch, m), np.int32)]),
    ]
    return draw(st.sampled_from(cases))


@st.composite
def fourier(draw: Any) -> Case:
    shape = (*draw(shapes(0, 2)), draw(st.sampled_from([4, 8])), draw(st.sampled_from([4, 6])))
    count = draw(st.integers(1, 2))
    kind = draw(st.sampled_from(["FFT", "IFFT", "RFFT", "IRFFT"]))
    dtype = np.float32 if kind == "RFFT" else np.complex64
    lengths = shape[-count:] if kind != "IRFFT" else (*shape[-count:-1], 2 * (shape[-1] - 1))
    return (lambda x: lax.fft(x, kind, lengths)), [numbers(*shape).astype(dtype)]


@st.composite
def randomness(draw: Any) -> Case:
    shape = draw(shapes(1, 3))
    impl = draw(st.sampled_from(["threefry2x32", "rbg", "unsafe_rbg"]))
    keys = jax.random.split(jax.random.key(3, impl=impl), draw(st.sampled_from([2, 4, 8])))
    kind = draw(st.sampled_from(["bits", "split", "fold_in", "data", "wrap", "many", "hash", "state", "gamma"]))
    if kind == "bits":
        return (lambda k: jax.random.bits(k, shape)), [jax.random.key(3, impl=impl)]
    if kind == "split":
        return (lambda k: jax.random.split(k, shape)), [jax.random.key(3, impl=impl)]
    if kind == "fold_in":
        return (lambda k, n: jax.vmap(jax.random.fold_in)(k, n)), [keys, np.arange(len(keys), dtype=np.uint32)]
    if kind == "data":
        return (lambda k: jax.random.key_data(k)), [keys]
    if kind == "wrap":
        return (lambda k: jax.random.wrap_key_data(k, impl=impl)), [np.asarray(jax.random.key_data(keys))]
    if kind == "many":
        return (lambda k: jax.vmap(lambda k: jax.random.bits(k, shape))(k)), [keys]
    if kind == "hash":
        words = [numbers(*shape, dtype=np.uint32) for _ in range(4)]
        return (lambda *w: threefry2x32_p.bind(*w)), words
    if kind == "state":
        return (lambda k: lax.rng_bit_generator(k, shape)), [np.arange(4, dtype=np.uint32)]
    alpha = np.abs(numbers(len(keys), *shape)) + np.float32(1)
    return (lambda k, a: jax.vmap(jax.random.gamma)(k, a)), [keys, alpha]


@st.composite
def elementwise(draw: Any) -> Case:
    shape = draw(shapes(1, 3))
    x, y = numbers(*shape), numbers(*shape)
    whole = numbers(*shape, dtype=np.int32)
    cases: list[Case] = [
        (lambda x, y: x + y, [x, y]),
        (lambda x, y: lax.div(x, y), [x, y]),
        (lambda x: lax.convert_element_type(x, jnp.bfloat16), [x]),
        (lambda x: lax.convert_element_type(x, np.int32), [x]),
        (lambda c, x, y: lax.select(c, x, y), [x > 0, x, y]),
        (lambda a, x, b: lax.clamp(a, x, b), [np.float32(-1), x, np.float32(1)]),
        (lambda x: lax.integer_pow(x, 3), [x]),
        (lambda x: lax.tanh(x), [x]),
        (lambda x, y: lax.complex(x, y), [x, y]),
        (lambda x: lax.reduce_precision(x, 5, 10), [x]),
        (lambda x: lax.bitcast_convert_type(x, np.int32), [x]),
        (lambda x: lax.bitcast_convert_type(x, np.uint8), [whole]),
        (lambda x, y: lax.optimization_barrier((x, y)), [x, numbers(4, 4)]),
        (lambda x: checkpoint_name(x, "name"), [x]),
        (lambda x, y: lax.bitwise_and(x, y), [whole, whole + 1]),
        (lambda x, y: lax.shift_left(x, y), [whole, abs(whole)]),
        (lambda x: lax.erf_inv(x / 8), [x]),
        (lambda x: lax.stop_gradient(x) * 2.0, [x]),
        (lambda x, y: lax.add_p.bind(x, y), [x[..., :1], y]),
        (lambda x: lax.population_count(x), [whole]),
        (lambda x: jnp.copy(x), [x]),
        (lambda: lax.broadcasted_iota(np.int32, shape, 0), []),
    ]
    return draw(st.sampled_from(cases))


def groups(total: int, *shape: int) -> np.ndarray:
    """Sizes of groups, some of them empty, that take at most ``total`` together."""
    cuts = np.sort(np.random.default_rng(total).integers(0, total + 1, shape), -1)
    return np.diff(cuts, axis=-1, prepend=0).astype(np.int32)


@st.composite
def products(draw: Any) -> Case:
    b, m, k, n, g = (draw(st.sampled_from([2, 4, 6, 8])) for _ in range(5))
    kind = draw(st.sampled_from(["ragged rows", "ragged batches of rows", "ragged sum", "ragged batch", "scaled"]))
    ragged = lax.RaggedDotDimensionNumbers
    if kind == "ragged rows":
        return (lambda x, y, s: lax.ragged_dot(x, y, s)), [numbers(m, k), numbers(g, k, n), groups(m, g)]
    if kind == "ragged batches of rows":
        layout = ragged((([2], [2]), ([0], [1])), [1], [0])
        operands = [numbers(b, m, k), numbers(g, b, k, n), groups(m, b, g)]
    elif kind == "ragged sum":
        layout = ragged((([2], [1]), ([0], [0])), [2], [])
        operands = [numbers(b, m, k), numbers(b, k, n), groups(k, b, g)]
    elif kind == "ragged batch":
        layout = ragged((([2], [1]), ([0], [0])), [0], [])
        operands = [numbers(b, m, k), numbers(b, k, n), groups(b, g)]
    else:
        scales = [np.ones((b, m, 2), jnp.bfloat16), np.ones((b, n, 1), jnp.bfloat16)]
        numbers_of = (((2,), (2,)), ((0,), (0,)))
        operands = [numbers(b, m, 2 * k).astype(jnp.float8_e4m3fn), numbers(b, n, 2 * k).astype(jnp.float8_e4m3fn)]
        return (lambda x, y, s, t: lax.scaled_dot(x, y, lhs_scale=s, rhs_scale=t, dimension_numbers=numbers_of)), [
            *operands,
            *scales,
        ]
    return (lambda x, y, s: lax.ragged_dot_general(x, y, s, layout)), operands


FAMILIES = {
    maker.__name__: maker
    for maker in (
        dot_general,
        convolution,
        convolution_gradients,
        reduction,
        cumulative,
        windows,
        linear_algebra,
        fourier,
        randomness,
        elementwise,
        products,
    )
}
