"""Networks for tests and benchmarks: random ones, and training steps as einsums."""
