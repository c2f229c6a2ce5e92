"""Missing libraries: plans are made without them, and an error at compilation names the operation that needs one.

Examples are cuDNN's attention, and the targets of ``jax.ffi.ffi_call``. The errors of JAX and XLA name neither the
operation nor a remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from shardplan import _jax
from shardplan.errors import ShardplanError
from shardplan.program.program import Program

_NOT_REGISTERED = re.compile(
    r"No (?:FFI handler registered for|registered implementation for (?:un)?typed custom call to) (\S+)"
    r" (?:on a platform|for) (\w+)"
)


def check_libraries(program: Program) -> None:
    """Raises ShardplanError for an operation that needs a library which is not installed."""
    asking = next((operation for operation in program.operations if _jax.asks_for_cudnn(operation.equation)), None)
    if asking is not None and not _jax.has_cudnn():
        raise ShardplanError(
            f"`{asking.primitive.name}` at {asking.source} asks for cuDNN, which is not installed here: pip install "
            'nvidia-cudnn-cu12, or take another implementation than "cudnn" (a plan needs none, compiling does)'
        )


@contextmanager
def name_missing_library(program: Program | None) -> Iterator[None]:
    """Names the operation in the error for an unregistered call target."""
    try:
        yield
    except RuntimeError as error:
        found = _NOT_REGISTERED.search(str(error))
        if found is None:
            raise
        name, platform = found[1], {"Host": "cpu"}.get(found[2], found[2])
        operations = () if program is None else program.operations
        sources = [o.source for o in operations if name in _jax.targets_of(o.equation)]
        where = f", which an `ffi_call` at {sources[0]} calls," if sources else ""
        raise ShardplanError(
            f"`{name}`{where} is not registered for the platform `{platform}` in this process: import the library "
            f"that registers it, or call jax.ffi.register_ffi_target({name!r}, ..., platform={platform!r}) before"
        ) from error
