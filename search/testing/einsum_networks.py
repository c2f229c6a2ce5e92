"""Networks of training steps written as einsums, for tests and benchmarks.

A `Program` is a list of tensors and einsums over named indices. `network` turns it into a cost network for a mesh. A
tensor is a variable whose choice is the dimension that each mesh axis splits. An einsum is a variable whose choice is
the index that each axis splits. Tables hold the bytes that one device sends, by ring algorithms. The networks have the
shape and the scale of real programs, and model no compiler.

>>> program = Program()
>>> x, w = program.tensor("bi", b=64, i=32), program.tensor("io", i=32, o=16)
>>> y = program.einsum("bi,io->bo", x, w)
>>> net = program.network((2, 4))
>>> len(net), net.costs[0].size
(4, 9)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from shardplan.search.network import Network

__all__ = ["Program", "gpt", "lstm", "resnet"]

Layout = tuple[int | None, ...]
Shape = tuple[int, ...]
_BYTES = 4
# Work that a mesh axis repeats instead of splitting, in bytes per operation: 300 GB/s over 500 TFLOP/s.
_BYTES_PER_OPERATION = 300e9 / 500e12


@dataclass(slots=True)
class Program:
    """Tensors (by index names and sizes) and the einsums between them; backward operations are made by `backward`."""

    sizes: dict[str, int] = field(default_factory=dict)
    tensors: list[str] = field(default_factory=list)
    groups: list[object] = field(default_factory=list)
    einsums: list[tuple[str, tuple[int, ...], int, object]] = field(default_factory=list)
    ties: list[tuple[int, int]] = field(default_factory=list)
    repeated: object = None
    position: int = 0

    def repeat(self, label: object) -> None:
        """What follows, up to the next call, is one of several equal parts of this name (a timestep, say); tensors and
        einsums at the same place of each are one group. `None` ends the repetition."""
        self.repeated, self.position = label, 0

    def _group(self) -> object:
        self.position += 1
        return None if self.repeated is None else (self.repeated, self.position)

    def tensor(self, indices: str, **sizes: int) -> int:
        """A tensor over these indices (one letter each); a letter has one size in the whole program."""
        self.sizes.update(sizes)
        self.tensors.append(indices)
        self.groups.append(self._group())
        return len(self.tensors) - 1

    def einsum(self, expression: str, *operands: int) -> int:
        """The result of an einsum (an elementwise operation where all tensors have the same indices)."""
        result = self.tensor(expression.split("->")[1])
        self.einsums.append((expression, operands, result, self._group()))
        return result

    def elementwise(self, *operands: int, times: int = 1) -> int:
        """The last of a chain of elementwise operations; operands may have fewer indices than the first one."""
        for _ in range(times):
            names = [self.tensors[operand] for operand in operands]
            operands = (self.einsum(f"{','.join(names)}->{names[0]}", *operands),)
        return operands[0]

    def backward(self, last: int, weights: list[int], chain: int = 1) -> None:
        """Adds the gradients of everything that `last` depends on, and an update of each weight, tied to it.

        chain: elementwise operations per weight update.
        """
        gradients: dict[int, list[int]] = {}
        self.repeat(None)
        gradients[last] = [self.elementwise(last)]
        for expression, operands, result, group in list(self.einsums)[::-1]:
            if result not in gradients:
                continue
            self.repeat(None if group is None else ("gradients", group))
            found = gradients.pop(result)
            total = found[0] if len(found) == 1 else self.elementwise(*found)
            names = expression.split("->")[0].split(",")
            for place, operand in enumerate(operands):
                others = [o for i, o in enumerate(operands) if i != place]
                inputs = ",".join([self.tensors[total], *(names[i] for i in range(len(names)) if i != place)])
                gradients.setdefault(operand, []).append(self.einsum(f"{inputs}->{names[place]}", total, *others))
        for weight in weights:
            self.repeat(None)
            found = gradients.get(weight, [])
            if found:
                total = found[0] if len(found) == 1 else self.elementwise(*found)
                moments = [self.tensor(self.tensors[weight]) for _ in range(2)]
                new = [self.elementwise(moment, total, times=chain) for moment in moments]
                updated = self.elementwise(self.elementwise(*new, times=chain), weight, times=chain)
                self.ties += [(weight, updated), *zip(moments, new, strict=True)]

    def network(self, mesh: Shape, memory: bool = False) -> Network:
        """The cost network of the program on a mesh of these axis sizes.

        memory: whether tensors use their bytes per device from their making to their last use.
        """
        return _Builder(self, mesh, memory).net


class _Builder:
    """Makes the network of a program, with tables shared by all operations of equal shapes."""

    def __init__(self, program: Program, mesh: Shape, memory: bool) -> None:
        self.program, self.mesh = program, mesh
        self.net = Network()
        self.values: list[int] = []
        for indices, group in zip(program.tensors, program.groups, strict=True):
            shape = self._shape(indices)
            v = self.net.add_variable(_zeros(len(_layouts(shape, mesh))), name=indices)
            self.net.annotate(v, _BYTES * float(np.prod(shape)), _layouts(shape, mesh), group)
            self.values.append(v)
        for expression, operands, result, group in program.einsums:
            self._add(expression, operands, result, group)
        for u, v in program.ties:
            self.net.add_tie(self.values[u], self.values[v])
        if memory:
            self._add_memory()

    def _shape(self, indices: str) -> Shape:
        return tuple(self.program.sizes[i] for i in indices)

    def _add(self, expression: str, operands: tuple[int, ...], result: int, group: object) -> None:
        inputs, output = expression.split("->")[0].split(","), expression.split("->")[1]
        elementwise = all(name == output for name in inputs)
        if elementwise:
            shape = self._shape(output)
            for operand in operands:
                self.net.add_edge(self.values[operand], self.values[result], _transitions(shape, self.mesh))
            return
        letters = "".join(dict.fromkeys(output + "".join(inputs)))
        sizes = self._shape(letters)
        strategies = _layouts(sizes, self.mesh)
        op = self.net.add_variable(_repeated_work(sizes, self.mesh), name=expression)
        self.net.annotate(op, 0.0, strategies, group)
        for name, operand in zip(inputs, operands, strict=True):
            places = tuple(name.find(letter) for letter in letters)
            self.net.add_edge(self.values[operand], op, _reads(self._shape(name), sizes, places, self.mesh))
        places = tuple(output.find(letter) for letter in letters)
        self.net.add_edge(op, self.values[result], _writes(self._shape(output), sizes, places, self.mesh))

    def _add_memory(self) -> None:
        program, end = self.program, len(self.program.einsums) + 1
        made = {result: time for time, (_, _, result, _) in enumerate(program.einsums)}
        used: dict[int, int] = {}
        for time, (_, operands, _, _) in enumerate(program.einsums):
            used.update(dict.fromkeys(operands, time))
        for tensor, indices in enumerate(program.tensors):
            local = _local_bytes(self._shape(indices), self.mesh)
            start = made.get(tensor, 0)
            last = used[tensor] + 1 if tensor in made and tensor in used else end
            self.net.add_usage(self.values[tensor], local, start, last)


@cache
def _zeros(size: int) -> NDArray[np.float64]:
    return np.zeros(size)


@cache
def _layouts(shape: Shape, mesh: Shape) -> tuple[Layout, ...]:
    """Every way in which the mesh axes split the dimensions evenly."""
    found = []
    for layout in itertools.product((None, *range(len(shape))), repeat=len(mesh)):
        parts = [1] * len(shape)
        for axis, dimension in enumerate(layout):
            if dimension is not None:
                parts[dimension] *= mesh[axis]
        if all(size % part == 0 for size, part in zip(shape, parts, strict=True)):
            found.append(layout)
    return tuple(found)


@cache
def _local_bytes(shape: Shape, mesh: Shape) -> NDArray[np.float64]:
    return np.array([_share(shape, mesh, layout) for layout in _layouts(shape, mesh)])


def _share(shape: Shape, mesh: Shape, layout: Layout) -> float:
    """Bytes of the tensor on one device."""
    split = [mesh[axis] for axis, dimension in enumerate(layout) if dimension is not None]
    return _BYTES * float(np.prod(shape)) / float(np.prod(split))


def _move(shape: Shape, mesh: Shape, source: Layout, target: Layout) -> float:
    """Bytes one device sends to change layouts: slices first, as they are free; then all-to-alls, then gathers."""
    current, sent = list(source), 0.0
    for axis, dimension in enumerate(target):
        if current[axis] is None and dimension is not None:
            current[axis] = dimension
    for axis, dimension in enumerate(target):
        if current[axis] != dimension and dimension is not None:
            sent += (mesh[axis] - 1) / mesh[axis] * _share(shape, mesh, tuple(current))
            current[axis] = dimension
    for axis in range(len(mesh)):
        if current[axis] is not None and target[axis] is None:
            current[axis] = None
            sent += (mesh[axis] - 1) / mesh[axis] * _share(shape, mesh, tuple(current))
    return sent


@cache
def _transitions(shape: Shape, mesh: Shape) -> NDArray[np.float64]:
    layouts = _layouts(shape, mesh)
    return np.array([[_move(shape, mesh, a, b) for b in layouts] for a in layouts])


def _projected(strategies: tuple[Layout, ...], places: tuple[int, ...]) -> Iterator[Layout]:
    """Per strategy of an einsum, the layout of a tensor that has its letters at these places (-1: not there)."""
    for strategy in strategies:
        yield tuple(None if i is None or places[i] < 0 else places[i] for i in strategy)


@cache
def _reads(shape: Shape, sizes: Shape, places: tuple[int, ...], mesh: Shape) -> NDArray[np.float64]:
    """`[layout of an operand, strategy]`."""
    layouts = _layouts(shape, mesh)
    table = _transitions(shape, mesh)
    index = {layout: i for i, layout in enumerate(layouts)}
    return table[:, [index[layout] for layout in _projected(_layouts(sizes, mesh), places)]]


@cache
def _writes(shape: Shape, sizes: Shape, places: tuple[int, ...], mesh: Shape) -> NDArray[np.float64]:
    """`[strategy, layout of the result]`: partial results are reduced (scattered where the layout allows)."""
    strategies = _layouts(sizes, mesh)
    table = np.empty((len(strategies), len(_layouts(shape, mesh))))
    for i, (strategy, natural) in enumerate(zip(strategies, _projected(strategies, places), strict=True)):
        pending = [a for a, letter in enumerate(strategy) if letter is not None and places[letter] < 0]
        for j, layout in enumerate(_layouts(shape, mesh)):
            current, sent = list(natural), 0.0
            for axis in pending:
                local = (mesh[axis] - 1) / mesh[axis] * _share(shape, mesh, tuple(current))
                sent += local if layout[axis] is not None else 2 * local
                current[axis] = layout[axis]
            table[i, j] = sent + _move(shape, mesh, tuple(current), layout)
    return table


@cache
def _repeated_work(sizes: Shape, mesh: Shape) -> NDArray[np.float64]:
    """Per strategy of an einsum: the price of what devices compute more than once."""
    total = 2.0 * float(np.prod(sizes)) / float(np.prod(mesh)) * _BYTES_PER_OPERATION
    repeats = [
        float(np.prod([mesh[axis] for axis, letter in enumerate(strategy) if letter is None]))
        for strategy in _layouts(sizes, mesh)
    ]
    return np.array([total * (repeat - 1) for repeat in repeats])


def gpt(layers: int, batch: int = 32, length: int = 1024, width: int = 1024, vocabulary: int = 32768) -> Program:
    """A training step of a GPT, about 740 variables a layer."""
    p = Program()
    b = dict(b=batch, l=length, m=length, d=width, h=16, k=width // 16, f=4 * width, v=vocabulary)
    weights = [p.tensor("vd", **b)]
    tokens = p.tensor("blv")
    x = p.einsum("blv,vd->bld", tokens, weights[0])
    for _ in range(layers):
        w = {name: p.tensor(name) for name in ("dhk", "hkd", "df", "fd")}
        more = [p.tensor("dhk"), p.tensor("dhk")]
        scales = [p.tensor("d") for _ in range(4)]
        weights += [*w.values(), *more, *scales]
        y = _normalise(p, x, scales[:2])
        q, k, v = (p.elementwise(p.einsum("bld,dhk->blhk", y, t), times=2) for t in (w["dhk"], *more))
        k2, v2 = p.einsum("blhk->bmhk", k), p.einsum("blhk->bmhk", v)
        scores = p.elementwise(p.einsum("blhk,bmhk->bhlm", q, k2), times=4)
        total = p.einsum("bhlm->bhl", scores)
        scores = p.elementwise(scores, total, times=3)
        context = p.einsum("bhlm,bmhk->blhk", scores, v2)
        x = p.elementwise(x, p.elementwise(p.einsum("blhk,hkd->bld", context, w["hkd"]), times=2))
        y = _normalise(p, x, scales[2:])
        hidden = p.elementwise(p.einsum("bld,df->blf", y, w["df"]), times=6)
        x = p.elementwise(x, p.elementwise(p.einsum("blf,fd->bld", hidden, w["fd"]), times=2))
    logits = p.elementwise(p.einsum("bld,vd->blv", x, weights[0]), times=3)
    total = p.einsum("blv->bl", logits)
    p.backward(p.einsum("blv,bl->bl", logits, total), weights, chain=6)
    return p


def _normalise(p: Program, x: int, scales: list[int]) -> int:
    """Layer normalisation."""
    mean = p.elementwise(p.einsum("bld->bl", x), times=2)
    centred = p.elementwise(x, mean, times=2)
    spread = p.elementwise(p.einsum("bld->bl", p.elementwise(centred)), times=3)
    return p.elementwise(p.elementwise(p.elementwise(centred, spread), scales[0]), scales[1])


def lstm(layers: int, steps: int, batch: int = 512, width: int = 4096) -> Program:
    """A training step of an LSTM, unrolled over time; timesteps of one layer are one group."""
    p = Program()
    p.sizes.update(b=batch, d=width, e=width)
    gates = [[(p.tensor("de"), p.tensor("de")) for _ in range(4)] for _ in range(layers)]
    inputs = [p.tensor("bd") for _ in range(steps)]
    for layer in range(layers):
        state, cell, outputs = p.tensor("bd"), p.tensor("be"), []
        for x in inputs:
            p.repeat(layer)
            parts = [
                p.elementwise(p.elementwise(p.einsum("bd,de->be", x, a), p.einsum("bd,de->be", state, c)))
                for a, c in gates[layer]
            ]
            cell = p.elementwise(p.elementwise(parts[0], cell), p.elementwise(parts[1], parts[2]))
            state = p.einsum("be->bd", p.elementwise(parts[3], p.elementwise(cell)))
            outputs.append(state)
        inputs = outputs
    p.repeat(None)
    p.backward(p.elementwise(inputs[-1]), [w for layer in gates for pair in layer for w in pair])
    return p


def resnet(blocks: tuple[int, ...] = (3, 4, 6, 3), widening: int = 4, batch: int = 128) -> Program:
    """A training step of a wide ResNet; convolutions are contractions over channels and window at each position."""
    p = Program()
    p.sizes.update(b=batch, w=3)
    letters = iter("acdefghijklmnopqrstuvxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    weights: list[int] = []
    position, channels = next(letters), next(letters)
    p.sizes.update({position: 56 * 56, channels: 64 * widening})
    x = p.tensor(f"b{position}{channels}")
    for stage, count in enumerate(blocks):
        middle, outer = next(letters), next(letters)
        p.sizes.update({middle: 64 * widening * 2**stage, outer: 256 * widening * 2**stage})
        for _ in range(count):
            kernels = [p.tensor(f"{channels}{middle}"), p.tensor(f"{middle}{outer}")]
            y = p.elementwise(p.einsum(f"b{position}{channels},{channels}{middle}->b{position}{middle}", x, kernels[0]))
            y = p.einsum(f"b{position}{middle},{middle}{outer}->b{position}{outer}", y, kernels[1])
            weights += kernels
            if channels == outer:
                y = p.elementwise(y, x)
            x, channels = p.elementwise(y), outer
        if stage + 1 < len(blocks):
            smaller = next(letters)
            p.sizes[smaller] = p.sizes[position] // 4
            x = p.einsum(f"b{position}{channels}->b{smaller}{channels}", x)
            position = smaller
    p.backward(p.elementwise(x), weights)
    return p
