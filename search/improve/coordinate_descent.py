"""Coordinate descent: cheaper choices of single variables, with all other choices fixed.

The descent ignores usage. The caller takes those of its steps that fit the limit.

>>> net = Network()
>>> variables = [net.add_variable([1.0, 0.0]) for _ in range(3)]
>>> net.add_tie(variables[0], variables[1])
>>> net.add_edge(variables[1], variables[2], np.array([[0.0, 5.0], [9.0, 5.5]]))
>>> descents(net, np.array([1, 1, 0])), descents(net, np.array([0, 0, 1]))
([Descent(gain=7.0, choices={0: 0, 1: 0})], [Descent(gain=1.5, choices={0: 1, 1: 1})])
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph.union_find import leaders
from shardplan.search.network import Network

__all__ = ["Descent", "descents"]

_MAX_ROUNDS = 10
_LEAST_GAIN = 1e-13
"""Of what a variable and its edges cost: less is rounding."""

_Edges = dict[int, list[tuple[int, NDArray[np.float64]]]]


class Descent(NamedTuple):
    """By how much an assignment gets cheaper where some variables, which touch each other, take other choices."""

    gain: float
    choices: dict[int, int]


def descents(network: Network, choices: NDArray[np.int64]) -> list[Descent]:
    """What makes an assignment cheaper one variable after another, until none does: apart, what does not touch."""
    taken, gains = choices.copy(), defaultdict[int, float](float)
    edges: _Edges = defaultdict(list)
    for u, v, index in network.edges:
        edges[u].append((v, network.tables[index]))
        edges[v].append((u, network.tables[index].T))
    groups = {variables[0]: variables for variables in _independent(len(network), network.ties)}
    first = {v: place for place, variables in groups.items() for v in variables}
    waiting = groups
    for _ in range(_MAX_ROUNDS):
        changed = dict[int, None]()
        for place, variables in waiting.items():
            costs = _costs(network, variables, edges, taken)
            best, present = int(costs.argmin()), int(taken[place])
            gain = float(costs[present] - costs[best])
            if gain > _LEAST_GAIN * abs(costs[present]):
                taken[variables] = best
                gains[place] += gain
                changed |= dict.fromkeys(first[w] for v in variables for w, _ in edges[v])
        waiting = {place: groups[place] for place in changed}
    found = sorted(gains)
    number = {place: n for n, place in enumerate(found)}
    touching = (
        (number[place], number[first[w]])
        for place in found
        for v in groups[place]
        for w, _ in edges[v]
        if first[w] in number
    )
    return [
        Descent(sum(gains[found[n]] for n in part), {v: int(taken[v]) for n in part for v in groups[found[n]]})
        for part in _independent(len(found), touching)
    ]


def _independent(count: int, pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The numbers below a count, those together that pairs connect."""
    groups: dict[int, list[int]] = {}
    for n, leader in enumerate(leaders(count, pairs)):
        groups.setdefault(leader, []).append(n)
    return list(groups.values())


def _costs(network: Network, tied: list[int], edges: _Edges, choices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Per choice of tied variables, what they and their edges cost."""
    total = np.zeros(network.costs[tied[0]].size)
    for v in tied:
        total += network.costs[v] * network.multiplicities[v]
        for w, table in edges[v]:
            if w not in tied:
                total += table[:, choices[w]]
            elif v < w:
                total += table.diagonal()
    return total
