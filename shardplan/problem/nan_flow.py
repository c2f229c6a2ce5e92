"""NaN flow: whether a step's results depend on a maximum that ignores NaNs.

A softmax does not. Each element minus the maximum is NaN if the element is. The sum over the same elements is then NaN
with any maximum, and so is every quotient by it. The analysis follows the results that depend on a maximum, by the
index expressions of the operations, until they are the same with any maximum.

>>> import jax
>>> from shardplan.program.tracing import trace_program
>>> def lost(function):
...     program = trace_program(function, (jax.ShapeDtypeStruct((8, 16), "float32"),))
...     return [loses_nan(program, o.index) for o in program.operations if o.primitive.name == "reduce_max"]
>>> lost(jax.numpy.max), lost(jax.nn.softmax)
([True], [False])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode

from shardplan import _jax, rules
from shardplan.memoize import memoize
from shardplan.program.program import Constant, Operation, Program, Value, operand_type
from shardplan.rules.expression import Affine, Read, Reduce, Term, children

_PASSING_NAN = frozenset(
    {
        "add",
        "add_any",
        "sub",
        "mul",
        "div",
        "rem",
        "max",
        "min",
        "neg",
        "abs",
        "sign",
        "square",
        "sqrt",
        "rsqrt",
        "cbrt",
    }
    | {"exp", "exp2", "expm1", "log", "log1p", "sin", "cos", "tan", "sinh", "cosh", "tanh", "logistic"}
    | {"erf", "erfc", "floor", "ceil", "round", "reduce_precision", "convert_element_type", "reduce_sum", "dot_general"}
)
"""Operations of floats whose result is NaN if one of its elements is NaN."""

_FALSE_OF_NAN = frozenset({"eq", "ge", "gt", "le", "lt", "is_finite"})
"""Operations whose result is false if one of its elements is NaN."""

_MOVING = frozenset(
    {"transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "stop_gradient", "copy", "copy_p"}
    | {"sharding_constraint", "optimization_barrier"}
)
"""Operations that move elements without a change."""

_MAX_DEPTH = 12
"""The most operations in a row that are followed for a NaN. A softmax and its gradient have fewer."""


@memoize
def loses_nan(program: Program, index: int) -> bool:
    """Whether a step gives another result if an operation's maximum (or minimum) ignores NaNs."""
    operation = program.operations[index]
    if not _jax.is_float(program.values[operation.results[0]].dtype):
        return False
    # the result of a scatter is not followed further
    return operation.primitive.name.startswith("scatter") or _Following(program, operation).is_lost()


@dataclass(frozen=True, slots=True)
class _Seen:
    """Facts about a value if the maximum's operand has a NaN, for any maximum.

    ``differs``: the value may depend on the maximum of the elements that agree with its own in these dimensions, None
    if it does not. ``nan``: it is NaN (or false) if a NaN agrees in these dimensions, None if that is unknown.
    """

    differs: Mapping[Any, int] | None = None
    nan: Mapping[Any, int] | None = None


class _Following:
    """The values that depend on a maximum, followed until all are the same with any maximum."""

    def __init__(self, program: Program, operation: Operation) -> None:
        self._program = program
        self._operation = operation
        self._dims = frozenset(map(int, operation.params["axes"]))
        self._readers = _readers(program)
        self._mask: dict[int, int] = {}  # a choice of the operand's elements, and the case that may be NaN
        self._seen = self._beginning()

    def _beginning(self) -> dict[int, _Seen]:
        """The maximum, its operand, and the origin of the operand's NaNs."""
        [operand], [result] = self._operation.operands, self._operation.results
        if not isinstance(operand, int):
            return {}
        rank, makers = len(self._program.values[operand].shape), self._program.makers
        kept = [dim for dim in range(rank) if dim not in self._dims]
        found = {result: _Seen(differs=dict(enumerate(kept)))}
        while isinstance(operand, int):
            found[operand] = _Seen(nan={dim: dim for dim in range(rank)})
            maker = makers.get(operand)
            if maker is None or maker.primitive.name != "select_n":
                break
            pred, *cases = maker.operands
            named = [n for n, case in enumerate(cases) if not _is_number(self._program, case)]
            if len(named) != 1 or not isinstance(pred, int) or self._program.values[pred].shape == ():
                break
            self._mask[pred], operand = named[0], cases[named[0]]
        return found

    def is_lost(self) -> bool:
        """Whether a value that leaves the region of the maximum depends on it."""
        [result] = self._operation.results
        waiting: list[int] = []
        if self._leaves(result, waiting):
            return True
        while waiting:
            operation = self._program.operations[heappop(waiting)]
            while waiting and waiting[0] == operation.index:
                heappop(waiting)
            for value, seen in zip(operation.results, self._results(operation, 0), strict=True):
                self._seen[value] = seen
                if seen.differs is not None and self._leaves(value, waiting):
                    return True
        return False

    def _leaves(self, value: int, waiting: list[int]) -> bool:
        """Whether a value leaves its region, or enters another one. Otherwise its readers are followed."""
        readers = self._readers.get(value, ())
        for reader in readers:
            heappush(waiting, reader)
        return value in _leaving(self._program) or any(not _is_plain(self._program, reader) for reader in readers)

    def _of(self, operand: int | Constant, depth: int) -> _Seen:
        """The facts about an operand. A value that differs comes before all its readers."""
        if not isinstance(operand, int):
            return _Seen()
        if operand not in self._seen:
            maker = self._program.makers.get(operand)
            followed = maker is not None and depth < _MAX_DEPTH and not maker.bodies
            found = self._results(maker, depth + 1)[maker.results.index(operand)] if maker and followed else _Seen()
            self._seen[operand] = found
        return self._seen[operand]

    def _results(self, operation: Operation, depth: int) -> list[_Seen]:
        """The facts about an operation's results."""
        name = operation.primitive.name
        operands = [self._of(operand, depth) for operand in operation.operands]
        tensors = [operand_type(self._program, operand) for operand in operation.operands]
        results = [self._program.values[result] for result in operation.results]
        rule = rules.derive(operation.primitive, operation.params, tensors, results)
        if rule.expression is None or not _is_followed(operation, results):
            differs = any(seen.differs is not None for seen in operands)
            return [_Seen({} if differs else None) for _ in results]
        read = operands
        if name in _PASSING_NAN or name in _FALSE_OF_NAN:  # no facts follow from false values here
            read = [
                seen if _jax.is_float(t.dtype) else _Seen(seen.differs)
                for seen, t in zip(operands, tensors, strict=True)
            ]
        found = []
        for result in rule.expression.results:
            walk = _Walk(read, rule.expression.operand_shapes, rule.expression.sizes, self._dims, name == "gather")
            seen, names = walk.term(result.body), [_name(position) for position in result.at]
            nan = seen.nan if seen.nan is not None and seen.nan.keys() <= {*names} else None
            is_nan = self._chosen(operation, operands) if name == "select_n" else _by_dimension(nan, names)
            found.append(self._settled(_Seen(_by_dimension(seen.differs, names), is_nan)))
        return found

    def _settled(self, seen: _Seen) -> _Seen:
        """Facts without `differs`, if the value is NaN wherever it may differ."""
        if seen.differs is None or seen.nan is None or self._dims & {*seen.nan.values()}:
            return seen
        return _Seen(None, seen.nan) if seen.nan.items() <= seen.differs.items() else seen

    def _chosen(self, operation: Operation, operands: Sequence[_Seen]) -> Mapping[int, int] | None:
        """The NaNs of a choice among cases of one shape.

        It is NaN if all cases are, if the first one is and is chosen, or if the case is that has the operand's NaNs.
        """
        pred, *cases = (seen.nan for seen in operands)
        same = self._mask.get(operation.operands[0]) if isinstance(operation.operands[0], int) else None
        if same is not None and (taken := cases[same]) is not None and [*taken.items()] == [(d, d) for d in taken]:
            rank = len(self._program.values[operation.results[0]].shape)
            if len(taken) == rank:
                return taken
        if len(cases) == 2 and pred is not None and cases[0] is not None:
            return {**pred, **cases[0]} if _agree(pred, cases[0]) else None
        first, *others = cases
        if first is None or any(other != first for other in others):
            return None
        return first


class _Walk:
    """The facts about one element of a result, by the indices of its expression."""

    def __init__(
        self,
        operands: Sequence[_Seen],
        shapes: Sequence[tuple[int, ...]],
        sizes: Mapping[str, int],
        dims: frozenset[int],
        looks_up: bool,
    ) -> None:
        self._operands, self._shapes, self._sizes = operands, shapes, sizes
        self._dims = dims
        self._looks_up = looks_up

    def term(self, term: Term) -> _Seen:
        """The facts about a term."""
        if isinstance(term, Read):
            seen = self._operands[term.operand]
            return _Seen(self._places(term, seen.differs, False), self._places(term, seen.nan, True))
        below = [self.term(child) for child in children(term)]
        differs = [seen.differs for seen in below if seen.differs is not None]
        found = [seen.nan for seen in below if seen.nan is not None]
        common = dict(set(differs[0].items()).intersection(*(one.items() for one in differs))) if differs else None
        nan = min(found, key=lambda one: (len(self._dims & {*one.values()}), len(one)), default=None)
        if not isinstance(term, Reduce):
            return _Seen(common, nan)
        if nan is not None and self._looks_up and nan.keys() & term.indices:
            nan = None  # one element is looked up, not all are added
        return _Seen(_without(common, term.indices), _without(nan, term.indices))

    def _places(self, read: Read, places: Mapping[int, int] | None, every: bool) -> Mapping[str, int] | None:
        """Dimensions of an operand by their indices. Empty if ``every`` dimension needs an index and one has none."""
        found: dict[str, int] = {}
        for dim, place in places.items() if places is not None else ():
            name, size = _name(read.at[dim]), self._shapes[read.operand][dim]
            if name is not None and self._sizes[name] == size and name not in found:
                found[name] = place
            elif every and size > 1:
                return None
        return None if places is None else found


def _without(places: Mapping[Any, int] | None, names: Iterable[Any]) -> Mapping[Any, int] | None:
    return None if places is None else {name: place for name, place in places.items() if name not in names}


def _by_dimension(places: Mapping[str, int] | None, names: Sequence[str | None]) -> Mapping[int, int] | None:
    if places is None:
        return None
    return {dim: places[name] for dim, name in enumerate(names) if name is not None and name in places}


def _agree(one: Mapping[int, int], other: Mapping[int, int]) -> bool:
    return all(other[dim] == place for dim, place in one.items() if dim in other)


def _name(position: Affine | None) -> str | None:
    """The index of a position that is a plain index."""
    if position is None or position.offset or len(position.terms) != 1:
        return None
    [(coefficient, atom)] = position.terms
    return atom if coefficient == 1 and isinstance(atom, str) else None


def _is_followed(operation: Operation, results: Sequence[Value]) -> bool:
    """Whether the NaNs of an operation's results are known. A lookup must fill with NaN."""
    name, params = operation.primitive.name, operation.params
    if name == "gather":
        fill = params["fill_value"]
        return params["mode"] != GatherScatterMode.FILL_OR_DROP or fill is None or bool(fill != fill)
    passes = name in _PASSING_NAN and all(_jax.is_float(result.dtype) for result in results)
    return passes or name in _FALSE_OF_NAN or name in _MOVING or name == "select_n"


def _is_number(program: Program, operand: int | Constant) -> bool:
    """Whether an operand is a literal other than NaN, converted or broadcast."""
    if isinstance(operand, Constant):
        return bool(np.all(operand.value == operand.value))
    maker = program.makers.get(operand)
    spreads = maker is not None and maker.primitive.name in ("broadcast_in_dim", "convert_element_type")
    return maker is not None and spreads and _is_number(program, maker.operands[0])


def _is_plain(program: Program, index: int) -> bool:
    """Whether an operation has neither bodies nor effects."""
    operation = program.operations[index]
    return not operation.bodies and not operation.equation.effects


@memoize
def _leaving(program: Program) -> frozenset[int]:
    """The values that leave the program, or a region."""
    outputs = (program.outputs, *(region.outputs for region in program.regions))
    return frozenset(output for some in outputs for output in some if isinstance(output, int))


@memoize
def _readers(program: Program) -> dict[int, list[int]]:
    """Per value, the operations that read it."""
    found: dict[int, list[int]] = {}
    for operation in program.operations:
        for operand in operation.operands:
            if isinstance(operand, int):
                found.setdefault(operand, []).append(operation.index)
    return found
