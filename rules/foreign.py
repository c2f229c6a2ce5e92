"""Operations with a rule of their own: described functions, ``custom_partitioning``, foreign calls."""

from typing import Any

from shardplan.rules import calls
from shardplan.rules.equation import Equation, Semantics, Unknown, expression
from shardplan.rules.expression import ZERO, Affine, Apply, Expression, Opaque, Read, Reduce, Result, Shape, Term, index
from shardplan.rules.registry import described

_ELLIPSIS = "…"
"""The name of ``...`` in a parsed sharding rule of JAX."""


def _whole_call(equation: Equation) -> Expression:
    """A function described as a whole: by the user's expression, or from its body."""
    statement = equation.params["statement"]
    return statement.expression(equation) if statement is not None else calls.RULES["jit"](equation)


def _ffi_call(equation: Equation) -> Expression:
    name = equation.params["target_name"]
    description = described(name)
    if description is None:
        raise Unknown(
            f"nobody described the foreign function `{name}`: say what it computes with "
            f'`shardplan.describe("{name}", "b i -> b i")`.'
        )
    return description.expression(equation)


def _custom_partitioning(equation: Equation) -> Expression:
    """The function's own sharding rule: factors of a result are splits, reduction factors give partial sums."""
    rule = equation.params["sharding_rule"]
    if callable(rule):  # it is made for the shapes at hand
        rule = rule(*equation.params["static_args"], None, list(equation.inputs), list(equation.outputs))
    if rule is None or isinstance(rule, str):
        raise Unknown(
            "the `custom_partitioning` function has no sharding rule: give it one with `def_partition(..., "
            'sharding_rule="b i -> b i")`, or describe it with `shardplan.describe(function, ...)`.'
        )
    return _Factors(rule, equation).expression()


class _Factors:
    """A sharding rule of JAX, read as an expression."""

    def __init__(self, rule: Any, equation: Equation) -> None:
        self.rule, self.equation = rule, equation
        self.sizes: dict[str, int] = dict(rule.factor_sizes)
        self.whole = {*rule.need_replication_factors, *rule.permutation_factors}
        shapes = [tensor.shape for tensor in (*equation.inputs, *equation.outputs)]
        mappings = [
            self._dims(m, s) for m, s in zip((*rule.operand_mappings, *rule.result_mappings), shapes, strict=True)
        ]
        self.operands, self.results = mappings[: len(equation.inputs)], mappings[len(equation.inputs) :]

    def _dims(self, mapping: Any, shape: Shape) -> list[tuple[str, ...]]:
        """Names of the factors of every dimension, leading ``...`` spelled out; learns their sizes."""
        dims: list[tuple[str, ...]] = []
        for dim in mapping:
            if isinstance(dim, str) and dim.startswith(_ELLIPSIS):
                leading = len(shape) - len(mapping) + 1
                dims += [(f"batch{dim[1:]}_{n}",) for n in range(leading)]
            else:
                dims.append((dim,) if isinstance(dim, str) else tuple(dim))
        for names, size in zip(dims, shape, strict=True):
            if len(names) == 1:
                self.sizes.setdefault(names[0], size)
        return dims

    def expression(self) -> Expression:
        given = {name for dims in self.results for dim in dims for name in dim}
        taken = {name for dims in self.operands for dim in dims for name in dim}
        sums = tuple(n for n in self.rule.reduction_factors if n not in given)
        self.whole |= taken - given - set(sums)
        reads = tuple(Read(n, tuple(self._read(dim) for dim in dims)) for n, dims in enumerate(self.operands))
        hidden = tuple(index(name) for name in sorted(given & self.whole))
        results = []
        for n, dims in enumerate(self.results):
            body: Term = Opaque(f"f{n}", reads, hidden) if self.whole else Apply(f"f{n}", reads)
            results.append(Result(tuple(map(self._position, dims)), Reduce("sum", sums, body) if sums else body))
        sizes = {name: size for name, size in self.sizes.items() if name in given or name in sums}
        return expression(self.equation, sizes, results)

    def _read(self, dim: tuple[str, ...]) -> Affine | None:
        return None if self.whole & set(dim) else self._position(dim)

    def _position(self, dim: tuple[str, ...]) -> Affine:
        position = ZERO
        for name in dim:
            position = position * self.sizes[name] + index(name)
        return position


RULES: dict[str, Semantics] = {
    "whole_call": _whole_call,
    "ffi_call": _ffi_call,
    "custom_partitioning": _custom_partitioning,
}
