"""The file of a page: the data, the style and the program in one HTML text without network."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from shardplan.common.atomic_files import write_file

_FOLDER = Path(__file__).parent


def page_text(title: str, data: Mapping[str, Any], program: str = "page") -> str:
    """The page of some data, drawn by ``program`` (page.js or sides.js).

    Names from the user's program are text: they come from JSON, in which `<` is escaped.

    >>> "<script>alert" in page_text("a plan", {"inputs": ["<script>alert(1)</script>"]})
    False
    """
    names = ("page.html", "page.css", "base.js", f"{program}.js")
    html, style, base, own = ((_FOLDER / name).read_text(encoding="utf-8") for name in names)
    encoded = json.dumps({"title": title, **data}, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        encoded = encoded.replace(character, f"\\u{ord(character):04x}")
    return Template(html).substitute(style=style, base=base, program=own, data=encoded)


def write_page(path: str | os.PathLike[str], text: str) -> None:
    """Writes a page, atomically. Raises ArgumentError for a path that cannot be written."""
    write_file(path, text, "the page")
