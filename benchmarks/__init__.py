"""One command a table: `python -m benchmarks.quality` prints it and writes it under `docs/benchmarks/`.

`python -m benchmarks.all` makes them all. Nothing needs a GPU: programs are compiled for H100 and read back.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
