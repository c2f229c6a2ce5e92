"""Plan files: JSON that another machine can read, check and run.

A file has the mesh axes, the layout of every argument, the collectives, the figures, the options, the fingerprint of
the program, and the choice of every variable of the network. From these choices and the user's function the schedule is
built again. The reader refuses files that are torn or changed, of another version, or for another mesh. It also refuses
files with a repaired checksum and entries of wrong types or for another mesh.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields, replace
from importlib.metadata import PackageNotFoundError, version
from math import prod
from operator import mod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from shardplan.common.atomic_files import write_file
from shardplan.common.checks import check_path
from shardplan.common.entries import FREE, MalformedError, check, read
from shardplan.errors import ArgumentError, PlanMismatchError
from shardplan.hardware import HardwareProfile, load, profiles
from shardplan.layout.layout import axes_of
from shardplan.layout.mesh import mesh_axes, with_auto_axes
from shardplan.options import Options
from shardplan.plans.plan_data import PlanData, PlannedArgument, PlannedCollective, Recipe
from shardplan.program.blocks import Blocks
from shardplan.program.recompute import Offloaded

if TYPE_CHECKING:
    from os import PathLike

_MAX_DEVICES = 2**31

Positions = int | tuple[int, ...] | None
"""Positions of arguments in files."""


class OptionEntries(TypedDict):
    """Options in a file."""

    memory_limit: float | None
    objective: str
    hardware: HardwareProfile | str | None
    pins: Mapping[str, PartitionSpec]
    donate_argnums: Positions
    static_argnums: Positions
    reduce_dtype: str | None
    time_limit: float
    refine: int
    islands: bool
    verify: bool | None
    static_argnames: tuple[str, ...] | None
    donate_argnames: tuple[str, ...] | None
    keep_unused: bool
    compiler_options: Mapping[str, str | bool | float] | None
    fit: tuple[str, ...]
    blocks: Mapping[str, int] | None
    host_memory: float | None
    results: Mapping[str, PartitionSpec] | None
    on_host: tuple[str, ...]


class BlocksRow(TypedDict):
    index: str
    count: tuple[int, ...]
    module: str
    operations: int
    bytes: float | None
    seconds: float | None
    remark: NotRequired[str]


class RecomputedRow(TypedDict):
    """Values of a part of the model that are computed again: the bytes of a device that wait no longer, and the work of
    a device that is added."""

    module: str
    made_by: str
    count: int
    bytes: float
    flops: float
    seconds: float


class OffloadedRow(TypedDict):
    """Values of a part of the model that wait in host memory: the bytes of a device, and the seconds that it waits."""

    module: str
    made_by: str
    count: int
    bytes: float
    seconds: float


class Figures(TypedDict):
    objective: float
    lower_bound: float | None
    communication_bytes: float
    peak_bytes: float
    host_bytes: float


class PinsPrice(TypedDict):
    objective: float
    communication_bytes: float


class MeshRow(TypedDict):
    mesh: Mapping[str, int]
    objective: float | None
    lower_bound: float
    sent: NotRequired[float]


class RefinedRow(TypedDict):
    way: str
    kept: bool
    result: str
    predicted_bytes: NotRequired[float]
    compiled_bytes: NotRequired[float]
    compiled_peak_bytes: NotRequired[float]
    compiled_seconds: NotRequired[float]


class VerifiedRow(TypedDict):
    predicted_peak_bytes: float
    compiled_peak_bytes: float
    communication_bytes: float
    compile_seconds: float


class Verified(TypedDict):
    target: str
    jaxlib: str
    rounds: tuple[VerifiedRow, ...]


class RepeatedWork(TypedDict):
    share: float
    flops: float
    seconds: float
    split: float


class Statistics(TypedDict):
    """The statistics that plans print. There are more."""

    seconds: Mapping[str, float]
    repeated: NotRequired[RepeatedWork]
    pins: NotRequired[PinsPrice]
    meshes: NotRequired[tuple[MeshRow, ...]]
    refined: NotRequired[tuple[RefinedRow, ...]]
    verified: NotRequired[Verified]
    recomputed: NotRequired[tuple[RecomputedRow, ...]]
    offloaded: NotRequired[tuple[OffloadedRow, ...]]
    kept_for_effects: NotRequired[int]
    least_added_seconds: NotRequired[float]
    blocks: NotRequired[tuple[BlocksRow, ...]]


class PlanEntries(TypedDict):
    """A file without its format, version and checksum."""

    fingerprint: str
    mesh: tuple[tuple[str, int], ...]
    figures: Figures
    options: OptionEntries
    donated: tuple[int | str, ...]
    arguments: tuple[PlannedArgument, ...]
    collectives: tuple[PlannedCollective, ...]
    statistics: Statistics
    network: str
    choices: str
    recomputed: tuple[int, ...] | None
    offloaded: tuple[Offloaded, ...]
    blocks: tuple[Blocks, ...]


_RESOLVED = ("in_shardings", "out_shardings", "like")
"""Options that become pins and layouts of results after a trace."""

_FORMAT = "shardplan plan"
_FORMAT_VERSION = 8


def save_plan(plan: PlanData, path: str | PathLike[str]) -> None:
    """Writes a plan as JSON, atomically: into a temporary file, renamed at the end.

    Raises ArgumentError for a path that cannot be written.
    """
    write_file(path, json.dumps(document_of(plan), indent=1), "the plan")


def document_of(plan: PlanData) -> dict[str, Any]:
    """The content of a plan's file."""
    content = _content(plan)
    return {"format": _FORMAT, "format_version": _FORMAT_VERSION, "checksum": checksum(content), **content}


def plan_of_document(document: Mapping[str, Any], mesh: Mesh | AbstractMesh | None = None) -> PlanData:
    """The plan of a file's content. Raises PlanMismatchError for content that cannot be trusted."""
    return _understood(lambda: _checked(json.loads(json.dumps(document)), "the pickled plan"), mesh, "the pickled plan")


def load_plan(path: str | PathLike[str], mesh: Mesh | AbstractMesh | None = None) -> PlanData:
    """Reads a plan. Raises PlanMismatchError for a file that cannot be trusted, or for another mesh."""
    check_path(path)
    return _understood(lambda: _read(path), mesh, path)


def _understood(content: Callable[[], dict[str, Any]], mesh: Mesh | AbstractMesh | None, path: Any) -> PlanData:
    try:
        return _plan_of(content(), mesh, path)
    except (MalformedError, ArgumentError) as error:
        raise PlanMismatchError(f"`{path}` is no plan that this library has written: {error}. Plan again") from None
    except RecursionError:
        raise PlanMismatchError(f"`{path}` is no plan of shardplan: its entries are nested too deep") from None


def _plan_of(document: Mapping[str, Any], mesh: Mesh | AbstractMesh | None, path: str | PathLike[str]) -> PlanData:
    entries: PlanEntries = read(PlanEntries, document, "plan")
    axes, figures = dict(entries["mesh"]), entries["figures"]
    check(len(axes) == len(entries["mesh"]) > 0, "plan.mesh", document["mesh"], "a list of axes of different names")
    check(all(0 < n < _MAX_DEVICES for n in axes.values()), "plan.mesh", axes, "a number of devices for each axis")
    if mesh is None:
        mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise PlanMismatchError(
            f"a jax.sharding.Mesh or AbstractMesh was expected for the plan in `{path}`, got `{mesh!r}`"
        )
    given = mesh_axes(mesh)
    if (given.names, given.sizes) != (tuple(axes), tuple(axes.values())):
        found = dict(zip(given.names, given.sizes, strict=True))
        raise PlanMismatchError(f"the plan in `{path}` is for the mesh {axes}, got {found}: plan again for it")
    known = figures["objective"], figures["lower_bound"] or 0.0, figures["peak_bytes"], figures["host_bytes"]
    check(all(map(math.isfinite, known)), "plan.figures", known, "finite numbers")
    check_layouts(entries["arguments"], axes)
    check_collectives(entries["collectives"], axes)
    return PlanData(
        mesh=with_auto_axes(mesh),
        objective=figures["objective"],
        lower_bound=-np.inf if figures["lower_bound"] is None else figures["lower_bound"],
        peak_bytes=figures["peak_bytes"],
        collectives=entries["collectives"],
        statistics=document["statistics"],
        arguments=entries["arguments"],
        recipe=Recipe(
            options=_options(entries["options"]),
            choices=choices_of(entries["choices"]),
            network=entries["network"],
            fingerprint=entries["fingerprint"],
            recomputed=entries["recomputed"],
            offloaded=entries["offloaded"],
            blocks=entries["blocks"],
        ),
        built=None,
        donated=entries["donated"],
        host_bytes=figures["host_bytes"],
    )


def choices_of(entry: str) -> tuple[int, ...]:
    """The choices in a text."""
    check(re.fullmatch(r"(\d{1,18}( \d{1,18})*)?", entry) is not None, "choices", entry, "numbers with a space between")
    return tuple(map(int, entry.split()))


def check_layouts(arguments: Iterable[PlannedArgument], axes: Mapping[str, int]) -> None:
    """Raises MalformedError for an argument whose layout does not fit its shape."""
    for n, argument in enumerate(arguments):
        where, split = f"arguments[{n}]", [axes_of(entry) for entry in argument.spec]
        named = [axis for some in split for axis in some]
        sound = len(split) <= len(argument.shape) and len({*named}) == len(named) and {*named} <= axes.keys()
        check(sound, f"{where}.spec", str(argument.spec), "for each dimension, axes of the mesh")
        degrees = [prod(axes[axis] for axis in some) for some in split]
        even = all(size >= 0 for size in argument.shape) and not any(map(mod, argument.shape, degrees))
        check(even and argument.total_bytes >= 0, f"{where}.shape", argument.shape, "sizes that its axes divide")


def check_collectives(collectives: Iterable[PlannedCollective], axes: Mapping[str, int]) -> None:
    """Raises MalformedError for a collective with other axes than the mesh, or with impossible bytes."""
    for n, sent in enumerate(collectives):
        check({*sent.axes} <= axes.keys(), f"collectives[{n}].axes", sent.axes, "axes of the mesh")
        check(0 <= sent.bytes < np.inf and sent.times >= 0, f"collectives[{n}]", str(sent), "bytes and times above 0")


def library_version() -> str:
    """The installed version of shardplan."""
    try:
        return version("shardplan")
    except PackageNotFoundError:
        return "not installed"


def _content(plan: PlanData) -> dict[str, Any]:
    return {
        "shardplan_version": library_version(),
        "jax_version": jax.__version__,
        "fingerprint": plan.fingerprint,
        "mesh": list(plan.mesh_axes.items()),
        "figures": {
            "objective": plan.objective,
            "lower_bound": plan.lower_bound if np.isfinite(plan.lower_bound) else None,
            "communication_bytes": plan.communication_bytes,
            "peak_bytes": float(plan.peak_bytes),
            "host_bytes": float(plan.host_bytes),
        },
        "options": options_entries(plan.recipe.options),
        "donated": list(plan.donated),
        "arguments": [argument_entry(argument) for argument in plan.arguments],
        "collectives": [asdict(collective) for collective in plan.collectives],
        "statistics": plain(plan.statistics),
        "network": plan.recipe.network,
        "choices": " ".join(map(str, plan.recipe.choices)),
        "recomputed": plain(plan.recipe.recomputed),
        "offloaded": [asdict(one) for one in plan.recipe.offloaded],
        "blocks": [asdict(one) for one in plan.recipe.blocks],
    }


def _read(path: str | PathLike[str]) -> dict[str, Any]:
    """A file's content, with its format, version and checksum checked."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanMismatchError(f"cannot read the plan `{path}`: {error.strerror}") from error
    except ValueError as error:
        raise PlanMismatchError(f"`{path}` is torn, or no plan at all: it is no valid JSON ({error})") from None
    return _checked(document, path)


def _checked(document: Any, path: Any) -> dict[str, Any]:
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise PlanMismatchError(f"`{path}` is no plan of shardplan: write one by plan.save(path)")
    found, made_by = document.get("format_version"), document.get("shardplan_version")
    if found != _FORMAT_VERSION:
        raise PlanMismatchError(f"`{path}` has format {found}, this shardplan reads {_FORMAT_VERSION}: plan again")
    if made_by != library_version():
        raise PlanMismatchError(f"`{path}` was made by shardplan {made_by}, this is {library_version()}: plan again")
    content = {name: entry for name, entry in document.items() if name not in ("format", "format_version", "checksum")}
    if checksum(content) != document.get("checksum"):
        raise PlanMismatchError(f"`{path}` was changed since it was written: its checksum is wrong; plan again")
    return content


def checksum(content: Mapping[str, Any]) -> str:
    """A digest of plain data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def argument_entry(argument: PlannedArgument) -> dict[str, Any]:
    """An argument as plain data."""
    return {f.name: getattr(argument, f.name) for f in fields(argument)} | {"spec": _spec_entries(argument.spec)}


def _spec_entries(spec: PartitionSpec) -> list[Any]:
    named = [FREE if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec]
    return [list(entry) if isinstance(entry, tuple) else entry for entry in named]


def options_entries(options: Options) -> dict[str, Any]:
    """Options as plain data, with the numbers of a profile of the user's own."""
    entries = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _RESOLVED}
    entries["pins"] = {path: _spec_entries(spec) for path, spec in (options.pins or {}).items()}
    if options.results is not None:
        entries["results"] = {path: _spec_entries(spec) for path, spec in options.results.items()}
    entries["reduce_dtype"] = None if options.reduce_dtype is None else np.dtype(options.reduce_dtype).name
    if options.hardware is not None and options.hardware not in profiles():
        entries["hardware"] = asdict(load(options.hardware))
    return {name: plain(entry) for name, entry in entries.items()}


def _options(entries: OptionEntries) -> Options:
    """Options from plain data. Raises ArgumentError for options that no program could be planned with."""
    hardware, named = entries["hardware"], entries["reduce_dtype"]
    if isinstance(hardware, HardwareProfile):
        rates = (*hardware.flops.values(), hardware.memory_bytes, hardware.memory_bytes_per_second)
        links = (hardware.intra_host, hardware.inter_host, *hardware.axes.values())
        rates = (*rates, hardware.devices_per_host, *(link.bytes_per_second for link in links))
        host = hardware.host_bytes_per_second
        rates = rates if host is None else (*rates, host)
        sound = hardware.flops and min(rates) > 0 <= min(link.latency_seconds for link in links)
        check(bool(sound), "plan.options.hardware", hardware.name, "rates above 0")
    given: dict[str, Any] = {name: entry for name, entry in entries.items() if name in OptionEntries.__annotations__}
    options = Options(**(given | {"pins": entries["pins"] or None}))
    options.check()
    dtype = None if named is None else np.dtype(named)
    return replace(options, reduce_dtype=dtype)


def plain(entry: Any) -> Any:
    """The JSON types of an entry: numbers, texts, lists and dictionaries."""
    if entry is None or isinstance(entry, (bool, str)):
        return entry
    if isinstance(entry, Mapping):
        return {str(name): plain(inner) for name, inner in entry.items()}
    if isinstance(entry, (tuple, list)):
        return [plain(inner) for inner in entry]
    if isinstance(entry, (int, np.integer)):
        return int(entry)
    return float(entry) if isinstance(entry, (float, np.floating)) else str(entry)
