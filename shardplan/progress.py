"""What planning says of itself while it runs: a line in the log when it has ended, and a display where it takes long.

The log is that of ``logging`` under the name ``shardplan``: one line of level INFO per planning. The display is a line
on a terminal, from the second second on, which goes when planning has ended.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOG = logging.getLogger("shardplan")

_SECONDS_BEFORE = 2.0
_SECONDS_BETWEEN = 0.5

_doing = "tracing"


def doing(what: str) -> None:
    """Says what planning is at, for the display."""
    global _doing
    _doing = what


@contextmanager
def shown(name: str) -> Iterator[None]:
    """Shows on a terminal what the planning of a function is at, where it takes more than two seconds."""
    doing("tracing")
    stream = sys.stderr
    if stream is None or not stream.isatty():
        yield
        return
    over, started = threading.Event(), time.perf_counter()

    def show() -> None:
        wait, shown = _SECONDS_BEFORE, False
        while not over.wait(wait):
            seconds = time.perf_counter() - started
            stream.write(f"\r\x1b[Kshardplan: planning {name}, {_doing}, {seconds:.0f} s")
            stream.flush()
            wait, shown = _SECONDS_BETWEEN, True
        if shown:
            stream.write("\r\x1b[K")
            stream.flush()

    display = threading.Thread(target=show, daemon=True)
    display.start()
    try:
        yield
    finally:
        over.set()
        display.join()


def log_planning(line: str, seconds: float, cached: bool) -> None:
    """The line of a planning: what was planned, how long that took, what it sends, how near the optimum it is."""
    if LOG.isEnabledFor(logging.INFO):
        LOG.info("%s (%.2f s%s)", line, seconds, ", from the cache" if cached else "")
