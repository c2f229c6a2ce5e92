"""OR-tools, imported at its first use: the import, with its pandas, takes most of a second.

>>> cp_model.CpModel().name
''
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["cp_model", "max_flow", "pywraplp"]


class _Later:
    """A module that is imported when something of it is first read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
    from ortools.graph.python import max_flow
    from ortools.linear_solver import pywraplp
    from ortools.sat.python import cp_model
else:
    cp_model = _Later("ortools.sat.python.cp_model")
    max_flow = _Later("ortools.graph.python.max_flow")
    pywraplp = _Later("ortools.linear_solver.pywraplp")
