"""Equinox: numbers in modules are compiled in, as ``eqx.filter_jit`` does it, and stay numbers in what comes back."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import numpy as np

from shardplan.frameworks.static import Static, held_static, with_static_leaves
from shardplan.program.call_arguments import Call

eqx: Any = importlib.import_module("equinox")
"""The script has imported it: this package knows no library by itself."""


def adapted(call: Call) -> Call:
    """The call as it is where no argument has a module."""
    nodes = jax.tree.leaves((call.args, call.kwargs), is_leaf=_is_module)
    return with_static_leaves(call, _held_in_module) if any(map(_is_module, nodes)) else call


def _is_module(node: Any) -> bool:
    return isinstance(node, eqx.Module)


def _held_in_module(leaf: Any) -> Any:
    is_number = isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic)
    return Static(leaf) if is_number else held_static(leaf)
