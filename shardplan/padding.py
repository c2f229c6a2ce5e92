"""Which sizes are padded inside the step: those that products would split if the mesh divided them.

A vocabulary of 50257 or 12 heads do not divide by 8. Inside a step XLA pads them: every device gets the next whole
number of rows, and the last ones have less, or nothing. Arguments and results of a step divide evenly or stay whole.
Only sizes are padded that a product has as a whole dimension, where splitting it shares work; all others stay as they
are, so that programs whose sizes divide are planned as ever.

>>> import jax
>>> from shardplan.layout import MeshAxes
>>> from shardplan.tracing import trace_program
>>> shapes = jax.ShapeDtypeStruct((16, 64), "float32"), jax.ShapeDtypeStruct((50257, 64), "float32")
>>> program = trace_program(lambda h, table: (h @ table.T).max(), shapes)
>>> padded_sizes(program, MeshAxes(("x",), (8,)))
frozenset({50257})
"""

from __future__ import annotations

from shardplan import rules
from shardplan.layout import LayoutSpace, MeshAxes
from shardplan.program import Program
from shardplan.strategy import operand_type

# Smaller dimensions (colours, coordinates) share no work worth the further layouts.
_LEAST_SIZE = 6


def padded_sizes(program: Program, mesh: MeshAxes) -> frozenset[int]:
    """The sizes of a program that some mesh axes split unevenly, with little padding, where work is shared so."""
    found: set[int] = set()
    for operation in program.operations:
        if operation.primitive.name == "dot_general":
            operands = [operand_type(program, operand) for operand in operation.operands]
            results = [program.values[result] for result in operation.results]
            sizes = {size for tensor in (*operands, *results) for size in tensor.shape if size >= _LEAST_SIZE} - found
            space = LayoutSpace(mesh, frozenset(sizes))
            wanted = {size for size in sizes if any(space.pads(size, n) for n in mesh.degrees)}
            if wanted:
                rule = rules.derive(operation.primitive, operation.params, operands, results)
                found |= wanted & {rule.size(split.index) for split in rule.padded_splits}
    return frozenset(found)
