"""Layouts by hand per model: the published recipes of its kind, over 8 devices.

Patterns are of parameter paths. Columns of a dot's kernel are split over `tensor` if its results are to be split, rows
if its operand is (Shoeybi et al., Megatron-LM, 2019). `baselines_of("gpt")` lists them all. Each is a mesh of `data` x
`tensor` devices, and any mesh of 8 devices can take it, since its axes are made of 2, 4 or 8 devices.
"""

from collections.abc import Callable
from functools import partial

from jax.sharding import PartitionSpec as P

from benchmarks.baselines import Baseline, Weights
from shardplan.models.logical import Layouts

D, T = "data", "tensor"
COLUMN, ROW = P(None, T), P(T, None)
TWO_AXES = ((2, 4), (4, 2))

ATTENTION: Weights = (
    *((f"*/{name}/kernel", COLUMN) for name in ("query", "key", "value")),
    *((f"*/{name}/bias", P(T)) for name in ("query", "key", "value", "up", "gate")),
    ("*/out/kernel", ROW),
)
VOCABULARY: Weights = (("*tokens*", ROW), ("head/kernel", COLUMN))
TRANSFORMER: Weights = (
    *ATTENTION,
    *((f"*/{name}/kernel", COLUMN) for name in ("up", "gate")),
    ("*/down/kernel", ROW),
    *VOCABULARY,
)
# Looked-up rows are split by columns. An all-to-all gives each device whole rows of its own examples.
TABLE: Weights = (("*tokens*", P(None, (D, T))),)
INSIDE: Layouts = {"batch": D, "heads": T, "kv_heads": T, "mlp": T, "vocabulary": T}
# Activations between the blocks are split along the sequence (Korthikanti et al., 2022); inside they are not.
SEQUENCE: Layouts = {
    **INSIDE,
    "sequence": T,
    ("batch", "sequence", "mlp"): P(D, None, T),
    ("batch", "sequence", "heads", "head_dim"): P(D, None, T),
    ("batch", "sequence", "kv_heads", "head_dim"): P(D, None, T),
    ("batch", "sequence", "kv_heads", None, "head_dim"): P(D, None, T),
    ("batch", "sequence", "vocabulary"): P(D, None, T),
}
# A bottleneck: the 3 x 3 convolution has split output channels, and the 1 x 1 after it sums over them.
CHANNELS: Weights = (
    ("*/window/kernel", P(None, None, None, T)),
    ("*/window_norm/*", P(T)),
    ("*/expand/kernel", P(None, None, T)),
)
ALTERNATING: Weights = tuple(
    pair
    for number in range(0, 32, 2)
    for pair in (
        (f"layer_{number}/kernel", COLUMN),
        (f"layer_{number}/bias", P(T)),
        (f"layer_{number + 1}/kernel", ROW),
    )
)


def data_parallel(activations: Layouts | None = None) -> tuple[Baseline, ...]:
    """The layouts that depend only on a model's batch: data parallelism, ZeRO-1, ZeRO-3."""
    names: Layouts = {"batch": D} if activations is None else activations
    return (
        Baseline("data parallelism", 8, activations=names),
        Baseline("ZeRO-1", 8, stage=1, activations=names),
        Baseline("FSDP by input shardings", 8, stage=3, gathered_by_xla=True, activations={}),
        Baseline("ZeRO-3", 8, stage=3, gathered_by_xla=True, activations=names),
    )


def two_axes(name: str, weights: Weights, activations: Layouts, batch: P | None = None) -> tuple[Baseline, ...]:
    """Fully sharded over `data`, by these weights over `tensor`."""
    batch_spec = batch if batch is not None else P(D)
    return tuple(
        Baseline(name, data, tensor, stage=3, weights=weights, activations=activations, batch=batch_spec)
        for data, tensor in TWO_AXES
    )


def transformer(tied: bool = False) -> tuple[Baseline, ...]:
    """Layouts of transformers. `tied`: the table of the tokens is the head too, so that its rows are split, not its
    columns."""
    weights = TRANSFORMER if tied else (*TABLE, *TRANSFORMER)
    return (
        *data_parallel(),
        Baseline("Megatron", 1, 8, weights=weights, activations=INSIDE),
        Baseline("Megatron, sequence parallel", 1, 8, weights=weights, activations=SEQUENCE),
        *two_axes("FSDP x Megatron", weights, INSIDE),
        *two_axes("FSDP x Megatron, sequence parallel", weights, SEQUENCE),
        *(() if tied else (Baseline("ZeRO-3, table by columns", 8, stage=3, weights=TABLE),)),
    )


def mixture() -> tuple[Baseline, ...]:
    """Layouts of transformers, and experts over the data axis, tokens sent to them and back (GShard)."""
    experts: Weights = (("*/experts/gate", P(D)), ("*/experts/up", P(D)), ("*/experts/down", P(D)))
    both: Weights = (
        ("*/experts/gate", P(D, None, T)),
        ("*/experts/up", P(D, None, T)),
        ("*/experts/down", P(D, T)),
        *TABLE,
        *TRANSFORMER,
    )
    sent: Layouts = {"batch": D, "experts": D, "groups": D}
    inside: Weights = (
        ("*/experts/gate", P(None, None, T)),
        ("*/experts/up", P(None, None, T)),
        ("*/experts/down", P(None, T)),
        *TABLE,
        *TRANSFORMER,
    )
    return (
        *data_parallel({"batch": D, "groups": D}),
        Baseline("expert parallelism", 8, weights=experts, activations=sent),
        Baseline(
            "expert parallelism, ZeRO-3",
            8,
            stage=3,
            weights=experts,
            activations=sent,
        ),
        *two_axes("expert parallelism x Megatron", both, {**INSIDE, **sent}),
        *two_axes("FSDP x Megatron", inside, {**INSIDE, "groups": D}),
    )


def multilayer() -> tuple[Baseline, ...]:
    split: Layouts = {("batch", "mlp"): P(D, T), ("batch", "embed"): P((D, T))}
    return (
        *data_parallel(),
        Baseline("Megatron", 1, 8, weights=ALTERNATING, activations=INSIDE),
        Baseline("Megatron, sequence parallel", 1, 8, weights=ALTERNATING, activations=split),
        *two_axes("FSDP x Megatron", ALTERNATING, INSIDE),
        *two_axes("FSDP x Megatron, sequence parallel", ALTERNATING, split),
    )


def spatial(name: str, dim: int = 1) -> tuple[Baseline, ...]:
    """Images or volumes split along the space dimension `dim` of that name, with halos (Dryden et al., 2019)."""
    names: Layouts = {"batch": D, name: T}
    batch_spec = P(D, *[None] * (dim - 1), T)
    return (
        Baseline(f"spatial, by {name}", 1, 8, activations=names, batch=batch_spec),
        *(Baseline(f"data x {name}", data, tensor, activations=names, batch=batch_spec) for data, tensor in TWO_AXES),
    )


def residual() -> tuple[Baseline, ...]:
    return (*data_parallel(), *spatial("height"), *two_axes("FSDP x channels", CHANNELS, {"batch": D}))


def vgg() -> tuple[Baseline, ...]:
    """Data parallelism, and convolutions by examples with the wide dense layers by their columns (Krizhevsky, 2014)."""
    dense: Weights = (("hidden_*/kernel", P(None, D)), ("hidden_*/bias", P(D)))
    names: Layouts = {"batch": D, ("batch", "mlp"): P(None, D)}
    return (
        *data_parallel(),
        *spatial("height"),
        Baseline("one weird trick", 8, weights=dense, activations=names),
        Baseline("one weird trick, ZeRO-1", 8, stage=1, weights=dense, activations=names),
    )


def volumes() -> tuple[Baseline, ...]:
    """Layouts of a single volume without examples to split: blocks along one dimension of space, or two."""
    blocks: Layouts = {"depth": D, "height": T}
    return (
        Baseline("spatial, by depth", 1, 8, activations={"depth": T}, batch=P(None, T)),
        Baseline("spatial, by height", 1, 8, activations={"height": T}, batch=P(None, None, T)),
        *(
            Baseline(name, data, tensor, stage=stage, activations=blocks, batch=P(None, D, T))
            for name, stage in (("depth x height", 0), ("depth x height, ZeRO-1", 1))
            for data, tensor in TWO_AXES
        ),
    )


def recurrent() -> tuple[Baseline, ...]:
    """Data parallelism, and the gates' columns split, the hidden state gathered in every step."""
    weights: Weights = (
        ("layer_*/input", P(None, None, T)),
        ("layer_*/state", P(None, None, T)),
        ("layer_*/bias", P(None, T)),
        *VOCABULARY,
    )
    names: Layouts = {"batch": D, "vocabulary": T, ("batch", None, "mlp"): P(D, None, T)}
    return (
        *data_parallel(),
        Baseline("columns of the gates", 1, 8, weights=weights, activations=names),
        *two_axes("FSDP x columns of the gates", weights, names),
    )


def graph() -> tuple[Baseline, ...]:
    """Edges split over the devices. Nodes are whole on each device, split too, or split by their features.

    Lookups of rows and sums over edges keep a split by features.
    """
    return (
        *data_parallel({"edges": D, "nodes": D}),
        Baseline("edges split, nodes whole", 8, activations={"edges": D}),
        Baseline("edges split, nodes whole, ZeRO-1", 8, stage=1, activations={"edges": D}),
        Baseline("edges split, nodes by features", 8, activations={"edges": D, ("nodes", "features"): P(None, D)}),
    )


def tables() -> tuple[Baseline, ...]:
    """Embedding tables split by columns or rows, the rest by examples (Naumov et al., DLRM, 2019)."""
    columns: Weights = (("tables/*", P(None, D)),)
    rows: Weights = (("tables/*", P(D)),)
    return (
        Baseline("data parallelism", 8),
        Baseline("columns of the tables split", 8, weights=columns),
        Baseline("rows of the tables split", 8, weights=rows),
    )


def state_space() -> tuple[Baseline, ...]:
    """Layouts of transformers, and the channels of the state split (as for Mamba in Megatron-LM)."""
    weights: Weights = (
        ("*/in/kernel", COLUMN),
        ("*/convolution/*", P(None, None, T)),
        ("*/decay", P(T)),
        ("*/skip", P(T)),
        ("*/select/kernel", ROW),
        ("*/step/kernel", COLUMN),
        ("*/step/bias", P(T)),
        ("*/out/kernel", ROW),
        *VOCABULARY,
    )
    return (
        *data_parallel(),
        Baseline("Megatron", 1, 8, weights=weights, activations=INSIDE),
        *two_axes("FSDP x Megatron", weights, INSIDE),
    )


RECIPES: dict[str, Callable[[], tuple[Baseline, ...]]] = {
    "bert": partial(transformer, tied=True),
    "darknet": residual,
    "dcgan": data_parallel,
    "dlrm": tables,
    "gnn": graph,
    "inception": residual,
    "lstm": recurrent,
    "mamba": state_space,
    "mlp": multilayer,
    "moe": mixture,
    "resnet": residual,
    "t5": partial(transformer, tied=True),
    "unet3d": volumes,
    "vgg": vgg,
    "wide_resnet": residual,
}


def baselines_of(model: str) -> tuple[Baseline, ...]:
    """The layouts by hand of a model, by default those of a transformer."""
    return RECIPES.get(model, transformer)()
