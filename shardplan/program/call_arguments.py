"""Calls of a planned function: its static and donated arguments, and the key by which calls share a plan.

Positions and names have the meaning of ``jax.jit``. Negative positions count from the end. An argument that is static
or donated by position is so by its name too.

>>> import numpy as np
>>> def scale(x, factor, offset=0.0):
...     return x * factor + offset
>>> calls = Calls(scale, static_argnums=-2)
>>> call = calls.take((np.ones(3), 2), {})
>>> len(call.args), call.fn(np.ones(3)).tolist(), calls.take((np.ones(3),), {"factor": 2}).key() == call.key()
(1, [2.0, 2.0, 2.0], False)
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax

from shardplan import _jax
from shardplan.errors import ArgumentError, CallError

Argnums = int | Sequence[int] | None
Argnames = str | Iterable[str] | None


@dataclass(frozen=True, slots=True)
class Call:
    """One call, without its static arguments.

    ``fn`` takes the remaining ``args`` and ``kwargs``. ``donated`` are positions in ``args`` and names in ``kwargs``.
    ``static_positions`` and ``donated_positions`` are positions of the whole call, ``static_names`` names of its
    keywords. ``name`` is the name of the user's function, ``parameters`` are those of its parameters for ``args``, as
    far as the signature has them. ``finish`` are functions that convert the results, one after
    another. ``on_host`` are path globs of arguments that wait in host memory, wherever they are given.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    constants: tuple[Any, ...]
    donated: tuple[int | str, ...]
    static_positions: tuple[int, ...]
    donated_positions: tuple[int, ...]
    static_names: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    finish: tuple[Callable[[Any], Any], ...] = ()
    on_host: tuple[str, ...] = ()

    def finished(self, results: Any, of_shapes: bool = False) -> Any:
        """The caller's results, converted from the results of ``fn``. Shapes as results change no object of the
        caller."""
        for one in self.finish:
            results = (getattr(one, "of_shapes", one) if of_shapes else one)(results)
        return results

    @property
    def donated_names(self) -> tuple[str, ...]:
        return tuple(place for place in self.donated if isinstance(place, str))

    def key(self) -> Any:
        """The key of calls that run by the same plan: structure, types with the layouts that are part of them, memory
        kinds and static values.
        """
        leaves, structure = jax.tree.flatten((self.args, self.kwargs))
        try:
            kinds = [(_key_of(leaf), _jax.typed_layout(leaf)) for leaf in leaves]
        except TypeError:
            self.shapes()  # says which argument it is
            raise
        for position in _matching(structure, self.on_host):
            kinds[position] = _with_kind(kinds[position][0], _jax.HOST_MEMORY), kinds[position][1]
        return structure, tuple(kinds), self.constants, _jax.trace_context()

    @property
    def positions_on_host(self) -> frozenset[int]:
        """The leaves that wait in host memory as ``on_host`` asks, by their positions."""
        return _matching(jax.tree.structure((self.args, self.kwargs)), self.on_host)

    def shapes(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments as shapes, dtypes and memory kinds: their layouts are no part of the trace. What waits on the host
        by ``on_host`` is on the devices for the function.

        Raises CallError for leaves that are no arrays, and for donated references.
        """
        for place in self.donated:
            argument = self.args[place] if isinstance(place, int) else self.kwargs[place]
            for path, leaf in jax.tree_util.tree_leaves_with_path(argument):
                if _jax.is_ref(leaf):
                    where = _place_of((None, jax.tree_util.DictKey(place), *path))
                    raise CallError(
                        f"`{where}` is a Ref in an argument that is donated (donate_argnums): what is written to a Ref "
                        "takes its memory in any case. Pass it in an argument that is not donated"
                    )
        leaves, structure = jax.tree.flatten(jax.tree_util.tree_map_with_path(_shape_of, (self.args, self.kwargs)))
        for position in self.positions_on_host:
            leaves[position] = _shape(*_with_kind(_key_of(leaves[position]), None))
        args, kwargs = jax.tree.unflatten(structure, leaves)
        return args, kwargs

    def types(self) -> dict[str, str]:
        """Types of the arguments by their paths, as messages have them."""
        on_host = self.positions_on_host
        keys = ((path, _key_of(leaf)) for path, leaf in _by_path(self.shapes()).items())
        kinds = ((path, _with_kind(k, _jax.HOST_MEMORY) if n in on_host else k) for n, (path, k) in enumerate(keys))
        return {path: type_text(*kind) for path, kind in kinds}

    def leaves(self) -> list[Any]:
        return jax.tree.leaves((self.args, self.kwargs))

    def by_path(self) -> dict[str, Any]:
        """The arguments by their paths."""
        return _by_path((self.args, self.kwargs))

    def check_single(self, leaves: Sequence[Any], refs: Iterable[int], captured: Sequence[Any]) -> None:
        """Raises CallError if a reference (``refs``, by position) is given twice, or closed over as well."""
        seen = {id(ref): "one that the function closes over" for ref in captured}
        for position in sorted(refs):
            if id(leaves[position]) in seen:
                place = _place_of(self._leaf_paths()[position])
                raise CallError(
                    f"`{place}` is the same Ref as {seen[id(leaves[position])]}: a step takes each Ref once"
                )
            seen[id(leaves[position])] = "another argument"

    def _leaf_paths(self) -> list[Any]:
        return [path for path, _ in jax.tree_util.tree_leaves_with_path((self.args, self.kwargs))]

    def check_alive(self, leaves: Sequence[Any]) -> None:
        """Raises CallError if an array was donated before. XLA would end the process over several CPU devices."""
        gone = [isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves]
        if any(gone):
            raise CallError(
                f"`{_place_of(self._leaf_paths()[gone.index(True)])}` holds no data any more, one of {sum(gone)} such "
                "arrays: a step before took their memory for its results (donate_argnums) or they were deleted. Pass "
                "what that step returned"
            )


def _by_path(arguments: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(arguments)
    return {jax.tree_util.keystr(path[1:], simple=True, separator="/"): leaf for path, leaf in leaves}


@functools.lru_cache
def _matching(structure: Any, patterns: tuple[str, ...]) -> frozenset[int]:
    """The positions of the leaves of ``(args, kwargs)`` whose paths match a glob."""
    if not patterns:
        return frozenset()
    paths = _by_path(jax.tree.unflatten(structure, range(structure.num_leaves)))
    return frozenset(n for path, n in paths.items() if any(fnmatchcase(path, pattern) for pattern in patterns))


class Calls:
    """The calls of one function with static and donated arguments.

    Raises ArgumentError for positions that the function does not have, or that are both static and donated.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        static_argnums: Argnums = None,
        donate_argnums: Argnums = None,
        static_argnames: Argnames = None,
        donate_argnames: Argnames = None,
        on_host: tuple[str, ...] = (),
    ) -> None:
        self._fn, self._on_host = fn, on_host
        self._parameters, self._takes_more = _positional_parameters(fn)
        self.static, self._static_names = self._places("static", static_argnums, static_argnames)
        self.donated, self._donated_names = self._places("donate", donate_argnums, donate_argnames)
        both = {*self.static} & {*self.donated} or {*self._static_names} & {*self._donated_names}
        if both:
            raise ArgumentError(
                f"argument {min(both)} of `{name_of(fn)}` is in static_argnums and in donate_argnums: a static "
                "argument has no memory to donate"
            )

    def take(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Splits a call into its static values and the rest.

        Raises CallError for static values that cannot be hashed.
        """
        static = [p for p in self._within(self.static, len(args)) if p < len(args)]
        donated = [p for p in self._within(self.donated, len(args)) if p < len(args)]
        fixed = {name: kwargs[name] for name in self._static_names if name in kwargs}
        dynamic = [position for position in range(len(args)) if position not in static]
        places = [dynamic.index(position) for position in donated if position in dynamic]
        names = [name for name in self._donated_names if name in kwargs]
        given = {p: args[p] for p in static}
        constants = tuple((place, type(value), value) for place, value in (*given.items(), *sorted(fixed.items())))
        self._check_hashable(constants)
        return Call(
            name=name_of(self._fn),
            fn=_with_constants(self._fn, len(args), given, fixed) if given or fixed else self._fn,
            args=tuple(args[position] for position in dynamic),
            kwargs={name: value for name, value in kwargs.items() if name not in fixed},
            constants=constants,
            donated=(*places, *names),
            static_positions=tuple(static),
            donated_positions=tuple(donated),
            static_names=tuple(fixed),
            parameters=tuple(self._parameters[p] for p in dynamic if p < len(self._parameters)),
            on_host=self._on_host,
        )

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises CallError for a call that does not fit the signature."""
        try:
            inspect.signature(self._fn).bind(*args, **kwargs)
        except TypeError as error:
            raise CallError(f"`{name_of(self._fn)}` cannot be called with these arguments: {error}") from None
        except ValueError:  # a builtin without a signature: tracing will tell
            pass

    def _places(self, kind: str, argnums: Argnums, argnames: Argnames) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Positions and names of arguments. Each argument has both if the function has a parameter for it."""
        positions, names = self._positions(f"{kind}_argnums", argnums), self._named(f"{kind}_argnames", argnames)
        by_name = (self._parameters.index(name) for name in names if name in self._parameters)
        found = tuple(sorted({*positions, *by_name}))
        return found, tuple(dict.fromkeys((*names, *self._names(found))))

    def _named(self, option: str, given: Argnames) -> list[str]:
        listed = [given] if given is None or isinstance(given, str) else given
        named = [*listed] if isinstance(listed, Iterable) else [listed]
        if given is None:
            return []
        if not all(isinstance(name, str) for name in named):
            raise ArgumentError(f"{option} takes names of arguments, got `{given!r}`")
        try:
            parameters = inspect.signature(self._fn).parameters
        except (TypeError, ValueError):
            return named
        more = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
        for name in named:
            if name not in parameters and not more:
                raise ArgumentError(
                    f"{option} has the name `{name}`, but `{name_of(self._fn)}` takes {', '.join(parameters)}"
                )
        return named

    def _positions(self, option: str, given: Argnums) -> tuple[int, ...]:
        listed = [] if given is None else given if isinstance(given, Iterable) else [given]
        try:
            found = tuple(operator.index(position) for position in listed)
        except TypeError:
            raise ArgumentError(f"{option} takes positions of arguments, integers, got `{given!r}`") from None
        count = len(self._parameters)
        if not self._takes_more:
            for position in found:
                if not -count <= position < count:
                    raise ArgumentError(
                        f"{option} has the position {position}, but `{name_of(self._fn)}` takes {count} positional "
                        "arguments"
                    )
            found = tuple(position % count for position in found)
        return tuple(sorted(set(found)))

    def _within(self, positions: tuple[int, ...], count: int) -> list[int]:
        """Positions in a call of ``count`` positional arguments."""
        return [position + count if position < 0 else position for position in positions]

    def _names(self, positions: tuple[int, ...]) -> list[str]:
        return [self._parameters[p] for p in positions if -len(self._parameters) <= p < len(self._parameters)]

    def _check_hashable(self, constants: Any) -> None:
        try:
            hash(constants)
        except TypeError as error:
            raise CallError(
                f"a static argument of `{name_of(self._fn)}` cannot be hashed ({error}): static arguments are compared "
                "between calls; pass a tuple instead of a list, a frozen dataclass instead of a dictionary"
            ) from None


def name_of(fn: Callable[..., Any]) -> str:
    """The name of a function in messages."""
    inner = fn.func if isinstance(fn, functools.partial) else fn
    return getattr(inner, "__name__", type(inner).__name__)


def _with_constants(
    fn: Callable[..., Any], count: int, positional: dict[int, Any], named: dict[str, Any]
) -> Callable[..., Any]:
    @functools.wraps(fn)
    def closed(*args: Any, **kwargs: Any) -> Any:
        dynamic = iter(args)
        whole = [positional[p] if p in positional else next(dynamic) for p in range(count)]
        return fn(*whole, **named, **kwargs)

    return closed


def _positional_parameters(fn: Callable[..., Any]) -> tuple[list[str], bool]:
    """Names of the positional parameters, and whether the function takes any number of further ones."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return [], True
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return positional, any(p.kind == p.VAR_POSITIONAL for p in parameters)


def memory_kind_of(leaf: Any) -> str | None:
    """The memory kind of an array or a shape (``pinned_host``), None for the memory of the devices, the default."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return None if kind == "device" else kind


def type_text(
    shape: Sequence[int], dtype: Any, weak_type: bool = False, memory_kind: str | None = None, is_ref: bool = False
) -> str:
    """The type of an argument, as messages have it.

    >>> type_text((8, 4), "float32"), type_text((), "int32", memory_kind="pinned_host")
    ('float32[8, 4]', 'int32<pinned_host>[]')
    >>> type_text((2,), "bool", is_ref=True)
    'Ref to bool[2]'
    """
    kind = f"<{memory_kind}>" if memory_kind else ""
    return f"{'Ref to ' * is_ref}{dtype}{kind}{list(shape)}"


def _key_of(leaf: Any) -> Any:
    kind, aval = memory_kind_of(leaf), leaf
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        is_type = isinstance(leaf, jax.core.AbstractValue)
        aval, kind = (leaf, _jax.memory_kind(leaf)) if is_type else (jax.typeof(leaf), kind)
    return aval.shape, aval.dtype, getattr(aval, "weak_type", False), kind, _jax.is_ref_type(aval)


def _with_kind(key: Any, kind: str | None) -> Any:
    """The type of an argument, as `_key_of` gives it, in a memory kind."""
    shape, dtype, weak_type, _, is_ref = key
    return shape, dtype, weak_type, kind, is_ref


def _shape_of(path: Any, leaf: Any) -> Any:
    try:
        shape, dtype, weak_type, kind, is_ref = _key_of(leaf)
    except TypeError:
        raise CallError(
            f"`{_place_of(path)}` is `{leaf!r}` of type `{type(leaf).__name__}`: arguments are arrays, numbers or "
            f"pytrees of them; list others in {_static_option(path)}"
        ) from None
    return _shape(shape, dtype, weak_type, kind, is_ref)


def _shape(shape: Any, dtype: Any, weak_type: bool, kind: str | None, is_ref: bool) -> Any:
    if is_ref:
        return _jax.ref_type(shape, dtype, weak_type)
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type, sharding=kind and _jax.without_layout(kind))


def _static_option(path: Any) -> str:
    """The option by which the argument of a leaf is static."""
    _, argument, *_ = path
    return "static_argnums" if path[0].idx == 0 else f'static_argnames="{argument.key}"'


def _place_of(path: Any) -> str:
    """The path of a leaf of ``(args, kwargs)``, as messages have it."""
    return jax.tree_util.keystr(path[1:], simple=True, separator="/") or "an argument"
