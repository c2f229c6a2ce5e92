"""Placement: arguments where a plan has them.

>>> import jax, jax.numpy as jnp
>>> from jax.sharding import NamedSharding, PartitionSpec
>>> mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
>>> keys = placed(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, PartitionSpec("x")))
>>> keys.sharding.shard_shape((8,))
(1,)
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from shardplan import _jax


def placed(leaf: Any, sharding: NamedSharding) -> Any:
    """A leaf where the plan has it; itself where it lies so already. A layout that is part of its type is taken off."""
    if isinstance(leaf, jax.Array) and leaf.committed:
        lies_so = leaf.sharding == sharding or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        if lies_so and not _jax.has_typed_layout(leaf):
            return leaf
    return put(leaf, sharding)


def put(leaf: Any, sharding: Any) -> Any:
    """``jax.device_put`` to a sharding, for typed PRNG keys by words: JAX places no keys over several processes."""
    if not isinstance(leaf, jax.Array) or not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.device_put(leaf, sharding)
    words = jax.device_put(jax.random.key_data(leaf), sharding)
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
