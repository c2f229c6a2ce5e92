"""The errors and warnings that shardplan raises.

Every error is a :class:`ShardplanError`. Its message has the given value, the place in the user's code, and a remedy.
"""

from __future__ import annotations

import math
import sys
import warnings

from shardplan.rules.errors import ShardplanError as ShardplanError


class ArgumentError(ShardplanError, ValueError):
    """An argument of a public function is wrong. Raised before any work starts."""


def no_plan(got: object) -> ArgumentError:
    """The error of a function that got another object than a plan."""
    return ArgumentError(f"a plan was expected, got `{got!r}`: take that of an `auto` step from its .plan(*args)")


class CallError(ShardplanError, TypeError):
    """A planned function is called with arguments that it cannot take."""


class EnclosingTraceError(CallError):
    """A function reads values of an enclosing trace, and so is no program of its own."""


class PlanMismatchError(ShardplanError, ValueError):
    """A plan is used for another program, mesh or version than its own."""


class ProcessesError(ShardplanError):
    """Processes that share the devices of a mesh do not plan, or run, the same."""


class InfeasibleError(ShardplanError):
    """No layout of the program is within the memory limit. `least_peak_bytes` is the lowest peak found."""

    def __init__(self, message: str, least_peak_bytes: float = math.nan) -> None:
        super().__init__(message)
        self.least_peak_bytes = least_peak_bytes


class ShardplanWarning(UserWarning):
    """A part of the program could run better: a replicated operation, or a batch that no axis divides."""


def warn(message: str) -> None:
    """A `ShardplanWarning` at the line of the user's code: the nearest frame outside of this package and of JAX."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, ShardplanWarning, stacklevel=level)


def _is_inside(module: str) -> bool:
    package, _, rest = module.partition(".")
    return package == "jax" or (package == "shardplan" and not rest.startswith("models"))
