"""Initial values of deferred sums in loops: the parts with which a loop's partial carry begins.

The sum that a loop accumulates may be deferred until after the loop: its carry is then one partial sum per device.
Zeros are partial sums as they are. Another initial value needs no bytes either, if only additions read the carry: a
device that has a block of it has this block as its part, unless another device has the same one, and zeros around it.

>>> from shardplan.layout.layout import LayoutSpace, MeshAxes
>>> domain = LayoutSpace(MeshAxes(("x",), (8,))).domain((16, 16))
>>> initial_layouts(domain, ((0,), (), ()))          # a sum over x, of tensors that nothing splits
(((), ()), ((), (0,)), ((0,), ()))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from shardplan.layout.layout import Domain, Layout, MeshAxes, to_spec
from shardplan.layout.transitions import Transitions
from shardplan.problem.strategy import Choices
from shardplan.program.control_flow import Links
from shardplan.program.program import Constant, Operation, Program


@lru_cache(maxsize=4096)
def initial_layouts(domain: Domain, target: Layout) -> tuple[Layout, ...]:
    """The layouts of a whole tensor from which parts in the layout ``target`` are made without sending bytes.

    None if ``target`` is no partial layout. ``domain`` has the layouts of the whole tensor.
    """
    if len(target) == domain.rank:
        return ()
    pending, *own = target
    return tuple(
        layout
        for layout in domain.layouts
        if layout not in domain.padded
        and all(axes[: len(kept)] == kept for axes, kept in zip(layout, own, strict=True))
        and {axis for axes, kept in zip(layout, own, strict=True) for axis in axes[len(kept) :]} <= set(pending)
    )


def initial_prices(moving: Transitions, domain: Domain, targets: Sequence[Layout], total_bytes: int) -> np.ndarray:
    """float [layouts of the domain, targets]: the price until a tensor can become the parts of a target.

    Infinite for targets that are no partial layouts.
    """
    table = np.full((len(domain), len(targets)), np.inf)
    for place, target in enumerate(targets):
        if found := initial_layouts(domain.whole or domain, target):
            table[:, place] = moving.table(domain, found, total_bytes).min(axis=1)
    return table


def in_parts(whole: Any, layout: Layout, target: Layout, mesh: Mesh, axes: MeshAxes) -> Any:
    """The parts, stacked in front, of a tensor in one of the layouts of ``initial_layouts``.

    For axes that split the tensor further than its parts, a block is put into its position among zeros. Of the other
    devices of the sum, the first ones have the tensor, and the others zeros.
    """
    pending, *own = target
    further = [axes_of[len(kept) :] for axes_of, kept in zip(layout, own, strict=True)]
    alone = [axis for axis in pending if all(axis not in group for group in further)]

    def blocks(local: Any) -> Any:
        shape = [size * axes.degree(group) for size, group in zip(local.shape, further, strict=True)]
        place = [_index(group, axes) * size for size, group in zip(local.shape, further, strict=True)]
        zeros = jax.numpy.zeros(shape, local.dtype)
        part = jax.lax.dynamic_update_slice(zeros, local, place) if any(further) else local
        return jax.numpy.where(_index(tuple(alone), axes) == 0, part, 0)[None]

    in_specs, out_specs = to_spec(axes, layout), to_spec(axes, target)
    return jax.shard_map(blocks, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(whole)


def _index(group: tuple[int, ...], axes: MeshAxes) -> Any:
    """The number of a device's block among those over some axes."""
    return jax.lax.axis_index(tuple(axes.names[axis] for axis in group)) if group else jax.numpy.int32(0)


def carries_of_sums(
    program: Program,
    choices: Mapping[int, Choices],
    links: Mapping[int, Links],
    is_zero: Callable[[int | Constant | None], bool],
) -> dict[int, int]:
    """Carries that may be deferred sums: the value that enters an iteration, and the one for the next iteration.

    These are carries of a scan that begin with zeros, and carries that only additions read, also of a while loop.
    """
    adding, found = _Adding(program, choices, links), {}
    for index, around in links.items():
        primitive = program.operations[index].primitive.name
        initial = {link.target: link.source for link in around.enter if link.begins}
        for link in around.inside if primitive in ("scan", "while") else ():
            if link.stacked is None and isinstance(link.source, int):
                zeros = primitive == "scan" and is_zero(initial.get(link.target))
                if zeros or adding.only(link.target, link.source):
                    found[link.target] = link.source
    return found


class _Adding:
    """The carries that only additions and other operations that pass sums on read, inner loops included."""

    def __init__(self, program: Program, choices: Mapping[int, Choices], links: Mapping[int, Links]) -> None:
        self._choices = choices
        self._links = links
        self._readers: dict[int, list[Operation]] = {}
        for operation in program.operations:
            for operand in operation.operands:
                if isinstance(operand, int):
                    self._readers.setdefault(operand, []).append(operation)
        ends = [o for outputs in (program.outputs, *(r.outputs for r in program.regions)) for o in outputs]
        self._ends = Counter(o for o in ends if isinstance(o, int))
        self._tested = {
            links[o.index].same[value]
            for o in program.operations
            for value in (program.regions[o.bodies[0]].inputs if o.primitive.name == "while" else ())
            if value in links[o.index].same and value in self._readers
        }

    def only(self, entering: int, coming: int) -> bool:
        """Whether only additions read a carry, and the next iteration's value is the sum."""
        value, added = entering, False
        while value != coming:
            step = None if value in self._ends or entering in self._tested else self._passed(value)
            if step is None:
                return False
            value, added = step[0], added or step[1]
        return added and coming not in self._readers and self._ends[coming] == 1

    def _passed(self, value: int) -> tuple[int, bool] | None:
        """The result of the only reader of a sum, and whether it adds to it. None if it needs the whole sum."""
        readers = self._readers.get(value, [])
        if len(readers) != 1:
            return None
        if readers[0].bodies:
            return self._added_up(readers[0], value)
        choices = self._choices.get(readers[0].index)
        sets = [s for s in (choices.linear if choices else ()) if readers[0].operands.index(value) in s]
        return (readers[0].results[0], max(map(len, sets)) > 1) if sets and len(readers[0].results) == 1 else None

    def _added_up(self, loop: Operation, value: int) -> tuple[int, bool] | None:
        """The result of a loop that adds to a value."""
        around = self._links[loop.index]
        coming = {link.target: link.source for link in around.inside if link.stacked is None}
        for link in around.enter:
            source = coming.get(link.target) if link.source == value else None
            if isinstance(source, int) and loop.primitive.name != "cond" and self.only(link.target, source):
                result = next((r for r in loop.results if around.same.get(r) == link.target), None)
                return None if result is None else (result, True)
        return None
