"""Products that are added up in place: XLA:GPU makes an addition part of the product that it adds.

cuBLAS can add a product to what already lies in its result's memory. A weight that several operations read has a
gradient for each of them, and their sum so takes the memory of one, where nothing else reads them and none has to be
brought to another layout before.

>>> import jax, jax.numpy as jnp
>>> from shardplan.tracing import trace_program
>>> square = jax.ShapeDtypeStruct((8, 8), "float32")
>>> program = trace_program(lambda x, y, z: x @ y + (y @ z + z @ x), (square,) * 3, {})
>>> [operation.primitive.name for operation in program.operations]
['dot_general', 'dot_general', 'dot_general', 'add', 'add']
>>> products = {operation.results[0] for operation in program.operations[:3]}
>>> len(added_in_place(program, program.operations, products, lambda operation: True))
1
>>> program = trace_program(lambda x, y, z: (x @ y + y @ z) + z @ x, (square,) * 3, {})
>>> products = {operation.results[0] for operation in program.operations if operation.primitive.name == "dot_general"}
>>> len(added_in_place(program, program.operations, products, lambda operation: True))
2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from shardplan.memory.products import PRODUCT
from shardplan.program import Operation, Program

_ADDITIONS = frozenset({"add", "add_any"})
_VIEWS = frozenset({"transpose", "reshape", "squeeze", "expand_dims"})
_WITHIN = _ADDITIONS | _VIEWS | {PRODUCT}


def added_in_place(
    program: Program, order: Iterable[Operation], held: Collection[int], stays: Callable[[Operation], bool]
) -> frozenset[int]:
    """Results of products that take no memory of their own, where operations run in ``order``.

    ``held`` are the values in memory that may be overwritten; ``stays`` says whether an operation's result, and what an
    addition reads, need not be brought to another layout. A product that has been added to something is not added up
    again.
    """
    reads = Counter(o for operation in program.operations for o in operation.operands if isinstance(o, int))
    reads.update(o for region in program.regions for o in region.outputs if isinstance(o, int))
    memory: dict[int, int] = {}  # per value that is read once, the held value whose memory it takes
    made: dict[int, int] = {}
    alone: dict[int, int] = {}  # per value that is a product and nothing else, when it is made
    found: set[int] = set()
    for place, operation in enumerate(order):
        result = operation.results[0] if len(operation.results) == 1 else None
        if result is None:
            continue
        operands = [o for o in operation.operands if isinstance(o, int)]
        if result in held:
            memory[result], made[result] = result, place
        if operation.primitive.name not in _WITHIN or not stays(operation):
            continue
        if operation.primitive.name == PRODUCT and result in held:
            alone[result] = place
        elif operation.primitive.name in _VIEWS and reads[operands[0]] == 1 and operands[0] in memory:
            memory.setdefault(result, memory[operands[0]])
            if result not in held and operands[0] in alone:
                alone[result] = alone[operands[0]]
        elif operation.primitive.name in _ADDITIONS and len(operands) == 2:
            added = [o for o in operands if reads[o] == 1 and o in memory]
            products = sorted((o for o in added if o in alone), key=lambda o: alone[o])
            if len(added) == 2 and products:
                product = products[-1]
                target = memory[added[0] if added[1] == product else added[1]]
                if made[target] < alone[product]:
                    found.add(memory[product])
                    memory.setdefault(result, target)
            elif added:
                memory.setdefault(result, memory[added[0]])
    return frozenset(found)
