"""The errors and warnings that shardplan raises.

Every error is a :class:`ShardplanError`; its message says what was got, where in the user's code, and what to do next.
"""

from __future__ import annotations

from shardplan.rules.errors import ShardplanError as ShardplanError


class ArgumentError(ShardplanError, ValueError):
    """An argument of a public function is wrong; raised before any work starts."""


class CallError(ShardplanError, TypeError):
    """A planned function is called with arguments that it cannot take."""


class PlanMismatchError(ShardplanError, ValueError):
    """A plan is used for another program, mesh or version than the one that it was made for."""


class InfeasibleError(ShardplanError):
    """No layout of the program keeps within the memory limit."""


class ShardplanWarning(UserWarning):
    """Something runs, but not as well as it could: an operation that is replicated, a dimension that nothing divides."""
