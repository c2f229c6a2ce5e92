"""The plan cache on disk: a second planning of a program builds its schedule from the saved choices.

An entry is one small JSON file with the choice per variable, the figures of the search, and a checksum. Its name is a
digest of the inputs of a plan: the program, the mesh, the options with the hardware profile's numbers, and the versions
of this library and of JAX. A writer renames a finished file, so that readers see entries whole or not at all. An error
of the cache fails no planning: an unreadable entry is planned again.

>>> import tempfile
>>> cache = Cache(Path(tempfile.mkdtemp()))
>>> cache.write("0123abcd", {"choices": "1 2"})
>>> cache.read("0123abcd", dict), cache.read("4567abcd", dict)
({'choices': '1 2'}, None)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import jax

from shardplan.common.atomic_files import atomic_write
from shardplan.common.entries import MalformedError
from shardplan.errors import warn
from shardplan.hardware import load
from shardplan.layout.layout import MeshAxes
from shardplan.options import Options
from shardplan.plans.file import checksum, library_version, options_entries
from shardplan.program.program import Program
from shardplan.rules.registry import everything_described

Entry = TypeVar("Entry")

VARIABLE = "SHARDPLAN_CACHE_DIR"
"""The environment variable of the folder. Empty, it turns the cache off."""

_MAX_ENTRIES = 1000
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_warned_folders: set[Path] = set()


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder of entries."""

    folder: Path

    def read(self, key: str, understood: Callable[[dict[str, Any]], Entry]) -> Entry | None:
        """The entry of a key, parsed by ``understood``, which may raise MalformedError.

        None for a missing entry, and for a torn or malformed one, with one warning."""
        path, content = self._path(key), None
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["key"] == key and document["checksum"] == checksum(document["content"]):
                content = dict(document["content"])
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn_once(f"cannot be read ({error.strerror})")
            return None
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        if content is not None:
            with suppress(MalformedError, RecursionError):
                return understood(content)
        self._warn_once(f"holds `{path.name}`, which is torn or was changed: it is planned again")
        return None

    def write(self, key: str, content: Mapping[str, Any]) -> None:
        """Writes an entry. A folder that cannot be written gets one warning."""
        document = {"key": key, "checksum": checksum(content), "content": content}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._path(key), others="*.json") as file:
                json.dump(document, file)
            self._drop_oldest()
        except OSError as error:
            self._warn_once(f"cannot be written ({error.strerror}): plans are not kept")

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _drop_oldest(self) -> None:
        entries = list(self.folder.glob("*.json"))
        if len(entries) > _MAX_ENTRIES:
            by_age = sorted((entry.stat().st_mtime, entry) for entry in entries)
            for _, entry in by_age[: len(entries) - _MAX_ENTRIES]:
                entry.unlink(missing_ok=True)

    def _warn_once(self, what: str) -> None:
        if self.folder not in _warned_folders:
            _warned_folders.add(self.folder)
            warn(f"the cache of plans in `{self.folder}` {what}. Set {VARIABLE} to another folder, or empty for none.")


def default_cache() -> Cache | None:
    """The cache of the present environment. None where it is off, or the user has no home."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return Cache(Path(given)) if given else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return Cache(root / "shardplan" / "plans")


def key_of(program: Program, meshes: Sequence[MeshAxes], options: Options, target: str = "") -> str:
    """A digest of all inputs of the plan of a program. ``meshes`` are the candidates, ``target`` is the GPU type of its
    verification."""
    entries = options_entries(replace(options, hardware=None))
    hardware = None if options.hardware is None else asdict(load(options.hardware))
    shapes = [(mesh.names, mesh.sizes) for mesh in meshes]
    versions = (library_version(), _code(), jax.__version__)
    parts = (program.fingerprint(), shapes, entries, hardware, versions, described(), target)
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def described() -> list[str]:
    """The user's descriptions of operations, with lambdas by their code."""
    found = []
    for key, description in everything_described().items():
        code = getattr(description.said, "__code__", None)
        text = description.said if code is None else _code_text(code)
        found.append(f"{_ADDRESS.sub('', str(key))} {text} {description.sizes}")
    return sorted(found)


def _code_text(code: types.CodeType) -> str:
    inside = [_code_text(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()}{code.co_names}{code.co_varnames}{inside}"


@lru_cache(maxsize=1)
def _code() -> str:
    """Sizes and times of the library's files, for working copies, whose version does not change."""
    digest = hashlib.sha256()
    for path in code_files():
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns};".encode())
    return digest.hexdigest()


def code_files() -> list[Path]:
    """The library's source files that plans depend on. `rules` and `search` may be links, which globs do not follow."""
    root = Path(str(resources.files("shardplan")))
    found = {path for folder in (root, root / "rules", root / "search") for path in folder.rglob("*.py")}
    return sorted(found | set(root.rglob("*.toml")))
