"""Usages that depend on the choices of two variables.

A resharded copy of a tensor takes memory only where its layout differs from the tensor's layout. That is no sum over
variables. `with_pairs` adds one variable per pair. A choice of it is a choice of the second variable together with the
usage of the pair, so the usage depends on one variable. The costs of the pair move to the new variable.

>>> import numpy as np
>>> net = Network(usage_limit=5)
>>> tensor, copy = net.add_variable([0.0, 0.0]), net.add_variable([3.0, 0.0])
>>> net.add_edge(tensor, copy, np.array([[0.0, 1.0], [1.0, 0.0]]))
>>> differs = np.array([[0, 4], [8, 0]])
>>> limited = with_pairs(net, [PairUsage(tensor, copy, differs, start=0, end=2)])
>>> from shardplan.search import solve
>>> solution = solve(limited)
>>> solution.choices[:2].tolist(), solution.peak_usage
([1, 1], 0.0)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from shardplan.search.network import EXCLUDED, Network

__all__ = ["PairUsage", "all_extended", "extended", "with_pairs"]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PairUsage:
    """Units that two variables together use at each time in `[start, end)`: `amounts[choice of u, choice of v]`."""

    u: int
    v: int
    amounts: Array
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _States:
    """The choices of a pair's variable. left: costs [choice of u, state]; right: which of v's choices a state is for
    [state, choice of v], as costs; amounts: [usage, state]."""

    left: Array
    right: Array
    amounts: Array


def with_pairs(network: Network, usages: Iterable[PairUsage]) -> Network:
    """A network with the usages of pairs added. The variables of this one come first and keep their numbers."""
    by_pair: dict[tuple[int, int], list[PairUsage]] = {}
    for usage in usages:
        if usage.start < usage.end:
            by_pair.setdefault((usage.u, usage.v), []).append(usage)
    tables: dict[tuple[int, int], list[int]] = {pair: [] for pair in by_pair}
    other = network.copy()
    other.derived = network.derived
    other.edges = [edge for edge in network.edges if edge[:2] not in tables]
    for u, v, table in network.edges:
        if (u, v) in tables:
            tables[u, v].append(table)
    for (u, v), together in by_pair.items():
        states = _known_states(network, (u, v), tables[u, v], [usage.amounts for usage in together])
        pair = other.add_variable(np.zeros(states.left.shape[1]), f"{network.names[u]} with {network.names[v]}")
        other.add_edge(u, pair, states.left)
        other.add_edge(pair, v, states.right)
        if v in network.twins:
            labels = network.twins[v]
            key = id(states), labels.tobytes()
            if key not in network.derived:
                network.derived[key] = _twins(states, labels)
            other.twins[pair] = network.derived[key]
        for usage, used in zip(together, states.amounts, strict=True):
            other.add_usage(pair, used, usage.start, usage.end)
    return other


def extended(network: Network, choices: NDArray[np.int64]) -> NDArray[np.int64]:
    """An assignment of a network that `with_pairs` made, from the choices of its first variables. Each pair takes its
    cheapest choice, and of these the one of least usage."""
    return all_extended(network, [choices])[0]


def all_extended(network: Network, assignments: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """The same of several assignments of the same variables."""
    if not assignments:
        return []
    chosen = np.stack(assignments)
    first = chosen.shape[1]
    costs: dict[int, Array] = {}  # [assignment, choice]
    for u, v, table in network.edges:
        if v >= first:
            costs[v] = costs.get(v, 0.0) + network.tables[table][chosen[:, u]]
        elif u >= first:
            costs[u] = costs.get(u, 0.0) + network.tables[table].T[chosen[:, v]]
    used: dict[int, Array] = {}
    for usage in network.usages:
        if usage.variable >= first:
            used[usage.variable] = used.get(usage.variable, 0.0) + usage.amounts
    later = np.zeros((len(chosen), len(network) - first), dtype=np.int64)
    for v, rows in costs.items():
        cheapest = rows == rows.min(axis=1, keepdims=True)
        later[:, v - first] = np.where(cheapest, used[v], np.inf).argmin(axis=1)
    return list(np.concatenate([chosen, later], axis=1))


def _known_states(network: Network, pair: tuple[int, int], tables: Sequence[int], usages: Sequence[Array]) -> _States:
    """The states of a pair, which are derived once of equal tables and amounts."""
    amounts = np.stack(usages).astype(np.float64)
    key = amounts.shape, blake2b(amounts.tobytes(), digest_size=16).digest(), *tables
    if key not in network.derived:
        shape = network.costs[pair[0]].size, network.costs[pair[1]].size
        network.derived[key] = _states(sum((network.tables[t] for t in tables), np.zeros(shape)), amounts)
    return network.derived[key]


def _states(costs: Array, amounts: Array) -> _States:
    """costs: [choice of u, choice of v]; amounts: [usage, choice of u, choice of v]."""
    excluded = costs >= EXCLUDED
    columns: dict[bytes, int] = {}
    kinds: list[tuple[int, tuple[float, ...]]] = []
    owners: list[list[int]] = []
    for j in range(costs.shape[1]):
        used = np.where(excluded[None, :, j], 0.0, amounts[:, :, j])
        kind = columns.setdefault(costs[:, j].tobytes() + used.tobytes(), len(columns))
        if kind == len(owners):
            rows = used[:, ~excluded[:, j]] if not excluded[:, j].all() else used[:, :1]
            kinds += [(j, amount) for amount in sorted(set(zip(*rows.tolist(), strict=True)))]
            owners.append([])
        owners[kind].append(j)
    left = np.stack([_allowed(costs[:, j], amounts[:, :, j], amount) for j, amount in kinds], axis=1)
    first = {js[0]: js for js in owners}
    right = np.full((len(kinds), costs.shape[1]), np.inf)
    for state, (j, _) in enumerate(kinds):
        right[state, first[j]] = 0.0
    return _States(left, right, np.array([amount for _, amount in kinds]).T)


def _twins(states: _States, labels: NDArray[np.intp]) -> NDArray[np.intp]:
    """A label per state of a pair: that of v's choices that it is for, and what the pair uses."""
    owners = [int(labels[np.isfinite(row)].min()) for row in states.right]
    numbers: dict[object, int] = {}
    kinds = zip(owners, states.amounts.T.tolist(), strict=True)
    return np.array([numbers.setdefault((label, *used), len(numbers)) for label, used in kinds], dtype=np.intp)


def _allowed(costs: Array, used: Array, amount: Sequence[float]) -> Array:
    """The costs of u's choices in a state, which pays for all that use no more."""
    return np.where((used <= np.array(amount)[:, None]).all(axis=0), costs, np.inf)
