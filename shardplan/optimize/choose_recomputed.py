"""Choosing what is recomputed or waits on the host: the residuals whose fates keep a schedule within a memory limit.

First, what saves most of the bytes above the limit per second that it adds, one kind of residual after another in all
repeated layers at once, by whichever fate is cheaper; or all that a policy by hand computes again. Then single values
are kept again, as far as that fits, the dearest first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import invert

import numpy as np
from numpy.typing import NDArray

from shardplan.optimize.checkpoint_policies import POLICIES
from shardplan.optimize.residual_graph import ResidualGraph

_LEAST_SECONDS = 1e-7
"""What making any residual again costs at least: a part of a kernel's launch."""

_FEW = 16000
"""Of so many kinds times residuals, all kinds are judged again after each choice."""

_MANY = 200
"""Of more residuals, whole kinds are kept again before single ones."""

_STEPS = 2
"""How far around a residual kinds are told apart."""


@dataclass(frozen=True, slots=True)
class Fates:
    """What may become of residuals: whether they may be recomputed, and the bytes of host memory for those of a
    device."""

    recompute: bool = True
    host_bytes: float = 0.0


def choose_recomputed(graph: ResidualGraph, limit: float, fates: Fates) -> frozenset[int]:
    """The fates of residuals, for as few seconds as are found; those that save most where the limit is not reached."""
    ways = [fates, Fates()] if fates.recompute and fates.host_bytes else [fates]
    by_kinds = [_by_kinds(graph, limit, capped, way) for way in ways for capped in (True, False)]
    found = [*map(graph.useful, by_kinds)]
    if fates.recompute:
        found += [policy(graph) for policy in POLICIES.values()]
    fitting = [_kept_again(graph, one, limit) for one in found if _Judged.of(graph, one, limit).excess <= 0]
    if fitting:
        return min(fitting, key=lambda one: graph.estimate(one)[1])
    return _kept_again(graph, min(found, key=lambda one: _Judged.of(graph, one, limit).excess), limit)


@dataclass(frozen=True, slots=True)
class _Judged:
    """What some residuals do: the bytes above the limit, summed over places, the seconds, and the bytes over time."""

    excess: float
    seconds: float
    profile: NDArray[np.float64]

    @classmethod
    def of(cls, graph: ResidualGraph, chosen: frozenset[int], limit: float) -> _Judged:
        profile, seconds = graph.estimate(chosen)
        return cls(float(np.maximum(profile - limit, 0.0).sum()), seconds, profile)

    def saved(self, after: _Judged, limit: float, capped: bool) -> float:
        """The bytes that a later choice saves where this one is above the limit: those above the limit alone, or all,
        less what it adds to those above the limit elsewhere."""
        if capped:
            return self.excess - after.excess
        above = self.profile > limit
        elsewhere = np.maximum(after.profile[~above] - limit, 0.0).sum()
        return float((self.profile[above] - after.profile[above]).sum() - elsewhere)


def _by_kinds(graph: ResidualGraph, limit: float, capped: bool, fates: Fates) -> frozenset[int]:
    """One kind after another, that first which saves most per second, until the limit is reached or nothing saves.

    Of many kinds, one is judged again when it comes first: what it saves hardly grows with what is chosen."""
    families, chosen = _kinds(graph), graph.unread
    kinds = [*families] if fates.recompute else []
    if fates.host_bytes:
        kinds += [frozenset(~value for value in kind & graph.movable) for kind in families]
    now = _Judged.of(graph, chosen, limit)

    def judged(kind: frozenset[int]) -> tuple[float, frozenset[int], _Judged]:
        """What adding a kind saves per second; 0 for nothing."""
        found = (0.0, chosen, now)
        for more in _with(graph, kind, chosen, fates):
            after = _Judged.of(graph, more, limit)
            rate = now.saved(after, limit, capped) / max(after.seconds - now.seconds, _LEAST_SECONDS)
            if after.excess < now.excess and rate > found[0]:
                found = rate, more, after
        return found

    waiting = [(-np.inf, -1, number) for number in range(len(kinds))]  # by what each saved when it was judged last
    step = 0
    while now.excess > 0 and waiting:
        rate, at, number = heapq.heappop(waiting)
        if chosen.issuperset(kinds[number]):
            continue
        if at == step:
            if rate == 0:
                break
            _, chosen, now = judged(kinds[number])
            step += 1
            if len(kinds) * len(graph.residuals) <= (0 if fates.host_bytes else _FEW):
                waiting = [(-np.inf, -1, other) for *_, other in waiting]
        else:
            heapq.heappush(waiting, (-judged(kinds[number])[0], step, number))
    return chosen


def _with(graph: ResidualGraph, kind: frozenset[int], chosen: frozenset[int], fates: Fates) -> Iterator[frozenset[int]]:
    """What is chosen and one kind more, with the residuals that it is made of alone, without the stacks that it could
    be made of, or neither. Of what waits on the host, as much as its memory holds, those first that are made first."""
    kind = frozenset(fate for fate in kind if ~fate not in chosen)
    if not any(fate < 0 for fate in kind):
        sources = graph.unread.intersection(s for value in kind for s in graph.sources[value])
        ways = (chosen | kind, chosen | kind | graph.fresh_sources(kind, chosen), (chosen | kind) - sources)
        yield from dict.fromkeys(ways)
        return
    room = fates.host_bytes - graph.host_bytes(chosen)
    more = sorted(kind - chosen, reverse=True)
    held = np.cumsum([graph.host_sizes[~fate] for fate in more])
    yield chosen.union(more[: int(np.searchsorted(held, room, side="right"))])


def _kept_again(graph: ResidualGraph, chosen: frozenset[int], limit: float) -> frozenset[int]:
    """Fewer of the chosen, those first that take longest for what they save; of many, whole kinds at first. What
    exceeds the limit may do so by less then: what a residual is made of is kept for it."""
    now = _Judged.of(graph, chosen, limit)
    families = [one for kind in _kinds(graph) for one in (kind & chosen, frozenset(map(invert, kind)) & chosen)]
    kinds = [kind for kind in families if len(kind) > 1] if len(chosen) > _MANY else []
    for group in (*_dearest_first(graph, kinds), *_dearest_first(graph, [frozenset([value]) for value in chosen])):
        if group <= chosen:
            after = _Judged.of(graph, chosen - group, limit)
            if after.excess < now.excess or (after.excess == now.excess and after.seconds <= now.seconds):
                chosen, now = chosen - group, after
    return graph.useful(chosen)


def _dearest_first(graph: ResidualGraph, groups: Iterable[frozenset[int]]) -> list[frozenset[int]]:
    def dearness(group: frozenset[int]) -> tuple[float, int]:
        saved = sum(graph.sizes[max(fate, ~fate)] for fate in group)
        return -sum(map(graph.cost, group)) / max(saved, 1.0), min(group)

    return sorted(groups, key=dearness)


def _kinds(graph: ResidualGraph) -> Sequence[frozenset[int]]:
    """The residuals of one kind each: made in one way, of residuals of equal kinds, and read by such. Repeated layers
    have the same kinds, but for the first and the last of them."""
    program, readers = graph.program, dict[int, list[int]]()
    for value in graph.residuals:
        for source in graph.sources[value]:
            readers.setdefault(source, []).append(value)
    kind: dict[int, object] = {}
    for value in graph.residuals:
        maker, own = program.makers[value], program.values[value]
        kind[value] = maker.primitive.name, maker.source, own.shape, str(own.dtype), value in graph.stacks and value
    for _ in range(_STEPS):
        around = {
            value: (
                kind[value],
                *(sorted(str(kind.get(n)) for n in near.get(value, ())) for near in (graph.sources, readers)),
            )
            for value in graph.residuals
        }
        numbers: dict[str, int] = {}
        kind = {value: numbers.setdefault(repr(one), len(numbers)) for value, one in around.items()}
    found: dict[object, list[int]] = {}
    for value, own_kind in kind.items():
        found.setdefault(own_kind, []).append(value)
    return [frozenset(values) for values in found.values()]
