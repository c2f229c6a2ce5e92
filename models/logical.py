"""Names for the dimensions of activations, by which a layout can be written by hand beside a model, not inside it.

A model says what the dimensions of an activation are, and nothing else:

    x = logical(x, "batch", "sequence", "embed")

That does nothing and leaves no trace in the program, which is how plans are made. Under `logical_axes`, every named
activation is constrained instead, as an expert would write it: each name is looked up, and the dimension is split by
the mesh axes that it stands for.

    with logical_axes(mesh, {"batch": "data", "heads": "model", "mlp": "model"}):
        lowered = jax.jit(train_step, in_shardings=...).lower(state, batch)

The names in use: batch, sequence, embed, heads, kv_heads, head_dim, mlp, vocabulary, experts, groups, capacity, state,
height, width, depth, channels, nodes, edges, features, tables.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Axes = str | tuple[str, ...] | None
Layouts = Mapping[str | tuple[str | None, ...], Axes | PartitionSpec]
_rules: ContextVar[tuple[Mesh, Layouts] | None] = ContextVar("logical_axes", default=None)


@contextmanager
def logical_axes(mesh: Mesh, axes: Layouts) -> Iterator[None]:
    """While it is open, what is traced has its named activations constrained: `axes` maps a name to mesh axes.

    A name that is not in `axes` splits nothing, nor does one whose mesh axes do not divide the dimension; a mesh axis
    splits the first dimension of an activation that asks for it. A tuple of all the names of an activation stands for
    the `PartitionSpec` that just these activations get.

    JAX keeps what it has traced by the function alone, so its caches are cleared at either end: nothing that was traced
    under other names is taken for this.
    """
    token = _rules.set((mesh, axes))
    jax.clear_caches()
    try:
        yield
    finally:
        _rules.reset(token)
        jax.clear_caches()


def logical(x: jax.Array, *names: str | None) -> jax.Array:
    """`x`, whose dimensions have these names (None for one without a name), constrained where `logical_axes` is open.

    Raises `ValueError` where there are not as many names as dimensions.
    """
    if len(names) != x.ndim:
        raise ValueError(f"`logical` needs a name per dimension: got {names} for the shape {x.shape}")
    rules = _rules.get()
    if rules is None:
        return x
    mesh, axes = rules
    given = axes.get(names)
    if isinstance(given, PartitionSpec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, given))
    used: set[str] = set()
    spec: list[tuple[str, ...] | None] = []
    for size, name in zip(x.shape, names, strict=True):
        wanted = axes.get(name) if name is not None else None
        split = (wanted,) if isinstance(wanted, str) else tuple(wanted or ())
        if used & set(split) or size % prod(mesh.shape[axis] for axis in split):
            split = ()
        used |= set(split)
        spec.append(split or None)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))
