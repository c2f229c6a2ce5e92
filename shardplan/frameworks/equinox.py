"""Equinox adapter: numbers in modules are static, as with ``eqx.filter_jit``, and stay numbers in results."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import numpy as np

from shardplan.frameworks.static import Static, held_static, with_static_leaves
from shardplan.program.call_arguments import Call

eqx: Any = importlib.import_module("equinox")
"""Imported by the script already: this package imports no library by itself."""


def adapted(call: Call) -> Call:
    """The call with static numbers in its modules. A call without modules stays as it is."""
    nodes = jax.tree.leaves((call.args, call.kwargs), is_leaf=_is_module)
    return with_static_leaves(call, _held_in_module) if any(map(_is_module, nodes)) else call


def _is_module(node: Any) -> bool:
    return isinstance(node, eqx.Module)


def _held_in_module(leaf: Any) -> Any:
    is_number = isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic)
    return Static(leaf) if is_number else held_static(leaf)
