"""Primitives that have no rule because there is nothing to split, and why; by group."""

from collections.abc import Mapping

APART: Mapping[str, tuple[str, ...]] = {
    "calls and control flow, whose bodies the planner plans": (
        *("call", "call_exported", "closed_call", "composite", "cond", "core_map", "cudnn_fusion", "custom_jvp_call"),
        *("custom_lin", "custom_linear_solve", "custom_vjp_call", "custom_vmap_call", "jit", "linear_call", "mpmd_map"),
        *("platform_index", "remat2", "remat_opt", "run_scoped", "run_state", "scan", "while"),
    ),
    "collectives: they only occur where a program has been split by hand already": (
        *("all_gather", "all_gather_done", "all_gather_invariant", "all_gather_reduced", "all_gather_reduced_start"),
        *("all_gather_start", "all_to_all", "all_to_all_done", "all_to_all_start", "axis_index", "pbroadcast"),
        *("pbroadcast_done", "pbroadcast_start", "pmax", "pmin", "ppermute", "ppermute_done", "ppermute_start"),
        *("precv", "psend", "psum", "psum_done", "psum_invariant", "psum_invariant_start", "psum_start"),
        *("ragged_all_to_all", "reduce_scatter", "reduce_scatter_done", "reduce_scatter_start", "shard_map"),
        *("unreduced_psum", "unreduced_psum_start", "unreduced_reduce_scatter", "unreduced_reduce_scatter_start"),
    ),
    "casts of varying mesh axes: they compute nothing, and only occur next to collectives": (
        *("preduced", "pvary", "reduced_vary_cast_p", "vary_unreduced_cast_p"),
    ),
    "callbacks: their operands leave the devices as a whole": (
        *("debug_callback", "debug_print", "inspect_sharding", "io_callback", "pure_callback"),
    ),
    "effects, tokens and references to memory: there is no tensor to split": (
        *("after_all", "check", "create_linear", "create_token", "dce_sink", "pin", "unpin", "unreachable"),
    ),
    "shapes as values: single numbers, only known in exported programs": (
        *("dim_as_value", "dimension_size", "shape_assertion"),
    ),
    "parts of kernels: they only occur in the bodies of Pallas kernels": ("multiple_of", "reciprocal"),
}
