"""Planning without searches for garbage.

Tracing and planning make millions of objects that stay, and hardly a cycle among them. Python's garbage collector
goes through all of them again and again, which takes a quarter of the time of planning a deep program, and finds
nothing. So it is off meanwhile, and what was made is old for it afterwards: it would be gone through at once else.

>>> import gc
>>> with uncollected():
...     made = [[] for _ in range(100_000)]
...     gc.isenabled()
False
>>> gc.isenabled(), len(gc.get_objects(generation=0)) < len(made)
(True, True)
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """Switches the collector of cycles off, and on again where it was on. Reference counts free what they free.

    Objects that somebody has frozen stay so."""
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # to the oldest generation
            gc.enable()
