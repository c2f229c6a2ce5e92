"""Quiet imports: JAX's CUDA plugin says on stderr, from C++, that it found no driver, each time it is loaded.

Nothing in the environment silences that. Where this package is what imports JAX, or what first starts its backends, as
on the command line, the notice is left out.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_NOTICES = (b"cudart_stub.cc", b"log messages before absl::InitializeLog()")


@contextmanager
def without_cuda_notice(anyhow: bool = False) -> Iterator[None]:
    """Runs what may load the plugin, whose notice is left out of stderr: all else that is written there follows when
    it has ended. Where JAX is imported already nothing is done, unless ``anyhow``."""
    if "jax" in sys.modules and not anyhow:
        yield
        return
    try:
        sys.stderr.flush()
        outside = os.dup(2)
    except (AttributeError, OSError, ValueError):  # there is no stderr
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(outside, 2)
            os.close(outside)
            held.seek(0)
            os.write(2, b"".join(line for line in held if not any(notice in line for notice in _NOTICES)))
