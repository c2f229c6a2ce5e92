"""Where a NaN goes: whether a step's results depend on a maximum that ignores NaNs.

A softmax does not. Each element minus the maximum is NaN where the element is, so that the sum over the same elements
is NaN with any maximum, and so is all that is divided by it. What is computed of a maximum is followed, by the index
expressions of the operations, until it is the same with any maximum.

>>> import jax
>>> from shardplan.tracing import trace_program
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
from shardplan.once import once
from shardplan.program import Constant, Operation, Program, Value, operand_type
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
"""Operations of floats whose result is NaN where an element that they read is NaN."""

_FALSE_OF_NAN = frozenset({"eq", "ge", "gt", "le", "lt", "is_finite"})
"""Operations whose result is false where an element that they read is NaN."""

_MOVING = frozenset(
    {"transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "stop_gradient", "copy", "copy_p"}
    | {"sharding_constraint", "optimization_barrier"}
)
"""Operations that give what they read."""

_DEEPEST = 12
"""Operations in a row that are looked through for a NaN; a softmax and its gradient have fewer."""


@once
def loses_nan(program: Program, index: int) -> bool:
    """Whether a step gives another result if an operation's maximum (or minimum) ignores NaNs."""
    operation = program.operations[index]
    if not _jax.is_float(program.values[operation.results[0]].dtype):
        return False
    # what a scatter puts together is not followed further
    return operation.primitive.name.startswith("scatter") or _Following(program, operation).is_lost()


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is known of a value if the maximum's operand has a NaN, whatever the maximum then is.

    ``differs``: the value may depend on the maximum of the elements that agree with its own in these dimensions; None
    where it does not. ``nan``: it is NaN (or false) where a NaN agrees in these dimensions; None where that is not
    known.
    """

    differs: Mapping[Any, int] | None = None
    nan: Mapping[Any, int] | None = None


class _Following:
    """What is computed of a maximum, followed until all of it is the same with any maximum."""

    def __init__(self, program: Program, operation: Operation) -> None:
        self._program = program
        self._operation = operation
        self._dims = frozenset(map(int, operation.params["axes"]))
        self._readers = _readers(program)
        self._mask: dict[int, int] = {}  # a choice of the operand's elements, and the case that may be NaN
        self._seen = self._beginning()

    def _beginning(self) -> dict[int, _Seen]:
        """The maximum, its operand, and what that has its NaNs from."""
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
        """Whether something that leaves the region of the maximum depends on it."""
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
        """Whether a value leaves its region, or enters another one; else its readers wait."""
        readers = self._readers.get(value, ())
        for reader in readers:
            heappush(waiting, reader)
        return value in _leaving(self._program) or any(not _is_plain(self._program, reader) for reader in readers)

    def _of(self, operand: int | Constant, depth: int) -> _Seen:
        """What is known of an operand. What differs was seen before all that reads it."""
        if not isinstance(operand, int):
            return _Seen()
        if operand not in self._seen:
            maker = self._program.makers.get(operand)
            followed = maker is not None and depth < _DEEPEST and not maker.bodies
            found = self._results(maker, depth + 1)[maker.results.index(operand)] if maker and followed else _Seen()
            self._seen[operand] = found
        return self._seen[operand]

    def _results(self, operation: Operation, depth: int) -> list[_Seen]:
        """What is known of an operation's results."""
        name = operation.primitive.name
        operands = [self._of(operand, depth) for operand in operation.operands]
        tensors = [operand_type(self._program, operand) for operand in operation.operands]
        results = [self._program.values[result] for result in operation.results]
        rule = rules.derive(operation.primitive, operation.params, tensors, results)
        if rule.expression is None or not _is_followed(operation, results):
            differs = any(seen.differs is not None for seen in operands)
            return [_Seen({} if differs else None) for _ in results]
        read = operands
        if name in _PASSING_NAN or name in _FALSE_OF_NAN:  # of what is false, nothing follows here
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
        """What is NaN wherever it may differ does not differ."""
        if seen.differs is None or seen.nan is None or self._dims & {*seen.nan.values()}:
            return seen
        return _Seen(None, seen.nan) if seen.nan.items() <= seen.differs.items() else seen

    def _chosen(self, operation: Operation, operands: Sequence[_Seen]) -> Mapping[int, int] | None:
        """Where a choice among cases of one shape is NaN: where all cases are, or the first one is and is chosen, or
        the one is that the maximum's operand has its NaNs from."""
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
    """What is known of one element of a result, by the indices of its expression."""

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
        """What is known of a term."""
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
        """Dimensions of an operand by the indices that run over them; nothing where ``every`` one needs an index."""
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
    """The index that a position is, if it is one."""
    if position is None or position.offset or len(position.terms) != 1:
        return None
    [(coefficient, atom)] = position.terms
    return atom if coefficient == 1 and isinstance(atom, str) else None


def _is_followed(operation: Operation, results: Sequence[Value]) -> bool:
    """Whether it is known what an operation makes of NaNs: of a lookup, if what it finds nowhere is NaN as well."""
    name, params = operation.primitive.name, operation.params
    if name == "gather":
        fill = params["fill_value"]
        return params["mode"] != GatherScatterMode.FILL_OR_DROP or fill is None or bool(fill != fill)
    passes = name in _PASSING_NAN and all(_jax.is_float(result.dtype) for result in results)
    return passes or name in _FALSE_OF_NAN or name in _MOVING or name == "select_n"


def _is_number(program: Program, operand: int | Constant) -> bool:
    """Whether an operand is a literal that is no NaN, converted or broadcast."""
    if isinstance(operand, Constant):
        return bool(np.all(operand.value == operand.value))
    maker = program.makers.get(operand)
    spreads = maker is not None and maker.primitive.name in ("broadcast_in_dim", "convert_element_type")
    return maker is not None and spreads and _is_number(program, maker.operands[0])


def _is_plain(program: Program, index: int) -> bool:
    """Whether an operation has neither bodies nor effects."""
    operation = program.operations[index]
    return not operation.bodies and not operation.equation.effects


@once
def _leaving(program: Program) -> frozenset[int]:
    """The values that leave the program, or a region."""
    outputs = (program.outputs, *(region.outputs for region in program.regions))
    return frozenset(output for some in outputs for output in some if isinstance(output, int))


@once
def _readers(program: Program) -> dict[int, list[int]]:
    """Per value, the operations that read it."""
    found: dict[int, list[int]] = {}
    for operation in program.operations:
        for operand in operation.operands:
            if isinstance(operand, int):
                found.setdefault(operand, []).append(operation.index)
    return found
