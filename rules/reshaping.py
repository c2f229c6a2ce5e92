"""Operations that move elements without a change: reshape, transpose, broadcast, pad, slice, concatenate and others."""

from collections.abc import Iterator

from shardplan.rules.equation import Equation, Semantics, expression, letters, sizes_of
from shardplan.rules.expression import (
    ZERO,
    Affine,
    Apply,
    Compare,
    Constant,
    Expression,
    Opaque,
    Position,
    Read,
    Result,
    Shape,
    index,
)
from shardplan.rules.indexing import lookup


def regroup(source: Shape, target: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Minimal runs of dimensions of both shapes with equally many elements, in order, without dimensions of size 1.

    >>> list(regroup((6, 1, 4), (2, 3, 4)))
    [([0], [0, 1]), ([2], [2])]
    """
    left = [dim for dim, size in enumerate(source) if size != 1]
    right = [dim for dim, size in enumerate(target) if size != 1]
    while left:
        run, target_run = [left.pop(0)], [right.pop(0)]
        extent, target_extent = source[run[0]], target[target_run[0]]
        while extent != target_extent:
            if extent < target_extent:
                run.append(left.pop(0))
                extent *= source[run[-1]]
            else:
                target_run.append(right.pop(0))
                target_extent *= target[target_run[-1]]
        yield run, target_run


def _reshape(equation: Equation) -> Expression:
    """Both sides agree when they are flattened; a run of dimensions is divided by ``//`` and ``%``."""
    order = equation.params["dimensions"] or range(len(equation.inputs[0].shape))  # transposed so, before flattening
    source, target = tuple(equation.inputs[0].shape[dim] for dim in order), equation.outputs[0].shape
    at = letters("i", len(target))
    read = [ZERO] * len(source)
    for run, target_run in regroup(source, target) if 0 not in source else ():
        flat, extent = ZERO, 1
        for dim in reversed(target_run):
            flat, extent = at[dim] * extent + flat, extent * target[dim]
        for dim in reversed(run):
            extent //= source[dim]
            read[order[dim]] = flat % source[dim] if extent > 1 else flat
            flat = flat // source[dim]
    return expression(equation, sizes_of((at, target)), [Result(at, Read(0, tuple(read)))])


def _broadcast_in_dim(equation: Equation) -> Expression:
    source, target = equation.inputs[0].shape, equation.outputs[0].shape
    at = letters("i", len(target))
    dims = equation.params["broadcast_dimensions"]
    read = tuple(ZERO if source[n] != target[dim] else at[dim] for n, dim in enumerate(dims))
    return expression(equation, sizes_of((at, target)), [Result(at, Read(0, read))])


def _broadcast_to(equation: Equation) -> Expression:
    source, target = equation.inputs[0].shape, equation.outputs[0].shape
    at = letters("i", len(target))
    last = zip(at[len(target) - len(source) :], source, target[len(target) - len(source) :], strict=True)
    read = tuple(p if size == full else ZERO for p, size, full in last)
    return expression(equation, sizes_of((at, target)), [Result(at, Read(0, read))])


def _transpose(equation: Equation) -> Expression:
    shape = equation.outputs[0].shape
    at = letters("i", len(shape))
    read = [ZERO] * len(shape)
    for dim, source_dim in enumerate(equation.params["permutation"]):
        read[source_dim] = at[dim]
    return expression(equation, sizes_of((at, shape)), [Result(at, Read(0, tuple(read)))])


def _squeeze(equation: Equation) -> Expression:
    source, target = equation.inputs[0].shape, equation.outputs[0].shape
    at = letters("i", len(target))
    left = iter(at)
    read = tuple(ZERO if dim in equation.params["dimensions"] else next(left) for dim in range(len(source)))
    return expression(equation, sizes_of((at, target)), [Result(at, Read(0, read))])


def _rev(equation: Equation) -> Expression:
    shape, dims = equation.inputs[0].shape, equation.params["dimensions"]
    at = letters("i", len(shape))
    read = tuple(p * -1 + (shape[dim] - 1) if dim in dims and shape[dim] > 1 else p for dim, p in enumerate(at))
    return expression(equation, sizes_of((at, shape)), [Result(at, Read(0, read))])


def _slice(equation: Equation) -> Expression:
    """A part that fits into one of two blocks is a lookup: one block gives it, and the other one zeros."""
    shape, starts = equation.outputs[0].shape, equation.params["start_indices"]
    at = letters("i", len(shape))
    strides = equation.params["strides"] or (1,) * len(shape)
    read = [p * int(stride) + int(start) for p, stride, start in zip(at, strides, starts, strict=True)]
    conditions, sums = [], {}
    for dim, (size, part) in enumerate(zip(equation.inputs[0].shape, shape, strict=True)):
        if part and 2 * part <= size and strides[dim] == 1:
            conditions.append(Compare("==", Position(read[dim]), Position(index(f"v{dim}"))))
            sums[f"v{dim}"], read[dim] = size, index(f"v{dim}")
    body = lookup(equation.inputs[0].dtype, tuple(sums), conditions, Read(0, tuple(read)))
    return expression(equation, sizes_of((at, shape)) | sums, [Result(at, body)])


def _pad(equation: Equation) -> Expression:
    shape = equation.outputs[0].shape
    at = letters("i", len(shape))
    config = [tuple(map(int, dim)) for dim in equation.params["padding_config"]]
    read = tuple((p - low).exactly(inner + 1) for p, (low, _, inner) in zip(at, config, strict=True))
    padded = any(low > 0 or high > 0 or inner > 0 for low, high, inner in config)
    body = Apply("pad", (Read(0, read, padded), Read(1)))
    return expression(equation, sizes_of((at, shape)), [Result(at, body)], ("x", "value"))


def _concatenate(equation: Equation) -> Expression:
    shape, axis = equation.outputs[0].shape, equation.params["dimension"]
    at, start, reads = letters("i", len(shape)), 0, []
    for n, tensor in enumerate(equation.inputs):
        reads.append(Read(n, (*at[:axis], at[axis] - start, *at[axis + 1 :]), padded=len(equation.inputs) > 1))
        start += tensor.shape[axis]
    body = Apply("concat", tuple(reads)) if len(reads) > 1 else reads[0]
    return expression(equation, sizes_of((at, shape)), [Result(at, body)])


def _split(equation: Equation) -> Expression:
    axis, shape = equation.params["axis"], equation.inputs[0].shape
    at, start, results, sizes = letters("i", len(shape)), 0, [], sizes_of((letters("i", len(shape)), shape))
    del sizes[next(iter(at[axis].indices()))]
    for n, tensor in enumerate(equation.outputs):
        own = index(f"part{n}")
        sizes[f"part{n}"] = tensor.shape[axis]
        read = Read(0, (*at[:axis], own + start, *at[axis + 1 :]))
        results.append(Result((*at[:axis], own, *at[axis + 1 :]), read))
        start += tensor.shape[axis]
    return expression(equation, sizes, results)


def _iota(equation: Equation) -> Expression:
    shape = equation.outputs[0].shape
    at = letters("i", len(shape))
    return expression(equation, sizes_of((at, shape)), [Result(at, Position(at[equation.params["dimension"]]))])


def _stack(equation: Equation) -> Expression:
    shape, axis = equation.outputs[0].shape, equation.params["axis"]
    at = letters("i", len(shape))
    inner = (*at[:axis], *at[axis + 1 :])
    body = Apply("stack", (Position(at[axis]), *(Read(n, inner) for n in range(len(equation.inputs)))))
    return expression(equation, sizes_of((at, shape)), [Result(at, body)])


def _unstack(equation: Equation) -> Expression:
    shape, axis = equation.outputs[0].shape, equation.params["axis"]
    at = letters("i", len(shape))
    results = [Result(at, Read(0, (*at[:axis], Affine((), n), *at[axis:]))) for n in range(len(equation.outputs))]
    return expression(equation, sizes_of((at, shape)), results)


def _tile(equation: Equation) -> Expression:
    source, target = equation.inputs[0].shape, equation.outputs[0].shape
    at = letters("i", len(target))
    read = tuple(p % size if size != full else p for p, size, full in zip(at, source, target, strict=True))
    return expression(equation, sizes_of((at, target)), [Result(at, Read(0, read))])


def _iota_2x32_shape(equation: Equation) -> Expression:
    """The row-major number of every element, in two words of 32 bits."""
    shape = equation.outputs[0].shape
    at, number, extent = letters("i", len(shape)), ZERO, 1
    for position, size in zip(reversed(at), reversed(shape), strict=True):
        number, extent = position * extent + number, extent * size
    words = (Apply(name, (Position(number),)) for name in ("high_word", "low_word"))
    return expression(equation, sizes_of((at, shape)), [Result(at, word) for word in words])


def _empty(equation: Equation) -> Expression:
    shape = equation.outputs[0].shape
    at = letters("i", len(shape))
    return expression(equation, sizes_of((at, shape)), [Result(at, Constant(0))])


def _platform_index(equation: Equation) -> Expression:
    return expression(equation, {}, [Result((), Apply("platform", ()))])


def _same_values(equation: Equation) -> Expression:
    """Every result is the operand of the same number: only its place, its name or its order in time changes."""
    sizes: dict[str, int] = {}
    results = []
    for n, tensor in enumerate(equation.outputs):
        at = letters("i" if len(equation.outputs) == 1 else f"i{n}_", len(tensor.shape))
        sizes |= sizes_of((at, tensor.shape))
        results.append(Result(at, Read(n, at)))
    return expression(equation, sizes, results)


def _bitcast(equation: Equation) -> Expression:
    """A bitcast to elements of another width: the parts are a last dimension."""
    source, target = equation.inputs[0].shape, equation.outputs[0].shape
    at, shared = letters("i", len(target)), min(len(source), len(target))
    whole = (*at[:shared], *([None] * (len(source) - shared)))
    same = len(source) == len(target)
    body = Apply("bits", (Read(0, at),)) if same else Opaque("bits", (Read(0, whole),), at[shared:])
    return expression(equation, sizes_of((at, target)), [Result(at, body)])


RULES: dict[str, Semantics] = {
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast_in_dim,
    "broadcast_to": _broadcast_to,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "rev": _rev,
    "slice": _slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "split": _split,
    "iota": _iota,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "iota_2x32_shape": _iota_2x32_shape,
    "empty": _empty,
    "empty2": _empty,
    "platform_index": _platform_index,
    "bitcast_convert_type": _bitcast,
    **{
        name: _same_values
        for name in (
            "optimization_barrier",
            "device_put",
            "layout_constraint",
            "sharding_constraint",
            "reshard",
            "with_memory_space_constraint",
        )
    },
}
