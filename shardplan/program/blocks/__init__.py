"""Blocks: a region of a program runs block by block along an index, in a loop.

>>> import jax, jax.numpy as jnp
>>> from shardplan.program.tracing import trace_program
>>> def loss(w, x):
...     return jnp.sum(jnp.tanh(x @ w) ** 2)
>>> program = trace_program(jax.grad(loss), (jnp.ones((8, 8)), jnp.ones((64, 8))))
>>> found = in_blocks(program, Blocks(((1, 0),), (4,)))
>>> [operation.primitive.name for operation in found.program.operations if operation.bodies]
['scan']
"""

from shardplan.program.blocks.growth import grown as grown
from shardplan.program.blocks.places import Growth as Growth
from shardplan.program.blocks.regions import Region as Region
from shardplan.program.blocks.regions import regions as regions
from shardplan.program.blocks.rewrite import Blocked as Blocked
from shardplan.program.blocks.rewrite import Blocks as Blocks
from shardplan.program.blocks.rewrite import in_blocks as in_blocks
from shardplan.program.blocks.tiling import Tiling as Tiling
from shardplan.program.blocks.tiling import tiling as tiling
