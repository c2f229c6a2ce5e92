"""Checks of the arguments of public functions. Another type is an ArgumentError of one sentence.

>>> check_count("limit", True)
Traceback (most recent call last):
  ...
shardplan.errors.ArgumentError: `limit` is a whole number above 0, got `True`
"""

from __future__ import annotations

import os
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from shardplan.errors import ArgumentError

__all__ = ["check_count", "check_function", "check_path", "check_seconds"]


def check_path(path: Any) -> Path:
    """The path of a file."""
    try:
        return Path(path)
    except TypeError:
        raise ArgumentError(f"the path of a file was expected, got `{path!r}`") from None


def check_function(name: str, fn: Any) -> None:
    if not callable(fn):
        raise ArgumentError(f"`{name}` is a function, got `{fn!r}`")


def check_count(name: str, count: Any) -> None:
    if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
        raise ArgumentError(f"`{name}` is a whole number above 0, got `{count!r}`")


def check_seconds(name: str, seconds: Any) -> None:
    if not isinstance(seconds, Real) or isinstance(seconds, bool) or not float(seconds) >= 0:
        raise ArgumentError(f"`{name}` is a number of seconds, got `{seconds!r}`")


def reason(error: Exception) -> str:
    """The reason for which a file was not written or read, as a message has it."""
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
