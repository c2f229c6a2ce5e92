"""What gradients of poolings scatter into: zeros that rectifiers have made, or another gradient of the same image."""

from __future__ import annotations

from shardplan.memory.convolutions import POOLING_GRADIENT
from shardplan.memory.repeated import read_counts
from shardplan.once import once
from shardplan.program import Constant, Operation, Program

_ADDITIONS = frozenset({"add", "add_any"})


@once
def added_poolings(program: Program) -> dict[int, int]:
    """The gradients of poolings, by index, that are added to another gradient of the same image, and that: XLA scatters
    into it, unless something is put around the image, which is cut off before."""
    makers, counts = program.makers, read_counts(program)
    found = dict[int, int]()
    for addition in program.operations:
        if addition.primitive.name in _ADDITIONS:
            for operand, other in (addition.operands, addition.operands[::-1]):
                maker = makers.get(operand) if isinstance(operand, int) and counts[operand] == 1 else None
                if maker is None or maker.primitive.name != POOLING_GRADIENT or not isinstance(other, int):
                    continue
                if not any(map(any, maker.params["padding"])):
                    found[maker.index] = other
                    break  # of two, the other one is scattered into zeros before
    return found


@once
def rectifiers_of_poolings(program: Program) -> dict[int, list[Operation]]:
    """Per pooling gradient of images that were rectified, by index: the rectifier whose kernel makes its zeros, and the
    gradients of rectifiers after it.

    XLA scatters into the zeros that rectifiers of such images compare with: equal values are one, and what is needed
    in memory is made in the kernel of the first that computes with it. That kernel stores what it rectifies as well.
    Gradients of rectifiers read these zeros again, so that the pooling's gradient scatters into a copy. Where rows or
    columns are put before an image, zeros are larger than it, and no rectifier's; and what is added to something, and
    nothing else, is scattered into that.
    """
    added = added_poolings(program)
    rectifiers: dict[tuple[object, ...], list[Operation]] = {}
    found: dict[int, list[Operation]] = {}
    scattering: dict[tuple[object, ...], list[Operation]] = {}
    for operation in program.operations:
        if not operation.results:
            continue
        value = program.values[operation.results[0]]
        shape = *value.shape, value.dtype
        constants = [operand.value for operand in operation.operands if isinstance(operand, Constant)]
        if operation.primitive.name == "max" and constants == [0]:
            rectifiers.setdefault(shape, []).append(operation)
        elif operation.primitive.name == POOLING_GRADIENT and shape in rectifiers:
            if operation.index not in added and not any(before for before, _ in operation.params["padding"]):
                found[operation.index] = scattering[shape] = [rectifiers[shape][0]]
        elif operation.primitive.name == "select_n" and shape in scattering:
            scattering[shape].append(operation)
    return found
