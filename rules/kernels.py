"""Pallas kernels: the reads and writes of every program of the grid follow from the block index maps.

A kernel with grid ``(4,)`` whose blocks of 8 rows move along with the grid computes

    ``out[8*g0 + e0, e1] = Opaque.kernel(All(r0, r1) x[8*g0 + r0, r1])[e0, e1]``

The grid splits in the dimensions along which every result's blocks move. It does not split where a result's block stays
in place (an accumulation). Programs of a kernel with scratch memory can see each other: its grid does not split, unless
the kernel declares the dimension ``"parallel"``.
"""

from typing import Any

from shardplan.rules.equation import Equation, Semantics, Unknown, expression, letters, name_of
from shardplan.rules.expression import ZERO, Affine, Expression, Opaque, Read, Reduce, Result, Shape, Term, index


def _pallas_call(equation: Equation) -> Expression:
    mapping, params = equation.params["grid_mapping"], equation.params
    if mapping.num_dynamic_grid_bounds or not all(isinstance(size, int) for size in mapping.grid):
        raise Unknown("the grid of the Pallas kernel is only known when it runs: describe the function that calls it.")
    grid = letters("g", len(mapping.grid))
    sizes = {name_of(g): size for g, size in zip(grid, mapping.grid, strict=True)}
    scalars, inputs = mapping.num_index_operands, mapping.num_inputs
    arguments: list[Term] = [Read(n, (None,) * len(tensor.shape)) for n, tensor in enumerate(equation.inputs[:scalars])]
    for n, block in enumerate(mapping.block_mappings[:inputs]):
        arguments.append(_block_read(scalars + n, block, grid, equation.inputs[scalars + n].shape, sizes))
    results = []
    for n, block in enumerate(mapping.block_mappings[inputs:]):
        at, inside = _result_position(n, block, grid, equation.outputs[n].shape, sizes)
        name = params.get("name") or "kernel"
        results.append(
            Result(at, Opaque(f"{name}_{n}" if len(equation.outputs) > 1 else name, tuple(arguments), inside))
        )
    tied = _tied(params, len(grid), bool(mapping.scratch_avals))
    if tied:  # every result depends on all programs along these
        results = [Result(r.at, _hide(r.body, tuple(grid[d] for d in tied))) for r in results]
    return expression(equation, sizes, results)


def _hide(body: Term, positions: tuple[Affine, ...]) -> Term:
    assert isinstance(body, Opaque)
    return Opaque(body.function, body.arguments, (*body.at, *positions))


def _tied(params: Any, rank: int, scratch: bool) -> tuple[int, ...]:
    """Grid dimensions along which programs may see each other."""
    if not scratch:
        return ()
    semantics = getattr(params.get("compiler_params"), "dimension_semantics", None) or ("sequential",) * rank
    return tuple(dim for dim, word in enumerate(semantics) if "parallel" not in str(word).lower())


def _block_read(operand: int, block: Any, grid: tuple[Affine, ...], shape: Shape, sizes: dict[str, int]) -> Term:
    """All elements of a program's block, or of whole dimensions where its position is not affine in the grid."""
    starts = _starts(block, grid)
    at: list[Affine | None] = []
    inside, padded = [], False
    for dim, (start, extent) in enumerate(zip(starts, shape, strict=True)):
        length = _length(block.block_shape[dim])
        if start is None or length >= extent:
            at.append(None)
            continue
        if length > 1:
            name = f"r{operand}_{dim}"
            sizes[name] = length
            inside.append(name)
            start = start + index(name)
            padded |= extent % length != 0 or type(block.block_shape[dim]).__name__ == "Element"
        at.append(start)
    read = Read(operand, tuple(at), padded)
    return Reduce("all", tuple(inside), read) if inside else read


def _result_position(
    number: int, block: Any, grid: tuple[Affine, ...], shape: Shape, sizes: dict[str, int]
) -> tuple[tuple[Affine, ...], tuple[Affine, ...]]:
    """The positions of a result's block, and the indices inside of the block."""
    starts = _starts(block, grid)
    at, inside = [], []
    for dim, (start, extent) in enumerate(zip(starts, shape, strict=True)):
        length = _length(block.block_shape[dim])
        if start is None:
            raise Unknown("a result's block index map is not affine in the grid: describe the function that calls it.")
        if length >= extent:
            start = ZERO
        if length > 1:
            name = f"e{number}_{dim}"
            sizes[name] = min(length, extent)
            inside.append(index(name))
            start = start + inside[-1]
        at.append(start)
    return tuple(at), tuple(inside)


def _length(block_dim: Any) -> int:
    """Elements of a block along one dimension; squeezed dimensions hold one."""
    if isinstance(block_dim, int):
        return block_dim
    return getattr(block_dim, "block_size", 1)


def _starts(block: Any, grid: tuple[Affine, ...]) -> list[Affine | None]:
    """First element of a program's block per dimension, ``None`` where that is not affine in the grid."""
    jaxpr = block.index_map_jaxpr.jaxpr
    values: dict[Any, Affine | None] = dict.fromkeys(jaxpr.invars)
    values |= dict(zip(jaxpr.invars, grid, strict=False))
    places = _evaluate(jaxpr, values)
    starts: list[Affine | None] = []
    for place, block_dim in zip(places, block.block_shape, strict=True):
        kind = type(block_dim).__name__
        if place is None or kind in ("BoundedSlice", "Indirect"):
            starts.append(None)
        elif kind == "Element":
            starts.append(place - block_dim.padding[0])
        else:
            starts.append(place * _length(block_dim))
    return starts


def _evaluate(jaxpr: Any, values: dict[Any, Affine | None]) -> list[Affine | None]:
    """Results of an index map as positions, ``None`` for results that are not affine."""

    def read(atom: Any) -> Affine | None:
        if hasattr(atom, "val"):
            return Affine((), int(atom.val))
        return values.get(atom)

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        inner = equation.params.get("jaxpr")
        if inner is not None and equation.params.get("name") in ("floor_divide", "remainder"):
            found = [_quotient(equation.params["name"], *operands)]
        elif inner is not None and hasattr(inner, "jaxpr"):
            found = _evaluate(inner.jaxpr, dict(zip(inner.jaxpr.invars, operands, strict=True)))
        else:
            found = [_affine(equation.primitive.name, operands)] * len(equation.outvars)
        values.update(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _affine(name: str, operands: list[Affine | None]) -> Affine | None:
    if name == "convert_element_type":
        return operands[0]
    if None in operands or len(operands) != 2:
        return None
    left, right = operands
    assert left is not None and right is not None
    if name == "add":
        return left + right
    if name == "sub":
        return left - right
    if name == "mul" and not (left.terms and right.terms):
        return left * right.offset if left.terms else right * left.offset
    return _quotient({"div": "floor_divide", "rem": "remainder"}.get(name, ""), left, right)


def _quotient(name: str, left: Affine | None, right: Affine | None) -> Affine | None:
    """Places are not negative, so that all divisions round down."""
    if left is None or right is None or right.terms or right.offset <= 0:
        return None
    return {"floor_divide": left.__floordiv__, "remainder": left.__mod__}.get(name, lambda _: None)(right.offset)


RULES: dict[str, Semantics] = {"pallas_call": _pallas_call}
