"""Islands: operations and reductions inside a ``shard_map``, with the collectives of the plan spelled out.

Constraints alone cannot say that a value is still a sum, nor in which order axes are reduced, nor how a sum lies in
memory before it is scattered. Inside an island each device sees its own blocks, and the plan's reductions are called by
name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from shardplan.layout.collectives import CollectiveKind, Step
from shardplan.layout.layout import Layout, MeshAxes, to_spec
from shardplan.program.program import Operation


def run_on_blocks(
    operation: Callable[..., Any],
    operands: Sequence[Any],
    layouts: Sequence[Layout | None],
    own: Layout,
    island: Island,
    dtype: Any,
) -> Any:
    """The result of an operation whose blocks give partial results, of a type that may be wider than its own
    ``dtype``, after the reductions of the island."""

    def blocks(*local: Any) -> Any:
        return island.reduce(operation(*local), own).astype(dtype)

    return island.map(blocks, tuple(layout or () for layout in layouts), own)(*operands)


def made_in(dtype: Any, operation: Operation, params: dict[str, Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """An operation on blocks whose parts of a sum are made in a type that is wider than its own, in which they travel,
    and not rounded before: a product, a convolution, a sum. ``run`` takes the parameters and the blocks."""
    if "preferred_element_type" in params:
        return partial(run, {**params, "preferred_element_type": dtype})
    if operation.primitive.name == "reduce_sum":
        return lambda read: run(params, read.astype(dtype))
    return partial(run, params)


class Island:
    """The reductions of one partial tensor: ``pending`` axes, and the steps that reduce them.

    Without steps the tensor stays partial: the parts are stacked in front, split over the pending axes. Where
    nothing is pending it is whole.
    ``travelling`` is the element type in which parts are sent.
    """

    def __init__(
        self, mesh: Mesh, axes: MeshAxes, pending: tuple[int, ...], steps: Sequence[Step], travelling: Any
    ) -> None:
        self._mesh = mesh
        self._axes = axes
        self._pending = pending
        self._steps = steps
        self._travelling = travelling

    def map(self, blocks: Callable[..., Any], layouts: tuple[Layout, ...], own: Layout) -> Callable[..., Any]:
        """``blocks`` over operands in layouts; the result comes out in the layout of the last step."""
        open_ = (self._pending, *own) if self._pending else own
        out = self._steps[-1].layout if self._steps else open_
        in_specs = tuple(to_spec(self._axes, layout) for layout in layouts)
        out_specs = to_spec(self._axes, out)
        return jax.shard_map(blocks, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def reduce(self, part: Any, own: Layout) -> Any:
        """A device's part of the sum, as far reduced as the steps say."""
        if not self._steps:
            return part[None] if self._pending else part
        result, before = part.astype(self._travelling), own
        for step in self._steps:
            names = tuple(self._axes.names[axis] for axis in step.axes)
            if step.kind == CollectiveKind.ALL_REDUCE:
                result = jax.lax.psum(result, names)
            else:
                assert step.kind == CollectiveKind.REDUCE_SCATTER, step.kind
                dim = next(d for d, axes in enumerate(step.layout) if axes != before[d])
                result = jax.lax.psum_scatter(result, names, scatter_dimension=dim, tiled=True)
            before = step.layout
        return result.astype(part.dtype)

    def reduce_stacked(self, stacked: Any, own: Layout) -> Any:
        """A tensor that stayed partial, reduced."""

        def blocks(local: Any) -> Any:
            return self.reduce(local[0], own)

        return self.map(blocks, ((self._pending, *own),), own)(stacked)
