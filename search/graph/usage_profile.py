"""Usage profiles: the usage of an assignment over time, binding times, and choices that never fit.

A usage is an amount over a half-open span of time. A variable of a reduced graph may have thousands, since it stands
for all variables that follow it. `Profile` holds the usages in flat arrays, for one order of variables and choices.
`used` sums them for an assignment, `at` gives the usage of every choice at one time.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph.graph import Graph, Infeasible

__all__ = ["Profile", "drop_safe_spans", "feasible_choices"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]


class Profile:
    """The usages of some variables of a graph, and what is fixed.

    instants: the times at which anything starts or ends, ascending; steps between them are numbered by their start.
    """

    def __init__(self, graph: Graph, variables: list[int], offsets: Index) -> None:
        """offsets: per variable, where its choices start among all choices."""
        self.limit = math.inf if graph.usage_limit is None else float(graph.usage_limit)
        self.size = sum(graph.size(v) for v in variables)
        owners, amounts, starts, ends, firsts = [], [], [], [], []
        total = 0
        for place, v in enumerate(variables):
            for values, start, end in graph.spans[v]:
                owners.append(place)
                amounts.append(values)
                starts.append(start)
                ends.append(end)
                firsts.append(total)
                total += len(values)
        fixed = graph.fixed_spans
        edges = np.array(starts + ends + [s for _, s, _ in fixed] + [e for _, _, e in fixed], dtype=np.int64)
        self.instants = np.unique(edges) if edges.size else np.zeros(1, dtype=np.int64)
        self.owners = np.array(owners, dtype=np.intp)
        self.firsts = np.array(firsts, dtype=np.intp)
        self.starts = np.searchsorted(self.instants, np.array(starts, dtype=np.int64))
        self.ends = np.searchsorted(self.instants, np.array(ends, dtype=np.int64))
        self.amounts = np.concatenate(amounts) if amounts else np.zeros(0)
        sizes = np.array([len(values) for values in amounts], dtype=np.intp)
        self.entry_span = np.repeat(np.arange(len(sizes)), sizes)
        within = np.arange(len(self.amounts)) - self.firsts[self.entry_span]
        self.entry_choice = np.asarray(offsets, dtype=np.intp)[self.owners][self.entry_span] + within
        self.fixed = self.add_up(
            np.array([a for a, _, _ in fixed]),
            np.searchsorted(self.instants, np.array([s for _, s, _ in fixed], dtype=np.int64)),
            np.searchsorted(self.instants, np.array([e for _, _, e in fixed], dtype=np.int64)),
        )

    def add_up(self, amounts: Array, starts: Index, ends: Index) -> Array:
        """The sum over time of amounts that are used from instant number `starts` until `ends`."""
        count = len(self.instants)
        steps = np.bincount(starts, weights=amounts, minlength=count)
        steps -= np.bincount(ends, weights=amounts, minlength=count)
        return np.cumsum(steps)

    def used(self, choices: Index) -> Array:
        """The usage at each instant, of one choice per variable."""
        return self.fixed + self.add_up(self.amounts[self.firsts + choices[self.owners]], self.starts, self.ends)

    def extreme(self, most: bool) -> Array:
        """The sum of each usage's highest (or least) amount, per instant."""
        if not len(self.firsts):
            return self.fixed
        reduce = np.maximum.reduceat if most else np.minimum.reduceat
        return self.fixed + self.add_up(reduce(self.amounts, self.firsts), self.starts, self.ends)

    def at(self, instant: int) -> Array:
        """Per choice of each variable, what it uses at this instant."""
        alive = (self.starts <= instant) & (instant < self.ends)
        entries = np.flatnonzero(alive[self.entry_span])
        used = np.bincount(self.entry_choice[entries], weights=self.amounts[entries], minlength=self.size)
        return used.astype(np.float64, copy=False)

    def candidates(self) -> Index:
        """Instants that could exceed the limit, without those at which no more is alive than at the next or last."""
        starting = np.bincount(self.starts, minlength=len(self.instants)) > 0
        ending = np.bincount(self.ends, minlength=len(self.instants) + 1)[1:] > 0
        tops = []
        rising = True
        for instant in range(len(self.instants)):
            rising = rising or bool(starting[instant])
            if rising and ending[instant]:
                tops.append(instant)
                rising = False
        top = np.array(tops, dtype=np.intp)
        return top[self.extreme(most=True)[top] > self.limit]


def drop_safe_spans(graph: Graph) -> int:
    """Forgets usages at times that stay within the limit whatever is chosen; returns how many."""
    live = graph.live()
    profile = _whole(graph, live)
    unsafe = np.concatenate([[0], np.cumsum(profile.extreme(most=True) > profile.limit)])
    safe = unsafe[profile.ends] == unsafe[profile.starts]
    count, position = 0, 0
    for v in live:
        spans = graph.spans[v]
        flags = safe[position : position + len(spans)]
        position += len(spans)
        if flags.any():
            graph.spans[v] = [span for span, flag in zip(spans, flags, strict=True) if not flag]
            graph.undominated.add(v)
            count += int(flags.sum())
    return count


def feasible_choices(graph: Graph) -> dict[int, NDArray[np.bool_]]:
    """Per variable, the choices that fit with everyone else at the least usage; only where some do not."""
    live = graph.live()
    profile = _whole(graph, live)
    if not len(profile.firsts):
        if profile.fixed.max() > profile.limit:
            raise Infeasible("what every assignment uses exceeds the usage limit")
        return {}
    room = profile.limit - profile.extreme(most=False)
    least = _range_minimum(room, profile.starts, profile.ends)
    above = profile.amounts - np.minimum.reduceat(profile.amounts, profile.firsts)[profile.entry_span]
    misfit = above > least[profile.entry_span] + 1e-9 * profile.limit
    bad = np.zeros(profile.size, dtype=bool)
    bad[profile.entry_choice[misfit]] = True
    masks = {}
    position = 0
    for v in live:
        size = graph.size(v)
        if bad[position : position + size].any():
            masks[v] = ~bad[position : position + size]
        position += size
    return masks


def _whole(graph: Graph, live: list[int]) -> Profile:
    sizes = np.array([graph.size(v) for v in live], dtype=np.intp)
    return Profile(graph, live, np.cumsum(sizes) - sizes)


def _range_minimum(values: Array, starts: Index, ends: Index) -> Array:
    """The least of `values[start:end]`, for each pair."""
    layers = [values]
    while 2 ** len(layers) <= len(values):
        half = 2 ** (len(layers) - 1)
        layers.append(np.minimum(layers[-1][:-half], layers[-1][half:]))
    depth = np.frexp((ends - starts).astype(np.float64))[1] - 1
    result = np.empty(len(starts))
    for layer, minima in enumerate(layers):
        here = np.flatnonzero(depth == layer)
        result[here] = np.minimum(minima[starts[here]], minima[ends[here] - 2**layer])
    return result
