"""The placement of arguments in the layouts of a plan.

>>> import jax, jax.numpy as jnp
>>> from jax.sharding import NamedSharding, PartitionSpec
>>> mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
>>> keys = placed(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, PartitionSpec("x")))
>>> keys.sharding.shard_shape((8,))
(1,)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.errors import ArgumentError
from shardplan.layout.mesh import can_run, with_auto_axes


def placed(leaf: Any, sharding: NamedSharding) -> Any:
    """A leaf in its planned layout, or itself if it has that already. Its type loses its layout, if any."""
    if isinstance(leaf, jax.Array) and leaf.committed:
        lies_so = leaf.sharding == sharding or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        if lies_so and not _jax.has_typed_layout(leaf):
            return leaf
    return put(leaf, sharding)


def put(leaf: Any, sharding: Any) -> Any:
    """``jax.device_put`` to a sharding. Typed PRNG keys go as words: JAX places no keys over several processes."""
    if not isinstance(leaf, jax.Array) or not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.device_put(leaf, sharding)
    words = jax.device_put(jax.random.key_data(leaf), sharding)
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))


@contextmanager
def place_references(
    leaves: Sequence[Any], shardings: Sequence[NamedSharding], refs: Collection[int]
) -> Iterator[list[Any]]:
    """All leaves in their planned layouts, with references (``refs``, by position) to placed arrays.

    At the end the caller's references get the arrays of these, in the layout of their types where they have one."""
    there: list[Any] = [None if n in refs else placed(leaf, shardings[n]) for n, leaf in enumerate(leaves)]
    held = {position: _jax.array_in(leaves[position]) for position in refs}
    for position, array in held.items():
        there[position] = _jax.ref_to(placed(array, shardings[position]))
    yield there
    for position, array in held.items():
        left = _jax.array_in(there[position])
        _jax.put_in(leaves[position], put(left, array.sharding) if _jax.has_typed_layout(array) else left)


def place_captured(refs: Iterable[Any], mesh: Any) -> None:
    """Copies the arrays of a function's closed-over references to all devices of a mesh.

    Raises ArgumentError for a mesh without devices, and for types with layouts.
    """
    for ref in refs:
        held = _jax.array_in(ref)
        typed = _jax.has_typed_layout(held)
        if typed or not all(map(can_run, mesh.local_devices)):
            where = "on mesh axes of type Explicit" if typed else "that is not on the devices to compile for"
            raise ArgumentError(
                f"the function closes over a Ref to {held.dtype}{list(held.shape)} {where}: pass it as an argument"
            )
        _jax.put_in(ref, placed(held, NamedSharding(with_auto_axes(mesh), PartitionSpec())))
