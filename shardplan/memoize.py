"""A cache of values derived from a program, a problem, a schedule or lifetimes.

>>> from types import SimpleNamespace
>>> @memoize
... def doubled(of):
...     print("doubling")
...     return 2 * of.number
>>> six = SimpleNamespace(number=3, memo={})
>>> doubled(six), doubled(six)
doubling
(6, 6)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Derive = TypeVar("Derive", bound=Callable[..., Any])


def memoize(derive: Derive) -> Derive:
    """Caches the results of a function in the ``memo`` of its first argument, by its other, hashable arguments.

    The caller must not change a result."""

    @functools.wraps(derive)
    def memoized(of: Any, *arguments: Any) -> Any:
        key = (derive, *arguments) if arguments else derive
        try:
            return of.memo[key]
        except KeyError:
            pass
        found = of.memo[key] = derive(of, *arguments)
        return found

    return memoized  # type: ignore[return-value]
