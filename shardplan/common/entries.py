"""Entries of files: plain JSON data, checked against type annotations and converted to these types.

The author of a file is unknown, whatever its checksum says. Each value is therefore checked against the annotation of
its class. An error names the path of the entry that is missing, unknown or of another type.

>>> from dataclasses import dataclass
>>> @dataclass
... class Sent:
...     kind: str
...     axes: tuple[str, ...]
...     bytes: float
>>> read(Sent, {"kind": "all-gather", "axes": ["data"], "bytes": 64}, "sent")
Sent(kind='all-gather', axes=('data',), bytes=64)
>>> read(Sent, {"kind": "all-gather", "axes": ["data", 3], "bytes": 64}, "sent")
Traceback (most recent call last):
    ...
shardplan.common.entries.MalformedError: `sent.axes[1]` is `3`: a text was expected
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from jax.sharding import PartitionSpec

_MAX_NUMBER = 2.0**63
"""The upper limit of counts, sizes and positions in a file."""

FREE = "*"
"""The entry of an unconstrained dimension of a ``PartitionSpec``."""

_MAX_DEPTH = 20
"""The most levels of nested plain data."""

_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}
_SHOWN = 60


class MalformedError(ValueError):
    """An entry that has not the expected type or value. The message has its path and the expectation."""


def read(kind: Any, entry: Any, where: str) -> Any:
    """An entry as a type: numbers, texts, tuples, mappings by text, ``PartitionSpec``, dataclasses, typed dictionaries
    and unions of these. ``Any`` is plain data of limited depth. Raises MalformedError.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _first_of(inner, entry, where)
    if kind is PartitionSpec:
        named = read(tuple[str | tuple[str, ...] | None, ...], entry, where)
        return PartitionSpec(*(PartitionSpec.UNCONSTRAINED if one == FREE else one for one in named))
    if kind is Any:
        return _plain(entry, where, _MAX_DEPTH)
    if origin is tuple:
        return _tuple(inner, entry, where)
    if is_dataclass(kind) or is_typeddict(kind):
        return _fields(kind, entry, where)
    if origin is Mapping or origin is dict:
        return {name: read(inner[1], value, f"{where}.{name}") for name, value in _section(entry, where).items()}
    if kind not in _NAMES:
        raise TypeError(f"no entry is read as `{kind}`")
    if not _matches(kind, entry):
        raise _unexpected(entry, where, _NAMES[kind])
    return entry


def check(holds: bool, where: str, entry: Any, expected: str) -> None:
    """Raises MalformedError if a condition on an entry is false."""
    if not holds:
        raise _unexpected(entry, where, expected)


def _matches(kind: Any, entry: Any) -> bool:
    if kind is float:
        return (isinstance(entry, float) and not math.isnan(entry)) or _matches(int, entry)
    if kind is int:
        return isinstance(entry, int) and not isinstance(entry, bool) and abs(entry) < _MAX_NUMBER
    return kind in _NAMES and isinstance(entry, kind)


def _first_of(kinds: Sequence[Any], entry: Any, where: str) -> Any:
    """The entry as the first of several types that fits."""
    for kind in kinds:
        is_list, is_section = get_origin(kind) is tuple or kind is PartitionSpec, kind not in _NAMES
        if is_list if isinstance(entry, list) else is_section if isinstance(entry, dict) else _matches(kind, entry):
            return read(kind, entry, where)
    named = ("a list" if get_origin(kind) is tuple else _NAMES.get(kind, "a section") for kind in kinds)
    raise _unexpected(entry, where, " or ".join(named))


def _tuple(inner: tuple[Any, ...], entry: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(entry, list):
        raise _unexpected(entry, where, "a list")
    kinds = inner[:1] * len(entry) if inner[-1] is Ellipsis else inner
    if len(kinds) != len(entry):
        raise _unexpected(entry, where, f"a list of {len(kinds)}")
    return tuple(read(kind, value, f"{where}[{n}]") for n, (kind, value) in enumerate(zip(kinds, entry, strict=True)))


def _fields(kind: Any, entry: Any, where: str) -> Any:
    """A dataclass with exactly its fields, or a typed dictionary, which may have further ones."""
    section, types = _section(entry, where), get_type_hints(kind)
    for name, said in get_type_hints(kind, include_extras=True).items():
        if name not in section and get_origin(said) is not NotRequired:
            raise MalformedError(f"`{where}.{name}` is missing")
    found = {}
    for name, value in section.items():
        if name not in types and is_dataclass(kind):
            raise MalformedError(f"`{where}.{name}` is unknown: the entries are {', '.join(types)}")
        found[name] = read(types.get(name, Any), value, f"{where}.{name}")
    return kind(**found)


def _section(entry: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(entry, dict) or not all(isinstance(name, str) for name in entry):
        raise _unexpected(entry, where, "a section")
    return entry


def _plain(entry: Any, where: str, levels: int) -> Any:
    if isinstance(entry, dict | list):
        if not levels:
            raise MalformedError(f"`{where}` is nested too deep")
        for inner in entry.values() if isinstance(entry, dict) else entry:
            _plain(inner, where, levels - 1)
    return entry


def _unexpected(entry: Any, where: str, expected: str) -> MalformedError:
    got = f"a list of {len(entry)}" if isinstance(entry, list) else "a section" if isinstance(entry, dict) else None
    return MalformedError(f"`{where}` is {got or f'`{repr(entry)[:_SHOWN]}`'}: {expected} was expected")
