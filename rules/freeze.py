"""Hashable stand-ins for the parameters of an equation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class _Identity:
    """A key for something that has no hash: the object itself, kept alive."""

    thing: Any

    def __hash__(self) -> int:
        return id(self.thing)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.thing is other.thing


def frozen(value: Any) -> Any:
    """A hashable stand-in for a parameter: equal for equal lists, dicts and sets, the object itself for all others."""
    if isinstance(value, Mapping):
        return tuple((k, frozen(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(frozen(v) for v in value)
    try:
        hash(value)
    except TypeError:
        return _Identity(value)
    return value
