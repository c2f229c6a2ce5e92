"""Quiet imports: JAX is loaded without the notice of its CUDA plugin that no driver was found.

The plugin writes the notice to stderr from C++ each time it is loaded, and no environment variable silences it. The
notice is filtered where this package imports JAX or starts its backends first, as on the command line.
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
    """Filters the plugin's notice out of stderr; all other output follows at the end of the context.

    If JAX is imported already, stderr stays as it is, unless ``anyhow``.
    """
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
