"""Timelines of simulations: a drawing for a notebook, and a trace for the viewers of browsers."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardplan.timing.task import Event

_COLOURS = {"compute": "#4c78a8", "collective": "#f58518", "transfer": "#e45756"}
_WIDTH = 900
_ROW = 16
_MAX_EVENTS = 3000


def timeline_html(events: Sequence[Event], seconds: float, workers: int) -> str:
    """A drawing: per worker a line for its work and one for its transfers. The longest events have names.

    The drawing leaves out the shortest events of a long timeline.
    """
    longest = sorted(events, key=lambda event: event.start - event.end)[:_MAX_EVENTS]
    scale = _WIDTH / seconds if seconds else 0.0
    drawn = []
    for event in longest:
        row = 2 * event.worker + (event.kind != "compute")
        what = f"{event.kind} {event.name}: {1e3 * event.start:.3f} to {1e3 * event.end:.3f} ms"
        if event.bytes:
            what += f", {event.bytes / 1e6:,.1f} MB"
        if event.receiver is not None:
            what += f" to worker {event.receiver}"
        place = (
            f'x="{60 + scale * event.start:.2f}" y="{_ROW * row + 2}" width="{scale * (event.end - event.start):.2f}"'
        )
        drawn.append(
            f'<rect {place} height="{_ROW - 4}" fill="{_COLOURS[event.kind]}"><title>{html.escape(what)}</title></rect>'
        )
    labels = "".join(
        f'<text x="0" y="{2 * _ROW * worker + 12}" font-size="11">worker {worker}</text>' for worker in range(workers)
    )
    legend = ", ".join(f'<span style="color:{colour}">{kind}</span>' for kind, colour in _COLOURS.items())
    return (
        f"<div>{1e3 * seconds:.2f} ms: {legend}</div>"
        f'<svg width="{_WIDTH + 60}" height="{2 * _ROW * workers}">{labels}{"".join(drawn)}</svg>'
    )


def write_chrome_trace(events: Sequence[Event], workers: int, path: str | Path) -> None:
    """Writes the events in the Trace Event Format: a process per worker, a thread for its work and one for its sending.

    Times there are in microseconds.
    """
    rows: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": worker, "args": {"name": f"worker {worker}"}}
        for worker in range(workers)
    ]
    for event in events:
        rows.append(
            {
                "name": event.name,
                "cat": event.kind,
                "ph": "X",
                "pid": event.worker,
                "tid": "compute" if event.kind == "compute" else "send",
                "ts": 1e6 * event.start,
                "dur": 1e6 * (event.end - event.start),
                "args": {"bytes": event.bytes, "receiver": event.receiver},
            }
        )
    Path(path).write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}), encoding="utf-8")
