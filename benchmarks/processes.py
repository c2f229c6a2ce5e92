"""Work in processes of their own: timed cold, with the memory that it took, whatever went before.

A process is forked off a server that has imported what all of them need and done nothing else: JAX has no devices
there, and nothing is traced. Importing anew for each would take longer than planning most models.
"""

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

os.environ["SHARDPLAN_CACHE_DIR"] = ""  # planning is timed, not the finding of an earlier plan

IMPORTED = ("benchmarks.documents", "benchmarks.measuring")

Result = TypeVar("Result")


def in_own_process(work: Callable[..., Result], *arguments: Any) -> Result:
    """What a function of a module gives in a fresh process; its exceptions reach the caller."""
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
    """The most that this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
