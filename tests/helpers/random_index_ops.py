"""Random operations that move elements, by place or by index, for the proofs of the rules."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax import numpy as jnp

from tests.helpers.random_compute_ops import SIZES, Case, numbers, shapes

MODES = st.sampled_from(["fill", "clip", "promise_in_bounds"])


def places(high: int, *shape: int) -> np.ndarray:
    """Indices, some of them out of bounds."""
    return np.random.default_rng(high + sum(shape)).integers(-1, high + 2, shape).astype(np.int32)


@st.composite
def reshape(draw: Any) -> Case:
    factors = draw(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=4))

    def grouped() -> tuple[int, ...]:
        dims, rest = [], list(factors)
        while rest:
            count = draw(st.integers(1, len(rest)))
            dims.append(int(np.prod(rest[:count])))
            rest = rest[count:]
            if draw(st.integers(0, 3)) == 0:
                dims.append(1)
        return tuple(dims)

    source, target = grouped(), grouped()
    order = draw(st.one_of(st.none(), st.permutations(range(len(source)))))
    return (lambda x: lax.reshape(x, target, order)), [numbers(*source)]


MOVES = ["transpose", "broadcast", "rev", "pad", "slice", "concatenate", "split", "squeeze", "tile", "stack", "unstack"]


@st.composite
def moves(draw: Any) -> Case:
    shape = draw(shapes(1, 3))
    rank = len(shape)
    axis = draw(st.integers(0, rank - 1))
    x = numbers(*shape)
    kind = draw(st.sampled_from(MOVES))
    if kind == "transpose":
        order = draw(st.permutations(range(rank)))
        return (lambda x: lax.transpose(x, order)), [x]
    if kind == "broadcast":
        more = draw(st.integers(0, 2))
        dims = sorted(draw(st.permutations(range(rank + more)))[:rank])
        target = [draw(SIZES) for _ in range(rank + more)]
        for dim, size in zip(dims, shape, strict=True):
            target[dim] = size if size > 1 else target[dim]
        return (lambda x: lax.broadcast_in_dim(x, target, dims)), [x]
    if kind == "rev":
        dims = sorted(draw(st.sets(st.integers(0, rank - 1))))
        return (lambda x: lax.rev(x, dims)), [x]
    if kind == "pad":
        config = [(draw(st.integers(-1, 2)), draw(st.integers(-1, 3)), draw(st.integers(0, 2))) for _ in shape]
        config = [
            (low if size > 2 else abs(low), abs(high), inner)
            for (low, high, inner), size in zip(config, shape, strict=True)
        ]
        return (lambda x, v: lax.pad(x, v, config)), [x, np.float32(2)]
    if kind == "slice":
        starts = [draw(st.integers(0, size - 1)) for size in shape]
        limits = [draw(st.integers(start + 1, size)) for start, size in zip(starts, shape, strict=True)]
        strides = [draw(st.integers(1, 3)) for _ in shape]
        return (lambda x: lax.slice(x, starts, limits, strides)), [x]
    if kind == "concatenate":
        others = [tuple(draw(SIZES) if d == axis else s for d, s in enumerate(shape)) for _ in range(2)]
        return (lambda *xs: lax.concatenate(xs, axis)), [x, *(numbers(*s) for s in others)]
    if kind == "split":
        first = draw(st.integers(0, shape[axis]))
        return (lambda x: lax.split(x, [first, shape[axis] - first], axis)), [x]
    if kind == "tile":
        reps = [draw(st.integers(1, 3)) for _ in shape]
        return (lambda x: lax.tile_p.bind(x, reps=tuple(reps)) if hasattr(lax, "tile_p") else jnp.tile(x, reps)), [x]
    if kind == "stack":
        return (lambda x, y: jnp.stack([x, y, x], axis)), [x, numbers(*shape)]
    if kind == "unstack":
        return (lambda x: jnp.unstack(x, axis=axis)), [x]
    return (lambda x: lax.squeeze(lax.expand_dims(x, [axis]), [axis])), [x]


@st.composite
def window_moves(draw: Any) -> tuple[Any, ...]:
    """Dimension numbers that a gather and a scatter have in common."""
    kinds = draw(st.lists(st.sampled_from(["batch", "point", "part", "full", "free", "free"]), min_size=1, max_size=3))
    sizes = [draw(st.sampled_from([2, 3, 4, 6, 8])) for _ in kinds]
    window = [
        1 if kind in ("batch", "point") else draw(st.integers(1, size)) if kind == "part" else size
        for kind, size in zip(kinds, sizes, strict=True)
    ]
    batching = tuple(d for d, kind in enumerate(kinds) if kind == "batch")
    indexed = tuple(draw(st.permutations([d for d, kind in enumerate(kinds) if kind in ("point", "part", "full")])))
    dropped = tuple(d for d, kind in enumerate(kinds) if kind == "point")
    extra = [draw(st.sampled_from([2, 4, 6])) for _ in range(draw(st.integers(0, 2)))]
    index_shape = list(extra)
    for dim in batching:
        index_shape.insert(0, sizes[dim])
    index_batch = tuple(range(len(batching)))[::-1]
    inside = [w for d, w in enumerate(window) if kinds[d] not in ("batch", "point")]
    rank = len(inside) + len(index_shape)
    window_dims = tuple(sorted(draw(st.permutations(range(rank)))[: len(inside)]))
    shape, a, b = [], iter(inside), iter(index_shape)
    for dim in range(rank):
        shape.append(next(a) if dim in window_dims else next(b))
    ids = places(max(sizes), *index_shape, len(indexed))
    return sizes, window, window_dims, dropped, indexed, batching, index_batch, ids, shape, draw(MODES)


@st.composite
def gather(draw: Any) -> Case:
    sizes, window, dims, dropped, indexed, batching, index_batch, ids, _, mode = draw(window_moves())
    layout = lax.GatherDimensionNumbers(dims, dropped, indexed, batching, index_batch)
    dtype = draw(st.sampled_from([np.float32, np.int32, np.bool_]))
    if mode == "promise_in_bounds":
        ids = np.zeros_like(ids)
    return (lambda x, i: lax.gather(x, i, layout, window, mode=mode)), [numbers(*sizes, dtype=dtype), ids]


@st.composite
def scatter(draw: Any) -> Case:
    sizes, _, dims, dropped, indexed, batching, index_batch, ids, shape, mode = draw(window_moves())
    layout = lax.ScatterDimensionNumbers(dims, dropped, indexed, batching, index_batch)
    kind = draw(
        st.sampled_from(
            [
                lax.scatter_add,
                lax.scatter_add,
                lax.scatter_sub,
                lax.scatter_min,
                lax.scatter_max,
                lax.scatter_mul,
                lax.scatter,
            ]
        )
    )
    if mode == "promise_in_bounds":
        ids = np.zeros_like(ids)
    if kind is lax.scatter and draw(st.booleans()):
        return (lambda x, i: lax.scatter_apply(x, i, lambda a: a * 2 + 1, layout, update_shape=shape, mode=mode)), [
            numbers(*sizes),
            ids,
        ]
    shift = 0.5 if kind is lax.scatter_mul else 0
    operands = [numbers(*sizes) + np.float32(shift), ids, numbers(*shape) + np.float32(shift)]
    return (lambda x, i, u: kind(x, i, u, layout, mode=mode)), operands


@st.composite
def dynamic(draw: Any) -> Case:
    shape = draw(shapes(1, 3))
    window = [draw(st.sampled_from([size, draw(st.integers(1, size))])) for size in shape]
    starts = [np.int32(draw(st.integers(-1, size))) for size in shape]
    if draw(st.booleans()):
        return (lambda x, *s: lax.dynamic_slice(x, s, window)), [numbers(*shape), *starts]
    return (lambda x, u, *s: lax.dynamic_update_slice(x, u, s)), [numbers(*shape), numbers(*window), *starts]


@st.composite
def sorting(draw: Any) -> Case:
    shape = draw(shapes(1, 3))
    axis = draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(["sort", "several", "top_k", "approx"]))
    x = numbers(*shape)
    if kind == "sort":
        return (lambda x: lax.sort(x, axis)), [x]
    if kind == "several":
        return (lambda x, y: lax.sort((x, y), axis, num_keys=2)), [x, numbers(*shape, dtype=np.int32)]
    if kind == "top_k":
        return (lambda x: lax.top_k(x, min(2, shape[-1]))), [x]
    return (lambda x: lax.approx_max_k(x, min(2, shape[axis]), reduction_dimension=axis)), [x]


FAMILIES = {
    maker.__name__: maker
    for maker in (
        reshape,
        moves,
        gather,
        scatter,
        dynamic,
        sorting,
    )
}
