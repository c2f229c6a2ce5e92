"""Benchmarks, one command per table: `python -m benchmarks.quality` prints one and writes it under `docs/benchmarks/`.

`python -m benchmarks.all` makes them all, without a GPU: programs are compiled for H100 and read back.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
