"""Fresh processes for measurements: cold times, and peak memory, independent of earlier work.

A process is forked off a server that has imported the common modules and done nothing else: JAX has no devices there,
and no traces. Separate imports for each process would take longer than planning most models.
"""

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

os.environ["SHARDPLAN_CACHE_DIR"] = ""  # planning is timed, without the cache of plans

IMPORTED = ("benchmarks.documents", "benchmarks.measuring")

Result = TypeVar("Result")


def in_own_process(work: Callable[..., Result], *arguments: Any) -> Result:
    """The result of a module's function in a fresh process. Its exceptions reach the caller."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(work, *arguments).result()


def timed(work: Callable[[], Result]) -> tuple[Result, float, float]:
    """A result, and the seconds that it took: by the clock, and of all cores together."""
    started, before = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - started, time.process_time() - before


def peak_memory_bytes() -> int:
    """The most memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
