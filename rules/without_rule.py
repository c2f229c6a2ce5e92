"""Primitives without a rule, since they have no tensor to split, grouped by reason."""

from collections.abc import Mapping
from typing import Any

WITHOUT_RULE: Mapping[str, tuple[str, ...]] = {
    "loops, whose bodies the planner plans": ("scan", "while"),
    "calls without a body to look into, or of functions that refer to memory or to devices": (
        *("call_exported", "core_map", "custom_lin", "mpmd_map", "remat_opt", "run_scoped"),
        *("run_state",),
    ),
    "collectives: they only occur where a program has been split by hand already": (
        *("all_gather", "all_gather_done", "all_gather_invariant", "all_gather_reduced", "all_gather_reduced_start"),
        *("all_gather_start", "all_to_all", "all_to_all_done", "all_to_all_start", "axis_index", "pbroadcast"),
        *(
            "pbroadcast_done",
            "pbroadcast_dynamic",
            "pbroadcast_start",
            "pmax",
            "pmin",
            "ppermute",
            "ppermute_done",
            "ppermute_start",
        ),
        *("precv", "psend", "psum", "psum_done", "psum_invariant", "psum_invariant_start", "psum_start"),
        *("ragged_all_to_all", "reduce_scatter", "reduce_scatter_done", "reduce_scatter_start", "shard_map"),
        *("unreduced_pmax", "unreduced_pmin", "unreduced_psum", "unreduced_psum_start"),
        *("unreduced_reduce_scatter", "unreduced_reduce_scatter_start"),
    ),
    "casts of varying mesh axes: they compute nothing, and only occur next to collectives": (
        *("preduced", "pvary", "reduced_vary_cast", "reduced_vary_cast_p", "vary_unreduced_cast"),
        *("vary_unreduced_cast_p",),
    ),
    "callbacks: their operands leave the devices as a whole": (
        *("debug_callback", "debug_print", "inspect_sharding", "io_callback", "pure_callback"),
    ),
    "orders in memory: they only occur in programs that set them by hand": ("relayout",),
    "effects, tokens and references to memory: there is no tensor to split": (
        *("after_all", "check", "create_linear", "create_token", "dce_sink", "pin", "unpin", "unreachable"),
    ),
    "shapes as values: single numbers, only known in exported programs": (
        *("dim_as_value", "dimension_size", "shape_assertion"),
    ),
    "parts of kernels: they only occur in the bodies of Pallas kernels": ("multiple_of", "reciprocal"),
}


def is_without_rule(primitive: Any) -> bool:
    """Whether a primitive has no rule because there is nothing to split."""
    return any(primitive.name in names for names in WITHOUT_RULE.values())
