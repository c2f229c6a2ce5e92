"""TRW-S: lower bounds by sequential tree-reweighted message passing, with decoded assignments.

Kolmogorov, "Convergent Tree-Reweighted Message Passing for Energy Minimization", PAMI 2006: the algorithm of section 4
with the bound of section 5. Monotonic chains cover the network. Sweeps up and down the order of the variables average
the chains' min-marginals at each variable. The sum of the chains' minima is a lower bound that never falls. It equals
the optimum where the linear relaxation is tight and the sweeps do not stop at a weaker fixed point.

A sweep is a few numpy calls per *level*. Variables of one level have no edges between them and are handled together as
ragged rows of flat arrays. `Sweeper` holds the arrays:

- messages: one number per (edge, end, choice of that end). The messages into one choice are adjacent.
- tables: per direction and level, in one or a few blocks (`shardplan.search.bounds.edge_blocks`). Levels with the same
  tables share them, as repeated layers do. Large tables are not copied: their edges are handled one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.search.bounds.edge_blocks import Block, groups_by_size, ragged
from shardplan.search.bounds.message_order import Model, levels_of

__all__ = ["Sweeper"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]
_LARGE_TABLE = 4000


@dataclass(frozen=True, slots=True)
class _Large:
    """An edge with a large table, in one direction."""

    near: int
    """Place of the near end."""
    choices: slice
    """Of the near end."""
    share: float
    opposite: slice
    """Where the message into the near end is stored."""
    targets: slice
    """Where the message into the far end is stored."""
    table: Array
    axis: int
    """The near end's, in the table."""


@dataclass(frozen=True, slots=True)
class _Edges:
    """Edges of one level in one direction, whose messages are sent together (see `Sweeper`)."""

    sources: Index
    """`[choice of the near end, edge]`: the choice, flat; the last one again where the near end has fewer."""
    shares: Array
    """Per edge."""
    opposite: Index
    """As `sources`: where the message from the far end is stored."""
    block: Block
    ends: tuple[Index, Index]
    """Places of the near and the far end of each edge."""
    far_sources: Index
    """Per (edge, choice of the far end): place of the near end."""
    targets: Index
    """Per (edge, choice of the far end): where the message is stored."""


@dataclass(frozen=True, slots=True)
class _Level:
    """Index arrays of one level in one direction (see `Sweeper`)."""

    first: int
    """Place of its first variable."""
    choices: slice
    """Its choices, of the flat array of all."""
    slots: slice
    slot_starts: Index
    row_starts: Index
    """First choice of each of its variables, within the level."""
    row_of: Index
    edges: list[_Edges]
    large: list[_Large]


class Sweeper:
    """Message passing on a `Model`. `costs` may be changed between sweeps: all bounds are of the costs then set."""

    def __init__(self, model: Model) -> None:
        self.model = model
        levels = levels_of(model)
        count = len(model.costs)
        self.order = np.array(sorted(range(count), key=lambda v: (levels[v], v)), dtype=np.intp)
        place = np.empty(count, dtype=np.intp)
        place[self.order] = np.arange(count)
        sizes = np.array([len(model.costs[v]) for v in self.order], dtype=np.intp)
        self.sizes = sizes
        self.offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.intp)
        self.place = place
        self.costs: Array = np.concatenate([model.costs[v] for v in self.order])
        self._connect(levels)
        self.messages = np.zeros(int(self._slot_offsets[-1]))
        self.beliefs = self.costs.copy()
        """After `down`: by how much each choice's min-marginal was above its variable's least."""

    def _connect(self, levels: list[int]) -> None:
        """Builds the index arrays."""
        model, place, sizes = self.model, self.place, self.sizes
        ends = place[np.array(model.edges, dtype=np.intp).reshape(-1, 2)]
        turned = ends[:, 0] > ends[:, 1]
        self._turned = turned
        low, high = ends.min(axis=1), ends.max(axis=1)
        count = len(sizes)
        ups, downs = np.bincount(low, minlength=count), np.bincount(high, minlength=count)
        self.shares = 1.0 / np.maximum(np.maximum(ups, downs), 1)
        degrees = np.maximum(ups + downs, 1)
        # The slot of each edge at each of its ends.
        both = np.concatenate([low, high])
        sequence = np.argsort(both, kind="stable")
        rank_within = np.empty(len(both), dtype=np.intp)
        firsts = np.concatenate([[0], np.cumsum(ups + downs)])[:-1]
        rank_within[sequence] = np.arange(len(both)) - np.repeat(firsts, ups + downs)
        self._slot_offsets = np.concatenate([[0], np.cumsum(sizes * degrees)]).astype(np.intp)
        self._degrees = degrees
        self._ends = (low, high)
        self._end_slots = (rank_within[: len(low)], rank_within[len(low) :])
        level_of = np.array([levels[v] for v in self.order], dtype=np.intp)
        bounds = np.searchsorted(level_of, np.arange((int(level_of[-1]) if count else -1) + 2))
        self._is_large = np.array([t.size > _LARGE_TABLE for t in model.tables], dtype=bool)
        views = {id(t): t.T for t, turn in zip(model.tables, turned, strict=True) if turn}
        tables = [views[id(t)] if turn else t for t, turn in zip(model.tables, turned, strict=True)]
        self._up, self._down = self._direction(tables, 0, bounds), self._direction(tables, 1, bounds)
        every = (*self._up, *self._down)
        blocks = list({id(edges.block): edges.block.tables for level in every for edges in level.edges}.values())
        self._buffer = np.empty(max((tables.size for tables in blocks), default=0))
        self._large_buffer = np.empty(max((table.size for table in self._large_tables()), default=0))
        spread = max([_spread(blocks), *(_spread([table]) for table in self._large_tables())])
        self.penalty = 4.0 * (spread + float(np.ptp(self.costs)) if count else 0.0) + 1.0
        """What decoding takes an excluded pair to cost."""

    def _direction(self, tables: list[Array], near: int, bounds: Index) -> list[_Level]:
        """Levels with the messages that leave them, upwards (near end low) or downwards (near end high)."""
        sources, targets = self._ends[near], self._ends[1 - near]
        every = np.lexsort((targets, sources))
        edges, large = every[~self._is_large[every]], every[self._is_large[every]]
        splits = np.searchsorted(sources[edges], bounds)
        large_splits = np.searchsorted(sources[large], bounds)
        blocks: dict[tuple[int, ...], Block] = {}
        levels = []
        for i, (first, last) in enumerate(itertools.pairwise(bounds.tolist())):
            within = edges[splits[i] : splits[i + 1]]
            level = self._level(first, last)
            for group in groups_by_size(*(self.sizes[ends[within]].tolist() for ends in (sources, targets))):
                own = within[group]
                key = tuple([id(tables[e]) for e in own.tolist()])
                if key not in blocks:
                    blocks[key] = Block.of([tables[e] for e in own.tolist()], near)
                level.edges.append(self._edges(own, near, blocks[key]))
            for e in large[large_splits[i] : large_splits[i + 1]].tolist():
                level.large.append(self._large_edge(e, tables[e], near))
            levels.append(level)
        return levels

    def _large_edge(self, edge: int, table: Array, near: int) -> _Large:
        source, target = int(self._ends[near][edge]), int(self._ends[1 - near][edge])
        near_slot, far_slot = int(self._end_slots[near][edge]), int(self._end_slots[1 - near][edge])
        # As it lies in memory, so that it is read in order.
        turned = not table.flags.c_contiguous and table.T.flags.c_contiguous
        return _Large(
            near=source,
            choices=slice(int(self.offsets[source]), int(self.offsets[source + 1])),
            share=float(self.shares[source]),
            opposite=self._slots(source, near_slot),
            targets=self._slots(target, far_slot),
            table=table.T if turned else table,
            axis=1 - near if turned else near,
        )

    def _slots(self, place: int, slot: int) -> slice:
        """Where the messages of one edge into one variable are stored."""
        start, stop = int(self._slot_offsets[place]), int(self._slot_offsets[place + 1])
        return slice(start + slot, stop, int(self._degrees[place]))

    def _large_tables(self) -> list[Array]:
        return list({id(t): t for t in self.model.tables if t.size > _LARGE_TABLE}.values())

    def _level(self, first: int, last: int) -> _Level:
        rows = self.sizes[first:last]
        row_degrees = np.repeat(self._degrees[first:last], rows)
        return _Level(
            first=first,
            choices=slice(int(self.offsets[first]), int(self.offsets[last])),
            slots=slice(int(self._slot_offsets[first]), int(self._slot_offsets[last])),
            slot_starts=np.cumsum(row_degrees) - row_degrees,
            row_starts=np.cumsum(rows) - rows,
            row_of=np.repeat(np.arange(last - first), rows),
            edges=[],
            large=[],
        )

    def _edges(self, edges: Index, near: int, block: Block) -> _Edges:
        offsets, slot_offsets, degrees = self.offsets, self._slot_offsets, self._degrees
        sources, targets = self._ends[near][edges], self._ends[1 - near][edges]
        near_slots, far_slots = self._end_slots[near][edges], self._end_slots[1 - near][edges]
        near_choice = np.minimum(np.arange(len(block.tables))[:, None], self.sizes[sources] - 1)
        far_edge, far_choice = ragged(self.sizes[targets])
        far_var = targets[far_edge]
        return _Edges(
            sources=offsets[sources] + near_choice,
            shares=self.shares[sources],
            opposite=slot_offsets[sources] + near_choice * degrees[sources] + near_slots,
            block=block,
            ends=(sources, targets),
            far_sources=sources[far_edge],
            targets=slot_offsets[far_var] + far_choice * degrees[far_var] + far_slots[far_edge],
        )

    @property
    def ends(self) -> tuple[Index, Index]:
        """Places of the lower and the higher end of each edge."""
        return self._ends

    @property
    def entries(self) -> int:
        """Number of table entries, each of which a sweep reads twice."""
        large = sum(edge.table.size for level in self._up for edge in level.large)
        return sum(edges.block.entries for level in self._up for edges in level.edges) + large

    @property
    def levels(self) -> int:
        """Number of groups of variables that are handled one after another."""
        return len(self._up)

    def up(self) -> None:
        """One sweep in ascending order."""
        for level in self._up:
            self._gather(level)
            self._send(level)

    def down(self) -> float:
        """One sweep in descending order; returns the lower bound."""
        leasts: list[Array] = []
        for level in reversed(self._down):
            belief = self._gather(level)
            least = np.minimum.reduceat(belief, level.row_starts)
            leasts.append(least)
            belief -= least[level.row_of]
            leasts += self._send(level)
        return float(np.concatenate(leasts).sum()) if leasts else 0.0

    def _gather(self, level: _Level) -> Array:
        """The level's beliefs: its costs and all messages into it."""
        belief = self.beliefs[level.choices]
        np.add.reduceat(self.messages[level.slots], level.slot_starts, out=belief)
        belief += self.costs[level.choices]
        return belief

    def _send(self, level: _Level) -> list[Array]:
        """Sends the level's messages, each with its least entry taken off; returns these."""
        leasts = [self._send_large(edge) for edge in level.large]
        beliefs, messages = self.beliefs, self.messages
        for edges in level.edges:
            block = edges.block
            outgoing = beliefs[edges.sources]
            outgoing *= edges.shares
            outgoing -= messages[edges.opposite]
            # Taking into a buffer with "clip" is three times as fast as indexing, which checks and allocates.
            entries = self._buffer[: block.tables.size].reshape(block.tables.shape)
            outgoing.take(block.edge_of, 1, entries, "clip")
            entries += block.tables
            message = np.minimum.reduce(entries)
            least = np.minimum.reduceat(message, block.edge_starts)
            message -= least[block.edge_of]
            messages[edges.targets] = message
            leasts.append(least)
        return leasts

    def _send_large(self, edge: _Large) -> Array:
        outgoing = self.beliefs[edge.choices] * edge.share - self.messages[edge.opposite]
        entries = self._large_buffer[: edge.table.size].reshape(edge.table.shape)
        np.add(edge.table, outgoing[:, None] if edge.axis == 0 else outgoing, out=entries)
        message = entries.min(axis=edge.axis)
        least = message.min(keepdims=True)
        message -= least
        self.messages[edge.targets] = message
        return least

    def message_sums(self) -> Array:
        """Per choice, the sum of the messages into it."""
        starts = np.repeat(self._slot_offsets[:-1], self.sizes)
        within = np.arange(len(starts)) - np.repeat(self.offsets[:-1], self.sizes)
        return np.add.reduceat(self.messages, starts + within * np.repeat(self._degrees, self.sizes))

    def message_pairs(self) -> Iterator[tuple[int, int, Array, Array]]:
        """Per edge: the places of its ends, and the messages into either."""
        lows, highs = self._ends
        low_slots, high_slots = self._end_slots
        for low, high, low_slot, high_slot in zip(lows, highs, low_slots, high_slots, strict=True):
            into_low, into_high = self._slots(low, low_slot), self._slots(high, high_slot)
            yield int(low), int(high), self.messages[into_low], self.messages[into_high]

    def decode(self, rounds: int = 2) -> Index:
        """An assignment, by place: choices are fixed in ascending order, each the best for those fixed before it and
        the messages from those to come; then each variable is improved against all others, `rounds` times."""
        messages = self.messages.copy()
        choices = np.zeros(len(self.sizes), dtype=np.intp)
        for level in self._up:
            self._settle(level, messages, choices)
            self._tell(level, messages, choices)
        for level in self._down:
            self._tell(level, messages, choices)
        for _ in range(rounds):
            before = choices.copy()
            for up, down in zip(self._up, self._down, strict=True):
                self._settle(up, messages, choices)
                self._tell(up, messages, choices)
                self._tell(down, messages, choices)
            if (before == choices).all():
                break
        return choices

    def _settle(self, level: _Level, messages: Array, choices: Index) -> None:
        """Gives each variable of the level its best choice by these messages."""
        belief = np.add.reduceat(messages[level.slots], level.slot_starts)
        belief += self.costs[level.choices]
        best = np.flatnonzero(belief == np.minimum.reduceat(belief, level.row_starts)[level.row_of])[::-1]
        rows = level.row_of[best]
        choices[rows + level.first] = best - level.row_starts[rows]

    def _tell(self, level: _Level, messages: Array, choices: Index) -> None:
        """Replaces the messages of the level by the tables' columns of its variables' choices."""
        for edge in level.large:
            column = edge.table.take(int(choices[edge.near]), axis=edge.axis)
            messages[edge.targets] = np.minimum(column, self.penalty)
        for edges in level.edges:
            columns = edges.block.tables[choices[edges.far_sources], edges.block.columns]
            messages[edges.targets] = np.minimum(columns, self.penalty)

    def cost(self, choices: Index) -> float:
        """The cost of an assignment (by place)."""
        total = float(self.costs[self.offsets[:-1] + choices].sum())
        for level in self._up:
            for edges in level.edges:
                near, far = edges.ends
                total += float(edges.block.tables[choices[near], edges.block.edge_starts + choices[far]].sum())
        lows, highs = self._ends
        for e in np.flatnonzero(self._is_large).tolist():
            k, j = int(choices[lows[e]]), int(choices[highs[e]])
            total += float(self.model.tables[e][(j, k) if self._turned[e] else (k, j)])
        return total


def _spread(tables: list[Array]) -> float:
    """Between the least finite entry of all tables and the largest."""
    finite = [entries for entries in (table[np.isfinite(table)] for table in tables) if entries.size]
    return float(max(map(np.max, finite)) - min(map(np.min, finite))) if finite else 0.0
