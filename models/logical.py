"""Logical names for the dimensions of activations: layouts by hand are written outside of a model, by these names.

A model only names the dimensions of an activation:

    x = logical(x, "batch", "sequence", "embed")

This has no effect and leaves no trace in the program, and plans are made so. Under `logical_axes`, every named
activation is constrained instead, as an expert would write it: the mesh axes of each name split the dimension.

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
    """A context in which traced programs have constraints on their named activations. `axes` maps a name to mesh axes.

    A name without an entry in `axes` splits nothing, nor does one whose mesh axes do not divide the dimension. A mesh
    axis splits the first dimension of an activation that has its name. A tuple of all the names of an activation stands
    for the `PartitionSpec` of just these activations.

    JAX caches traces by the function alone. Its caches are therefore cleared at both ends of the context.
    """
    token = _rules.set((mesh, axes))
    jax.clear_caches()
    try:
        yield
    finally:
        _rules.reset(token)
        jax.clear_caches()


def logical(x: jax.Array, *names: str | None) -> jax.Array:
    """`x` with these names of its dimensions (None for one without a name), constrained inside of `logical_axes`.

    Raises `ValueError` unless there are as many names as dimensions.
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
