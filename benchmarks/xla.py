"""Behaviour of XLA:GPU on small programs, alone and with islands; prints the tables of `docs/xla/`.

    python -m benchmarks.xla

Every program is compiled for eight H100 that need not exist. Bytes are what one device sends (ring algorithms).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardplan.compiled.hlo.collectives import collectives
from shardplan.compiled.target import compile_for, gpu_mesh

M, K, N = 64, 128, 256


def compiled(fn: Callable[..., Any], mesh: Mesh, out: P, *arguments: tuple[tuple[int, ...], Any, P]) -> str:
    """The collectives of a compiled function, with their element types and bytes."""
    shardings = tuple(NamedSharding(mesh, spec) for _, _, spec in arguments)
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in arguments]
    lowered = jax.jit(fn, in_shardings=shardings, out_shardings=NamedSharding(mesh, out)).lower(*shapes)
    found = collectives(compile_for(lowered)[0].as_text() or "")
    return ", ".join(f"{c.kind} {'/'.join(sorted(c.dtypes))} {c.bytes_sent * c.times:,}" for c in found) or "nothing"


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"\n### {title}\n")
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def reductions() -> list[tuple[str, str, str]]:
    """A dot whose contracted dimension is split, into several layouts: by constraints, and in an island."""
    mesh = gpu_mesh("h100", (2, 4), ("x", "y"))
    cases: list[tuple[tuple[str, ...], P, list[tuple[str, int]]]] = [
        (("x",), P(), []),
        (("x",), P("x"), [("x", 0)]),
        (("x", "y"), P(), []),
        (("x", "y"), P(("x", "y")), [("x", 0), ("y", 0)]),
        (("x", "y"), P(("y", "x")), [("y", 0), ("x", 0)]),
        (("x", "y"), P("x", "y"), [("x", 0), ("y", 1)]),
        (("x", "y"), P("x"), [("x", 0)]),
    ]
    rows = []
    for axes, target, scatters in cases:
        left, right = P(None, axes), P(axes)
        arguments = (((M, K), jnp.float32, left), ((K, N), jnp.float32, right))

        def constrained(a: Any, b: Any, target: P = target) -> Any:
            whole = lax.with_sharding_constraint(a @ b, NamedSharding(mesh, P()))
            return lax.with_sharding_constraint(whole, NamedSharding(mesh, target)) + 1.0

        def blocks(a: Any, b: Any, axes: tuple[str, ...] = axes, scatters: Any = tuple(scatters)) -> Any:
            part = a @ b
            for axis, dim in scatters:
                part = lax.psum_scatter(part, axis, scatter_dimension=dim, tiled=True)
            left_over = tuple(axis for axis in axes if axis not in dict(scatters))
            return lax.psum(part, left_over) if left_over else part

        island = jax.shard_map(blocks, mesh=mesh, in_specs=(left, right), out_specs=target, check_vma=False)
        rows.append(
            (
                f"over {axes} into `{target}`",
                compiled(constrained, mesh, target, *arguments),
                compiled(lambda a, b, island=island: island(a, b) + 1.0, mesh, target, *arguments),
            )
        )
    return rows


def halos() -> list[tuple[str, str]]:
    """Windows over a split dimension, each constrained on both sides."""
    mesh = gpu_mesh("h100", (8,), ("x",))
    split = P(None, "x")
    image = ((2, 64, 64, 16), jnp.float32, split)

    def convolution(width: int, stride: int) -> Callable[[Any], Any]:
        filters = jnp.ones((width, width, 16, 32))
        numbers = ("NHWC", "HWIO", "NHWC")
        return lambda x: lax.conv_general_dilated(x, filters, (stride,) * 2, "SAME", dimension_numbers=numbers)

    def pool(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    cases: dict[str, Callable[[Any], Any]] = {
        "convolution 3 x 3": convolution(3, 1),
        "convolution 3 x 3, stride 2": convolution(3, 2),
        "convolution 5 x 5": convolution(5, 1),
        "maximum over 3 x 3, stride 2": pool,
        "gradient of that maximum (select_and_scatter_add)": lambda x: jax.grad(lambda x: pool(x).sum())(x),
    }
    return [(name, compiled(lambda x, f=f: f(x * 2.0) + 1.0, mesh, split, image)) for name, f in cases.items()]


def precision() -> list[tuple[str, str]]:
    """The type in which a bfloat16 product with a split contraction is reduced."""
    mesh = gpu_mesh("h100", (8,), ("x",))
    rows, half = P("x"), jnp.bfloat16
    operands = (((512, 256), half, rows), ((512, 128), half, rows))

    def dot(a: Any, b: Any) -> Any:
        return lax.dot_general(a, b, (((0,), (0,)), ((), ())))

    def wide(a: Any, b: Any) -> Any:
        return lax.psum_scatter(dot(a, b).astype(jnp.float32), "x", scatter_dimension=0, tiled=True)

    island = jax.shard_map(wide, mesh=mesh, in_specs=(rows, rows), out_specs=rows, check_vma=False)
    cases: list[tuple[str, Callable[..., Any], P]] = [
        ("product", lambda a, b: dot(a, b) + half(1), P()),
        ("product, then float32", lambda a, b: dot(a, b).astype(jnp.float32) + 1.0, P()),
        ("product, then float32, split", lambda a, b: dot(a, b).astype(jnp.float32) + 1.0, rows),
        ("product, transposed, then float32", lambda a, b: dot(a, b).T.astype(jnp.float32) + 1.0, P()),
        ("island: float32, then reduced", lambda a, b: island(a, b) + 1.0, rows),
    ]
    return [(name, compiled(f, mesh, out, *operands)) for name, f, out in cases]


def uneven() -> list[tuple[str, ...]]:
    """Tables of 101 rows, which 8 does not divide, and of 104, which it does; constrained inside of the step."""
    mesh = gpu_mesh("h100", (8,), ("x",))
    rows, columns, whole, count, width = P("x"), P(None, "x"), P(), 64, 32

    def held(array: Any, spec: P) -> Any:
        return lax.with_sharding_constraint(array, NamedSharding(mesh, spec))

    def logits(h: Any, t: Any) -> Any:
        return held(held(h, whole) @ held(t, rows).T, columns)

    def partial(h: Any, g: Any) -> Any:
        gradient = held(jnp.einsum("bv,bd->vd", g, h), whole)
        return held(held(jnp.sin(held(gradient, rows)), rows), columns)

    batch, ids = ((count, width), jnp.float32, whole), ((count,), jnp.int32, whole)
    found: dict[str, list[str]] = {}
    for size in (101, 104):
        table, split = ((size, width), jnp.float32, columns), ((count, width), jnp.float32, rows)
        cases: dict[str, tuple[Callable[..., Any], P, Any]] = {
            "split by features into split by rows, then into whole": (
                lambda t: held(jnp.sin(held(t, rows)), whole),
                whole,
                (table,),
            ),
            "into split by rows, then a product over the rows": (
                lambda h, t: held(logits(h, t) @ held(t, rows), whole),
                whole,
                (batch, table),
            ),
            "into split by rows, then a lookup of 64 rows": (
                lambda t, i: held(held(t, rows)[i], whole),
                whole,
                (table, ids),
            ),
            "partial sums into split by rows, then by features": (
                partial,
                columns,
                (split, ((count, size), jnp.float32, rows)),
            ),
        }
        for name, (fn, out, arguments) in cases.items():
            found.setdefault(name, []).append(compiled(fn, mesh, out, *arguments))
    return [(name, *sent) for name, sent in found.items()]


def main() -> None:
    table("Reductions", ("partial sums", "by constraints", "in an island"), reductions())
    table("Halos", ("operation, split over 8", "compiled"), halos())
    table("Sizes that do not divide", ("program", "101 rows", "104 rows"), uneven())
    table("Precision", ("bfloat16, contraction split over 8", "compiled"), precision())


if __name__ == "__main__":
    main()
