"""Several processes run one plan: what differs is an error in all, what one finds all have, and none waits for ever."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import pytest

from shardplan.errors import ArgumentError, InfeasibleError, ProcessesError
from shardplan.plans import processes
from shardplan.plans.processes import Group


class Store:
    """The key-value store of ``jax.distributed``, in the memory of one process."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        with self.changed:
            self.held[key] = value
            self.changed.notify_all()

    def key_value_delete(self, folder: str) -> None:
        with self.changed:
            for key in [key for key in self.held if key.startswith(f"{folder}/")]:
                del self.held[key]

    def blocking_key_value_get_bytes(self, key: str, milliseconds: int) -> bytes:
        with self.changed:
            if self.changed.wait_for(lambda: key in self.held, milliseconds / 1000):
                return self.held[key]
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: nobody has set it")


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Runs a function in threads that stand for two processes; gives what each returns or raises."""
    store, counts = Store(), threading.local()

    class Own:  # each process has a count of its own
        def __getitem__(self, members: Any) -> int:
            return getattr(counts, "count", 0)

        def __setitem__(self, members: Any, count: int) -> None:
            counts.count = count

    monkeypatch.setattr(processes, "_meetings", Own())
    monkeypatch.setenv(processes.VARIABLE, "0.3")

    def run(act: Callable[[Group], Any]) -> list[Any]:
        started = threading.Barrier(2)

        def one(own: int) -> Any:
            started.wait()
            return act(Group((0, 3), own, store))

        with ThreadPoolExecutor(2) as threads:
            waiting = [threads.submit(one, own) for own in (0, 3)]
        return [done.exception() or done.result() for done in waiting]

    run.store = store  # type: ignore[attr-defined]
    return run


def test_processes_with_the_same(together: Any) -> None:
    """Each goes on with what it has made itself, and messages that all have read are not kept."""

    def act(group: Group) -> Any:
        for _ in range(5):
            made = group.same(lambda: [group.own], lambda made: {"options": "a", "length": str(len(made))})
        return made

    assert together(act) == [[0], [3]]
    assert len({key.split("/")[2] for key in together.store.held}) == 2


def test_processes_that_differ(together: Any) -> None:
    """All have the same error, with only the differences."""
    found = together(lambda group: group.same(lambda: group.own, lambda own: {"mesh": "8", "pins": f"of {own}"}))
    assert all(isinstance(error, ProcessesError) for error in found) and str(found[0]) == str(found[1])
    assert "pins: process 0 has `of 0`; process 3 has `of 3`" in str(found[0]) and "mesh:" not in str(found[0])


def test_a_process_that_fails_before_planning(together: Any) -> None:
    """It raises its own error, which the others name."""
    found = together(lambda group: group.same(lambda: 1 // group.own, lambda _: {}))
    assert isinstance(found[0], ZeroDivisionError)
    assert isinstance(found[1], ProcessesError) and "process 0 failed" in str(found[1])


def test_plain_data_of_the_first_process(together: Any) -> None:
    """The others receive it, and make nothing themselves."""
    found = together(lambda group: group.from_first(lambda: {"by": group.own}, lambda made: made, 1.0))
    assert found == [({"by": 0}, {"by": 0}), (None, {"by": 0})]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InfeasibleError("too large", 5.0), InfeasibleError),
        (ArgumentError("no"), ArgumentError),
        (OSError("disk"), ProcessesError),
    ],
)
def test_an_error_of_the_first_process(together: Any, error: Exception, kind: type[Exception]) -> None:
    """It is raised in all: of the library's kinds the same one."""

    def fail() -> None:
        raise error

    first, other = together(lambda group: group.from_first(fail, lambda made: made, 1.0))
    assert first is error and type(other) is kind and str(error) in str(other)
    assert getattr(other, "least_peak_bytes", None) == getattr(error, "least_peak_bytes", None)


def test_a_missing_process(together: Any) -> None:
    """The other one waits until the limit, and names it."""
    found = together(lambda group: group.own == 0 or group.same(lambda: 0, lambda _: {}))
    assert found[0] is True and "has waited 0 s for process 0" in str(found[1])


@pytest.mark.parametrize("given", ["soon", "0", "inf", "nan"])
def test_a_malformed_timeout(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """The error names the variable."""
    monkeypatch.setenv(processes.VARIABLE, given)
    with pytest.raises(ArgumentError, match="SHARDPLAN_PROCESS_TIMEOUT is a number of seconds"):
        Group((0, 1), 0, Store()).same(lambda: 0, lambda _: {})


@pytest.mark.long
def test_two_processes_have_one_plan(tmp_path: Path) -> None:
    """20 random programs within 0.1 s each, differing options and arguments, errors, and each process's own rows."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    devices = "--xla_force_host_platform_device_count=4"
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.plans_worker", str(index), str(port)],
            cwd=Path(__file__).parents[2],
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": devices,
                "SHARDPLAN_CACHE_DIR": str(tmp_path / str(index)),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        printed = [process.communicate(timeout=200)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    cases = [[line for line in output.splitlines() if line.startswith("CASE")] for output in printed]
    last = cases[0].pop()
    assert cases[0] == cases[1] and len(cases[0]) == 20 + 11, printed
    assert last.startswith("CASE alone process 0 has waited 1 s for process 1")
    said = "\n".join(cases[0])
    assert 'the option pins: process 0 has `{"0": [null, "model"]}`; process 1 has `{"0": ["data", null]}`' in said
    assert "the argument `1`: process 0 has `float32[256, 64]`; process 1 has `float32[128, 64]`" in said
    assert "the arguments alone take" in said and "CASE broken True" in said and "the layout of `0`" in said
    assert said.count("True") == 1 + 3 + 2 + 1, said
