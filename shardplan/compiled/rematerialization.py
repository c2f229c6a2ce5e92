"""XLA's lines on involuntary full rematerialization, caught while a program is compiled.

Where XLA's partitioner knows no collectives from one sharding to another, it gathers the whole tensor on every device.
It says so in its log, on file descriptor 2, and nowhere else:

>>> line = (
...     "W1128 14:10:37 26069 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler cannot "
...     "go from sharding {devices=[2,4]<=[8]} to {devices=[1,8]<=[8]} efficiently for HLO operation %reshape.0 = "
...     'f32[32,16]{1,0} reshape(%mul.1), metadata={op_name="jit(f)/op7/reshape" stack_frame_id=4}. As the last resort'
... )
>>> rematerializations(line)
(Rematerialization(tensor='f32[32,16]', before='{devices=[2,4]<=[8]}', after='{devices=[1,8]<=[8]}', \
op_name='jit(f)/op7/reshape'),)
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_LINE = re.compile(
    r"Involuntary full rematerialization\..*? from sharding (?P<before>\{.*?\}) to (?P<after>\{.*?\}) efficiently for "
    r"HLO operation %\S+ = (?P<tensor>[^\s{]+)[^\n]*?(?:op_name=\"(?P<op_name>[^\"]*)\"|$)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Rematerialization:
    """A tensor that XLA gathers whole on every device: its type, its shardings before and after, its metadata path."""

    tensor: str
    before: str
    after: str
    op_name: str


def rematerializations(log: str) -> tuple[Rematerialization, ...]:
    """Those that a log of XLA names, each one once."""
    found = (
        Rematerialization(one["tensor"], one["before"], one["after"], one["op_name"] or "")
        for one in _LINE.finditer(log)
    )
    return tuple(dict.fromkeys(found))


@contextmanager
def caught_rematerializations() -> Iterator[list[Rematerialization]]:
    """A list that has the rematerializations of the compilations inside, at the end. All else that was written to
    stderr meanwhile is written there afterwards."""
    found: list[Rematerialization] = []
    try:
        sys.stderr.flush()
        usual = os.dup(2)
    except (OSError, ValueError, AttributeError):  # there is no stderr
        yield found
        return
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield found
        finally:
            sys.stderr.flush()
            os.dup2(usual, 2)
            os.close(usual)
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines(keepends=True)
            found += rematerializations("".join(lines))
            sys.stderr.write("".join(line for line in lines if not _LINE.search(line)))
