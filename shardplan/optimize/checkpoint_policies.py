"""What people compute again by hand: the policies of `jax.checkpoint` around every layer, as sets of residuals.

| policy | keeps |
|---|---|
| `nothing_saveable` | what a layer hands to others |
| `dots_saveable` | results of products and convolutions |
| `dots_with_no_batch_dims_saveable` | those of products without batch dimensions, and of convolutions |

A layer is a module whose name has a number that others of its name differ in, or the body of a scan.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from shardplan import _jax
from shardplan.memoize import memoize
from shardplan.optimize.residual_graph import ResidualGraph
from shardplan.program.operation_kinds import PRODUCTS, readers_in
from shardplan.program.program import Program
from shardplan.program.residuals import border, materialised


def _within_layers(graph: ResidualGraph) -> frozenset[int]:
    """The residuals of layers that no other layer reads."""
    program, layers = graph.program, _layers(graph.program)
    found = set(graph.stacks)
    for value in graph.residuals:
        layer = layers.get(program.makers[value].index)
        if layer is not None and value not in graph.stacks and _readers(program, value, layers) <= {layer}:
            found.add(value)
    return frozenset(found)


def _products_apart(graph: ResidualGraph) -> frozenset[int]:
    """The residuals that no product makes."""
    stacks = graph.stacks
    makers = {v: graph.program.makers[stacks[v].made if v in stacks else v] for v in graph.residuals}
    return graph.useful([value for value, maker in makers.items() if maker.primitive.name not in PRODUCTS])


POLICIES: Mapping[str, Callable[[ResidualGraph], frozenset[int]]] = MappingProxyType(
    {
        "nothing_saveable": _within_layers,
        "dots_saveable": _products_apart,
        "dots_with_no_batch_dims_saveable": lambda graph: graph.useful(graph.cheap),
    }
)
"""The residuals that a policy computes again, by its name in JAX."""


@memoize
def _layers(program: Program) -> Mapping[int, str]:
    """The layers of operations, by index: the path up to the first numbered module that has siblings."""
    paths = {o.index: _jax.module_path(o.equation).split("/") for o in program.operations if o.region == 0}
    families: dict[tuple[str, ...], set[str]] = {}
    for path in paths.values():
        for n, name in enumerate(path):
            families.setdefault(_family(path[: n + 1]), set()).add(name)
    found = dict[int, str]()
    for index, path in paths.items():
        ends = [n for n in range(1, len(path) + 1) if len(families[_family(path[:n])]) > 1]
        if ends:
            found[index] = "/".join(path[: ends[0]])
    return found


def _family(path: Sequence[str]) -> tuple[str, ...]:
    """A module and those whose names differ from its own in numbers alone."""
    return (*path[:-1], re.sub(r"\d+", "*", path[-1]))


def _readers(program: Program, value: int, layers: Mapping[int, str]) -> set[str | None]:
    """The layers of the forward part that read a value, or what kernels compute of it on the way."""
    readers, found, waiting, seen = readers_in(program), set[str | None](), [value], {value}
    while waiting:
        for operation in readers.get(waiting.pop(), ()):
            if operation.index > border(program):
                continue
            more = [r for r in operation.results if r not in materialised(program)]
            if operation.index in layers or not more:  # some operations of a layer do not have its name
                found.add(layers.get(operation.index))
            more = [r for r in more if r not in seen]
            seen.update(more)
            waiting += more
    return found
