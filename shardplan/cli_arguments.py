"""The argument formats of the command line: steps and pins as texts.

>>> parse_pin("0/params/*/kernel=-,data+model"), parse_pin("0/opt_state/*=pinned_host")
(('0/params/*/kernel', P(None, ('data', 'model'))), ('0/opt_state/*', 'pinned_host'))
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from shardplan._jax import HOST_MEMORY
from shardplan.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Step:
    """A function with its arguments."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]


def load_step(text: str) -> Step:
    """The step of a name ``module:attribute``. The search path includes the present folder.

    The attribute is an object with ``train_step``, ``state`` and ``batch`` (as the models of ``shardplan.models``), a
    tuple ``(fn, *args)``, or a callable without arguments that returns either. Raises ArgumentError for others.
    """
    module_name, separator, attribute = text.partition(":")
    if not separator or not module_name or not attribute:
        raise ArgumentError(f"a step is named `module:attribute`, got `{text}`")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = reduce(getattr, attribute.split("."), importlib.import_module(module_name))
    except ModuleNotFoundError as error:
        hint = f": write `{module_name.removesuffix('.py')}:{attribute}`" if module_name.endswith(".py") else ""
        raise ArgumentError(f"cannot import `{module_name}` for the step `{text}`: {error}{hint}") from error
    except AttributeError as error:
        raise ArgumentError(f"there is no step `{text}`: {error}") from error
    step = _as_step(found)
    if step is None and callable(found) and not _takes_arguments(found):
        try:
            step = _as_step(found())
        except Exception as error:
            raise ArgumentError(f"`{text}` raised {type(error).__name__} when it was called: {error}") from error
    if step is None:
        raise ArgumentError(
            f"`{text}` is no step: it must be, or return when it is called, an object with train_step, state and "
            "batch, or a tuple (function, *arguments), whose arguments may be jax.ShapeDtypeStructs"
        )
    return step


def _takes_arguments(found: Any) -> bool:
    """Whether a callable needs arguments: a step itself, without shapes."""
    try:
        inspect.signature(found).bind()
    except TypeError:
        return True
    except ValueError:  # it has no signature
        return False
    return False


def _as_step(found: Any) -> Step | None:
    if all(hasattr(found, name) for name in ("train_step", "state", "batch")):
        return Step(found.train_step, (found.state, found.batch))
    if isinstance(found, tuple) and found and callable(found[0]):
        return Step(found[0], tuple(found[1:]))
    return None


def parse_pin(text: str) -> tuple[str, PartitionSpec | str]:
    """A pin from ``path=spec``: one entry per dimension, its mesh axes joined by ``+``, or ``-`` for a whole one; or
    from ``path=pinned_host``."""
    path, separator, spec = text.rpartition("=")
    if not separator or not path:
        raise ArgumentError(f"a pin is written `path=spec`, as `0/params/*/kernel=-,data+model`, got `{text}`")
    if spec.strip() == HOST_MEMORY:
        return path, HOST_MEMORY
    entries = [entry.strip() for entry in spec.split(",")] if spec.strip() else []
    return path, PartitionSpec(*[_entry(entry) for entry in entries])


def parse_pins(texts: Sequence[str]) -> dict[str, PartitionSpec | str]:
    """All pins by their paths, one for each path."""
    pins = [parse_pin(text) for text in texts]
    paths = [path for path, _ in pins]
    if twice := [f"`{path}`" for path in dict.fromkeys(paths) if paths.count(path) > 1]:
        raise ArgumentError(f"{', '.join(twice)} is pinned twice: keep one of the layouts")
    return dict(pins)


def parse_blocks(texts: Sequence[str]) -> dict[str, int]:
    """Numbers of blocks by the paths of arguments, from ``batch=8``.

    >>> parse_blocks(["1/image[1]=4", "1/image[2]=4"])
    {'1/image[1]': 4, '1/image[2]': 4}
    """
    found = {}
    for text in texts:
        path, _, count = text.rpartition("=")
        if not path or not count.isdecimal():
            raise ArgumentError(f"blocks are written as PATH=N, such as `batch=8`, got `{text}`")
        found[path] = int(count)
    return found


def _entry(text: str) -> str | tuple[str, ...] | None:
    if text in ("-", "", "None"):
        return None
    names = tuple(name.strip() for name in text.split("+"))
    return names[0] if len(names) == 1 else names


def parse_positions(texts: Sequence[str]) -> tuple[int, ...]:
    """Argument positions from ``0,1``."""
    try:
        return tuple(int(text) for text in texts)
    except ValueError:
        raise ArgumentError(f"positions of arguments are numbers, got `{','.join(texts)}`") from None
