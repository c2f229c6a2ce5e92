"""Text tables: aligned, in HTML and in Markdown, with cells for sizes in bytes.

>>> print(text_table(("kind", "MB"), [("all-reduce", "12.0"), ("total", "12.0")], numbers=(1,)))
kind          MB
----------  ----
all-reduce  12.0
total       12.0
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from math import floor, log10

Rows = Sequence[Sequence[str]]


def text_table(header: Sequence[str], rows: Rows, numbers: Sequence[int] = ()) -> str:
    """A header, a rule and one line per row; the columns in `numbers` are aligned to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    aligned = (
        [cell.rjust(width) if column in numbers else cell.ljust(width) for column, (cell, width) in enumerate(cells)]
        for cells in (list(zip(line, widths, strict=True)) for line in lines)
    )
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)


def html_table(header: Sequence[str], rows: Rows, numbers: Sequence[int] = (), caption: str = "") -> str:
    """The same table for a notebook."""

    def line(tag: str, cells: Sequence[str]) -> str:
        sides = ["right" if column in numbers else "left" for column in range(len(cells))]
        inside = (
            f'<{tag} style="text-align:{side}">{html.escape(cell)}</{tag}>'
            for side, cell in zip(sides, cells, strict=True)
        )
        return f"<tr>{''.join(inside)}</tr>"

    body = "".join(line("td", row) for row in rows)
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead>{line('th', header)}</thead><tbody>{body}</tbody></table>"


def markdown_table(header: Sequence[str], rows: Rows) -> str:
    """The same table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def megabytes(size: float) -> str:
    """Bytes in units of 10^6, with two digits where rounding to a decimal would leave nothing.

    >>> megabytes(234_881_031), megabytes(12_288), megabytes(4), megabytes(0)
    ('234.9', '0.012', '0.0000040', '0.0')
    """
    digits = 1 - floor(log10(size / 1e6)) if 0 < size < 50_000 else 1
    return f"{size / 1e6:,.{digits}f}"


def size_cell(size: float) -> str:
    """Bytes in units of 10^6, as table columns have them. Sizes that would round to nothing have a unit of their own.

    >>> size_cell(234_881_031), size_cell(12_288), size_cell(4), size_cell(0)
    ('234.9', '12.3 kB', '4 B', '0.0')
    """
    if 0 < size < 999.5:
        return f"{max(size, 1):.0f} B"
    return f"{size / 1e3:.1f} kB" if 0 < size < 50_000 else f"{size / 1e6:,.1f}"


def size_text(size: float) -> str:
    """Bytes with a unit that fits.

    >>> size_text(4_430_000_000), size_text(234_881_031), size_text(12_288), size_text(4), size_text(0)
    ('4.43 GB', '234.9 MB', '12.3 kB', '4 B', '0.0 MB')
    """
    if 1e9 <= size < float("inf"):
        return f"{size / 1e9:,.2f} GB"
    text = size_cell(size)
    return text if text.endswith("B") else f"{text} MB"
