"""What XLA's partitioner does not do, though the operation allows it.

A rule says how an operation can be split; XLA runs most operations so once their operands and results are constrained.
Where it was measured to gather the operands instead, the split is no strategy: the plan replicates the operation, which
costs what XLA would send. Measured by compiling every split of an example of every primitive for two H100 and holding
the bytes against the rule's: 175 of 203 agreed, and the others are here.

>>> import jax
>>> from shardplan import rules
>>> rule = rules.rule_of(jax.lax.cumsum, jax.ShapeDtypeStruct((8, 8), "float32"))
>>> [split.index for split in rule.splits(2)], [split.index for split in usable_splits(rule, 2)]
(['i0', 'i1', 'j'], ['i0', 'i1'])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from shardplan.groups import RAGGED, splits_rows_or_groups
from shardplan.lookups import adds_whole_rows, fills_elements, looks_up_rows
from shardplan.program import Operation
from shardplan.reads import SLICES, gives_whole_windows, reads_place, reads_poorly
from shardplan.rules.expression import Apply, Position, Term, children
from shardplan.strategy import Strategy
from shardplan.updates import runs_by_place, splits_moved_windows, splits_places, windows

ISLANDS = frozenset(
    {"dot_general", "ragged_dot_general", "reduce_sum", "conv_general_dilated", "gather", "scatter-add"}
)

PASSING = frozenset({"dot_general", "gather", "scatter-add", "reduce_sum", "split", *SLICES})
"""Operations that have strategies of their own and that XLA runs on all devices' parts of a sum, each on its own."""


def usable_splits(rule: Any, n: int) -> list[Any]:
    """The splits of a rule over n blocks that XLA runs as the rule says."""
    if rule.primitive in SLICES:
        return [split for split in rule.splits(n) if not reads_poorly(rule, split, n)]
    gathered = next((gathers for names, gathers in _GATHERED if rule.primitive.startswith(names)), None)
    return [split for split in rule.splits(n) if gathered is None or not gathered(rule, split)]


def usable_padded_splits(rule: Any) -> list[Any]:
    """The splits of a rule over blocks that do not divide an index which XLA runs as the rule says, by padding.

    Updates of a scatter are not among them: split so over some mesh axes, and over others not, XLA 0.10.2 was measured
    to write the padding as well, into the first row. Of ragged products nothing was measured; a transform runs in an
    island, whose blocks are equal.
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
    """The splits of windows over blocks that do not divide what they read or give which XLA runs as the rule says."""
    return list(rule.uneven_splits(n)) if has_windows(rule.primitive) else []


def _every(rule: Any, split: Any) -> bool:
    return True


def _with_neighbours(rule: Any, split: Any) -> bool:
    return any(slot.halo != (0, 0) for slot in split.operands)


def _partial(rule: Any, split: Any) -> bool:
    return any(slot.reducer is not None for slot in split.results)


def _operand_whole(rule: Any, split: Any) -> bool:
    """The right-hand sides of a solver are split and its matrix is not; a stack is split along what it stacks."""
    return any(slot.dim is None for slot in split.operands)


def _rows_or_groups(rule: Any, split: Any) -> bool:
    """Rows whose groups differ from batch to batch, and their groups: an island has one list of group sizes."""
    if len(rule.expression.operand_shapes[2]) == 1 and "g" in rule.expression.sizes:
        return False
    return split.index == "g" or split.index in _rows(rule.expression.results[0].body)


def _rows(term: Term) -> set[str]:
    """The indices of a ragged product that run over the rows: those whose group is asked for."""
    if isinstance(term, Apply) and term.function in ("group", "in_a_group"):
        (row, _) = term.arguments
        assert isinstance(row, Position)
        return set(row.value.indices())
    return {name for part in children(term) for name in _rows(part)}


# The first name that fits decides. Custom calls and kernels are never split by XLA.
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
    """Whether an operation can run as itself on the blocks of its operands, in a ``shard_map``, and be summed there.

    That is so where its parameters name no sizes but the groups of a convolution, of which a block may have fewer, and
    where no block needs rows of its neighbours: contractions, sums and convolutions, which are those that XLA reduces
    worse, lookups of rows and their gradients' sums (see `lookups`), and reads of one window (see `reads`). Blocks in a
    ``shard_map`` are equal. Products of rows in groups and convolutions in groups may have a whole result.
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
    """Whether XLA, left alone, would gather what an operation reads.

    That is what a product of rows in groups reads, a tensor of which one window is read along a dimension that is
    split, and a convolution in groups, unless each channel is a group of its own and makes one; and space that the
    gradient of a convolution's weights sums over, where the data are dilated along any of it (of a transposed
    convolution) and where the weights' channels are split besides. Of a convolution whose batch is divided into groups,
    it is also channels that are summed over, where the data are dilated, and where space is split that the result has.
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
    """Whether an operation can be split into n blocks of an index at all: where only an island would do, blocks are
    equal and lie apart, those of a convolution's channels hold whole groups, and a window that is moved does not lie
    across two of them."""
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

    Where windows move by one row, it computes some rows more and cuts them off, along the dimension of the result that
    has the number of the data's: wrong values, or a failed check, where this is another one. Else it gathers the data.
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
    """Whether an operation that is linear may be run on every device's part of a sum: where it needs no island."""
    return not _by_groups(operation) and not _pools_whole(operation)


def _by_groups(operation: Operation) -> bool:
    """Whether an operation is a convolution whose groups have several channels, of the data or of the result, or whose
    channels XLA loses track of.

    The second are also the gradients of one convolution's weights for each example, which `jax.vmap` makes.
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
    """Whether a split divides the channels of a convolution in groups, or the batch that is divided into groups."""
    if operation.primitive.name != "conv_general_dilated" or _groups(operation) == 1:
        return False
    batch, feature, *_ = operation.params["dimension_numbers"].lhs_spec
    return split.operands[0].dim == (batch if operation.params["batch_group_count"] > 1 else feature)


def _groups(operation: Operation) -> int:
    """Into how many groups a convolution divides its channels, or its batch: XLA allows one of them."""
    return operation.params["feature_group_count"] * operation.params["batch_group_count"]


def _misplaces_channels(operation: Operation) -> bool:
    """Whether XLA 0.10.2 takes the split channels of a convolution in groups for another dimension of its result.

    It looks up which dimension of the result a dimension of the data becomes in the table of the inverse: wrong values,
    unless both say the same of the channels (data in NHWC, and results in NCHW).
    """
    numbers = operation.params["dimension_numbers"]
    batch, feature, *space = numbers.out_spec
    if operation.params["batch_group_count"] > 1:
        batch, feature = feature, batch
    becomes = dict(zip(numbers.lhs_spec, (batch, feature, *space), strict=True))
    channels = numbers.lhs_spec[0 if operation.params["batch_group_count"] > 1 else 1]
    return becomes[becomes[channels]] != channels


def _pools_whole(operation: Operation) -> bool:
    """Whether an operation is the gradient of a max pooling of a type that XLA does not split: it pads blocks with NaNs
    of these two types, and gathers those of others."""
    if not operation.primitive.name.startswith("select_and_scatter"):
        return False
    first = operation.equation.invars[0]
    return str(first.aval.dtype) not in ("float32", "bfloat16")  # type: ignore[attr-defined]


def runs_apart(operation: Operation, strategy: Strategy) -> bool:
    """Whether an operation must run in a ``shard_map``, though its blocks need nothing of each other and sum nothing.

    XLA was measured to gather the operand of an `fft`, and of a `top_k` and a `dynamic_slice` that some mesh axes split
    and others do not, and what the gradient of a max pooling reads that is neither float32 nor bfloat16. A whole
    transform runs so as well, for the order in which its results lie (see `replay`).
    """
    apart = operation.primitive.name in ("top_k", "dynamic_slice", "fft") or _pools_whole(operation)
    if not apart or strategy.halos or strategy.padded:
        return False
    return not any(strategy.pending) and (operation.primitive.name == "fft" or any(strategy.operands[0] or ()))


def axes_apart(operation: Operation, strategy: Strategy, axes: Iterable[int]) -> tuple[int, ...]:
    """Those of the mesh axes over which a convolution runs in a ``shard_map``, while XLA splits what is in it along the
    others: the axes that split nothing, where its data and its kernel are split, and those of `channels_apart`.

    What XLA 0.10.2 adds up of such ones (over space, or over batches of a depthwise kernel's gradient) it adds up over
    all devices, also those that have the same: wrong by a factor.
    """
    if operation.primitive.name != "conv_general_dilated" or not all(any(layout or ()) for layout in strategy.operands):
        return ()
    layouts = [layout for layout in (*strategy.operands, *strategy.results) if layout]
    used = {axis for layout in layouts for group in layout for axis in group}.union(*strategy.pending)
    channels = channels_apart(operation, strategy)
    return tuple(axis for axis in axes if axis in channels or axis not in used)


def channels_apart(operation: Operation, strategy: Strategy) -> tuple[int, ...]:
    """The mesh axes that split the channels which a convolution gives, where others split its data along its windows.

    Of data that are larger than the kernel XLA 0.10.2 splits the windows instead, and adds up the parts of the devices
    that have the same channels besides.
    """
    if not _splits_windows(operation, strategy) or _has_groups(operation):
        return ()
    kernel = strategy.operands[1]
    return kernel[operation.params["dimension_numbers"].rhs_spec[0]] if kernel else ()


def _splits_windows(operation: Operation, strategy: Strategy) -> bool:
    """Whether an operation is a convolution whose data are split along dimensions that its windows move over."""
    if operation.primitive.name != "conv_general_dilated" or not strategy.operands[0]:
        return False
    numbers, data = operation.params["dimension_numbers"], strategy.operands[0]
    sizes = operation.equation.invars[1].aval.shape  # type: ignore[attr-defined]
    moved = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True)
    return any(data[dim] and sizes[window] > 1 for dim, window in moved)


def params_of_block(operation: Operation, strategy: Strategy, blocks: Callable[[Any], int]) -> dict[str, Any]:
    """The parameters with which an operation runs on a block: slices are smaller, groups of convolutions fewer.

    ``blocks`` says over how many blocks some mesh axes split a dimension.
    """
    params, data = dict(operation.params), strategy.operands[0] if strategy.operands else None
    if operation.primitive.name == "conv_general_dilated" and data is not None:
        in_batches, in_features, *_ = params["dimension_numbers"].lhs_spec
        for name, dim in (("feature_group_count", in_features), ("batch_group_count", in_batches)):
            if params[name] > 1:
                params[name] //= blocks(data[dim])
    if operation.primitive.name == "dynamic_slice" and data is not None:  # what is split is in every window whole
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
    if strategy.padded and axes_apart(operation, strategy, axes):
        return False  # XLA 0.10.2 adds up blocks that are padded over all devices inside of a `shard_map` as well
    if reads_place(operation, strategy) and not gives_whole_windows(operation, strategy):
        return False
    return not needs_island(operation, strategy) or may_be_island(operation, strategy)


def _pads_places(operation: Operation, strategy: Strategy) -> bool:
    """Whether XLA 0.10.2 would pad the places of a scatter: it fails a check of its own where these are not int32, as
    in the gradient of a sort."""
    if not operation.primitive.name.startswith("scatter") or not any(strategy.operands[1] or ()):
        return False
    return str(operation.equation.invars[1].aval.dtype) != "int32"  # type: ignore[attr-defined]


def order_of_sum(operation: Operation, strategy: Strategy, axes: tuple[int, ...], among: int) -> tuple[int, ...]:
    """The order of axes in which XLA sums partial results over them, and scatters these: that in which the axes split
    what is summed, and of a convolution whose blocks exchange rows, over all axes (so many), that of the mesh."""
    return tuple(sorted(axes)) if _exchanges_rows(operation, strategy) and len(axes) == among else axes


def scatters(operation: Operation, strategy: Strategy, axes: tuple[int, ...], among: int) -> bool:
    """Whether XLA, left alone, makes a reduce-scatter of partial sums over ``axes``, in their order, of a mesh of so
    many axes.

    It does where they together split one dimension of every operand that they split; of a convolution in groups, or one
    whose blocks need rows of their neighbours, only in the order of the mesh, of the latter whatever they split if they
    are all axes; and of single elements that are looked up only where none is filled in.
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


def order_of_devices(operation: Operation, strategy: Strategy, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The order of axes in which XLA, left alone, names the devices of an all-reduce of partial sums: in which they
    split what is summed, where this is one dimension of every operand that they split, else the mesh's."""
    in_mesh = _exchanges_rows(operation, strategy) or _in_groups(operation) or not _split_one(strategy, axes)
    return tuple(sorted(axes)) if in_mesh else axes


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
