"""The picture of a comparison: bytes sent and peak memory of each method, as bars."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from typing import Any

from shardplan.common.atomic_files import write_file
from shardplan.common.checks import check_path
from shardplan.common.tables import size_text
from shardplan.errors import ArgumentError
from shardplan.plans.page_head import Compared


def save_plot(rows: Sequence[Compared], title: str, path: str | os.PathLike[str]) -> None:
    """Writes the bars of a comparison, as PNG, SVG or PDF by the end of the path.

    Raises ArgumentError without Matplotlib, and for a path that cannot be written.
    """
    if find_spec("matplotlib") is None:
        raise ArgumentError(
            "a plot needs Matplotlib, which the extra `notebook` has (pip install 'shardplan[notebook]')"
        )
    figure = import_module("matplotlib.figure").Figure(figsize=(9, 1.2 + 0.35 * len(rows)), layout="constrained")
    for axes, name, sizes in zip(
        figure.subplots(1, 2, sharey=True),
        ("sent per device and step", "peak of a device"),
        ([row.communication_bytes for row in rows], [row.peak_bytes for row in rows]),
        strict=True,
    ):
        _draw(axes, name, [row.method for row in rows], sizes)
    figure.suptitle(title)
    target, drawn = check_path(path), BytesIO()
    try:
        figure.savefig(drawn, format=target.suffix.removeprefix(".") or "png")
    except ValueError as error:  # an unknown format
        raise ArgumentError(f"cannot write the plot to `{path}`: {error}") from None
    write_file(path, drawn.getvalue(), "the plot")


def _draw(axes: Any, name: str, methods: Sequence[str], sizes: Sequence[float]) -> None:
    known = [0.0 if math.isnan(size) else size for size in sizes]
    bars = axes.barh(range(len(methods)), [size / 1e6 for size in known], color="#4e79a7")
    axes.bar_label(bars, ["none" if math.isnan(size) else size_text(size) for size in sizes], padding=3, fontsize=8)
    axes.set_yticks(range(len(methods)), methods)
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("MB")
    axes.margins(x=0.2)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
