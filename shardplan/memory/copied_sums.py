"""Sums that a product of matrices writes into a copy of what it is added to.

A product is added to a matrix in place, where nothing else reads that. What has more dimensions it reads through a
view, of which it is the only reader: XLA takes it to be free then, and copies it first where something else reads what
the view is of. Its last scheduler places that copy like any other kernel, so that it may be there long before the sum.

>>> import jax, jax.numpy as jnp, shardplan
>>> from shardplan.memory.accumulation import accumulations
>>> def copies(*shape):
...     def step(w, x):
...         y = x * 2
...         return (y + jnp.tanh(y) @ w) @ w
...     w, x = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct(shape, "float32")
...     schedule = shardplan.plan(step, 1, w, x).schedule
...     return [copied_first(schedule.problem, one) for one in accumulations(schedule).values()]
>>> copies(32, 64), copies(4, 8, 64)
([False], [True])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardplan.memory.accumulation import Accumulation
from shardplan.memory.flattened import flattened, matrices_of
from shardplan.memory.products import is_multiplied
from shardplan.memory.times import BYTES_MOVED
from shardplan.problem import Problem

if TYPE_CHECKING:
    from shardplan.memory.graph import Graph


def copied_first(problem: Problem, added: Accumulation) -> bool:
    """Whether what a product is added to is copied first."""
    program = problem.program
    made, product = program.operations[added.addition].results[0], program.operations[added.product]
    if added.onto < 0 or added.in_place or made in flattened(problem) or not is_multiplied(program, product):
        return False
    shape = program.values[made].shape
    is_viewed = len(matrices_of(program, product)) < len(shape)
    return is_viewed and program.values[added.onto].elements == program.values[made].elements


def copy_sums(graph: Graph) -> None:
    """Adds a kernel to a graph for each such copy."""
    owner = {part: node for node, parts in graph.joined.items() for part in parts}

    def makers(values: set[int]) -> set[int]:
        made = {value: graph.maker(value) for value in values}
        ends = {graph.sent.get(value, owner.get(maker, maker)) for value, maker in made.items() if maker is not None}
        return {end for end in ends if end is not None}

    for node, added in graph.adding.items():
        if node in graph.needs and copied_first(graph.schedule.problem, added):
            onto = {added.onto} & graph.reads[node]
            needs = makers(onto) & graph.needs[node]
            takes = 2 * graph.size_of(added.onto) / BYTES_MOVED
            copy = graph.add(node - 0.5, needs, graph.values[node] & onto, takes)
            graph.copied[node] = copy
            graph.needs[node] -= needs - makers(set(graph.reads[node]) - onto)
            graph.needs[node].add(copy)
            graph.values[node] -= onto
