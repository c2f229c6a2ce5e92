"""Which groups of merged collectives wait for which."""

from __future__ import annotations


class Waiting:
    """Which groups of collectives wait for which: each for all that any of its members depends on.

    Sets of groups are numbers with a bit for each, the lowest one for the first.
    """

    def __init__(self) -> None:
        self._before: list[int] = []  # per group
        self._full = 0

    def begin(self, last: int) -> int:
        """The number of a new group; the last one of its kind, or -1, takes no more members."""
        self._before.append(0)
        self._full |= 1 << last if last >= 0 else 0
        return len(self._before) - 1

    def join(self, number: int, before: int) -> None:
        """Lets a group have a member that depends on others."""
        self._before[number] |= before & ~(1 << number)

    def still_open(self, found: int) -> int:
        """Of groups, and of what the full ones among them wait for, those that may take more members."""
        full = found & self._full
        if not full:
            return found
        for number in _members(full):
            self._look_through(number)
            found |= self._before[number]
        return found & ~full

    def _look_through(self, number: int) -> None:
        """Lets a group wait for what full ones wait for instead of for these."""
        stack = [number]
        while stack:
            before = self._before[stack[-1]]
            full = _members(before & self._full)
            if deeper := [other for other in full if self._before[other] & self._full]:
                stack += deeper
                continue
            for other in full:
                before = before & ~(1 << other) | self._before[other]
            self._before[stack.pop()] = before

    def leads(self, number: int, others: int) -> bool:
        """Whether one of the others is a group that may take more members, or waits for it."""
        seen = left = others
        while left and not seen >> number & 1:
            other = left.bit_length() - 1
            before = self._before[other] = self.still_open(self._before[other])
            left = left & ~(1 << other) | before & ~seen
            seen |= before
        return bool(seen >> number & 1)


def _members(groups: int) -> list[int]:
    found = []
    while groups:
        found.append(groups.bit_length() - 1)
        groups ^= 1 << found[-1]
    return found
