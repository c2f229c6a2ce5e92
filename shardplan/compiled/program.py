"""The report of a compiled program: its collectives, traffic and memory per device.

`measure` compiles any lowered program, for the devices of its shardings, and reads its HLO:

    report = measure(jax.jit(step, in_shardings=...).lower(*shapes), mesh_axes={"data": 2, "model": 4})
    report.communication_bytes          # per device and step, loops counted
    report.memory.peak
    print(report)                       # a row per kind of collective and mesh axes
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardplan.common.tables import html_table, size_cell, size_text, text_table
from shardplan.compiled.hlo.collectives import CompiledCollective, collectives
from shardplan.compiled.hlo.live_ranges import LiveRanges
from shardplan.compiled.hlo.module import Module
from shardplan.compiled.target import compile_for
from shardplan.errors import ArgumentError

Axes = tuple[str, ...] | None
"""Mesh axes in the order of the mesh. None for a part of an axis."""

_OPERATION = re.compile(r"(?:^|[/(])op(\d+)(?=[/ )]|$)")


@dataclass(frozen=True, slots=True)
class Traffic:
    """The sum over collectives, such as those of one kind over the same mesh axes.

    Attributes:
        times: executions per step.
        bytes_sent: by one device per step.
        overlapped_bytes: those of collectives that overlap with other work, in a compiled program.
    """

    times: int = 0
    bytes_sent: float = 0
    overlapped_bytes: float = 0

    def plus(self, times: int, bytes_sent: float, overlapped_bytes: float = 0) -> Traffic:
        return Traffic(self.times + times, self.bytes_sent + bytes_sent, self.overlapped_bytes + overlapped_bytes)


@dataclass(frozen=True, slots=True)
class CompiledMemory:
    """Bytes on one device, as the compiler allocated them.

    Attributes:
        arguments, outputs: of the program.
        aliases: outputs in the memory of donated arguments.
        temporaries: everything in between.
        peak: the most bytes live at once, with arguments and outputs.
        host: host memory of the device's blocks of arguments, outputs and temporaries. The others exclude it.
    """

    arguments: int
    outputs: int
    aliases: int
    temporaries: int
    peak: int
    host: int = 0


@dataclass(frozen=True, slots=True)
class CompiledReport:
    """The collectives and the memory of one device in one step of a compiled program."""

    mesh_axes: Mapping[str, int]
    collectives: tuple[CompiledCollective, ...]
    memory: CompiledMemory
    compile_seconds: float
    hlo_text: str = field(repr=False)
    live_ranges: LiveRanges | None = field(default=None, repr=False)
    """The live bytes at each position of the schedule, if requested and written by XLA."""
    executable: jax.stages.Compiled | None = field(default=None, repr=False)

    @property
    def communication_bytes(self) -> float:
        """Bytes that one device sends per step, by ring algorithms."""
        return sum(found.bytes_sent * found.times for found in self.collectives)

    @property
    def counted_once(self) -> str:
        """A line about loops with collectives of unknown trip count, or an empty text."""
        sources = dict.fromkeys(found.source.rsplit("/", 1)[-1] for found in self.collectives if found.assumed)
        if not sources:
            return ""
        return (
            f"\nloops of unknown length are counted once, with what they send at {', '.join(filter(None, sources))}: "
            "state their lengths by shardplan.trip_count"
        )

    def traffic(self) -> dict[tuple[str, Axes], Traffic]:
        """Times and bytes per kind of collective and mesh axes."""
        sent: dict[tuple[str, Axes], Traffic] = {}
        for found in self.collectives:
            key, size = (found.kind, found.axes(self.mesh_axes)), found.bytes_sent * found.times
            sent[key] = sent.get(key, Traffic()).plus(found.times, size, size if found.overlapped else 0)
        return sent

    def reduced_bytes(self) -> dict[str, float]:
        """Bytes sent by reductions (all-reduce, reduce-scatter) per element type, the precision of their sums."""
        sent: dict[str, float] = {}
        for found in self.collectives:
            for tensor in found.tensors if found.kind.reduces else ():
                share = found.bytes_sent * found.times * tensor.bytes / max(found.bytes, 1)
                sent[tensor.dtype] = sent.get(tensor.dtype, 0) + share
        return sent

    def _rows(self) -> list[tuple[str, ...]]:
        traffic = sorted(self.traffic().items(), key=lambda item: -item[1].bytes_sent)
        total = Traffic()
        rows: list[tuple[str, ...]] = []
        for (kind, axes), t in traffic:
            total = total.plus(t.times, t.bytes_sent, t.overlapped_bytes)
            rows.append((kind, axes_text(axes), *_cells(t)))
        return [*rows, ("total", "", *_cells(total))]

    def __str__(self) -> str:
        table = text_table(_HEADER, self._rows(), numbers=(2, 3, 4))
        host = f", host memory {size_text(self.memory.host)}" if self.memory.host else ""
        peak = f"peak memory {size_text(self.memory.peak)}{host}, compiled in {self.compile_seconds:.1f} s"
        return f"{table}\n{peak}{self.counted_once}"

    def _repr_html_(self) -> str:
        return html_table(_HEADER, self._rows(), numbers=(2, 3, 4))


_HEADER = ("collective", "mesh axes", "times", "MB sent", "overlapped")


def _cells(traffic: Traffic) -> tuple[str, str, str]:
    return str(traffic.times), size_cell(traffic.bytes_sent), size_cell(traffic.overlapped_bytes)


def operation_of(op_name: str) -> int | None:
    """The number of the planned operation in a metadata path such as `jit(step)/op12/dot_general`.

    >>> operation_of("jit(step)/while/body/op12/dot_general"), operation_of("jit(step)/jvp(op3)/add")
    (12, 3)
    """
    found = operations_of(op_name)
    return found[-1] if found else None


def operations_of(op_name: str) -> tuple[int, ...]:
    """The numbers of all planned operations in a metadata path. A merged instruction has several."""
    return tuple(map(int, _OPERATION.findall(op_name)))


def origins(found: CompiledCollective) -> list[tuple[tuple[str, ...], float]]:
    """For each tensor of a collective, the metadata paths of its planned operations, and its bytes per step.

    The path of a collective with one tensor comes first. Then come those of the producers for a sum, or of the
    consumers for any other collective, the nearest first. Those of the other side come last.
    """
    shares = []
    for tensor in found.tensors:
        own = (found.op_name,) if len(found.tensors) == 1 else ()
        around = (tensor.producers, tensor.consumers) if found.kind.reduces else (tensor.consumers, tensor.producers)
        known = tuple(path for path in (*own, *around[0], *around[1]) if operation_of(path) is not None)
        share = found.bytes_sent * found.times * tensor.bytes / found.bytes if found.bytes else 0.0
        shares.append((known, share))
    return shares


def bytes_by_operation(report: CompiledReport) -> dict[int, float]:
    """The most bytes that a compiled step holds while each operation of the plan runs, by the operation's number.

    An instruction without an operation counts for the previous one. Empty without live ranges.
    """
    if report.live_ranges is None:
        return {}
    computations = Module.parse(report.hlo_text).computations.values()
    names = {name: operation_of(one.op_name) for inside in computations for name, one in inside.items() if one.op_name}
    found: dict[int, float] = {}
    latest: int | None = None
    for name, held in zip(report.live_ranges.instructions, report.live_ranges.bytes.tolist(), strict=True):
        own = names.get(name)
        latest = latest if own is None else own
        if latest is not None:
            found[latest] = max(held, found.get(latest, 0.0))
    return found


def measure(
    lowered: jax.stages.Lowered,
    mesh_axes: Mapping[str, int] | None = None,
    kernels: str | None = None,
    live_ranges: bool = False,
    tuned: bool = False,
) -> CompiledReport:
    """Compiles a lowered program for the devices of its shardings, and reports the traffic and memory of one device.

    Args:
        lowered: any jitted function, lowered for a mesh of real, emulated or compile-only devices.
        mesh_axes: name and size of each axis of that mesh. By default those of the program's input shardings.
        kernels: a file of compiled kernels, see `shardplan.compiled.target.compile_for`.
        live_ranges: whether the report has the live bytes at each position of the schedule.
        tuned: whether the devices exist, see `shardplan.compiled.target.compile_for`.

    Raises:
        ArgumentError: no input of the program has a `NamedSharding`, and `mesh_axes` is not given.
    """
    with ExitStack() as stack:
        dump = stack.enter_context(tempfile.TemporaryDirectory(prefix="shardplan-xla-")) if live_ranges else None
        compiled, seconds = compile_for(lowered, kernels, dump, tuned)
        found = None if dump is None else read_live_ranges(dump)
    axes = dict(_mesh_axes_of(compiled) if mesh_axes is None else mesh_axes)
    text = compiled.as_text() or ""
    return CompiledReport(axes, collectives(text), _memory_of(compiled), seconds, text, found, compiled)


def read_live_ranges(folder: str) -> LiveRanges | None:
    """The live ranges in the files that XLA wrote of one program. None without them, or in another format."""
    try:
        [ranges] = Path(folder).glob("*_after_optimizations-live-range.txt")
        [buffers] = Path(folder).glob("*_after_optimizations-buffer-assignment.txt")
        return LiveRanges.parse(ranges.read_text(encoding="utf-8"), buffers.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return None


def _mesh_axes_of(compiled: jax.stages.Compiled) -> Mapping[str, int]:
    for sharding in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)):
        if isinstance(sharding, NamedSharding):
            return sharding.mesh.shape
    raise ArgumentError(
        "the program has no `NamedSharding` on its inputs or outputs: say which mesh it is for, as "
        '`measure(lowered, mesh_axes={"data": 2, "model": 4})`.'
    )


def _memory_of(compiled: jax.stages.Compiled) -> CompiledMemory:
    stats: Any = compiled.memory_analysis()
    sizes = [
        [getattr(stats, f"{where}{what}_size_in_bytes") for what in ("argument", "output", "alias", "temp")]
        for where in ("", "host_")
    ]
    (arguments, outputs, aliases, temporaries), on_host = sizes
    host, peak = on_host[0] + on_host[1] - on_host[2] + on_host[3], stats.peak_memory_in_bytes
    if host:  # XLA's peak counts it
        peak = min(peak, arguments + outputs - aliases + temporaries)
    return CompiledMemory(arguments, outputs, aliases, temporaries, peak, host)


def axes_text(axes: Axes) -> str:
    """Mesh axes as tables print them."""
    return "part of an axis" if axes is None else ", ".join(axes)
