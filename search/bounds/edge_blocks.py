"""Edge blocks: the tables of several edges in one array, whose messages are computed by a few calls of numpy.

A message is a minimum for each choice of the far end: over the near end's choices, of the sum of what the near end
sends and the table's entry. The near end's choices are the rows of a block. The far ends' choices, edge after edge, are
its columns. One minimum over the rows gives the messages of all edges. An edge whose near end has fewer choices than
the block has rows is padded by infinite entries. Blocks therefore gather edges of similar sizes.

>>> import numpy as np
>>> block = Block.of([np.array([[0.0, 2.0]]), np.array([[1.0, 5.0], [4.0, 3.0]])], near=0)
>>> block.tables
array([[ 0.,  2.,  1.,  5.],
       [inf, inf,  4.,  3.]])
>>> block.edge_of, block.edge_starts
(array([0, 0, 1, 1]), array([0, 2]))
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Block", "groups_by_size", "ragged"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]
_MOST_PADDING = 6000
"""Entries that edges may be padded by together: about what the calls for a block of their own take."""


@dataclass(frozen=True, slots=True)
class Block:
    """Tables of some edges of one level in one direction, and index arrays that depend on nothing but these."""

    tables: Array
    """`[choice of the near end, (edge, choice of the far end)]`."""
    edge_of: Index
    """Per column, its edge."""
    columns: Index
    edge_starts: Index
    """Per edge, its first column."""
    entries: int
    """Of the tables, without what pads them."""

    @classmethod
    def of(cls, tables: list[Array], near: int) -> Block:
        """near: the near end's axis in all tables."""
        near_sizes, far_sizes = ([table.shape[axis] for table in tables] for axis in (near, 1 - near))
        edge_of, _ = ragged(np.array(far_sizes, dtype=np.intp))
        entries = np.full((max(near_sizes, default=0), len(edge_of)), np.inf)
        start = 0
        starts = []
        for table, rows, columns in zip(tables, near_sizes, far_sizes, strict=True):
            entries[:rows, start : start + columns] = table if near == 0 else table.T
            starts.append(start)
            start += columns
        count = sum(table.size for table in tables)
        return cls(entries, edge_of, np.arange(len(edge_of)), np.array(starts, dtype=np.intp), count)


def groups_by_size(near_sizes: list[int], far_sizes: list[int]) -> list[list[int]]:
    """Groups of edges of similar sizes, so that blocks need little padding. Edges are given by the choices of their
    near and far ends, and come out as numbers, by the near end's choices, then ascending."""
    groups: list[list[int]] = []
    width = padding = 0
    for edge in sorted(range(len(near_sizes)), key=lambda e: (-near_sizes[e], e)):
        padding += (width - near_sizes[edge]) * far_sizes[edge]
        if not groups or padding > _MOST_PADDING:
            groups.append([])
            width, padding = near_sizes[edge], 0
        groups[-1].append(edge)
    return groups


def ragged(lengths: Index) -> tuple[Index, Index]:
    """For rows of these lengths laid end to end: the row of each entry, and its place in the row."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    return rows, np.arange(len(rows)) - starts[rows]
