"""Limits of XLA's partitioner: splits that an operation's rule allows and that XLA does not run as the rule says.

XLA runs most operations as their rule says if their operands and results are constrained. A split for which it was
measured to do an all-gather of the operands is no strategy: the plan replicates the operation, which costs the bytes
that XLA would send. For the measurement every split of an example of every primitive was compiled for two H100, and its
bytes were compared with the rule's. 175 of 203 agreed, and the others are here.

>>> import jax
>>> from shardplan import rules
>>> rule = rules.rule_of(jax.lax.cumsum, jax.ShapeDtypeStruct((8, 8), "float32"))
>>> [split.index for split in rule.splits(2)], [split.index for split in usable_splits(rule, 2)]
(['i0', 'i1', 'j'], ['i0', 'i1'])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from shardplan.problem.ops.gather import adds_whole_rows, fills_elements, looks_up_rows
from shardplan.problem.ops.ragged_dot import RAGGED, splits_rows_or_groups
from shardplan.problem.ops.slice import SLICES, gives_whole_windows, is_useless_split, reads_place
from shardplan.problem.ops.update_slice import runs_by_place, splits_moved_windows, splits_places, windows
from shardplan.problem.strategy import Strategy
from shardplan.program.program import Operation
from shardplan.rules.expression import Apply, Position, Term, children

ISLANDS = frozenset(
    {"dot_general", "ragged_dot_general", "reduce_sum", "conv_general_dilated", "gather", "scatter-add"}
)

PASSING = frozenset({"dot_general", "gather", "scatter-add", "reduce_sum", "split", *SLICES})
"""Operations with strategies of their own that XLA runs on partial sums, each device on its own part."""


def usable_splits(rule: Any, n: int) -> list[Any]:
    """The splits of a rule over n blocks that XLA runs as the rule says."""
    if rule.primitive in SLICES:
        return [split for split in rule.splits(n) if not is_useless_split(rule, split, n)]
    gathered = next((gathers for names, gathers in _GATHERED if rule.primitive.startswith(names)), None)
    return [split for split in rule.splits(n) if gathered is None or not gathered(rule, split)]


def usable_padded_splits(rule: Any) -> list[Any]:
    """The splits of a rule over blocks that do not divide an index which XLA runs as the rule says, by padding.

    Updates of a scatter are left out. If some mesh axes split them unevenly and others do not split them, XLA 0.10.2
    was measured to write the padding as well, into the first row. Ragged products were not measured. A transform runs
    in an island, whose blocks are equal.
    """
    if rule.primitive.startswith(("ragged_dot", "fft")):
        return []
    if rule.primitive.startswith("scatter") or rule.primitive in SLICES:
        return [split for split in rule.padded_splits if not _partial(rule, split)]
    gathered = next((gathers for names, gathers in _GATHERED if rule.primitive.startswith(names)), None)
    return [split for split in rule.padded_splits if gathered is None or not gathered(rule, split)]


_WINDOWED = ("conv_general_dilated", "reduce_window", "select_and_scatter_add")


def has_windows(primitive: str) -> bool:
    """Whether an operation moves windows over dimensions that XLA splits unevenly too, by exact halos."""
    return primitive.startswith(_WINDOWED)


def usable_uneven_splits(rule: Any, n: int) -> list[Any]:
    """The splits of windows over blocks that do not divide their operand or result which XLA runs as the rule says."""
    return list(rule.uneven_splits(n)) if has_windows(rule.primitive) else []


def _every(rule: Any, split: Any) -> bool:
    return True


def _with_neighbours(rule: Any, split: Any) -> bool:
    return any(slot.halo != (0, 0) for slot in split.operands)


def _partial(rule: Any, split: Any) -> bool:
    return any(slot.reducer is not None for slot in split.results)


def _operand_whole(rule: Any, split: Any) -> bool:
    """Whether a split leaves an operand whole: a solver's matrix with split right-hand sides, or a stack along the new
    dimension."""
    return any(slot.dim is None for slot in split.operands)


def _rows_or_groups(rule: Any, split: Any) -> bool:
    """Whether a split divides rows or groups of a ragged dot whose group sizes differ between batches: an island has
    one list of group sizes."""
    if len(rule.expression.operand_shapes[2]) == 1 and "g" in rule.expression.sizes:
        return False
    return split.index == "g" or split.index in _rows(rule.expression.results[0].body)


def _rows(term: Term) -> set[str]:
    """The indices of a ragged product that run over the rows: the arguments of its group functions."""
    if isinstance(term, Apply) and term.function in ("group", "in_a_group"):
        (row, _) = term.arguments
        assert isinstance(row, Position)
        return set(row.value.indices())
    return {name for part in children(term) for name in _rows(part)}


# The first matching name decides. XLA never splits custom calls and kernels.
_GATHERED: tuple[tuple[tuple[str, ...], Callable[[Any, Any], bool]], ...] = (
    (("select_and_scatter_add",), _with_neighbours),
    (("scatter-sub", "scatter_sub"), _partial),
    (("ragged_dot",), _rows_or_groups),
    (("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _partial),
    (("triangular_solve", "tridiagonal_solve", "ormqr", "stack"), _operand_whole),
    (("symmetric_product", "cudnn_fusion", "pallas_call", "ffi_call"), _every),
    (("dot_product_attention_fp8",), _every),
)


def may_be_island(operation: Operation, strategy: Strategy) -> bool:
    """Whether an operation can run unchanged on the blocks of its operands, in a ``shard_map``, and be reduced there.

    It can if no block needs rows of its neighbours, and if its parameters have no sizes except for the groups of a
    convolution, of which a block may have fewer. These operations are:

    - contractions, sums and convolutions, whose reductions by XLA are worse
    - row lookups and the sums of their gradients (see `shardplan.problem.ops.gather`)
    - reads of one window (see `shardplan.problem.ops.slice`)

    Blocks in a ``shard_map`` are equal. Ragged dots and grouped convolutions may have a whole result.
    """
    places = reads_place(operation, strategy)
    if (operation.primitive.name not in ISLANDS and not places) or strategy.halos or strategy.padded:
        return False
    if operation.primitive.name == "gather" and not places and not looks_up_rows(operation, strategy):
        return False
    if operation.primitive.name == "scatter-add" and not adds_whole_rows(operation, strategy):
        return False
    if set(strategy.reducers) == {None}:
        return splits_rows_or_groups(operation, strategy) or _by_groups(operation)
    return set(strategy.reducers) == {"sum"}


def needs_island(operation: Operation, strategy: Strategy) -> bool:
    """Whether XLA alone would do an all-gather of an operand.

    The cases are:

    - a ragged dot
    - a tensor of which one window is read along a split dimension
    - a grouped convolution, unless each channel is a group of its own with one result
    - a gradient of a convolution's weights that sums over split space, if the data are dilated along any of it (of a
      transposed convolution), or if the weights' channels are split too
    - a convolution with batch groups that sums over split channels, if the data are dilated, or if space of the result
      is split
    """
    if operation.primitive.name == RAGGED:
        return splits_rows_or_groups(operation, strategy)
    if reads_place(operation, strategy):
        return True
    if _by_groups(operation):
        return any(layout and any(layout) for layout in (*strategy.operands, *strategy.results))
    if operation.primitive.name != "conv_general_dilated" or not any(strategy.pending):
        return False
    _, feature, *space = operation.params["dimension_numbers"].lhs_spec
    data, pending = strategy.operands[0], set(strategy.pending[0])
    if data is None:
        return False
    in_batches = operation.params["batch_group_count"] > 1 and bool(data[feature])
    rows = [set(data[dim]) for dim in space]
    summed = any(axes & pending for axes in rows)
    if max(operation.params["lhs_dilation"], default=1) > 1 and (summed or in_batches):
        return True
    return (summed and any(strategy.results[0])) or (in_batches and any(axes - pending for axes in rows))


def split_runs(operation: Operation, split: Any, size: int, n: int) -> bool:
    """Whether an operation can be split into n blocks of an index at all.

    Blocks of an operation that needs an island must be equal and independent. Blocks of a grouped convolution's
    channels must have whole groups. A moved window must be inside of one block.
    """
    even = size % n == 0
    if _splits_groups(operation, split) and (_groups(operation) % n or _with_neighbours(None, split)):
        return False
    if _by_groups(operation) or _pools_whole(operation):
        return even and not _with_neighbours(None, split)
    if _begins_between_rows(operation, split, -(-size // n)):
        return False
    window = windows(operation).get(split.results[0].dim)
    return window is None or (even and window == 1)


def _begins_between_rows(operation: Operation, split: Any, rows: int) -> bool:
    """Whether XLA 0.10.2 fails to split a convolution into blocks of rows that begin between two dilated elements.

    If windows move by one row, XLA computes additional rows and removes them along the result's dimension of the same
    number as the data's. If this is another dimension, values are wrong or a check fails. In other cases XLA does an
    all-gather of the data.
    """
    if operation.primitive.name != "conv_general_dilated":
        return False
    params, numbers = operation.params, operation.params["dimension_numbers"]
    space = zip(
        numbers.lhs_spec[2:], numbers.out_spec[2:], params["window_strides"], params["lhs_dilation"], strict=True
    )
    return any(
        given == split.results[0].dim and (read != given or stride > 1) and rows * stride % dilation
        for read, given, stride, dilation in space
    )


def passes_sums(operation: Operation) -> bool:
    """Whether a linear operation may run on every device's part of a sum: it may if it needs no island."""
    return not _by_groups(operation) and not _pools_whole(operation)


def _by_groups(operation: Operation) -> bool:
    """Whether an operation is a grouped convolution with several channels of the data or of the result per group, or
    one whose channels XLA misplaces.

    The second are also the gradients of one convolution's weights for each example, by `jax.vmap`.
    """
    if operation.primitive.name != "conv_general_dilated":
        return False
    if _has_groups(operation) and _misplaces_channels(operation):
        return True
    filters = operation.equation.invars[1].aval.shape  # type: ignore[attr-defined]
    groups = operation.params["feature_group_count"]
    made, read, *_ = operation.params["dimension_numbers"].rhs_spec
    return groups > 1 and (filters[read] > 1 or filters[made] > groups)


def _splits_groups(operation: Operation, split: Any) -> bool:
    """Whether a split divides the channels of a convolution with feature groups, or the batch of one with batch
    groups."""
    if operation.primitive.name != "conv_general_dilated" or _groups(operation) == 1:
        return False
    batch, feature, *_ = operation.params["dimension_numbers"].lhs_spec
    return split.operands[0].dim == (batch if operation.params["batch_group_count"] > 1 else feature)


def _groups(operation: Operation) -> int:
    """The number of feature groups or batch groups of a convolution: XLA allows one kind of them."""
    return operation.params["feature_group_count"] * operation.params["batch_group_count"]


def _misplaces_channels(operation: Operation) -> bool:
    """Whether XLA 0.10.2 takes the split channels of a grouped convolution for another dimension of its result.

    It looks up the result's dimension for a dimension of the data in the inverse table. Values are wrong unless both
    tables agree on the channels (data in NHWC, and results in NCHW).
    """
    numbers = operation.params["dimension_numbers"]
    batch, feature, *space = numbers.out_spec
    if operation.params["batch_group_count"] > 1:
        batch, feature = feature, batch
    becomes = dict(zip(numbers.lhs_spec, (batch, feature, *space), strict=True))
    channels = numbers.lhs_spec[0 if operation.params["batch_group_count"] > 1 else 1]
    return becomes[becomes[channels]] != channels


def _pools_whole(operation: Operation) -> bool:
    """Whether an operation is the gradient of a max pooling of a type that XLA does not split.

    XLA pads blocks of float32 and bfloat16 with NaNs, and does an all-gather of blocks of other types.
    """
    if not operation.primitive.name.startswith("select_and_scatter"):
        return False
    first = operation.equation.invars[0]
    return str(first.aval.dtype) not in ("float32", "bfloat16")  # type: ignore[attr-defined]


def needs_shard_map(operation: Operation, strategy: Strategy) -> bool:
    """Whether an operation must run in a ``shard_map`` though its blocks are independent and its results not partial.

    XLA was measured to do an all-gather of the operand of an `fft`, of a `top_k` or `dynamic_slice` that only some mesh
    axes split, and of the gradient of a max pooling in types other than float32 and bfloat16. An unsplit transform runs
    in a ``shard_map`` as well, for the dimension order of its results (see `shardplan.apply.replay`).
    """
    in_shard_map = operation.primitive.name in ("top_k", "dynamic_slice", "fft") or _pools_whole(operation)
    if not in_shard_map or strategy.halos or strategy.padded:
        return False
    return not any(strategy.pending) and (operation.primitive.name == "fft" or any(strategy.operands[0] or ()))


def shard_map_axes(operation: Operation, strategy: Strategy, axes: Iterable[int]) -> tuple[int, ...]:
    """The mesh axes over which a convolution runs in a ``shard_map``, while XLA splits its inside along the other axes.

    These are the axes without a split, if its data and its kernel are split, and those of `shard_map_channel_axes`. XLA
    0.10.2 reduces a sum of such a convolution (over space, or over batches of a depthwise kernel's gradient) over all
    devices, also over those with equal parts: the result is wrong by a factor.
    """
    if operation.primitive.name != "conv_general_dilated" or not all(any(layout or ()) for layout in strategy.operands):
        return ()
    layouts = [layout for layout in (*strategy.operands, *strategy.results) if layout]
    used = {axis for layout in layouts for group in layout for axis in group}.union(*strategy.pending)
    channels = shard_map_channel_axes(operation, strategy)
    return tuple(axis for axis in axes if axis in channels or axis not in used)


def shard_map_channel_axes(operation: Operation, strategy: Strategy) -> tuple[int, ...]:
    """The mesh axes that split a convolution's output channels, if others split its data along its windows.

    If the data are larger than the kernel, XLA 0.10.2 splits the windows instead, and also adds up the parts of devices
    with the same channels.
    """
    if not _splits_windows(operation, strategy) or _has_groups(operation):
        return ()
    kernel = strategy.operands[1]
    return kernel[operation.params["dimension_numbers"].rhs_spec[0]] if kernel else ()


def _splits_windows(operation: Operation, strategy: Strategy) -> bool:
    """Whether an operation is a convolution whose data are split along dimensions of its windows."""
    if operation.primitive.name != "conv_general_dilated" or not strategy.operands[0]:
        return False
    numbers, data = operation.params["dimension_numbers"], strategy.operands[0]
    sizes = operation.equation.invars[1].aval.shape  # type: ignore[attr-defined]
    moved = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True)
    return any(data[dim] and sizes[window] > 1 for dim, window in moved)


def params_of_block(operation: Operation, strategy: Strategy, blocks: Callable[[Any], int]) -> dict[str, Any]:
    """The parameters of an operation on a block: smaller slices, fewer groups of a convolution.

    ``blocks`` gives the number of blocks over which mesh axes split a dimension.
    """
    params, data = dict(operation.params), strategy.operands[0] if strategy.operands else None
    if operation.primitive.name == "conv_general_dilated" and data is not None:
        in_batches, in_features, *_ = params["dimension_numbers"].lhs_spec
        for name, dim in (("feature_group_count", in_features), ("batch_group_count", in_batches)):
            if params[name] > 1:
                params[name] //= blocks(data[dim])
    if operation.primitive.name == "dynamic_slice" and data is not None:  # split dimensions are whole in every window
        params["slice_sizes"] = tuple(n // blocks(axes) for n, axes in zip(params["slice_sizes"], data, strict=True))
    return params


def runs(operation: Operation, strategy: Strategy, axes: Iterable[int]) -> bool:
    """Whether an operation runs as a strategy says on a mesh of these axes, by itself or in an island."""
    if operation.primitive.name == "select_and_scatter_add" and strategy.halos:
        windows, strides = operation.params["window_dimensions"], operation.params["window_strides"]
        if any(windows[halo.dim] > strides[halo.dim] for halo in strategy.halos):
            return False  # the windows overlap, and XLA sends several times the halo
    if splits_places(operation, strategy):
        return runs_by_place(strategy)
    if splits_moved_windows(operation, strategy):
        return False
    if strategy.padded and _pads_places(operation, strategy):
        return False
    if strategy.padded and shard_map_axes(operation, strategy, axes):
        return False  # XLA 0.10.2 adds up blocks that are padded over all devices inside of a `shard_map` as well
    if reads_place(operation, strategy) and not gives_whole_windows(operation, strategy):
        return False
    return not needs_island(operation, strategy) or may_be_island(operation, strategy)


def _pads_places(operation: Operation, strategy: Strategy) -> bool:
    """Whether XLA 0.10.2 would pad the indices of a scatter: it fails a check of its own on indices other than int32,
    as in the gradient of a sort."""
    if not operation.primitive.name.startswith("scatter") or not any(strategy.operands[1] or ()):
        return False
    return str(operation.equation.invars[1].aval.dtype) != "int32"  # type: ignore[attr-defined]


def order_of_sum(operation: Operation, strategy: Strategy, axes: tuple[int, ...], among: int) -> tuple[int, ...]:
    """The order of axes in which XLA reduces partial results over them, and scatters these.

    It is the order in which the axes split the reduced index. For a convolution with halos over all axes (``among``) it
    is the order of the mesh.
    """
    return tuple(sorted(axes)) if _exchanges_rows(operation, strategy) and len(axes) == among else axes


def scatters(operation: Operation, strategy: Strategy, axes: tuple[int, ...], among: int) -> bool:
    """Whether XLA alone does a reduce-scatter of partial sums over ``axes``, in their order, of a mesh of ``among``
    axes.

    The axes must together split one dimension of every operand that they split. Other conditions:

    - a grouped convolution, or one with halos, needs the order of the mesh
    - a convolution with halos may split any dimensions if the axes are all axes
    - a lookup of single elements must not fill missing ones
    """
    if fills_elements(operation):
        return False
    if len(axes) < 2:
        return True
    exchanges, in_groups = _exchanges_rows(operation, strategy), _in_groups(operation)
    if (exchanges or in_groups) and tuple(sorted(axes)) != axes:
        return False
    if exchanges and not in_groups and len(axes) == among:
        return True
    return _split_one(strategy, axes)


def _split_one(strategy: Strategy, axes: tuple[int, ...]) -> bool:
    """Whether axes, in their order, split one dimension of every operand that they split."""
    touching = [layout for layout in strategy.operands if layout and set(axes) & {a for group in layout for a in group}]
    return all(axes in layout for layout in touching)


def _exchanges_rows(operation: Operation, strategy: Strategy) -> bool:
    return operation.primitive.name == "conv_general_dilated" and bool(strategy.halos)


def _in_groups(operation: Operation) -> bool:
    return operation.primitive.name == "conv_general_dilated" and _has_groups(operation)


def _has_groups(operation: Operation) -> bool:
    return _groups(operation) > 1
