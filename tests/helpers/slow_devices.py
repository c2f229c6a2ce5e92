"""Slow devices: work on them is never repeated, so that operations are split that are too small for a GPU."""

SLOW_DEVICES = """
sources = ["made up: a millionth of the speed of an H100, so that work on a few rows costs more than sending them"]
devices_per_host = 8
memory_bytes = 80_000_000_000
memory_bytes_per_second = 3e12
launch_seconds = 8e-6

[flops_per_second]
float32 = 1e9
bfloat16 = 1e9

[intra_host]
bytes_per_second = 450e9
latency_seconds = 3e-6

[inter_host]
bytes_per_second = 50e9
latency_seconds = 14e-6
"""
"""A hardware profile, as the text of its file."""
