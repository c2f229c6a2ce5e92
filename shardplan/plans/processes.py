"""Several processes that share the devices of a mesh run one plan.

Each process traces the program by itself. Before anything is planned, what the plan depends on is compared: program,
options, mesh, the versions and the code of the library. A difference is an error in all processes that shows
both sides. The first process then plans, and hands its plan on, or its error. Before a step is compiled the plans are
compared, which holds for plans of files too.

Messages go through the key-value store of ``jax.distributed``, which needs no device. No message is waited for without
a limit: that of `VARIABLE`, and for a plan the time that its search may take.
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
"""The environment variable with the seconds that a process waits for another one, `PATIENCE` where it is not set."""

PATIENCE = 600.0

_SLICE = 1.0
"""Seconds of one wait, after which Python sees Ctrl-C."""

_SHOWN = 3
"""Differences that an error shows."""

_SEARCHES = 4
"""A search counts so often in the time that a plan is waited for: with its refinements and its memory."""

_meetings: Counter[tuple[int, ...]] = Counter()
_is_alone: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def planning_alone() -> Iterator[None]:
    """Plans that are made inside are those of one process, whatever the others do."""
    token = _is_alone.set(True)
    try:
        yield
    finally:
        _is_alone.reset(token)


@dataclass(frozen=True, slots=True)
class Group:
    """The processes whose devices a mesh has, seen from one of them; ``store`` is the key-value store."""

    members: tuple[int, ...]
    own: int
    store: Any

    @property
    def first(self) -> int:
        return self.members[0]

    def same(self, make: Callable[[], Made], told: Callable[[Made], Mapping[str, str]]) -> Made:
        """What ``make`` gives in this process, where what is ``told`` of it is the same in all.

        Raises what ``make`` raises here, and ProcessesError in all processes where it raises in another one, or what is
        told differs."""
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
        """What ``make`` gives in the first process, which is there alone, and plain data of it, in all processes.

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
        """The folder of the next message. That of the second last one is no longer read: who reads the last has it."""
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
            left = min(_SLICE, end - time.monotonic())
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
    """The processes whose devices a mesh has, or a plan over it would run on; None where that is this one alone."""
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
    """The devices that a plan over a mesh without devices runs on; 0 where there are fewer."""
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
    """The plan that ``make`` gives of what ``trace`` gives: in several processes, that of the first one in all."""
    group = group_of(mesh)
    if group is None:
        return make(*trace())
    program, options = group.same(trace, lambda traced: _told(mesh, *traced))
    searching = _SEARCHES * options.time_limit * options.refine * (8 if isinstance(mesh, (int, str)) else 1)
    first = group.from_first(partial(make, program, options), document_of, searching)
    made, document = first
    if made is not None:
        return made
    devices = mesh if isinstance(mesh, (Mesh, AbstractMesh)) else None
    return rebuild(plan_of_document(document, devices), program)


def plain_of_first(mesh: GivenMesh, make: Callable[[], Made], searching: float) -> Made:
    """Plain data that the first of the processes of a mesh makes, in all of them."""
    group = group_of(mesh)
    return make() if group is None else cast(Made, group.from_first(make, lambda made: made, searching)[1])


def check_plan(plan: PlanData, mesh: Mesh | None) -> None:
    """Raises ProcessesError in all processes where they are about to run different plans."""
    group = group_of(mesh)
    if group is not None:
        group.same(lambda: plan, _told_of_plan)


def _told(mesh: GivenMesh, program: Program, options: Options) -> dict[str, str]:
    """What a plan depends on, by what it is called in errors."""
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
    """The sentences of an error about what differs, with what each process has."""
    names = dict.fromkeys(name for one in told.values() for name in one)
    differing = [name for name in names if len({one.get(name) for one in told.values()}) > 1]
    lines = []
    for name in differing[:_SHOWN]:
        sides: dict[str, list[int]] = {}
        for process in sorted(told):
            sides.setdefault(told[process].get(name, "not there"), []).append(process)
        lines.append(f"  {name}: " + "; ".join(f"{_processes(who)} `{text}`" for text, who in sides.items()))
    more = f"\n  and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    return (
        "the processes that share the mesh would not run one plan. What differs:\n"
        + "\n".join(lines)
        + f"{more}\nAll processes plan and call the same steps, of the same arguments and options, in the same order"
    )


def _processes(who: Sequence[int]) -> str:
    few = ", ".join(map(str, who[:_SHOWN])) + (f" and {len(who) - _SHOWN} more" if len(who) > _SHOWN else "")
    return f"process{'es' * (len(who) > 1)} {few} has" if len(who) == 1 else f"processes {few} have"


def _error_entry(error: BaseException) -> dict[str, Any]:
    least = error.least_peak_bytes if isinstance(error, InfeasibleError) else None
    kind = type(error).__name__
    text = str(error) if isinstance(error, errors.ShardplanError) else f"{kind}: {error}"
    return {"error": text, "kind": kind, "least": least}


def _error_of(entry: Mapping[str, Any], process: int) -> errors.ShardplanError:
    """The error of another process: of the library's own kinds the same one."""
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
    """A digest of the library's files: of their content, since hosts have copies of their own."""
    digest = hashlib.sha256()
    for path in code_files():
        digest.update(f"{path.name};".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
