"""Plans as files: JSON that another machine can read, check and run.

A file holds the mesh axes, the layout of every argument, the collectives, the figures, the options, and the choice of
every variable of the network, from which the schedule is made again when the plan meets its function. It names the
program by its fingerprint. A file that is torn or changed, of another version, or for another mesh is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from shardplan.errors import ArgumentError, PlanMismatchError
from shardplan.hardware import HardwareProfile, Link, load, profiles
from shardplan.mesh import mesh_axes, with_auto_axes
from shardplan.options import Options
from shardplan.plan import Plan, PlannedArgument, PlannedCollective, Recipe

if TYPE_CHECKING:
    from os import PathLike

_FORMAT = "shardplan plan"
_FORMAT_VERSION = 3


def save_plan(plan: Plan, path: str | PathLike[str]) -> None:
    """Writes a plan as JSON: into a file beside the wanted one, which then takes its place.

    Raises ArgumentError where that cannot be written.
    """
    content = _content(plan)
    document = {"format": _FORMAT, "format_version": _FORMAT_VERSION, "checksum": checksum(content), **content}
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise ArgumentError(f"cannot write the plan to `{path}`: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def load_plan(path: str | PathLike[str], mesh: Mesh | AbstractMesh | None = None) -> Plan:
    """Reads a plan; raises PlanMismatchError where the file cannot be trusted or is for another mesh."""
    document = _read(path)
    axes = {name: size for name, size in document["mesh"]}
    if mesh is None:
        mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    given = mesh_axes(mesh)
    if (given.names, given.sizes) != (tuple(axes), tuple(axes.values())):
        found = dict(zip(given.names, given.sizes, strict=True))
        raise PlanMismatchError(f"the plan in `{path}` is for the mesh {axes}, got {found}: plan anew for it")
    figures = document["figures"]
    return Plan(
        mesh=with_auto_axes(mesh),
        objective=figures["objective"],
        lower_bound=-np.inf if figures["lower_bound"] is None else figures["lower_bound"],
        peak_bytes=figures["peak_bytes"],
        collectives=tuple(PlannedCollective(**{**c, "axes": tuple(c["axes"])}) for c in document["collectives"]),
        statistics=document["statistics"],
        arguments=tuple(argument_of(entry) for entry in document["arguments"]),
        recipe=Recipe(
            options=_options(document["options"]),
            choices=tuple(map(int, document["choices"].split())),
            network=document["network"],
            running=document["running"],
            fingerprint=document["fingerprint"],
        ),
        built=None,
        donated=tuple(document["donated"]),
        host_bytes=figures["host_bytes"],
    )


def library_version() -> str:
    """The installed version of shardplan."""
    try:
        return version("shardplan")
    except PackageNotFoundError:
        return "not installed"


def _content(plan: Plan) -> dict[str, Any]:
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
        "running": plan.recipe.running,
        "choices": " ".join(map(str, plan.recipe.choices)),
    }


def _read(path: str | PathLike[str]) -> dict[str, Any]:
    """A file's content, with its format, version and checksum checked."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanMismatchError(f"cannot read the plan `{path}`: {error.strerror}") from error
    except ValueError as error:
        raise PlanMismatchError(f"`{path}` is torn, or no plan at all: it is no valid JSON ({error})") from None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise PlanMismatchError(f"`{path}` is no plan of shardplan: write one by plan.save(path)")
    found, made_by = document.get("format_version"), document.get("shardplan_version")
    if found != _FORMAT_VERSION:
        raise PlanMismatchError(f"`{path}` has format {found}, this shardplan reads {_FORMAT_VERSION}: plan anew")
    if made_by != library_version():
        raise PlanMismatchError(f"`{path}` was made by shardplan {made_by}, this is {library_version()}: plan anew")
    content = {name: entry for name, entry in document.items() if name not in ("format", "format_version", "checksum")}
    if checksum(content) != document.get("checksum"):
        raise PlanMismatchError(f"`{path}` was changed since it was written: its checksum is wrong; plan anew")
    return content


def checksum(content: Mapping[str, Any]) -> str:
    """A digest of plain data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def argument_entry(argument: PlannedArgument) -> dict[str, Any]:
    """An argument as plain data."""
    return {f.name: getattr(argument, f.name) for f in fields(argument)} | {"spec": _spec_entries(argument.spec)}


def argument_of(entry: Mapping[str, Any]) -> PlannedArgument:
    """The argument that `argument_entry` wrote."""
    return PlannedArgument(**{**entry, "shape": tuple(entry["shape"]), "spec": _spec(entry["spec"])})


def _spec_entries(spec: PartitionSpec) -> list[Any]:
    return [list(entry) if isinstance(entry, tuple) else entry for entry in spec]


def _spec(entries: list[Any]) -> PartitionSpec:
    return PartitionSpec(*[tuple(entry) if isinstance(entry, list) else entry for entry in entries])


def options_entries(options: Options) -> dict[str, Any]:
    """Options as plain data; a profile of the user's own with its numbers."""
    entries = {f.name: getattr(options, f.name) for f in fields(options)}
    entries["pins"] = {path: _spec_entries(spec) for path, spec in (options.pins or {}).items()}
    entries["reduce_dtype"] = None if options.reduce_dtype is None else np.dtype(options.reduce_dtype).name
    if options.hardware is not None and options.hardware not in profiles():
        entries["hardware"] = asdict(load(options.hardware))
    return {name: plain(entry) for name, entry in entries.items()}


def _options(entries: dict[str, Any]) -> Options:
    hardware, pins = entries["hardware"], entries["pins"]
    if isinstance(hardware, dict):
        links = {key: Link(**hardware[key]) for key in ("intra_host", "inter_host")}
        axes = {axis: Link(**link) for axis, link in hardware["axes"].items()}
        hardware = HardwareProfile(**{**hardware, **links, "axes": axes, "sources": tuple(hardware["sources"])})
    reduce_dtype = None if entries["reduce_dtype"] is None else np.dtype(entries["reduce_dtype"])
    specs = {path: _spec(spec) for path, spec in pins.items()} or None
    positions = {key: _positions(entries[key]) for key in ("donate_argnums", "static_argnums")}
    return Options(**{**entries, **positions, "hardware": hardware, "pins": specs, "reduce_dtype": reduce_dtype})


def _positions(entry: Any) -> Any:
    return tuple(entry) if isinstance(entry, list) else entry


def plain(entry: Any) -> Any:
    """Numbers, texts, lists and dictionaries, as JSON has them."""
    if entry is None or isinstance(entry, (bool, str)):
        return entry
    if isinstance(entry, Mapping):
        return {str(name): plain(inner) for name, inner in entry.items()}
    if isinstance(entry, (tuple, list)):
        return [plain(inner) for inner in entry]
    if isinstance(entry, (int, np.integer)):
        return int(entry)
    return float(entry) if isinstance(entry, (float, np.floating)) else str(entry)
