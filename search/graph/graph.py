"""The graph of a search: a network without ties, with finite costs where possible, and one table per edge.

`Graph.of` reads a `Network`: it merges ties, drops excluded choices and adds parallel edges up. Each later change (see
`shardplan.search.graph.reductions`) appends to `undo` a record that gives the dropped variables' choices. `expand`
reads the records backwards. An assignment of the graph costs as much as its expansion in the network.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph.tables import Tables
from shardplan.search.graph.union_find import leaders
from shardplan.search.network import Network

__all__ = ["Best", "Follow", "Graph", "Infeasible", "Keep"]

Array = NDArray[np.float64]
Spans = list[tuple[Array, int, int]]


class Infeasible(Exception):
    """No assignment satisfies the exclusions."""


@dataclass(frozen=True, slots=True)
class Best:
    """Undo: the variable takes its cheapest choice, given those of its neighbours (tables `[self, neighbour]`)."""

    variable: int
    costs: Array
    neighbours: tuple[tuple[int, Array], ...]


@dataclass(frozen=True, slots=True)
class Follow:
    """Undo: the variable's choice is `mapping[choice of leader]`."""

    variable: int
    leader: int
    mapping: NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Keep:
    """Undo: the variable's choices were renumbered; `kept[choice]` is the earlier number."""

    variable: int
    kept: NDArray[np.intp]


class Graph:
    """A network under reduction. Variables keep their ids; those that are gone are `None` in `costs`."""

    def __init__(self, count: int) -> None:
        self.tables = Tables()
        self.costs: list[Array | None] = [None] * count
        self.neighbours: list[dict[int, Array]] = [{} for _ in range(count)]
        self.spans: list[Spans] = [[] for _ in range(count)]
        """Per variable its usages: (amounts per choice, start, end)."""
        self.usage_limit: float | None = None
        self.fixed_spans: list[tuple[float, int, int]] = []
        """Usages that no longer depend on a choice."""
        self.constant = 0.0
        self.exclusions = True
        """Whether any cost may be infinite; reductions never make one so."""
        self.tick: Callable[[], None] = lambda: None
        """Called during long computations. It may raise; after that only `expand` may be used."""
        self.twins: dict[int, NDArray[np.intp]] = {}
        """Per variable that has any, a label per choice (see `Network.twins`)."""
        self.undo: list[Best | Follow | Keep] = []
        self.unsupported, self.unfollowed, self.undominated = (set(range(count)) for _ in range(3))
        """Variables that changed since it was looked whether all their choices have some to go with, whether they
        follow another one, and whether choices beat each other: the others need no further look."""
        self.hint: dict[int, int] | None = None
        """A valid assignment of the variables that are left, which every reduction carries along."""

    @classmethod
    def of(
        cls,
        network: Network,
        hint: Sequence[int] | NDArray[np.int64] | None = None,
        kept: tuple[int, NDArray[np.bool_]] | None = None,
    ) -> Graph:
        """The network with ties merged, exclusions dropped and edges added up; raises `Infeasible`.

        hint: a valid assignment of the network, to be carried along. kept: a variable, and its choices that are left.
        """
        graph = cls(len(network))
        leader_of = leaders(len(network), network.ties)
        tables = graph.tables = Tables.shared_by(network.derived)
        for v, costs in enumerate(network.costs):
            values = tables.scale(tables.unique(tables.excluded(costs)), network.multiplicities[v])
            u = leader_of[v]
            known = graph.costs[u]
            graph.costs[u] = values if known is None else tables.add(known, values)
        unique = [tables.unique(tables.excluded(table)) for table in network.tables]
        graph.exclusions = any(np.isinf(array).any() for array in [*unique, *(c for c in graph.costs if c is not None)])
        for u, v, index in network.edges:
            graph.add_edge(leader_of[u], leader_of[v], unique[index])
        for usage in network.usages if network.usage_limit is not None else ():
            graph.spans[leader_of[usage.variable]].append((tables.unique(usage.amounts), usage.start, usage.end))
        graph.usage_limit = network.usage_limit
        graph.twins = {v: labels for v, labels in network.twins.items() if leader_of[v] == v}
        followers = [(v, u) for v, u in enumerate(leader_of) if v != u]
        for v, u in followers:
            graph.undo.append(Follow(v, u, np.arange(network.costs[v].size)))
        if hint is not None:
            graph.hint = {v: int(hint[v]) for v in graph.live()}
        if kept is not None:
            graph.restrict(leader_of[kept[0]], kept[1])
        graph.make_consistent()
        return graph

    def twins_of(self, v: int, choice: int) -> NDArray[np.bool_]:
        """The twins of one of a variable's choices, itself included."""
        labels = self.twins.get(v, np.arange(self.size(v)))
        return labels == labels[choice]

    def copy(self, sibling: bool = False) -> Graph:
        """A graph that can be reduced without changing this one.

        Its `expand` gives this one's choices, or, for a sibling, whatever this one's gives.
        """
        other = Graph(len(self.costs))
        other.costs = list(self.costs)
        other.neighbours = [dict(around) for around in self.neighbours]
        other.spans = [list(spans) for spans in self.spans]
        other.fixed_spans = list(self.fixed_spans)
        other.usage_limit, other.constant, other.tick = self.usage_limit, self.constant, self.tick
        other.exclusions, other.twins = self.exclusions, dict(self.twins)
        other.unsupported, other.unfollowed = set(self.unsupported), set(self.unfollowed)
        other.undominated = set(self.undominated)
        if sibling:
            other.undo = list(self.undo)
        return other

    def become(self, other: Graph) -> None:
        """Restores the state of an earlier sibling copy of this graph."""
        self.tables, self.costs, self.neighbours, self.spans = other.tables, other.costs, other.neighbours, other.spans
        self.constant, self.fixed_spans, self.exclusions = other.constant, other.fixed_spans, other.exclusions
        self.twins, self.undo, self.hint = other.twins, other.undo, other.hint
        self.unsupported, self.unfollowed, self.undominated = other.unsupported, other.unfollowed, other.undominated

    def forget(self) -> None:
        """Frees results for tables that no edge has any more. Results for others are computed again when needed."""
        self.tables = Tables()

    def touch(self, variables: Iterable[int]) -> None:
        """Notes that costs or tables of these variables changed."""
        for v in variables:
            self.unsupported.add(v)
            self.unfollowed.add(v)
            self.undominated.add(v)

    def live(self) -> list[int]:
        """Ids of the variables that are left, ascending."""
        return [v for v, costs in enumerate(self.costs) if costs is not None]

    def size(self, v: int) -> int:
        """Number of choices of a variable that is left."""
        return len(self.costs[v])  # type: ignore[arg-type]

    def entries(self) -> int:
        """Number of entries of all tables that are left."""
        return sum(table.size for v in self.live() for w, table in self.neighbours[v].items() if v < w)

    def add_edge(self, u: int, v: int, table: Array) -> None:
        """Adds `table[u, v]`, onto the table that the pair has already."""
        if u == v:
            self.costs[u] = self.tables.add(self.costs[u], np.diagonal(table).copy())  # type: ignore[arg-type]
            self.touch((u,))
            return
        known = self.neighbours[u].get(v)
        if known is not None:
            table = self.tables.add(known, table)
        self.set_edge(u, v, table)

    def set_edge(self, u: int, v: int, table: Array) -> None:
        """Puts a table in the place of the one that the pair has."""
        self.neighbours[u][v] = table
        self.neighbours[v][u] = self.tables.transpose(table)
        self.touch((u, v))

    def remove(self, v: int) -> tuple[tuple[int, Array], ...]:
        """Takes a variable out, and returns its former neighbours with the tables `[v, neighbour]`."""
        neighbours = tuple(self.neighbours[v].items())
        for w, _ in neighbours:
            del self.neighbours[w][v]
        self.touch(self.neighbours[v])
        self.neighbours[v] = {}
        self.costs[v] = None
        if self.hint is not None:
            del self.hint[v]
        return neighbours

    def restrict(self, v: int, keep: NDArray[np.bool_]) -> None:
        """Drops the choices of `v` where `keep` is False."""
        if keep.all():
            return
        rows = keep.tobytes()
        self._note(v, keep)
        self.costs[v] = self.tables.restrict(self.costs[v], rows)  # type: ignore[arg-type]
        for w, table in self.neighbours[v].items():
            every = np.ones(table.shape[1], dtype=bool).tobytes()
            smaller = self.tables.restrict(table, rows, every)
            self.neighbours[v][w] = smaller
            self.neighbours[w][v] = self.tables.transpose(smaller)
        self.spans[v] = [(self.tables.restrict(amounts, rows), start, end) for amounts, start, end in self.spans[v]]

    def _note(self, v: int, keep: NDArray[np.bool_]) -> None:
        """Records that only some choices of `v` stay; a hint that is not among them is lost."""
        self.touch((v, *self.neighbours[v]))
        self.undo.append(Keep(v, np.flatnonzero(keep)))
        if v in self.twins:
            self.twins[v] = self.twins[v][keep]
        if self.hint is not None:
            if keep[self.hint[v]]:
                self.hint[v] = int(np.count_nonzero(keep[: self.hint[v]]))
            else:
                self.hint = None

    def cost(self, choices: dict[int, int]) -> float:
        """The cost of an assignment of the variables that are left."""
        total = self.constant
        for v, k in choices.items():
            total += float(self.costs[v][k])  # type: ignore[index]
            total += sum([float(t[k, choices[w]]) for w, t in self.neighbours[v].items() if v < w])
        return total

    def make_consistent(self) -> None:
        """Drops every choice that has an infinite cost, or none to go with it at some neighbour."""
        changed, self.unsupported = sorted(self.unsupported), set()
        if not self.exclusions:
            return
        masks: dict[int, NDArray[np.bool_]] = {}
        finite, covers = self.tables.finite, self.tables.covers
        queue: list[int] = []
        for v in changed:
            costs = self.costs[v]
            if costs is None:
                continue
            mask = finite(costs)
            if mask is not None:
                masks[v] = mask
            if mask is not None or not all([covers(table) for table in self.neighbours[v].values()]):
                queue.append(v)
        waiting = set(queue)
        queue.reverse()
        for count in itertools.count():
            if not queue:
                break
            if count % 256 == 0:
                self.tick()
            v = queue.pop()
            waiting.discard(v)
            mask = masks.get(v)
            if mask is not None and not mask.any():
                raise Infeasible(f"variable {v} has no choice left")
            for w, table in self.neighbours[v].items():
                where = finite(table)
                if where is None or (mask is None and covers(table)):
                    continue
                supported = np.logical_or.reduce(where if mask is None else where[mask], axis=0)
                known = masks.get(w)
                if not (supported if known is None else supported[known]).all():
                    masks[w] = supported if known is None else known & supported
                    if w not in waiting:
                        waiting.add(w)
                        queue.append(w)
        self.restrict_all(masks)
        self.unsupported = set()

    def restrict_all(self, masks: dict[int, NDArray[np.bool_]]) -> None:
        """Drops, of every variable with a mask, the choices where it is False."""
        changed = {v: mask for v, mask in masks.items() if not mask.all()}
        rows = {v: mask.tobytes() for v, mask in changed.items()}
        for v, mask in changed.items():
            if not mask.any():
                raise Infeasible(f"variable {v} has no choice left")
            self._note(v, mask)
            self.costs[v] = self.tables.restrict(self.costs[v], rows[v])  # type: ignore[arg-type]
            self.spans[v] = [
                (self.tables.restrict(amounts, rows[v]), start, end) for amounts, start, end in self.spans[v]
            ]
        for v in changed:
            for w, table in self.neighbours[v].items():
                if w in changed and w < v:
                    continue
                columns = rows.get(w) or b"\x01" * table.shape[1]
                smaller = self.tables.restrict(table, rows[v], columns)
                self.neighbours[v][w] = smaller
                self.neighbours[w][v] = self.tables.transpose(smaller)

    def expand(self, choices: dict[int, int], mark: int | None = None) -> NDArray[np.int64]:
        """Choices of all the network's variables, from those that were left when `undo` had `mark` steps (now)."""
        picked = [0] * len(self.costs)
        for v, k in choices.items():
            picked[v] = k
        for step in reversed(self.undo[:mark]):
            v = step.variable
            if isinstance(step, Best):
                total = step.costs
                for w, table in step.neighbours:
                    total = total + table[:, picked[w]]
                picked[v] = int(total.argmin())
            elif isinstance(step, Follow):
                picked[v] = int(step.mapping[picked[step.leader]])
            else:
                picked[v] = int(step.kept[picked[v]])
        return np.asarray(picked, dtype=np.int64)
