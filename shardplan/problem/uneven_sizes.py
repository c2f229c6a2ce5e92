"""Uneven sizes: sizes that are padded inside a step, since dots and windows would split them if the mesh divided them.

A vocabulary of 50257 or 12 heads do not divide by 8. Inside a step XLA pads them: every device gets the next whole
number of rows, and the last ones have fewer, or none. Arguments and results of a step divide evenly or stay whole.

Two kinds of sizes are padded: a whole dimension of a dot, whose split shares work, and a dimension of windows
(convolutions, poolings and their gradients; `shardplan.rules.uneven`) with many rows per device. All others stay as
they are, so that programs whose sizes divide have the same plans.

>>> import jax
>>> from shardplan.layout.layout import MeshAxes
>>> from shardplan.program.tracing import trace_program
>>> shapes = jax.ShapeDtypeStruct((16, 64), "float32"), jax.ShapeDtypeStruct((50257, 64), "float32")
>>> program = trace_program(lambda h, table: (h @ table.T).max(), shapes)
>>> padded_sizes(program, MeshAxes(("x",), (8,)))
frozenset({50257})
"""

from __future__ import annotations

from shardplan import rules
from shardplan.layout.layout import LayoutSpace, MeshAxes
from shardplan.problem.strategies import split_sizes
from shardplan.problem.xla_limits import has_windows, usable_uneven_splits
from shardplan.program.program import Operation, Program, operand_type

# Smaller dimensions (colours, coordinates) share no work worth the further layouts.
_MIN_SIZE = 6

# Windows are split unevenly if each device has enough rows in addition to those of its neighbours.
_MIN_ROWS = 16


def padded_sizes(program: Program, mesh: MeshAxes) -> frozenset[int]:
    """The sizes of a program that some mesh axes split unevenly, with little padding, where the split shares work."""
    found: set[int] = set()
    for operation in program.operations:
        if operation.primitive.name == "dot_general":
            operands = [operand_type(program, operand) for operand in operation.operands]
            results = [program.values[result] for result in operation.results]
            sizes = {size for tensor in (*operands, *results) for size in tensor.shape if size >= _MIN_SIZE} - found
            space = LayoutSpace(mesh, frozenset(sizes))
            wanted = {size for size in sizes if any(space.pads(size, n) for n in mesh.degrees)}
            if wanted:
                rule = rules.derive(operation.primitive, operation.params, operands, results)
                found |= wanted & {rule.size(split.index) for split in rule.padded_splits}
        elif has_windows(operation.primitive.name):
            found |= _of_windows(program, operation, mesh)
    return frozenset(found)


def _of_windows(program: Program, operation: Operation, mesh: MeshAxes) -> set[int]:
    """The sizes of dimensions of windows' operands and results."""
    operands = [operand_type(program, operand) for operand in operation.operands]
    results = [program.values[result] for result in operation.results]
    shapes = [tensor.shape for tensor in (*operands, *results)]
    space = LayoutSpace(mesh, frozenset(size for shape in shapes for size in shape))
    found: set[int] = set()
    for n in mesh.degrees:
        wanted = {size for size in space.padded if size >= n * _MIN_ROWS and space.pads(size, n)}
        if wanted:
            rule = rules.derive(operation.primitive, operation.params, operands, results)
            found |= {s for split in usable_uneven_splits(rule, n) for s in split_sizes(split, shapes) if s in wanted}
    return found
