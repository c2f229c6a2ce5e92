"""What is derived of a program, a problem, a schedule or lifetimes, once for each.

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
    """Lets a function of one of these, and of hashable arguments, keep what it gives in the ``memo`` of the first.
    What it gives must not be changed."""

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
