"""One plan for several processes that share the devices of a mesh.

Each process traces the program by itself. Before planning, the processes compare the inputs of the plan: program,
options, mesh, and versions and code of the library. A difference is an error in all processes that shows both sides.
The first process then plans, and sends its plan or its error to the others. Before the compilation of a step the
processes compare their plans, also those from files.

Messages go through the key-value store of ``jax.distributed``, which needs no device. Every wait has a limit: that of
`VARIABLE`, and for a plan the time limit of its search.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar, cast

import jax
from jax.sharding import AbstractMesh, Mesh

from shardplan import _jax, errors
from shardplan.common.progress import set_stage
from shardplan.errors import ArgumentError, InfeasibleError, ProcessesError
from shardplan.layout.mesh import GivenMesh, can_run, hosts_by_devices, mesh_axes
from shardplan.options import Options
from shardplan.plans.cache import code_files, described
from shardplan.plans.file import document_of, library_version, options_entries, plan_of_document
from shardplan.plans.pipeline import rebuild
from shardplan.plans.plan_data import PlanData
from shardplan.program.program import Program

Made = TypeVar("Made")

VARIABLE = "SHARDPLAN_PROCESS_TIMEOUT"
"""The environment variable with the seconds that a process waits for another one. `PATIENCE` is the default."""

PATIENCE = 600.0

_POLL_SECONDS = 1.0
"""Seconds of one wait. Between two waits Python handles Ctrl-C."""

_MAX_DIFFERENCES = 3
"""The most differences in an error."""

_SEARCHES_PER_PLAN = 4
"""The time limits of a search in the wait for a plan, with its refinements and its memory."""

_meetings: Counter[tuple[int, ...]] = Counter()
_is_alone: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def planning_alone() -> Iterator[None]:
    """Makes plans inside those of this process only."""
    token = _is_alone.set(True)
    try:
        yield
    finally:
        _is_alone.reset(token)


@dataclass(frozen=True, slots=True)
class Group:
    """The processes of a mesh's devices, seen from one of them. ``store`` is the key-value store."""

    members: tuple[int, ...]
    own: int
    store: Any

    @property
    def first(self) -> int:
        return self.members[0]

    def same(self, make: Callable[[], Made], told: Callable[[Made], Mapping[str, str]]) -> Made:
        """The result of ``make`` in this process, after a comparison of its ``told`` texts in all processes.

        Raises the error of ``make`` here. Raises ProcessesError in all processes for an error in another one, and for
        different texts."""
        folder = self._next()
        try:
            made = make()
            mine = dict(told(made))
        except BaseException as error:
            self._send(f"{folder}/{self.own}", _error_entry(error))
            raise
        self._send(f"{folder}/{self.own}", {"told": mine})
        entries = {one: self._receive(f"{folder}/{one}", one, _patience()) for one in self.members if one != self.own}
        for process, entry in entries.items():
            if "error" in entry:
                raise ProcessesError(f"process {process} failed where it should plan too: {entry['error']}")
        all_told = {self.own: mine} | {process: entry["told"] for process, entry in entries.items()}
        if any(other != mine for other in all_told.values()):
            raise ProcessesError(_differences(all_told))
        return made

    def from_first(
        self, make: Callable[[], Made], entry: Callable[[Made], Any], searching: float
    ) -> tuple[Made | None, Any]:
        """The result of ``make`` in the first process, else None, and plain data of it in all processes.

        Raises the first process's error in all."""
        key = f"{self._next()}/{self.first}"
        if self.own != self.first:
            set_stage(f"waiting for process {self.first}")
            received = self._receive(key, self.first, _patience() + searching)
            if "error" in received:
                raise _error_of(received, self.first)
            return None, received["made"]
        try:
            made = make()
            content = entry(made)
        except BaseException as error:
            self._send(key, _error_entry(error))
            raise
        self._send(key, {"made": content})
        return made, content

    def _next(self) -> str:
        """The folder of the next message. Removes the second last one, which all processes have read."""
        _meetings[self.members] += 1
        count, name = _meetings[self.members], "-".join(map(str, self.members))
        name = hashlib.sha256(name.encode()).hexdigest()[:16]
        if self.own == self.first and count > 2:
            self.store.key_value_delete(f"shardplan/{name}/{count - 2}")
        return f"shardplan/{name}/{count}"

    def _send(self, key: str, entry: Mapping[str, Any]) -> None:
        self.store.key_value_set_bytes(key, zlib.compress(json.dumps(entry).encode()))

    def _receive(self, key: str, sender: int, seconds: float) -> Any:
        end = time.monotonic() + seconds
        while True:
            left = min(_POLL_SECONDS, end - time.monotonic())
            if left <= 0:
                raise ProcessesError(
                    f"process {self.own} has waited {seconds:.0f} s for process {sender}, which has not planned what "
                    f"it plans. All of the processes {self.members} plan and call the same steps in the same order. To "
                    "plan in one process alone, use shardplan.plan over a jax.sharding.AbstractMesh. To wait longer, "
                    f"set {VARIABLE} to a number of seconds"
                )
            try:
                return json.loads(zlib.decompress(self.store.blocking_key_value_get_bytes(key, int(1000 * left) + 1)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise ProcessesError(f"process {sender} cannot be heard: {error}") from None


def group_of(mesh: GivenMesh | None) -> Group | None:
    """The processes of a mesh's devices, or of those that a plan over it would run on. None for this process alone."""
    store = _jax.key_value_store()
    if store is None or jax.process_count() == 1 or _is_alone.get():
        return None
    devices: Sequence[jax.Device]
    if isinstance(mesh, Mesh):
        devices = list(mesh.devices.flat)
        if not can_run(devices[0]):
            return None
    else:
        devices = jax.devices()[: _count(mesh)]
    members = tuple(sorted({device.process_index for device in devices}))
    own = jax.process_index()
    return Group(members, own, store) if len(members) > 1 and own in members else None


def _count(mesh: AbstractMesh | int | str | None) -> int:
    """The number of devices for a plan over a mesh without devices. 0 where fewer exist."""
    if isinstance(mesh, str):
        hosts, per_host = hosts_by_devices(mesh)
        mesh = hosts * per_host
    count = 0 if mesh is None else mesh if isinstance(mesh, int) else mesh.size
    return count if count <= jax.device_count() else 0


def one_plan(
    mesh: GivenMesh,
    trace: Callable[[], tuple[Program, Options]],
    make: Callable[[Program, Options], PlanData],
) -> PlanData:
    """The plan of ``make`` from the result of ``trace``. In several processes, that of the first one."""
    group = group_of(mesh)
    if group is None:
        return make(*trace())
    program, options = group.same(trace, lambda traced: _told(mesh, *traced))
    searching = _SEARCHES_PER_PLAN * options.time_limit * options.refine * (8 if isinstance(mesh, (int, str)) else 1)
    first = group.from_first(partial(make, program, options), document_of, searching)
    made, document = first
    if made is not None:
        return made
    devices = mesh if isinstance(mesh, (Mesh, AbstractMesh)) else None
    return rebuild(plan_of_document(document, devices), program)


def plain_of_first(mesh: GivenMesh, make: Callable[[], Made], searching: float) -> Made:
    """Plain data from the first process of a mesh, in all of its processes."""
    group = group_of(mesh)
    return make() if group is None else cast(Made, group.from_first(make, lambda made: made, searching)[1])


def check_plan(plan: PlanData, mesh: Mesh | None) -> None:
    """Raises ProcessesError in all processes if their plans differ."""
    group = group_of(mesh)
    if group is not None:
        group.same(lambda: plan, _told_of_plan)


def _told(mesh: GivenMesh, program: Program, options: Options) -> dict[str, str]:
    """The inputs of a plan, by their names in errors."""
    values = [program.values[index] for index in program.inputs]
    options_told = {f"the option {name}": json.dumps(entry) for name, entry in options_entries(options).items()}
    return {
        "the function": program.name,
        **{f"the argument `{one.name}`": f"{one.dtype}{list(one.shape)}" for one in values},
        "the program": program.fingerprint()[:12],
        **options_told,
        "the mesh": _mesh_text(mesh),
        "the version": f"shardplan {library_version()}, JAX {jax.__version__}",
        "the code of the library": _code(),
        "what is described": hashlib.sha256(json.dumps(described()).encode()).hexdigest()[:12],
    }


def _told_of_plan(plan: PlanData) -> dict[str, str]:
    chosen = (plan.recipe.network, plan.recipe.choices)
    shown = {f"the layout of `{one.path}`": str(one.spec) for one in plan.arguments}
    return {
        "the program": plan.fingerprint[:12],
        "the mesh": str(plan.mesh_axes),
        **shown,
        "the plan": hashlib.sha256(repr(chosen).encode()).hexdigest()[:12],
        "the kinds of plan": json.dumps([plan.recipe.options.islands, str(plan.recipe.options.reduce_dtype)]),
    }


def _mesh_text(mesh: GivenMesh) -> str:
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        return str(mesh)
    axes = mesh_axes(mesh)
    text = ", ".join(f"{name}={size}" for name, size in zip(axes.names, axes.sizes, strict=True))
    return f"{text} of devices {[device.id for device in mesh.devices.flat]}" if isinstance(mesh, Mesh) else text


def _differences(told: Mapping[int, Mapping[str, str]]) -> str:
    """The sentences of an error about the differences, with the value of each process."""
    names = dict.fromkeys(name for one in told.values() for name in one)
    differing = [name for name in names if len({one.get(name) for one in told.values()}) > 1]
    lines = []
    for name in differing[:_MAX_DIFFERENCES]:
        sides: dict[str, list[int]] = {}
        for process in sorted(told):
            sides.setdefault(told[process].get(name, "not there"), []).append(process)
        lines.append(f"  {name}: " + "; ".join(f"{_processes(who)} `{text}`" for text, who in sides.items()))
    more = f"\n  and {len(differing) - _MAX_DIFFERENCES} more" if len(differing) > _MAX_DIFFERENCES else ""
    return (
        "the processes that share the mesh would not run one plan. What differs:\n"
        + "\n".join(lines)
        + f"{more}\nAll processes plan and call the same steps, of the same arguments and options, in the same order"
    )


def _processes(who: Sequence[int]) -> str:
    few = ", ".join(map(str, who[:_MAX_DIFFERENCES])) + (
        f" and {len(who) - _MAX_DIFFERENCES} more" if len(who) > _MAX_DIFFERENCES else ""
    )
    return f"process{'es' * (len(who) > 1)} {few} has" if len(who) == 1 else f"processes {few} have"


def _error_entry(error: BaseException) -> dict[str, Any]:
    least = error.least_peak_bytes if isinstance(error, InfeasibleError) else None
    kind = type(error).__name__
    text = str(error) if isinstance(error, errors.ShardplanError) else f"{kind}: {error}"
    return {"error": text, "kind": kind, "least": least}


def _error_of(entry: Mapping[str, Any], process: int) -> errors.ShardplanError:
    """The error of another process, of the same class for the library's own ones."""
    kind = getattr(errors, entry["kind"], None)
    if kind is InfeasibleError:
        return InfeasibleError(entry["error"], entry["least"])
    if isinstance(kind, type) and issubclass(kind, errors.ShardplanError):
        return kind(entry["error"])
    return ProcessesError(f"process {process}, which plans for all, failed: {entry['error']}")


def _patience() -> float:
    given = os.environ.get(VARIABLE)
    try:
        seconds = PATIENCE if given is None else float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ArgumentError(f"{VARIABLE} is a number of seconds above 0, got `{given}`")
    return seconds


@lru_cache(maxsize=1)
def _code() -> str:
    """A digest of the content of the library's files, since hosts have copies of their own."""
    digest = hashlib.sha256()
    for path in code_files():
        digest.update(f"{path.name};".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
