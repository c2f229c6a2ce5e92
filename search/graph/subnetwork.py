"""Subnetworks: a few choices of each variable of a network, as a smaller network.

>>> from shardplan.search.network import Network
>>> net = Network()
>>> a, b = net.add_variable([3.0, 1.0, 4.0]), net.add_variable([1.0, 5.0])
>>> net.add_edge(a, b, np.array([[0.0, 9.0], [2.0, 6.0], [5.0, 3.0]]))
>>> part = Part.of(net, {a: np.array([True, False, True])})
>>> part.network.cost([1, 0]), part.outside(np.array([1, 0])).tolist(), part.inside(np.array([2, 0])).tolist()
(10.0, [2, 0], [1, 0])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph.pairwise_usage import PairUsage
from shardplan.search.network import Network

__all__ = ["Part"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]


@dataclass(frozen=True)
class Part:
    """A network with some choices of another one's variables, without its usages.

    kept: per variable, the numbers that its choices have in the whole network; None where these are all of its choices.
    """

    network: Network
    kept: list[Index] | None = None

    @staticmethod
    def of(whole: Network, masks: Mapping[int, NDArray[np.bool_]]) -> Part:
        """masks: per variable, which of its choices are left; all of those that it does not name."""
        numbers: dict[bytes, Index] = {}  # those of equal masks are one, and so are the tables between them

        def left(v: int) -> Index:
            mask = masks.get(v, np.ones(whole.costs[v].size, dtype=bool))
            return numbers.setdefault(mask.tobytes(), np.flatnonzero(mask))

        kept = [left(v) for v in range(len(whole))]
        part = Network()
        part.costs = [costs[kept[v]] for v, costs in enumerate(whole.costs)]
        part.names, part.multiplicities, part.ties = list(whole.names), list(whole.multiplicities), whole.ties
        tables: dict[tuple[int, int, int], Array] = {}
        for u, v, index in whole.edges:
            key = index, id(kept[u]), id(kept[v])
            if key not in tables:
                tables[key] = whole.tables[index][np.ix_(kept[u], kept[v])]
            part.add_edge(u, v, tables[key])
        return Part(part, kept)

    @staticmethod
    def holding(whole: Network, assignments: Sequence[NDArray[np.int64]]) -> Part:
        """The choices that some assignments take."""
        masks = {v: np.zeros(costs.size, dtype=bool) for v, costs in enumerate(whole.costs)}
        for v, chosen in enumerate(np.stack(assignments).T):
            masks[v][chosen] = True
        for u, v in whole.ties:
            masks[u] = masks[v] = masks[u] | masks[v]
        return Part.of(whole, masks)

    def outside(self, choices: NDArray[np.int64]) -> NDArray[np.int64]:
        """An assignment of the part, and perhaps of further variables, as one of the whole network."""
        own = choices[: len(self.network)]
        return own if self.kept is None else self._outside[self._starts + own]

    def holds(self, choices: NDArray[np.int64]) -> bool:
        """Whether an assignment of the whole network is one of the part."""
        return self.kept is None or bool((self._places(choices) >= 0).all())

    def inside(self, choices: NDArray[np.int64]) -> NDArray[np.int64]:
        """An assignment of the whole network, as one of the part. Raises ValueError where it is not in there."""
        if self.kept is None:
            return choices
        places = self._places(choices)
        if (places < 0).any():
            raise ValueError("the assignment takes choices that are not in this part of the network")
        return places

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """Where each variable's choices start, among all of the part."""
        sizes = np.array([costs.size for costs in self.network.costs], dtype=np.int64)
        return np.cumsum(sizes) - sizes

    @cached_property
    def _outside(self) -> NDArray[np.int64]:
        """The numbers of all choices of the part in the whole network."""
        return np.concatenate(self.kept or [])

    def _places(self, choices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Per variable, the number in the part of its choice in the whole network; -1 where that is not in there."""
        starts, numbers = self._numbers
        found = starts[:-1] + choices
        known = found < starts[1:]
        return np.where(known, numbers[np.where(known, found, 0)], -1)

    @cached_property
    def _numbers(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where each variable's choices up to the last one that is kept start, and the end; the numbers of all these in
        the part, or -1."""
        kept = self.kept or []
        starts = np.cumsum([0, *(int(one.max(initial=-1)) + 1 for one in kept)], dtype=np.int64)
        numbers = np.full(starts[-1], -1, dtype=np.int64)
        for start, one in zip(starts.tolist(), kept, strict=False):
            numbers[start + one] = np.arange(len(one))
        return starts, numbers

    def amounts(self, variable: int, amounts: Array) -> Array:
        """Of what each choice of a variable uses, that of the choices in here."""
        return amounts if self.kept is None else amounts[self.kept[variable]]

    def pair(self, usage: PairUsage) -> PairUsage:
        """The usage of two variables, of their choices in here."""
        if self.kept is None:
            return usage
        amounts = usage.amounts[np.ix_(self.kept[usage.u], self.kept[usage.v])]
        return PairUsage(usage.u, usage.v, amounts, usage.start, usage.end)
