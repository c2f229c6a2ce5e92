"""Views that XLA:GPU has between kernels, libraries and collectives, as its last scheduler meets them.

A library reads matrices: what has more dimensions, or fewer, it reads through a view of another shape, and so does a
collective read what a library made. The scheduler places a view at once, as it does what is taken from several
results, and what it shows can start a microsecond later (`shardplan.memory.placing`). A kernel takes views in, and has
none. A matrix that one product reads the other way round than another one (the gradient of a layer's result, for its
weights' gradient) is there in two views, so that placing either product lets another one be placed.

>>> import jax, jax.numpy as jnp, shardplan
>>> def ranks(*shape):
...     def step(x, w):
...         return jnp.tanh(x) @ w
...     x, w = jax.ShapeDtypeStruct(shape, "float32"), jax.ShapeDtypeStruct((64, 64), "float32")
...     program = shardplan.plan(step, 1, x, w).program
...     [product] = [o for o in program.operations if o.primitive.name == "dot_general"]
...     shapes = [program.values[operand].shape for operand in product.operands]
...     return [(len(shape), matrix_rank(program, product, number)) for number, shape in enumerate(shapes)]
>>> ranks(8, 64), ranks(4, 8, 64)
([(2, 2), (2, 2)], [(3, 2), (2, 2)])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardplan.memory.combining import Gather, gather_for, read_otherwise
from shardplan.memory.flattened import flattened
from shardplan.memory.fusion import pointwise_operations
from shardplan.memory.products import is_multiplied
from shardplan.program import Operation, Program
from shardplan.strategy import operand_type

if TYPE_CHECKING:
    from shardplan.memory.graph import Graph


def viewed(graph: Graph) -> dict[int, set[tuple[int, bool]]]:
    """Per node, what it reads through a view: values, by their complement, and nodes: kernels that copy, and ends of
    collectives; each with whether it reads that the other way round, in which case the view is another one."""
    found = dict[int, set[tuple[int, bool]]]()
    products = {part: node for node in graph.needs for part in _products(graph, node)}
    otherwise = read_otherwise(graph.schedule)
    for index, node in products.items():
        product = graph.program.operations[index]
        for position, operand in enumerate(product.operands):
            if isinstance(operand, int):
                layouts = [layout for value, layout in otherwise.get(index, ()) if value == operand]
                gathers = [gather_for(graph.schedule, product, operand, layout) for layout in layouts]
                batch = product.params["dimension_numbers"][1][0]  # of several matrices, a library reads either way
                turned = not batch and _is_turned(product, position)
                through = _through(graph, product, position, operand, gathers)
                found.setdefault(node, set()).update((one, turned) for one in through)
        added = graph.adding.get(node)
        if added is not None and added.in_place and _rank(graph, added.onto) != _rank(graph, product.results[0]):
            found.setdefault(node, set()).add((~added.onto, False))
    for start in graph.starts.values():
        made = {(~value, False) for value in graph.values.get(start, ()) if _is_flat(graph, value)}
        found.setdefault(start, set()).update(made)
    return found


def _product_of(graph: Graph, node: int) -> int:
    """The product that a kernel runs which adds it to something, else itself."""
    return graph.adding[node].product if node in graph.adding else node


def _products(graph: Graph, node: int) -> Iterator[int]:
    """The products that a node runs, by index."""
    for part in (node, *graph.joined.get(node, ())):
        index = _product_of(graph, part)
        if index < len(graph.program.operations) and is_multiplied(graph.program, graph.program.operations[index]):
            yield index


def _through(graph: Graph, product: Operation, position: int, operand: int, gathers: Sequence[Gather]) -> Iterator[int]:
    """What a product reads an operand from through a view."""
    rank, dims = matrix_rank(graph.program, product, position), len(graph.program.values[operand].shape)
    copy = graph.beside.get((product.index, position))
    if copy is not None or gathers:
        nodes = [copy] if copy is not None else [graph.gathers[one] for one in gathers if one in graph.gathers]
        yield from nodes if dims != rank else ()
        return
    for value in graph.sources(operand):
        sent = graph.sent.get(value)
        if sent is not None:
            yield from [sent] if len(graph.program.values[value].shape) != rank else ()
        elif _rank(graph, value) != rank or (dims != rank and _is_turned(product, position)):
            yield ~value


def _is_flat(graph: Graph, value: int) -> bool:
    """Whether a library makes a value as a matrix, or matrices, that has more dimensions."""
    values = graph.program.values
    return value < len(values) and _rank(graph, value) != len(values[value].shape)


def _rank(graph: Graph, value: int) -> int:
    """How many dimensions a value has as a kernel, or a library, writes it. What one operation computes of libraries'
    results alone has as many as these."""
    program, problem = graph.program, graph.schedule.problem
    maker = program.makers.get(value)
    ranks = [_made_rank(graph, maker)] if maker is not None else []
    if maker is not None and ranks == [None] and maker.index in pointwise_operations(problem):
        makers = [program.makers.get(operand) if isinstance(operand, int) else None for operand in maker.operands]
        ranks = [_made_rank(graph, made) if made is not None else None for made in makers]
    if not ranks or None in ranks:
        shape = program.values[value].shape if value < len(program.values) else ()
        return len(flattened(problem).get(value, shape))
    return max(rank for rank in ranks if rank is not None)


def _made_rank(graph: Graph, maker: Operation) -> int | None:
    """How many dimensions a library's result has; None of what a kernel makes."""
    product = graph.program.operations[_product_of(graph, maker.index)]
    if not is_multiplied(graph.program, product):
        return None
    (contracted, batch), sides = product.params["dimension_numbers"], range(len(product.operands))
    ranks = [len(operand_type(graph.program, operand).shape) for operand in product.operands]
    return bool(batch[0]) + sum(ranks[side] > len(contracted[side]) + len(batch[side]) for side in sides)


def _is_turned(product: Operation, position: int) -> bool:
    """Whether a product reads an operand the other way round than the library, which adds up over the last dimension of
    its first operand, and over the first one of its second."""
    contracted, batch = (dims[position] for dims in product.params["dimension_numbers"])
    free = [dim for dim in range(max((*contracted, *batch), default=0) + 1) if dim not in (*contracted, *batch)]
    first = bool(contracted) and min(contracted) < min(free, default=len(free) + max(contracted) + 1)
    return first if position == 0 else not first


def matrix_rank(program: Program, product: Operation, position: int) -> int:
    """How many dimensions an operand has as a product reads it: what is free, added up, and the batch are one each."""
    contracted, batch = (len(dims[position]) for dims in product.params["dimension_numbers"])
    dims = len(operand_type(program, product.operands[position]).shape)
    return bool(contracted) + bool(batch) + (dims > contracted + batch)
