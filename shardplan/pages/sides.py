"""The page of two sides: two plans, or a plan and its compiled program. `sides.js` draws it.

A section is a table or a drawing of two curves. A column has a name and a kind: text, number, bytes, signed (bytes),
layout. A cell of a layout is a type and a layout, by their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.pages.page import page_text
from shardplan.pages.page_data import Rows

_MOST_POINTS = 1200
"""The most points of a curve. A point is the highest one of its part."""


class Sides:
    """The data of a page of two sides, whose names are over their columns. ``meshes`` have the size of each axis."""

    def __init__(self, title: str, names: tuple[str, str], meshes: Sequence[dict[str, int]]) -> None:
        self.title, self.names = title, names
        self.mesh = {name: size for mesh in meshes for name, size in mesh.items()}
        self.one_mesh = all(mesh == meshes[0] for mesh in meshes)
        self.figures: list[list[Any]] = []
        self.sections: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.texts: list[str] = []
        self.limit: float | None = None
        self._types, self._layouts = Rows(), Rows()

    def figure(self, label: str, kind: str, one: Any, other: Any) -> None:
        """A row of the table at the head of the page."""
        self.figures.append([label, kind, one, other])

    def layout(self, dtype: str, shape: Sequence[int], dims: Iterable[Sequence[str]]) -> list[int]:
        """The cell of a tensor, by the mesh axes of each dimension."""
        axes = tuple(tuple(list(self.mesh).index(axis) for axis in names) for names in dims)
        return [self._types.number((dtype, tuple(shape))), self._layouts.number(((), axes))]

    def table(self, title: str, columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[Any]], **more: Any) -> None:
        """A table. ``bars`` are the two columns that are drawn, ``total`` says whether there is a sum of the columns,
        ``note`` stands above it, ``nothing`` in its place where it has no rows."""
        name = title.lower().replace(" ", "-")
        self.sections.append({"id": name, "title": title, "columns": columns, "rows": [*map(list, rows)], **more})

    def curves(self, title: str, note: str, series: Sequence[NDArray[np.float64]]) -> None:
        """A curve for each side, over its own schedule."""
        points = [_fewer(one) for one in series]
        self.sections.append({"id": title.lower().replace(" ", "-"), "title": title, "note": note, "series": points})

    def text(self, command: str) -> str:
        """The page. ``command`` makes it."""
        data = {
            "mesh": [list(pair) for pair in self.mesh.items()],
            "one_mesh": self.one_mesh,
            "names": self.names,
            "figures": self.figures,
            "sections": self.sections,
            "warnings": self.warnings,
            "texts": self.texts,
            "limit": self.limit,
            "types": list(self._types),
            "layouts": list(self._layouts),
            "command": command,
        }
        return page_text(self.title, data, program="sides")


def _fewer(curve: NDArray[np.float64]) -> list[int]:
    """A curve with so many points as can be drawn.

    >>> _fewer(np.array([1.0, 3.0]))
    [1, 3]
    """
    starts = np.unique(np.linspace(0, len(curve), min(len(curve), _MOST_POINTS), endpoint=False).astype(int))
    return [round(top) for top in np.maximum.reduceat(curve, starts).tolist()]
