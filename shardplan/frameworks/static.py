"""Static leaves: leaves of argument trees that are no arrays become part of the tree's structure.

``jax.jit`` refuses functions and texts. In a module of Equinox they are the activation function, or a flag. An argument
that is a single leaf stays as it is: ``static_argnums`` exists for these.

>>> import jax
>>> tree = jax.tree.map(wrap_static, {"act": jax.nn.relu, "w": 1.0}, is_leaf=callable)
>>> jax.tree.leaves(tree), jax.tree.map(unwrap_static, tree, is_leaf=is_static)["act"] is jax.nn.relu
([1.0], True)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from shardplan import _jax
from shardplan.program.call_arguments import Call

_ARRAYS = (jax.Array, np.ndarray, np.generic, int, float, complex, jax.ShapeDtypeStruct, jax.core.AbstractValue)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Static:
    """A value in the structure of a tree."""

    value: Any

    def tree_flatten(self) -> tuple[tuple[()], Static]:
        return (), self

    @classmethod
    def tree_unflatten(cls, kept: Static, children: Any) -> Static:
        return kept


def is_static(node: Any) -> bool:
    return isinstance(node, Static)


def unwrap_static(node: Any) -> Any:
    """The value of a static leaf, or another leaf as it is."""
    return node.value if isinstance(node, Static) else node


def is_array(leaf: Any) -> bool:
    """Whether ``jax.jit`` takes a leaf."""
    if isinstance(leaf, _ARRAYS) or _jax.is_ref(leaf):
        return True
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    return True


def wrap_static(leaf: Any) -> Any:
    """A leaf as `Static` if ``jax.jit`` refuses it and its equality can be tested between calls."""
    return leaf if is_array(leaf) or not _is_hashable(leaf) else Static(leaf)


def _is_hashable(leaf: Any) -> bool:
    try:
        hash(leaf)
    except TypeError:
        return False
    return True


def with_static_leaves(call: Call, hold: Callable[[Any], Any]) -> Call:
    """The call with the leaves that ``hold`` makes `Static` in the structure of its arguments. A call without such
    leaves stays as it is.
    """
    args = tuple(_wrap_argument(argument, hold) for argument in call.args)
    kwargs = {name: _wrap_argument(argument, hold) for name, argument in call.kwargs.items()}
    if not any(map(is_static, jax.tree.leaves((args, kwargs), is_leaf=is_static))):
        return call

    @functools.wraps(call.fn)
    def with_values(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(unwrap_static, (args, kwargs), is_leaf=is_static)
        return jax.tree.map(hold, call.fn(*args, **kwargs))

    return replace(call, fn=with_values, args=args, kwargs=kwargs, finish=(*call.finish, _unwrap_all))


def _wrap_argument(argument: Any, hold: Callable[[Any], Any]) -> Any:
    """An argument with its static leaves wrapped. An argument that is a single leaf stays as it is."""
    is_leaf = jax.tree_util.treedef_is_leaf(jax.tree.structure(argument))
    return argument if is_leaf else jax.tree.map(hold, argument)


def _unwrap_all(results: Any) -> Any:
    return jax.tree.map(unwrap_static, results, is_leaf=is_static)
