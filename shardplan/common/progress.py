"""Progress of a planning: one log line at its end, and a display on a terminal while it runs.

The logger is ``logging.getLogger("shardplan")``. Each planning logs one line of level INFO. The display is one line,
shown after two seconds and erased at the end.
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

_stage = "tracing"


def set_stage(what: str) -> None:
    """Sets the stage of planning that the display shows."""
    global _stage
    _stage = what


@contextmanager
def show_progress(name: str) -> Iterator[None]:
    """Shows the stage of a function's planning on a terminal, from the third second on."""
    set_stage("tracing")
    stream = sys.stderr
    if stream is None or not stream.isatty():
        yield
        return
    over, started = threading.Event(), time.perf_counter()

    def show() -> None:
        wait, shown = _SECONDS_BEFORE, False
        while not over.wait(wait):
            seconds = time.perf_counter() - started
            stream.write(f"\r\x1b[Kshardplan: planning {name}, {_stage}, {seconds:.0f} s")
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
    """Logs the line of a planning, with its seconds and whether the plan came from the cache."""
    if LOG.isEnabledFor(logging.INFO):
        LOG.info("%s (%.2f s%s)", line, seconds, ", from the cache" if cached else "")
