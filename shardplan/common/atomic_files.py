"""Writing files whole or not at all, however the process ends.

What is written goes into a file of another name beside the wanted one, and then takes its place. A process that is
killed leaves that file behind: the next one that writes there removes it. Whether the writer of such a file lives, a
lock on it tells, which the system takes away with the process.

>>> import tempfile
>>> target = Path(tempfile.mkdtemp()) / "plan.json"
>>> left = target.with_name(".plan.json.dead.part")
>>> left.touch()
>>> with replacing(target) as file:
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
from typing import TextIO

try:
    import fcntl
except ImportError:  # Windows has no such locks: what is left behind there stays
    fcntl = None  # type: ignore[assignment]

_mine: set[Path] = set()
"""What this process is writing: over some network file systems, locks are those of a process, not of a file."""


@contextmanager
def replacing(target: Path, others: str | None = None) -> Iterator[TextIO]:
    """A file to write, which takes the place of ``target`` at the end, unless an error comes first.

    ``others``: a glob of targets in the same folder whose files are removed too where nobody is writing them any more.
    """
    _remove_left(target.parent, others or glob.escape(target.name))
    path, file = _begun(target)
    try:
        with file:
            yield file
            file.flush()
            if fcntl is not None:  # while the lock is held, or it could be taken for left behind
                os.replace(path, target)
        if fcntl is None:
            os.replace(path, target)
    finally:
        _mine.discard(path)
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _begun(target: Path) -> tuple[Path, TextIO]:
    """A new file with a lock; one whose lock another process had first, which then removed the file, is given up."""
    while True:
        path = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
        _mine.add(path)
        try:
            file = open(path, "x", encoding="utf-8")  # noqa: SIM115
        except OSError:
            _mine.discard(path)
            raise
        if fcntl is None:
            return path, file
        with suppress(OSError):  # a file system without locks: nothing is removed there either
            fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():
            return path, file
        file.close()
        _mine.discard(path)


def _remove_left(folder: Path, targets: str) -> None:
    """Removes files in a folder that were to take the place of these targets, and that no living process is writing."""
    for path in folder.glob(f".{targets}.*.part") if fcntl is not None else ():
        if path not in _mine:
            with suppress(OSError), open(path, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
