"""Atomic writes of files: a target has its old content or the new one, however the process ends.

The new content goes into a temporary file in the target's folder, which is then renamed to the target. The temporary
file of a killed process stays in the folder, and the next writer to that folder removes it. A lock tells whether the
writer of a temporary file lives: the system releases it when the process ends.

>>> import tempfile
>>> target = Path(tempfile.mkdtemp()) / "plan.json"
>>> left = target.with_name(".plan.json.dead.part")
>>> left.touch()
>>> with atomic_write(target) as file:
...     _ = file.write("{}")
>>> target.read_text(), left.exists()
('{}', False)
"""

from __future__ import annotations

import glob
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from shardplan.common.checks import check_path, reason
from shardplan.errors import ArgumentError

try:
    import fcntl
except ImportError:  # Windows has no such locks: abandoned files stay there
    fcntl = None  # type: ignore[assignment]

_own_files: set[Path] = set()
"""Temporary files of this process. On some network file systems a lock belongs to a process, not to a file."""


@contextmanager
def atomic_write(target: Path, others: str | None = None) -> Iterator[TextIO]:
    """A file to write. It takes the place of ``target`` at the end, unless an exception is raised.

    ``others`` is a glob of further targets in the same folder, whose abandoned temporary files are removed as well.
    """
    _remove_abandoned(target.parent, others or glob.escape(target.name))
    path, file = _create_locked(target)
    try:
        with file:
            yield file
            file.flush()
            if fcntl is not None:  # while the lock is held: without it the file counts as abandoned
                os.replace(path, target)
        if fcntl is None:
            os.replace(path, target)
    finally:
        _own_files.discard(path)
        with suppress(OSError):
            path.unlink(missing_ok=True)


def write_file(path: Any, content: str | bytes, what: str) -> None:
    """Writes a file, atomically. Raises ArgumentError for a path that cannot be written; ``what`` names the content."""
    target = check_path(path)
    try:
        with atomic_write(target) as file:
            if isinstance(content, str):
                file.write(content)
            else:
                file.buffer.write(content)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, ValueError) as error:  # ValueError for an invalid path
        raise ArgumentError(f"cannot write {what} to `{path}`: {reason(error)}") from None


def _create_locked(target: Path) -> tuple[Path, TextIO]:
    """A new temporary file with a lock. A file is given up if another process locked and removed it first."""
    while True:
        path = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
        _own_files.add(path)
        try:
            file = open(path, "x", encoding="utf-8")  # noqa: SIM115
        except OSError:
            _own_files.discard(path)
            raise
        if fcntl is None:
            return path, file
        with suppress(OSError):  # a file system without locks, where no file is removed
            fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():
            return path, file
        file.close()
        _own_files.discard(path)


def _remove_abandoned(folder: Path, targets: str) -> None:
    """Removes the temporary files of these targets in a folder that no living process writes."""
    for path in folder.glob(f".{targets}.*.part") if fcntl is not None else ():
        if path not in _own_files:
            with suppress(OSError), open(path, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
