"""Timelines of simulations: a drawing for a notebook, and a trace for the viewers of browsers."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardplan.common.atomic_files import write_file
from shardplan.timing.task import Event

_COLOURS = {"compute": "#4c78a8", "collective": "#f58518", "transfer": "#e45756"}
_WIDTH = 900
_ROW = 18
_MARGIN = 230
_MAX_EVENTS = 3000


@dataclass(frozen=True, slots=True)
class Lane:
    """The events of one resource: the work of a worker, or its network over some mesh axes."""

    title: str
    worker: int
    events: tuple[Event, ...]

    @property
    def busy_seconds(self) -> float:
        """The seconds in which an event runs."""
        return sum(event.end - event.start for event in self.events)


def lanes_of(events: Sequence[Event], workers: int) -> list[Lane]:
    """The lanes of a simulation, as the page of a plan has them: compute first, then each network.

    >>> events = [Event("collective", "sum", 0, 1.0, 2.0, axes=("x",)), Event("compute", "sin", 0, 0.0, 1.0)]
    >>> [(lane.title, lane.busy_seconds) for lane in lanes_of(events, 1)]
    [('compute', 1.0), ('network of x', 1.0)]
    """
    groups: dict[tuple[int, bool, tuple[str, ...]], list[Event]] = {}
    for event in events:
        groups.setdefault((event.worker, event.kind != "compute", event.axes), []).append(event)
    found = []
    for worker, sends, axes in sorted(groups, key=lambda key: (*key[:2], len(key[2]), key[2])):
        what = ("network of " + ", ".join(axes) if axes else "network") if sends else "compute"
        title = what if workers == 1 else f"worker {worker} {what}"
        found.append(Lane(title, worker, tuple(groups[worker, sends, axes])))
    return found


def timeline_html(events: Sequence[Event], seconds: float, workers: int) -> str:
    """A drawing with a line for each lane and the share of the time in which it is busy. The longest events have names.

    The drawing leaves out the shortest events of a long timeline.
    """
    longest = {id(event) for event in sorted(events, key=lambda event: event.start - event.end)[:_MAX_EVENTS]}
    scale = _WIDTH / seconds if seconds else 0.0
    drawn, lanes = [], lanes_of(events, workers)
    for row, lane in enumerate(lanes):
        busy = lane.busy_seconds / seconds if seconds else 0.0
        label = html.escape(f"{lane.title}, {busy:.0%} busy")
        drawn.append(f'<text x="0" y="{_ROW * row + 12}" font-size="11">{label}</text>')
        drawn += [_rectangle(event, scale, row) for event in lane.events if id(event) in longest]
    legend = ", ".join(f'<span style="color:{colour}">{kind}</span>' for kind, colour in _COLOURS.items())
    return (
        f"<div>{1e3 * seconds:.2f} ms: {legend}</div>"
        f'<svg width="{_WIDTH + _MARGIN}" height="{_ROW * len(lanes) + 4}">{"".join(drawn)}</svg>'
    )


def _rectangle(event: Event, scale: float, row: int) -> str:
    what = f"{event.kind} {event.name}: {1e3 * event.start:.3f} to {1e3 * event.end:.3f} ms"
    if event.bytes:
        what += f", {event.bytes / 1e6:,.1f} MB"
    if event.receiver is not None:
        what += f" to worker {event.receiver}"
    place = (
        f'x="{_MARGIN + scale * event.start:.2f}" y="{_ROW * row + 2}" width="{scale * (event.end - event.start):.2f}"'
    )
    return f'<rect {place} height="{_ROW - 4}" fill="{_COLOURS[event.kind]}"><title>{html.escape(what)}</title></rect>'


def write_chrome_trace(events: Sequence[Event], workers: int, path: str | Path) -> None:
    """Writes the events in the Trace Event Format: a process per worker, a thread per lane.

    Times there are in microseconds. Raises ArgumentError for a path that cannot be written.
    """
    rows: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": worker, "args": {"name": f"worker {worker}"}}
        for worker in range(workers)
    ]
    for number, lane in enumerate(lanes_of(events, workers)):
        own = {"pid": lane.worker, "tid": number}
        rows.append({"name": "thread_name", "ph": "M", **own, "args": {"name": lane.title}})
        rows += [
            {
                "name": event.name,
                "cat": event.kind,
                "ph": "X",
                **own,
                "ts": 1e6 * event.start,
                "dur": 1e6 * (event.end - event.start),
                "args": {"bytes": event.bytes, "receiver": event.receiver},
            }
            for event in lane.events
        ]
    write_file(path, json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}), "the trace")
