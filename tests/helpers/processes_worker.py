"""One of two processes that share eight devices: ``python -m tests.helpers.processes_worker INDEX PORT``.

Prints a line per program: its name, and whether this process's blocks of the results are those of jit alone.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan

X = np.arange(128.0, dtype=np.float32).reshape(16, 8)


def draw(key: Any, x: Any) -> Any:
    return jax.random.fold_in(key, 1), x + jax.random.normal(key, x.shape)


def draw_each(keys: Any, x: Any) -> Any:
    return jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys), x[:8] + jax.vmap(
        lambda k: jax.random.normal(k, (8,))
    )(keys)


def of_state(state: Any, x: Any) -> Any:
    key, noise = draw(state["key"], state["w"])
    return {"key": key, "w": noise}, x * 2


def from_ref(key: Any, x: Any) -> Any:
    key[...], noise = draw(key[...], x)
    return noise


def onto_ref(ref: Any, x: Any) -> Any:
    ref[...] += x
    return ref[...] @ x.T


def on_host(moments: Any, x: Any) -> Any:
    moments = jax.device_put(moments, jax.memory.Space.Device) * 0.9 + x
    return jax.device_put(moments, jax.memory.Space.Host), x - moments


def programs(mesh: Mesh) -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    """Per name a function, a function that makes its arguments, and options."""
    captured = jax.random.key(7)
    kind = NamedSharding(mesh, P("x"), memory_kind="pinned_host")
    found: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "captured key": (lambda x: draw(captured, x)[1], lambda: (X,), {}),
        "reference to a key": (from_ref, lambda: (jax.new_ref(jax.random.key(0)), X), {}),
        "reference": (onto_ref, lambda: (jax.new_ref(jnp.asarray(X)), X), {}),
        "host memory": (on_host, lambda: (jax.device_put(X, kind), X), {}),
    }
    keys = jax.random.split(jax.random.key(0), 8)
    found["key"] = (draw, lambda: (keys[0], X), {})
    found["keys"] = (draw_each, lambda: (keys, X), {"pins": {"0": P("x")}})
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        key = jax.random.key(0, impl=impl)
        make = lambda key=key: ({"key": jnp.copy(key), "w": jnp.asarray(X)}, X)  # noqa: E731
        found[f"{impl} state"] = (of_state, make, {"donate_argnums": 0})
    return found


def words(array: Any) -> np.ndarray:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


def agrees(found: Any, expected: Any) -> bool:
    """Whether this process's blocks are those of the whole array."""
    shards = found.addressable_shards
    return all(np.allclose(words(shard.data), words(expected)[shard.index], rtol=1e-5) for shard in shards)


def main(index: int, port: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, index)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
        for name, (fn, make, options) in programs(mesh).items():
            if kind is AxisType.Explicit and name not in ("keys", "reference"):
                continue
            step, args = shardplan.auto(fn, mesh, **options), make()
            alone = (jax.device_put(X, jax.memory.Space.Host), X) if name == "host memory" else make()
            expected = jax.jit(fn)(*alone)
            first = step(*args)
            if name.endswith("state"):  # what comes back goes in again
                first, expected = step(first[0], X), jax.jit(fn)(expected[0], X)
            print(name, all(map(agrees, jax.tree.leaves(first), jax.tree.leaves(expected))), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
