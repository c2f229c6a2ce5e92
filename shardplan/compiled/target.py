"""Compilation for GPU targets without a GPU: XLA:GPU only needs a description of the devices.

    mesh = gpu_mesh("h100", (2, 4), ("data", "model"))
    lowered = jax.jit(step, in_shardings=...).lower(*shapes)     # shardings on `mesh`
    compiled, seconds = compile_for(lowered)
    compiled.as_text()                                           # the program of eight H100

The compiler comes with the extra `audit` (Linux on x86-64). Its devices coexist with the real or emulated ones of the
process, before and after the first use of JAX. It needs no environment variables.
"""

from __future__ import annotations

import atexit
import importlib
import math
import os
import pkgutil
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import resources
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from shardplan.errors import ArgumentError, ShardplanError

DEVICES_PER_HOST = 8
"""GPUs in one host of every target (HGX and DGX boards of A100, H100, H200 and B200)."""

COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_cub_radix_sort": False}
"""Without a device XLA cannot tune kernels, and some matrix products then find no Triton tiling. The collectives are
the same without Triton. CUB's radix sort, for long sorts, asks a CUDA device for the size of its buffers. XLA's own
sort needs none. Other backends ignore the options."""

_MAX_KERNEL_BYTES = 64_000_000
"""The largest file of kernels. A larger one is replaced, since every compilation reads all of it."""

_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


class TargetNotInstalledError(ShardplanError):
    """The compiler for GPU targets is missing on this machine."""


def targets() -> tuple[str, ...]:
    """The names of the GPU types that programs can be compiled for.

    >>> targets()
    ('a100', 'b200', 'h100', 'h200')
    """
    files = resources.files("shardplan").joinpath("gpu_targets").iterdir()
    return tuple(sorted(file.name.removesuffix(".txtpb") for file in files if file.name.endswith(".txtpb")))


def gpu_mesh(target: str, shape: Sequence[int], axis_names: Sequence[str], hosts: int | None = None) -> Mesh:
    """A mesh of compile-only devices of one GPU type, its axes of type Auto.

    Args:
        target: one of `targets()`.
        shape: the size of each mesh axis. The devices are in row-major order.
        axis_names: one name per axis.
        hosts: the number of machines, of equally many devices. By default boards of eight.

    Raises:
        ArgumentError: an unknown target, a shape that does not fit its names, devices that hosts do not divide.
        TargetNotInstalledError: the extra `audit` is not installed.
    """
    sizes = shape if isinstance(shape, Sequence) else ()
    if not sizes or any(not isinstance(size, int) for size in sizes):
        raise ArgumentError(f"a mesh shape is a tuple of numbers of devices, as (2, 4), got `{shape!r}`")
    if len(shape) != len(axis_names):
        raise ArgumentError(
            f"a mesh shape `{tuple(shape)}` of {len(shape)} axes has {len(axis_names)} axis names "
            f"`{tuple(axis_names)}`: give one name per axis."
        )
    devices = gpu_devices(target, math.prod(shape), hosts)
    return Mesh(np.array(devices).reshape(tuple(shape)), tuple(axis_names), axis_types=(AxisType.Auto,) * len(shape))


def gpu_devices(target: str, count: int, hosts: int | None = None) -> list[jax.Device]:
    """Compile-only devices of one GPU type; see `gpu_mesh` for the arguments and the errors."""
    if target not in targets():
        raise ArgumentError(f"there is no GPU target `{target}`: choose one of {', '.join(targets())}.")
    if count < 1:
        raise ArgumentError(f"`{count}` devices were asked for: a target needs at least one.")
    if hosts is None:
        hosts = count // DEVICES_PER_HOST if count % DEVICES_PER_HOST == 0 else 1
    if hosts < 1 or count % hosts:
        raise ArgumentError(f"{count} devices do not spread evenly over `{hosts}` hosts: choose a divisor of {count}.")
    return list(_topology(target, count, hosts).devices)


@contextmanager
def only_described() -> Iterator[None]:
    """Explains the errors of lowering for compile-only devices where the message of JAX would mislead."""
    try:
        yield
    except RuntimeError as error:
        if "Unknown backend" not in str(error):
            raise
        raise ShardplanError(
            "the program cannot be compiled for a GPU that is not there: it calls back to Python (`jax.debug.print`, "
            "`pure_callback`, `io_callback`), which needs a real GPU."
        ) from error


def compile_for(
    lowered: jax.stages.Lowered, kernels: str | None = None, dump: str | None = None, tuned: bool = False
) -> tuple[jax.stages.Compiled, float]:
    """Compiles a lowered program for the devices of its shardings, with the options that a GPU target needs.

    Programs of one step have many kernels in common, and the generation of kernels is about half of a compilation.
    Collectives and memory are decided before it. So a file keeps the kernels for later compilations.

    Args:
        lowered: the program.
        kernels: the path of that file, in an existing folder. By default a file that is removed with the process.
        dump: a folder for the files that XLA writes about the program.
        tuned: whether the devices exist, so that XLA tunes its kernels on them as for a run.

    Returns:
        The compiled program, and the seconds that compiling took.
    """
    started = time.perf_counter()
    options: dict[str, bool | str] = {} if tuned else {**COMPILER_OPTIONS}
    # the options are part of the key in the compilation cache of JAX
    if not tuned and not getattr(jax.config, "jax_compilation_cache_dir", None):
        options["xla_gpu_kernel_cache_file"] = kernels or _kernels_of(os.getpid())
    if dump is not None:
        options |= {"xla_dump_to": dump, "xla_dump_hlo_as_text": True}
    compiled = lowered.compile(compiler_options=options)
    return compiled, time.perf_counter() - started


def _kernels_of(process: int) -> str:
    """The file of kernels of this process, not too large."""
    path = Path(_folder(process), "kernels")
    if path.exists() and path.stat().st_size > _MAX_KERNEL_BYTES:
        path.unlink(missing_ok=True)
    return str(path)


@lru_cache(maxsize=1)
def _folder(process: int) -> str:
    """A folder that is removed with the process, and not with a forked one."""
    folder = tempfile.mkdtemp(prefix="shardplan-kernels-")
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == process else None)
    return folder


@lru_cache(maxsize=64)
def _topology(target: str, count: int, hosts: int) -> topologies.TopologyDescription:
    """The topology of `count` devices; cached, since devices of two topologies are never equal."""
    facts = resources.files("shardplan").joinpath("gpu_targets", f"{target}.txtpb").read_text(encoding="utf-8")
    plugins = _cuda_plugins()
    if not plugins:
        raise TargetNotInstalledError(_missing("JAX's CUDA plugin is not installed"))
    with _skip_cuda_check():
        try:
            return _describe(facts, count, hosts)
        except NotImplementedError:
            pass
        # JAX has searched its plugins before, without a driver, and left the compiler out: register it.
        for plugin in plugins:
            importlib.import_module(plugin).initialize()
        try:
            return _describe(facts, count, hosts)
        except NotImplementedError as error:
            raise TargetNotInstalledError(_missing(str(error))) from error


def _describe(facts: str, count: int, hosts: int) -> topologies.TopologyDescription:
    """Asks XLA for a topology of one slice with `hosts` machines."""
    shape = f"1x{hosts}x{count // hosts}"
    return topologies.get_topology_desc(platform="cuda", target_config=facts, topology=shape)


def _cuda_plugins() -> list[str]:
    """Modules of the installed CUDA plugins of JAX."""
    try:
        namespace = importlib.import_module("jax_plugins")
    except ImportError:
        return []
    names = (module.name for module in pkgutil.iter_modules(namespace.__path__))
    return [f"jax_plugins.{name}" for name in names if name.startswith("xla_cuda")]


@contextmanager
def _skip_cuda_check() -> Iterator[None]:
    """Skips the check of JAX's plugin for CUDA libraries, which a compilation does not use."""
    before = os.environ.get(_SKIP_CHECK)
    os.environ[_SKIP_CHECK] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SKIP_CHECK]
        else:
            os.environ[_SKIP_CHECK] = before


def _missing(reason: str) -> str:
    return (
        f"cannot compile for a GPU target here: {reason}. Install the extra `audit` (Linux on x86-64): "
        'pip install "shardplan[audit]".'
    )
