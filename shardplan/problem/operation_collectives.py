"""Collectives of operations: halo exchanges between neighbours, and collectives that regions call by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardplan.layout.collectives import CollectiveKind, Step
from shardplan.layout.layout import Domain, Layout, MeshAxes
from shardplan.problem.strategy import Halo, Strategy
from shardplan.program.program import Value


def called_steps(mesh: MeshAxes, strategy: Strategy, results: Sequence[Value]) -> list[tuple[Step, Value]]:
    """The collectives that an operation calls by name, as fractions of its largest result."""
    if not strategy.calls or not results:
        return []
    layout, value = max(zip(strategy.results, results, strict=True), key=lambda pair: pair[1].total_bytes)
    share = 1 / max(value.total_bytes, 1)
    return [
        (Step(call.kind, tuple(map(mesh.names.index, call.axes)), layout, share * call.bytes), value)
        for call in strategy.calls
    ]


def halo_steps(mesh: MeshAxes, domain: Domain, layout: Layout, halos: Sequence[Halo], value: Value) -> Iterator[Step]:
    """The halo exchanges of one tensor in ``layout``, dimension by dimension.

    Rows from neighbours along earlier dimensions are sent on along later ones: the corners.
    """
    local = 1.0 / float(domain.degrees[domain.position[layout]])
    carried, rows_got, dim = 1.0, 0.0, -1
    for halo in sorted(halos, key=lambda halo: halo.dim):
        block = -(-value.shape[halo.dim] // mesh.degree(halo.axes))
        if halo.dim != dim:
            carried, rows_got, dim = carried * (1 + rows_got), 0.0, halo.dim
        rows_got += halo.rows / block
        yield Step(CollectiveKind.PERMUTE, halo.axes, layout, local * carried * halo.rows / block)
