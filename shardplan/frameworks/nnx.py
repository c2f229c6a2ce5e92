"""Flax NNX adapter: objects that a function changes in place are updated after the call, as with ``nnx.jit``.

All objects of a call are split together, so that a shared variable is one tensor. Their arrays are arguments, with the
paths of their attributes. All other attributes are static. Changed arrays are results, in front of the function's own
and in the positions of the arguments. After the call they are written into the caller's objects, with changed
attributes that are no arrays.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from shardplan.frameworks.static import Static, is_static
from shardplan.program.call_arguments import Call

nnx: Any = importlib.import_module("flax.nnx")
"""Imported by the script already: this package imports no library by itself."""

_OBJECTS = (nnx.Pytree, nnx.Variable)


def adapt_call(call: Call) -> Call:
    """The call on the arrays of its NNX objects. A call without such objects stays as it is."""
    places = [place for place, argument in _places(call).items() if _has_objects(argument)]
    if not places:
        return call
    objects = tuple(_places(call)[place] for place in places)
    graph, state = nnx.split(objects)
    arrays = nnx.to_pure_dict(state)
    given = {place: arrays.get(number, {}) for number, place in enumerate(places)}
    args = tuple(given.get(place, argument) for place, argument in enumerate(call.args))
    kwargs = {name: given.get(name, argument) for name, argument in call.kwargs.items()}
    whole = [number for number, place in enumerate(places) if place in call.donated]

    @functools.wraps(call.fn)
    def on_arrays(*args: Any, **kwargs: Any) -> Any:
        inside: dict[Any, Any] = dict(enumerate(args)) | dict(kwargs.items())
        before = {number: inside[place] for number, place in enumerate(places)}
        merged = nnx.merge(graph, {number: tree for number, tree in before.items() if tree})
        by_place: dict[Any, Any] = dict(zip(places, merged, strict=True))
        results = call.fn(
            *(by_place.get(place, argument) for place, argument in enumerate(args)),
            **{name: by_place.get(name, argument) for name, argument in kwargs.items()},
        )
        results = _without_arguments(results, merged)
        after_graph, after_state = nnx.split(merged)
        after = nnx.to_pure_dict(after_state)
        changed = {n: _changed(before[n], after.get(n, {}), n in whole) for n in before}
        updates = {place: changed[number] for number, place in enumerate(places)}
        in_front = tuple(updates.get(place, ()) for place in range(len(args)))
        return (*in_front, {name: updates[name] for name in kwargs if name in updates}, Static(after_graph), results)

    def finish(found: Any) -> Any:
        *in_front, by_name, after_graph, results = found
        updates = {**dict(enumerate(in_front)), **by_name}
        _put_into(objects, [updates[place] for place in places], after_graph.value)
        return jax.tree.map(lambda node: _restored(node, objects), results, is_leaf=is_static)

    def of_shapes(found: Any) -> Any:
        return jax.tree.map(lambda node: _restored(node, objects), found[-1], is_leaf=is_static)

    finish.of_shapes = of_shapes  # type: ignore[attr-defined]
    constants = (*call.constants, ("nnx", tuple(places), graph))
    return replace(call, fn=on_arrays, args=args, kwargs=kwargs, constants=constants, finish=(finish, *call.finish))


def _places(call: Call) -> dict[Any, Any]:
    return {**dict(enumerate(call.args)), **call.kwargs}


def _is_object(node: Any) -> bool:
    return isinstance(node, _OBJECTS) and not isinstance(node, nnx.State)


def _has_objects(argument: Any) -> bool:
    return any(map(_is_object, jax.tree.leaves(argument, is_leaf=_is_object)))


class _Argument(int):
    """The number of an object of the call, which stands for the object in its results."""


def _without_arguments(results: Any, objects: Sequence[Any]) -> Any:
    """Results in which objects of the call are replaced by their numbers."""
    numbers = {id(one): number for number, one in enumerate(objects)}

    def named(node: Any) -> Any:
        return Static(_Argument(numbers[id(node)])) if id(node) in numbers else node

    return jax.tree.map(named, results, is_leaf=lambda node: id(node) in numbers)


def _restored(node: Any, objects: Sequence[Any]) -> Any:
    is_argument = is_static(node) and isinstance(node.value, _Argument)
    return objects[node.value] if is_argument else node


def _changed(before: Any, after: Any, every: bool) -> Any:
    """The changed arrays of a tree, or all of its arrays."""
    if not isinstance(after, dict):
        return None if after is before and not every else after
    known = before if isinstance(before, dict) else {}
    found = {key: _changed(known.get(key), one, every) for key, one in after.items()}
    return {
        key: one for key, one in found.items() if one is not None and (one != {} if isinstance(one, dict) else True)
    }


def _put_into(objects: tuple[Any, ...], updates: Sequence[Any], graph: Any) -> None:
    """Writes changed arrays, and changed attributes that are no arrays, into the caller's objects."""
    own_graph, state = nnx.split(objects)
    arrays = nnx.to_pure_dict(state)
    for number, update in enumerate(updates):
        arrays[number] = _merged(arrays.get(number, {}), update)
    arrays = {number: tree for number, tree in arrays.items() if not isinstance(tree, dict) or tree}
    if own_graph == graph:
        nnx.replace_by_pure_dict(state, arrays)
        nnx.update(objects, state)
        return
    owners: dict[Any, Any] = {path: node for path, node in nnx.iter_graph(objects) if isinstance(node, _OBJECTS)}
    for path, node in nnx.iter_graph(nnx.merge(graph, arrays)):
        own = owners.get(path)
        if isinstance(node, nnx.Variable) and isinstance(own, nnx.Variable):
            own.set_value(node.get_value())
        elif isinstance(node, nnx.Pytree) and isinstance(own, nnx.Pytree):
            _put_attributes(own, node)


def _put_attributes(own: Any, node: Any) -> None:
    """Writes new and changed attributes of an object, other than objects, into another one of the same type."""
    held, wanted = ({k: v for k, v in vars(one).items() if not k.startswith("_pytree__")} for one in (own, node))
    for name in held.keys() - wanted.keys():
        delattr(own, name)
    for name, value in wanted.items():
        both = isinstance(value, _OBJECTS) and isinstance(held.get(name), _OBJECTS)
        if not both and (name not in held or held[name] is not value):
            setattr(own, name, value)


def _merged(tree: Any, update: Any) -> Any:
    if not isinstance(update, dict):
        return update
    return {**tree, **{key: _merged(tree.get(key, {}), one) for key, one in update.items()}}
