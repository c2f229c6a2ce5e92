"""Union-find: connected components by pairs of their members.

>>> leaders(5, [(3, 4), (1, 3)])
[0, 1, 2, 1, 1]
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["leaders"]


def leaders(count: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """For each number below a count, the least one that pairs connect it to."""
    leader = list(range(count))

    def find(n: int) -> int:
        while leader[n] != n:
            leader[n] = n = leader[leader[n]]
        return n

    for one, other in pairs:
        a, b = find(one), find(other)
        leader[max(a, b)] = min(a, b)
    return [find(n) for n in range(count)]
