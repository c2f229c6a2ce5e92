"""Searching: from a problem to the best schedule within the memory limit.

The problem is first solved without memory. Only where the plan that is found does not fit is memory made part of the
network, and solved again; so programs that fit, most of them, do not pay for the limit. What a coarser mesh can do,
with axes taken together, is a small part of the network: that is searched where all of it takes long or gives nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from shardplan.correcting import Corrections
from shardplan.descending import descend
from shardplan.errors import InfeasibleError
from shardplan.filling import fill
from shardplan.finding import CLEARLY, ENOUGH, Counts, Found, OutOfTime, Search, find, profile_of
from shardplan.leanest import Leanest
from shardplan.memory.products import turned_carries
from shardplan.problem import Problem
from shardplan.relieving import relieve
from shardplan.running import sums_of_products
from shardplan.search import METHODS, Part, Solution
from shardplan.search.solution import relative_gap
from shardplan.straightening import straightened
from shardplan.tables import megabytes

_FAR_TOO_DEAR, _JOINED = 0.1, 0.3
_SPARE = 0.8
"""The gaps, to what is needed without a limit, above which a schedule that fits is searched on from while less than
this share of the work is spent, and is held against what the joined mesh can do while there is work left."""

_ANOTHER, _MIXED, _MIXED_FIRST = 1.7, 0.35, 0.25
"""Where what is found at last is far too dear for what is proven, and less than so many times the work is spent that
searches may take, there is one more, and such a share of that work to mix what it finds. Where the gap is no more than
the last, what is known is mixed before, which often is enough."""

_LATE = 2.5
"""Where so many times the work that searches may take is spent, and nothing is found, what is leaner is looked for
before what the joined mesh can do: it is found sooner."""

_SHARE_OF_PARTS, _SHARE_OF_WHOLE = 0.75, 0.25
"""Of the work that searches may take: what those among the choices of a coarser mesh may, and the one among all choices
that follows these, for its bound above all."""
_LEAST_OF_WHOLE, _LONGEST = 2.0, 1.8
"""That one takes so many times the work of the search without a limit at least, and is not begun where that would be
more than so much of the work altogether."""

_AFTER = 0.5
"""Seconds after the time limit in which what is found is counted, and it is looked whether anything fits at all."""
_SECONDS_PER_OPERATION = 5e-4
"""What the memory of a program's first schedule takes to be counted, per operation: what takes more than the seconds
after the time limit is left out of the first search, of which one half is left in any case."""

_Masks = Mapping[int, NDArray[np.bool_]]


def search_within(problem: Problem, search: Search) -> Found:
    """The best schedule whose peak keeps within the limit. Raises InfeasibleError where nothing fits."""
    deadline = time.perf_counter() + search.seconds
    limit_bytes, ways = search.limit_bytes, [Counts(problem, search)]
    if limit_bytes < np.inf and (sums_of_products(problem).running or turned_carries(problem.program)):
        ways.append(Counts(problem, search, running=True))
    begun: list[Solution] = []

    def serves(choices: NDArray[np.int64]) -> bool:
        # as it would be found: in another order of mesh axes it may hold less
        known = Solution(straightened(problem, choices), np.inf, -np.inf, "feasible", search.method)
        if not begun:  # whatever the limit is: it has decided nothing so far
            begun.append(known)
        return any(counts.own(known).peak_bytes <= CLEARLY * limit_bytes for counts in ways)

    asked = serves if limit_bytes < np.inf else None
    best = find(problem, problem.network, search, _seconds_of_first(problem, search), serves=asked)
    if best.status == "infeasible":
        raise InfeasibleError(
            "the hard layouts of pins and constraints exclude each other: no layout of the step has them all"
        )
    first = ways[0].own(best)  # however late it is
    try:
        for counts in ways:
            counts.deadline = deadline + _AFTER
            found = counts.own(best)
            if found.peak_bytes <= limit_bytes:
                return found
        return _search_again(counts, search, [found, counts.own(begun[0] if begun else best)], deadline)
    except OutOfTime:
        raise _too_little(problem, search, [first], late=True) from None


def _seconds_of_first(problem: Problem, search: Search) -> float:
    counting = _SECONDS_PER_OPERATION * len(problem.program.operations)
    return max(search.seconds - max(counting - _AFTER, 0.0), search.seconds / 2)


def _search_again(counts: Counts, search: Search, first: Sequence[Found], deadline: float) -> Found:
    """The best schedule within the limit, where none of the ``first`` is: the best one without a limit, and one that
    does not depend on this limit."""
    among = partial(_among, counts, search)
    every, pairs = _coarser(counts.problem, search)
    whole = _Attempt(counts, search, first)
    counts.deadline = deadline
    main = whole
    with suppress(OutOfTime):
        main = (among(_nearest(pairs, first[1])) if pairs else None) or whole
    if main is not whole:
        main.corrections.be_patient(_SHARE_OF_PARTS, whole.corrections)
    main.joined = partial(among, every) if every else None
    free, patience, corrections = first[0].solution.lower_bound, whole.corrections.patience, main.corrections

    def dear(gap: float, share: float) -> bool:
        found = corrections.best
        return found is None or (relative_gap(found.solution.cost, free) > gap and corrections.work < share * patience)

    with suppress(OutOfTime):
        main.follow()
        descend(corrections)
        if dear(_JOINED, 1.0):
            main.take_joined()
            descend(corrections)
    corrections.take_counted()
    counts.deadline += _AFTER * (corrections.best is None)
    # all choices find lower peaks sooner than a mesh with two axes joined, but later than one with two of three
    attempts = [whole, *filter(None, [main.taken])] if main is whole else [main, whole]
    leanests = [attempt.leanest for attempt in attempts]
    with suppress(OutOfTime):
        if main is not whole and corrections.best is None:  # at last, a little below the least of fewer choices
            leanests.append(Leanest(counts, search, first[1], above=main.leanest))
        for leanest in leanests:
            if corrections.best is None:
                leanest.begin()
                leanest.look()
                corrections.take_leaner(leanest.take_spent())
                descend(corrections)
                if corrections.best is not None:
                    corrections.count_in(corrections.best.lifetimes)
    corrections.take_counted()
    if corrections.best is None:
        raise _too_little(counts.problem, search, [one.found for one in leanests], counts.late, whole.leanest.bound)
    if main is not whole:
        whole.corrections.go_on_from(corrections)
        corrections = whole.corrections
    with suppress(OutOfTime):
        if main is not whole:
            work = corrections.work + _LEAST_OF_WHOLE * first[0].solution.work
            if work < _LONGEST * patience and dear(ENOUGH, np.inf):
                corrections.search_from_best(_SHARE_OF_WHOLE * patience)
        elif dear(_FAR_TOO_DEAR, _SPARE):
            corrections.search_from_best()
        else:
            corrections.search_a_little_more()
        _mix_and_search(corrections)
    corrections.take_counted()
    return _straight(counts, corrections.best_proven(), search.limit_bytes)


def _mix_and_search(corrections: Corrections) -> None:
    """Mixes what is known, and makes one more search from the best schedule where that is far above what is proven, and
    work is left but for what mixing takes: first what mixing alone may make cheap enough."""

    def gap() -> float:
        assert corrections.best is not None
        return relative_gap(corrections.best.solution.cost, corrections.lower)

    work, mixed = corrections.work, gap() <= _MIXED_FIRST
    if mixed:
        fill(corrections)
        descend(corrections)
    if gap() > _FAR_TOO_DEAR and work < _ANOTHER * corrections.patience:
        corrections.search_from_best()
        corrections.until = max(corrections.until, corrections.work + _MIXED * corrections.patience)
        mixed = False
    if not mixed:
        fill(corrections)
        descend(corrections)


def _straight(counts: Counts, found: Found, limit_bytes: float) -> Found:
    """What is mixed from several searches, with mesh axes in the mesh's order where that keeps within the limit too."""
    choices = straightened(counts.problem, found.solution.choices)
    if np.array_equal(choices, found.solution.choices):
        return found
    with suppress(OutOfTime):
        turned = counts.own(replace(found.solution, choices=choices))
        return turned if turned.peak_bytes <= limit_bytes else found
    return found


class _Attempt:
    """Searches within the limit, and for the least peak besides, in a part of the problem's network, or all of it."""

    def __init__(self, counts: Counts, search: Search, first: Sequence[Found], part: Part | None = None) -> None:
        """``first``: as `_search_again` takes them."""
        self._first = first[0]
        self.corrections = Corrections(counts, search, first[0], part)
        self.leanest = Leanest(counts, search, first[1], part)
        self.joined: Callable[[], _Attempt | None] | None = None
        """Begins what is searched where a search has found nothing: what the mesh with all axes joined can do."""
        self.taken: _Attempt | None = None
        """That, once it was searched."""

    def follow(self) -> None:
        """Searches on from the first schedule."""
        self.corrections.follow(self._first, self._otherwise)

    def take_joined(self) -> bool:
        """Searches among what the joined mesh can do, and takes it over; False where that was done, or cannot be."""
        if self.joined is not None:
            self.taken, self.joined = self.joined(), None
            if self.taken is not None:
                self.taken.follow()
                self.corrections.take_over(self.taken.corrections)
                return True
        return False

    def _otherwise(self, again: bool) -> None:
        """Makes what a search has found fit, where none of it does: of parts of all that is known by then, and unless
        another search comes first (``again``), of what the joined mesh adds, or what is leaner."""
        corrections = self.corrections
        if self.joined is not None:  # which takes longer
            relieve(corrections, corrections.until_filled())
        if corrections.best is not None or again or corrections.least_bound > CLEARLY * corrections.limit_bytes:
            return
        late = corrections.work > _LATE * corrections.patience
        if late or not self.take_joined():
            self.leanest.begin()
            corrections.unreached = self.leanest.bound
            corrections.take_counted()
        if corrections.best is None:
            relieve(corrections, corrections.until_filled())
        corrections.spent += self.leanest.take_spent()  # now: it does not take from relieving


def _coarser(problem: Problem, search: Search) -> tuple[_Masks | None, Sequence[_Masks]]:
    """The choices that the mesh has with all axes taken as one, and on more than two axes those of each way to take
    them as two: few choices, of which some are good."""
    restrictions = problem.network.restrictions
    if not (restrictions and METHODS[search.method].limits):
        return None, ()
    return restrictions[0], restrictions[1:]


def _nearest(restrictions: Sequence[_Masks], first: Found) -> _Masks:
    """Of several coarser meshes, that which most choices of a schedule are choices of."""
    choices = first.solution.choices
    return max(restrictions, key=lambda masks: sum(bool(mask[choices[v]]) for v, mask in masks.items()))


def _among(counts: Counts, search: Search, masks: _Masks) -> _Attempt | None:
    """Searches among some choices; None where the hard layouts exclude these."""
    seconds, part = counts.seconds_left(), Part.of(counts.problem.network, masks)
    best = find(counts.problem, part.network, search, seconds, part=part)
    if not np.isfinite(best.cost):
        return None
    found = counts.own(best)
    attempt = _Attempt(counts, search, [found, found], part)
    attempt.corrections.patience *= _SHARE_OF_PARTS
    return attempt


def _too_little(
    problem: Problem, search: Search, leanest: Sequence[Found], late: bool, bound: float = 0.0
) -> InfeasibleError:
    """What is said where nothing fits, and no choice is below the bound."""
    least = min(leanest, key=lambda found: found.peak_bytes)
    said = _does_not_fit(problem, least, min(bound, least.peak_bytes), search, late and bound <= search.limit_bytes)
    return InfeasibleError(said, least.peak_bytes)


def _does_not_fit(problem: Problem, least: Found, bound: float, search: Search, late: bool) -> str:
    lifetimes = least.lifetimes
    profile = profile_of(lifetimes, least.schedule, search)
    moment = int(np.argmax(profile))
    program = problem.program
    makers = program.makers
    alive = []
    for value, lifetime in lifetimes.held.items():
        if lifetime.start <= moment <= lifetime.end:
            layout = least.schedule.assignment.values[value]
            domain = problem.domain(value)
            degree = domain.degrees[domain.position[layout]]
            tensor = program.values[value]
            where = tensor.name or (makers[value].source if value in makers else "captured array")
            alive.append((tensor.total_bytes / degree, f"{tensor.dtype}{list(tensor.shape)} of `{where}`"))
    largest = sorted(alive, key=lambda entry: -entry[0])[:5]
    lines = "\n".join(f"  {megabytes(size):>10} MB  {what}" for size, what in largest)
    proven = f"; by the planner's count none is below {_size(bound)}" if bound else ""
    helps = ["more devices", "a smaller batch", "jax.checkpoint around layers"]
    helps += ["donate_argnums for the state"] * (not search.donated) + ["more time"] * late
    stopped = f" in the {search.seconds:g} seconds of its search (`time_limit`)" if late else ""
    return (
        f"no layout was found{stopped} that keeps within {_size(search.limit_bytes)} per device; "
        f"the least peak found is {_size(least.peak_bytes)}{proven}. The largest tensors there, per device:\n{lines}\n"
        f"What helps: {', '.join(helps)}."
    )


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{megabytes(count)} MB"
