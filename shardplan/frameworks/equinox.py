"""Equinox adapter: numbers in modules are static, as with ``eqx.filter_jit``, and stay numbers in results."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import numpy as np

from shardplan.frameworks.static import Static, with_static_leaves, wrap_static
from shardplan.program.call_arguments import Call

eqx: Any = importlib.import_module("equinox")
"""Imported by the script already: this package imports no library by itself."""


def adapt_call(call: Call) -> Call:
    """The call with static numbers in its modules. A call without modules stays as it is."""
    nodes = jax.tree.leaves((call.args, call.kwargs), is_leaf=_is_module)
    return with_static_leaves(call, _wrap_in_module) if any(map(_is_module, nodes)) else call


def _is_module(node: Any) -> bool:
    return isinstance(node, eqx.Module)


def _wrap_in_module(leaf: Any) -> Any:
    is_number = isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic)
    return Static(leaf) if is_number else wrap_static(leaf)
