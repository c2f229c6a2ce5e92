"""Hard layouts: the user's pins, layouts on mesh axes of type Explicit, and the program's sharding constraints.

>>> import jax
>>> from shardplan.layout.layout import MeshAxes
>>> from shardplan.program.tracing import trace_program
>>> shape = jax.ShapeDtypeStruct((8, 6), "float32")
>>> program = trace_program(lambda x: x * 2, (shape,))
>>> space = LayoutSpace(MeshAxes(("data", "model"), (2, 2)))
>>> hard_layouts(program, space, {"0": PartitionSpec("data", PartitionSpec.UNCONSTRAINED)}).layouts
{0: ((0,), None)}
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardplan.errors import ArgumentError
from shardplan.layout.layout import LayoutSpace, MeshAxes, from_spec
from shardplan.program.program import Program, Value
from shardplan.program.regions.region import orders_of_region

# State is often small or oddly shaped. The warning covers undivided dimensions from this size on.
_MIN_WARNED_SIZE = 1024

HardLayout = tuple[tuple[int, ...] | None, ...]
"""Per dimension, the mesh axes that split it, None for a free dimension."""


@dataclass(frozen=True, slots=True)
class HardLayouts:
    """Hard layouts of values, and a sentence for every constraint of the user's function that cannot be kept."""

    layouts: dict[int, HardLayout]
    ignored: tuple[str, ...]


def with_explicit(
    pins: Mapping[str, PartitionSpec] | None, arguments: Mapping[str, Any], mesh: Any
) -> Mapping[str, PartitionSpec] | None:
    """Pins, with the layouts of arguments on mesh axes of type Explicit: these are part of the arguments' types.

    ``arguments`` are arrays or shapes by their paths. A pin has precedence over an argument's own layout. An argument
    that no such axis splits, or that is on another mesh than the planned one, is free.
    """
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        return pins
    found = dict(pins or {})
    for name, argument in arguments.items():
        spec = _explicit_spec(argument, mesh)
        if spec is not None and not any(fnmatchcase(name, pattern) for pattern in pins or {}):
            found[glob.escape(name)] = spec
    return found or pins


def _explicit_spec(argument: Any, mesh: Mesh | AbstractMesh) -> PartitionSpec | None:
    """The split of an argument over the axes of type Explicit of a mesh, None without one."""
    sharding = getattr(argument, "sharding", None)
    if not isinstance(sharding, NamedSharding) or [*sharding.mesh.shape.items()] != [*mesh.shape.items()]:
        return None
    kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    split = [entry if isinstance(entry, tuple) else (entry,) for entry in sharding.spec]
    kept = [tuple(axis for axis in axes if kinds.get(axis) is AxisType.Explicit) for axes in split]
    if not any(kept):
        return None
    rest = None if all(kind is AxisType.Explicit for kind in kinds.values()) else PartitionSpec.UNCONSTRAINED
    behind = ((),) * (len(argument.shape) - len(kept))
    return PartitionSpec(*(axes or rest for axes in (*kept, *behind)))


def hard_layouts(program: Program, space: LayoutSpace, pins: Mapping[str, PartitionSpec] | None) -> HardLayouts:
    """The hard layouts of a program's values over a mesh.

    Raises ArgumentError for pins without a matching argument, pins that are no layout of it, and pins that contradict
    each other.
    """
    layouts: dict[int, HardLayout] = {}
    problems: list[str] = []
    pinned_by: dict[int, str] = {}
    names = {index: program.values[index].name or "" for index in program.inputs}
    for pattern, spec in (pins or {}).items():
        found = [index for index, name in names.items() if fnmatchcase(name, pattern)]
        if not found:
            problems.append(unmatched(pattern, names.values()))
        for index in found:
            wanted = _layout(space, program.values[index], spec)
            if isinstance(wanted, str):
                problems.append(f"the pin `{pattern}` on `{names[index]}`: {wanted}")
            elif layouts.setdefault(index, wanted) != wanted:
                problems.append(
                    f"the pins `{pinned_by[index]}` and `{pattern}` give two layouts to `{names[index]}`: keep one"
                )
            else:
                pinned_by.setdefault(index, pattern)
    if problems:
        raise ArgumentError("\n".join(problems))
    kept, ignored = _constraints(program, space)
    return HardLayouts(layouts | kept, ignored)


def unmatched(pattern: str, names: Iterable[str]) -> str:
    """The sentence about a pin that matches no argument, with the nearest names."""
    nearest = sorted(names, key=lambda name: (-SequenceMatcher(None, pattern, name).ratio(), name))
    return f"the pin `{pattern}` matches no argument; there are {_some(nearest)}"


def named_orders(
    program: Program, mesh: MeshAxes, pins: Mapping[str, PartitionSpec] | None
) -> frozenset[tuple[int, ...]]:
    """The orders of mesh axes on one dimension that pins, constraints and the specs of regions name."""
    found = set()
    for spec in (*(pins or {}).values(), *program.constraints.values()):
        with suppress(ValueError):  # of another mesh, which has its own warning
            found |= {axes for axes in from_spec(mesh, spec, len(spec)) if len(axes) > 1}
    return frozenset(found | {axes for o in program.operations for axes in orders_of_region(mesh, o)})


def _constraints(program: Program, space: LayoutSpace) -> tuple[dict[int, HardLayout], tuple[str, ...]]:
    """The user's own constraints. A constraint that no plan can keep raises no error, as a jit would run it."""
    layouts: dict[int, HardLayout] = {}
    ignored = []
    sources = {result: operation.source for operation in program.operations for result in operation.results}
    for index, spec in program.constraints.items():
        wanted = _layout(space, program.values[index], spec)
        if isinstance(wanted, str):
            ignored.append(f"the sharding constraint at {sources[index]} is not kept: {wanted}")
        else:
            layouts[index] = wanted
    return layouts, tuple(ignored)


def _layout(space: LayoutSpace, value: Value, spec: PartitionSpec) -> HardLayout | str:
    """The layout of a spec, or the reason for which there is none."""
    mesh = space.mesh
    try:
        layout = from_spec(mesh, spec, len(value.shape))
    except ValueError as error:
        return str(error)
    entries = tuple(spec) + (None,) * (len(value.shape) - len(spec))
    wanted = tuple(
        None if entry is PartitionSpec.UNCONSTRAINED else axes for entry, axes in zip(entries, layout, strict=True)
    )
    used = [axis for axes in layout for axis in axes]
    for axis in used:
        if used.count(axis) > 1:
            return f"`{spec}` splits two dimensions over the axis `{mesh.names[axis]}`: an axis splits one"
    for dim, (size, axes) in enumerate(zip(value.shape, layout, strict=True)):
        blocks = mesh.degree(axes)
        if blocks > 1 and (size == 0 or size % blocks):
            return (
                f"`{spec}` splits dimension {dim} of {list(value.shape)} over {blocks} devices, which leaves "
                f"{size % blocks} of its {size} rows: split another dimension or pad to {_next(size, blocks)}"
            )
    return wanted


def undivided(program: Program, space: LayoutSpace) -> list[str]:
    """A sentence for each data argument whose first dimension no mesh axis divides, with sizes that would do.

    Data are the arguments that no result replaces in the next step. For a scan over microbatches the second dimension
    counts. Without a state, and next to a divided batch (a frozen network's weights), only arguments count that cannot
    be split on any dimension. Of a state, long dimensions count: a vocabulary.
    """
    mesh = space.mesh
    if not mesh.splitting:
        return []
    sizes = sorted({mesh.sizes[axis] for axis in mesh.splitting})
    axes = ", ".join(f"{mesh.names[axis]}={mesh.sizes[axis]}" for axis in mesh.splitting)
    state = set(program.ties.values())
    of_state = [program.values[program.inputs[position]] for position in sorted(state)]
    found = _undivided_state(of_state, sizes, axes, space.padded)
    scanned = _scanned(program)
    asked = list[tuple[int, int, int]]()  # per argument with data, which dimension, and its size
    for position, index in enumerate(program.inputs):
        shape, dim = program.values[index].shape, int(index in scanned)
        if position not in state and len(shape) > dim and shape[dim] > 1 and prod(shape) >= mesh.device_count:
            asked.append((index, dim, shape[dim]))
    every = state and not any(_divides(batch, sizes) for _, _, batch in asked)
    for index, dim, batch in asked:
        shape = program.values[index].shape
        if _divides(batch, sizes) or not (every or not any(_divides(size, sizes) for size in shape)):
            continue
        better = " or ".join(map(str, sorted({_next(batch, n) for n in (min(sizes), mesh.device_count)})))
        inside = " but inside the step, padded" if batch in space.padded else ""
        found.append(
            f"no mesh axis ({axes}) divides dimension {dim} of `{program.values[index].name}` {list(shape)}: its "
            f"{batch} rows are not split{inside}. {better} rows would be."
        )
    return found


def _scanned(program: Program) -> set[int]:
    """The values that a scan runs over: no plan splits their first dimension."""
    scans = [o for o in program.operations if o.primitive.name == "scan"]
    first = [o.params["num_consts"] + o.params["num_carry"] for o in scans]
    return {v for o, n in zip(scans, first, strict=True) for v in o.operands[n:] if isinstance(v, int)}


def _undivided_state(state: Iterable[Value], sizes: list[int], axes: str, padded: frozenset[int]) -> list[str]:
    """A sentence for each long size of the state that no axis divides, with the first tensor that has it."""
    of_size: dict[int, list[str]] = {}
    for value in state:
        for dim, size in enumerate(value.shape):
            if size >= _MIN_WARNED_SIZE and not _divides(size, sizes):
                of_size.setdefault(size, []).append(f"dimension {dim} of `{value.name}` {list(value.shape)}")
    inside = "split inside the step alone, padded, and the tensor stored in another layout, which costs its exchange"
    return [
        f"no mesh axis ({axes}) divides {size}, {where[0]}{f' and {len(where) - 1} more' if where[1:] else ''}: it is "
        f"{inside if size in padded else 'not split, which can cost much'}. {_next(size, max(sizes))} would be split."
        for size, where in of_size.items()
    ]


def _divides(size: int, blocks: Iterable[int]) -> bool:
    return size > 0 and any(size % n == 0 for n in blocks)


def _next(size: int, blocks: int) -> int:
    """The next multiple of a number of blocks."""
    return max(1, -(-size // blocks)) * blocks


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(f"`{name}`" for name in listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
