"""Atomic writes: whole or not at all, and no files of killed writers stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.common.atomic_files import atomic_write
from shardplan.plans.cache import Cache

KILLED = """
import os, runpy, signal, sys
from pathlib import Path
# without JAX, which takes seconds to import
atomic_write = runpy.run_path("shardplan/common/atomic_files.py")["atomic_write"]
with atomic_write(Path(sys.argv[1])) as file:
    file.write("half of it")
    file.flush()
    print("written", flush=True)
    if sys.argv[2] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.readline()
"""
MEANWHILE = ".*.part"


def writer(target: Path, ends: str) -> subprocess.Popen[str]:
    """Another process that has written half of a file."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", KILLED, str(target), ends]
    process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "written\n"
    return process


def plan() -> shardplan.Plan:
    square = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    return shardplan.plan(lambda x, w: x @ w, jax.sharding.AbstractMesh((8,), ("x",)), square, square)


@pytest.mark.long
def test_files_of_a_killed_process(tmp_path: Path) -> None:
    """The next save of the same file, or the next entry of the cache, removes them. Other files stay."""
    saved, kept, other = tmp_path / "plan.json", tmp_path / "key.json", tmp_path / "other.json"
    for target in (saved, kept, other):
        process = writer(target, "dies")
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(MEANWHILE))) == 3
    plan().save(saved)
    assert len(list(tmp_path.glob(MEANWHILE))) == 2
    assert saved.exists() and not kept.exists()
    Cache(tmp_path).write("another", {})
    assert not list(tmp_path.glob(MEANWHILE))


@pytest.mark.long
def test_files_of_a_living_process(tmp_path: Path) -> None:
    """They stay while others save the same file, and the last one wins."""
    target = tmp_path / "plan.json"
    process = writer(target, "lives")
    plan().save(target)
    Cache(tmp_path).write("key", {})
    assert len(list(tmp_path.glob(MEANWHILE))) == 1
    process.communicate("\n")
    assert process.returncode == 0
    assert target.read_text() == "half of it"
    assert not list(tmp_path.glob(MEANWHILE))


def test_files_of_other_threads(tmp_path: Path) -> None:
    """Several threads of a process may write the same file. None fails, and the file is whole."""
    target, failed = tmp_path / "plan.json", list[BaseException]()

    def write(number: int) -> None:
        try:
            for _ in range(30):
                with atomic_write(target) as file:
                    file.write(str(number) * 1000)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len({*target.read_text()}) == 1
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_write(tmp_path: Path) -> None:
    """An error, or Ctrl-C, leaves the file as it was."""
    target = tmp_path / "plan.json"
    target.write_text("before")
    with pytest.raises(KeyboardInterrupt), atomic_write(target) as file:
        file.write("half")
        raise KeyboardInterrupt
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]


def test_left_by_versions_before(tmp_path: Path) -> None:
    """A file of the name that earlier versions gave is removed too."""
    target = tmp_path / "plan[1].json"
    target.with_name(f".{target.name}.{os.getpid()}.part").touch()
    plan().save(target)
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_an_invalid_path(path: str) -> None:
    """The error is this library's."""
    with pytest.raises(shardplan.ArgumentError, match="cannot write the plan"):
        plan().save(path)
