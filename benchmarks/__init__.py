"""One command a table: `python -m benchmarks.quality` prints it and writes it under `docs/benchmarks/`."""
