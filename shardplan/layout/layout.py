"""Layouts: for one tensor, per dimension, the ordered mesh axes that split it.

>>> mesh = MeshAxes(("data", "model"), (2, 4))
>>> space = LayoutSpace(mesh)
>>> domain = space.domain((8, 6))
>>> len(domain.layouts)          # 6 is not divisible by 4: the model axis can split dimension 0 alone
7
>>> str(to_spec(mesh, ((0, 1), ())))
"P(('data', 'model'),)"

Sizes in ``padded`` may be split unevenly. Each block has the next whole number of rows, and the last blocks have fewer,
or none. XLA pads these blocks: a device holds, computes and sends whole blocks.

>>> padded = LayoutSpace(mesh, frozenset({50257})).domain((50257,))
>>> padded.layouts == space.domain((50264,)).layouts, len(space.domain((50257,)).layouts)
(True, 1)
>>> both = padded.position[((0, 1),)]
>>> round(50257 / float(padded.degrees[both]))      # rows per device
6283
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, permutations, product
from math import prod
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

Layout = tuple[tuple[int, ...], ...]
"""Per dimension, the numbers of the mesh axes that split it, major first."""

# With more axes than this, the search has only the mesh's own order of axes on a dimension, and the user's orders. The
# number of orders grows with the factorial of the axes.
_MAX_AXES_IN_EVERY_ORDER = 2

MAX_PADDING = 1 / 3
"""The largest size with padding, as a multiple of the size: 12 heads on 8 devices are 16."""


@dataclass(frozen=True, slots=True)
class MeshAxes:
    """Names and sizes of the mesh axes, in the order of the mesh."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def device_count(self) -> int:
        return prod(self.sizes)

    @property
    def splitting(self) -> tuple[int, ...]:
        """The axes of more than one device."""
        return tuple(axis for axis, size in enumerate(self.sizes) if size > 1)

    @property
    def degrees(self) -> tuple[int, ...]:
        """The numbers of blocks above 1 that sets of axes make, ascending."""
        found = {1}
        for axis in self.splitting:
            found |= {n * self.sizes[axis] for n in found}
        return tuple(sorted(found - {1}))

    def degree(self, axes: Sequence[int]) -> int:
        """The number of blocks that ``axes`` together make."""
        return prod([self.sizes[axis] for axis in axes])


@dataclass(frozen=True, eq=False)
class Domain:
    """The layouts of tensors of one shape. Shapes with the same divisibility share one domain."""

    rank: int
    layouts: tuple[Layout, ...]
    degrees: np.ndarray = field(repr=False)
    """[layouts]: the number of devices over which each layout splits the tensor, smaller where blocks are padded."""
    whole: Domain | None = None
    """The same domain without partial layouts, where this one has them: these come last, with one more entry in front,
    the axes over which the tensor is a sum of the devices' parts."""
    width: float = 1.0
    """The size of an element of a partial tensor while it is reduced, in units of its size afterwards."""
    padded: frozenset[Layout] = frozenset()
    """The layouts that split a dimension unevenly."""
    shape: tuple[int, ...] | None = None
    """The shape, where there are such layouts."""

    @cached_property
    def position(self) -> dict[Layout, int]:
        return {layout: position for position, layout in enumerate(self.layouts)}

    @cached_property
    def parts(self) -> dict[Layout, float]:
        """Per layout, over how many devices it splits the tensor, as in ``degrees``."""
        return dict(zip(self.layouts, self.degrees.astype(float).tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.layouts)


class LayoutSpace:
    """All layouts over one mesh, by rank, with those that a shape admits.

    ``padded`` are sizes that may be split over a number of blocks that does not divide them. ``named`` are orders of
    axes on one dimension that are layouts on any mesh.
    """

    def __init__(
        self,
        mesh: MeshAxes,
        padded: frozenset[int] = frozenset(),
        named: Iterable[tuple[int, ...]] = (),
    ) -> None:
        self.mesh = mesh
        self.padded = padded
        begun = {order[:count] for order in named for count in range(2, len(order) + 1)}  # slices take axis after axis
        self._named = sorted(order for order in begun if order != tuple(sorted(order)))
        self._in_every_order = len(mesh.splitting) <= _MAX_AXES_IN_EVERY_ORDER
        self._of_rank: dict[int, tuple[tuple[Layout, ...], np.ndarray]] = {}
        self._domains: dict[tuple[int, bytes], Domain] = {}
        self._by_shape: dict[tuple[int, ...], Domain] = {}
        self._partial: dict[tuple[Domain, float], Domain] = {}

    def same_layouts(self, other: LayoutSpace) -> bool:
        """Whether another space has the same layouts."""
        return (self.mesh, self.padded, self._named) == (other.mesh, other.padded, other._named)

    def domain(self, shape: tuple[int, ...]) -> Domain:
        """The layouts whose axes divide the dimensions of ``shape``. The replicated one is the first."""
        found = self._by_shape.get(shape)
        if found is None:
            layouts, degrees = self._all_of_rank(len(shape))
            sizes = np.array(shape, dtype=np.int64)
            divides = ((sizes % degrees == 0) & ((sizes > 0) | (degrees == 1))).all(axis=1)
            key = (len(shape), divides.tobytes())
            if self.padded.intersection(shape):
                found = self._padded_domain(shape, divides)
            elif key not in self._domains:
                kept = np.flatnonzero(divides)
                self._domains[key] = Domain(len(shape), tuple(layouts[i] for i in kept), degrees[kept].prod(axis=1))
            found = self._by_shape[shape] = found or self._domains[key]
        return found

    def _padded_domain(self, shape: tuple[int, ...], divides: np.ndarray) -> Domain:
        layouts, degrees = self._all_of_rank(len(shape))
        sizes = np.array(shape, dtype=np.int64)
        pads = [[self.pads(size, n) for size, n in zip(shape, row, strict=True)] for row in degrees.tolist()]
        even = (sizes % degrees == 0) & ((sizes > 0) | (degrees == 1))
        kept = np.flatnonzero((even | np.array(pads)).all(axis=1))
        blocks = np.maximum(1, -(-sizes // degrees[kept]))
        uneven = frozenset(layouts[i] for i in kept if not divides[i])
        of_blocks = np.where(sizes, sizes / blocks, 1).prod(axis=1)
        return Domain(len(shape), tuple(layouts[i] for i in kept), of_blocks, padded=uneven, shape=shape)

    def pads(self, size: int, blocks: int) -> bool:
        """Whether a dimension may be split unevenly: the padding must be small."""
        return size in self.padded and 0 < padding(size, blocks) <= size * MAX_PADDING

    def blocks_nest(self, size: int, outer: Sequence[int], inner: Sequence[int]) -> bool:
        """Whether each block over the axes ``inner`` is inside a block over the first of them, ``outer``."""
        few, many = self.mesh.degree(outer), self.mesh.degree(inner)
        return few == 1 or -(-size // few) * few == -(-size // many) * many

    def with_partial(self, shape: tuple[int, ...], width: float) -> Domain:
        """The domain of ``shape`` with the layouts in which the tensor is a partial sum over some mesh axes."""
        whole = self.domain(shape)
        key = (whole, width)
        if key not in self._partial:
            axes = self.mesh.splitting
            sums = [group for size in range(1, len(axes) + 1) for group in combinations(axes, size)]
            partial = [
                ((pending, *layout), whole.degrees[position])
                for pending in sums
                for position, layout in enumerate(whole.layouts)
                if layout not in whole.padded  # partial sums are reduced inside of a `shard_map`
                if not set(pending) & {axis for group in layout for axis in group}
            ]
            layouts = (*whole.layouts, *(layout for layout, _ in partial))
            degrees = np.array([*whole.degrees, *(degree for _, degree in partial)])
            self._partial[key] = Domain(whole.rank, layouts, degrees, whole, width, whole.padded, whole.shape)
        return self._partial[key]

    def orders(self, axes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """The orders in which ``axes`` (ascending) may split one dimension."""
        if self._in_every_order:
            return iter(permutations(axes))
        return iter([axes, *(order for order in self._named if set(order) == set(axes))])

    def _all_of_rank(self, rank: int) -> tuple[tuple[Layout, ...], np.ndarray]:
        if rank not in self._of_rank:
            layouts = tuple(self._enumerate(rank))
            degrees = [[self.mesh.degree(axes) for axes in layout] for layout in layouts]
            self._of_rank[rank] = layouts, np.array(degrees, dtype=np.int64).reshape(len(layouts), rank)
        return self._of_rank[rank]

    def _enumerate(self, rank: int) -> Iterator[Layout]:
        axes = self.mesh.splitting
        # dimension `rank` stands for "splits nothing"; counting down from it puts the replicated layout first
        for places in product(range(rank, -1, -1), repeat=len(axes)):
            members = [tuple(axis for axis, place in zip(axes, places, strict=True) if place == d) for d in range(rank)]
            yield from product(*(self.orders(group) for group in members))


def padding(size: int, blocks: int) -> int:
    """The rows that a dimension of ``size`` lacks for equal blocks."""
    return -size % blocks


def replicated(rank: int) -> Layout:
    """The layout without a split."""
    return ((),) * rank


def axes_of(entry: object) -> tuple[str, ...]:
    """The mesh axes that one entry of a ``PartitionSpec`` names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)  # type: ignore[arg-type]


def to_spec(mesh: MeshAxes, layout: Layout) -> PartitionSpec:
    """The ``PartitionSpec`` of a layout, without trailing unsplit dimensions."""
    entries: list[Any] = []
    for axes in layout:
        names = tuple(mesh.names[axis] for axis in axes)
        entries.append(None if not names else names[0] if len(names) == 1 else names)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def from_spec(mesh: MeshAxes, spec: PartitionSpec, rank: int) -> Layout:
    """The layout of a ``PartitionSpec`` for a tensor of ``rank`` dimensions, without axes of size 1.

    Raises ValueError for an axis that is not in the mesh and for a spec longer than the rank.
    """
    if len(spec) > rank:
        raise ValueError(f"`{spec}` has {len(spec)} entries for a tensor of {rank} dimensions")
    layout = []
    for entry in tuple(spec) + (None,) * (rank - len(spec)):
        names = () if entry is None or entry is PartitionSpec.UNCONSTRAINED else entry
        names = (names,) if isinstance(names, str) else tuple(names)
        unknown = [name for name in names if name not in mesh.names]
        if unknown:
            raise ValueError(f"`{spec}` names the axis `{unknown[0]}`; the mesh has {', '.join(mesh.names)}")
        axes = tuple(mesh.names.index(name) for name in names)
        layout.append(tuple(axis for axis in axes if mesh.sizes[axis] > 1))
    return tuple(layout)


def axes_by_dim(mesh: MeshAxes, layout: Layout, dims: Sequence[int]) -> tuple[tuple[str, int, int], ...]:
    """The name and the size of each mesh axis, and the place among ``dims`` of the one that it splits, -1 without one.

    >>> axes_by_dim(MeshAxes(("x", "y"), (2, 4)), ((), (1,)), (1, 0))
    (('x', 2, -1), ('y', 4, 0))
    """
    split = {axis: place for place, dim in enumerate(dims) for axis in layout[dim]}
    named = enumerate(zip(mesh.names, mesh.sizes, strict=True))
    return tuple((name, size, split.get(axis, -1)) for axis, (name, size) in named)


def satisfies(layout: Layout, fixed: tuple[tuple[int, ...] | None, ...]) -> bool:
    """Whether a layout satisfies a hard layout, in which None is a free dimension."""
    return all(want is None or axes == want for axes, want in zip(layout, fixed, strict=True))
