"""How long XLA takes collectives to run on the H100s of one host: from the times that its makers measured.

The times stand in the log of XLA's last scheduler, of collectives that are compiled for H100s (JAX 0.10.2), by the
number of devices that take part. Between the sizes that were measured, which are powers of two, the rate is that of the
nearest; of smaller and larger ones than all, that of the next.

>>> collective_microseconds("all-reduce", 2**21, 8), round(collective_microseconds("all-reduce", 1.25 * 2**21, 8), 3)
(57.28, 71.6)
>>> [round(collective_microseconds("all-gather", 2**28, devices)) for devices in (2, 4, 8)]
[549, 666, 729]
"""

from __future__ import annotations

from math import log2

_LEAST, _MOST = 10, 30
"""Of the sizes that were measured, as powers of two."""


def collective_microseconds(kind: str, size: float, devices: int) -> float:
    """Microseconds that a collective takes among so many devices; ``size``: bytes of the larger of what one device
    gives and what it gets. More devices than a host has are taken to be of one host."""
    times = _MEASURED[kind]
    known = times[min((number for number in times if number >= devices), default=max(times))]
    power = min(max(int(log2(max(size, 1.0))), _LEAST), _MOST)
    if power < _MOST and size >= 1.5 * 2**power:
        power += 1
    return size / 2**power * known[power - _LEAST]


def _by_devices(text: str) -> dict[int, list[float]]:
    """Microseconds by numbers of devices, and by sizes."""
    return {devices: [*map(float, part.split())] for devices, part in zip((2, 4, 8), text.split("\n\n"), strict=True)}


_MEASURED = {
    "all-gather": _by_devices("""
55.072 15.2 19.552 11.552 11.648 11.648 11.84 16.64 12.64 14.912 17.536 25.568 30.656 40.224 60.352 96.448 161.056
295.36 549.28 1049.41 1996.61

64.512 19.552 18.144 29.728 14.112 13.984 13.856 18.048 20.608 16.32 20.48 28.576 42.176 56.704 69.984 113.312 195.84
350.144 666.304 1268 2472.96

31.936 35.04 29.088 50.4 30.784 18.432 18.592 29.536 32.96 19.104 31.136 31.648 47.136 65.056 82.24 129.376 213.568
390.24 729.28 1392.29 2730.3
"""),
    "all-reduce": _by_devices("""
122.72 16.768 18.464 32.16 24.224 14.336 15.232 16.768 16.352 19.328 20.96 44.128 43.136 72.896 101.12 187.808 330.272
620.8 1181.47 2309.44 4432.51

74.272 22.624 32.096 35.776 31.52 23.392 18.048 26.048 20 42.528 43.456 59.136 59.168 84.992 152.768 218.208 394.72
738.176 1419.55 2777.12 5415.04

49.312 35.968 32.512 32.256 34.72 37.664 39.712 39.84 26.176 41.632 51.936 57.28 68.672 104.704 145.28 225.888 379.808
670.144 1262.24 2431.62 4720.9
"""),
    "reduce-scatter": _by_devices("""
86.496 13.28 11.968 11.296 14.336 37.76 18.176 18.88 29.344 20.128 15.712 30.72 31.712 42.688 68.032 126.144 220.864
406.336 772.704 1467.58 2756.32

36.256 39.392 25.568 23.872 30.496 45.376 14.528 36.384 15.392 28.704 29.12 22.528 42.432 54.752 69.792 123.552
224.416 404.448 774.112 1489.86 2892.45

21.376 37.088 29.984 29.504 32.928 39.84 37.664 22.368 28.576 41.344 20.448 34.4 35.648 59.296 86.592 133.536 218.624
411.52 771.104 1496.16 2920.86
"""),
    "all-to-all": _by_devices("""
134.272 30.784 58.208 15.264 21.664 45.952 17.344 24.736 43.904 18.976 36.192 48.96 55.84 47.296 79.392 105.536
169.536 308 517.088 960.576 1721.18

136.672 22.688 26.144 29.248 41.632 29.536 30.24 32.16 37.92 37.92 34.176 35.84 53.056 78.656 87.68 135.744 232.576
357.984 670.72 1272.26 2383.65

96.864 38.144 40.384 32.608 32.512 65.024 23.712 36.416 25.408 60.608 54.88 25.088 37.408 70.848 105.6 132.512 218.72
412.64 759.04 1460.54 2796.51
"""),
    "collective-permute": _by_devices("""
11.758 11.728 11.623 12.464 12.75 12.724 13.915 16.679 20.918 29.666 32.332 44.696 60.178 92.664 162.638 301.023
573.339 942.132 1095.94 1872.68 3696.97

11.275 11.225 11.955 12.794 13.187 13.105 14.703 17.657 26.88 40.102 35.197 50.954 72.767 128.493 237.865 451.895
877.273 929.403 1073.96 1879.76 3706.16

11.275 11.225 11.955 12.794 13.187 13.105 14.703 17.657 26.88 40.102 35.197 50.954 72.767 128.493 237.865 451.895
877.273 929.403 1073.96 1879.76 3706.16
"""),
}
