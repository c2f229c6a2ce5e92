"""Framework adapters: calls with objects of a library become calls with arrays, and results become objects again.

An adapter runs only if the script has imported its library already. Each module gives a call that takes arrays, and the
function that converts its results (`shardplan.program.call_arguments.Call.finish`).
"""

from __future__ import annotations

import importlib
import sys

from jax.sharding import PartitionSpec

from shardplan.layout.mesh import GivenMesh
from shardplan.program.call_arguments import Call

_LIBRARIES = {"flax.nnx": "shardplan.frameworks.nnx", "equinox": "shardplan.frameworks.equinox"}


def adapt_call(call: Call) -> Call:
    """A call whose arguments are trees of arrays, made of a call with objects of libraries."""
    for library, module in _LIBRARIES.items():
        if library in sys.modules:
            call = importlib.import_module(module).adapt_call(call)
    return call


def boxed_layouts(call: Call, mesh: GivenMesh) -> dict[str, PartitionSpec]:
    """The layouts in boxes of Flax linen, by the paths of arguments."""
    if "flax.core.meta" not in sys.modules or isinstance(mesh, (int, str)):
        return {}
    found: dict[str, PartitionSpec] = importlib.import_module("shardplan.frameworks.linen").boxed_layouts(
        call, tuple(mesh.axis_names)
    )
    return found
