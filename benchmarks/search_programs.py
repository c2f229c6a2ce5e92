"""Search methods on networks of training steps of growing depth, with and without a memory limit.

    python -m benchmarks.search_programs [growth] [memory] [methods]

The networks are those of `shardplan.search.testing.einsum_networks`. Seconds are of the processor, so that other work
on the machine hardly disturbs them. A time limit (of the clock) holds nevertheless.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from shardplan.search import METHODS, Network, Solution, solve
from shardplan.search.testing.einsum_networks import gpt, lstm, resnet

MESHES = ((8,), (2, 4))
TIME_LIMIT = 60.0


def timed(network: Network, gap: float, method: str = "auto") -> tuple[Solution, float]:
    """A solution, and the processor seconds that it took."""
    begun = time.process_time()
    solution = solve(network, method=method, gap=gap, time_limit=TIME_LIMIT)
    return solution, time.process_time() - begun


def growth() -> None:
    """GPTs of 12 to 96 layers, each layer with variables of its own."""
    print("| layers | variables | mesh | seconds to 0.1 % | seconds to 1e-6 | gap |\n|---|---|---|---|---|---|")
    for layers in (12, 24, 48, 96):
        for mesh in MESHES:
            network = gpt(layers).network(mesh)
            _, rough = timed(network, 1e-3)
            solution, fine = timed(network, 1e-6)
            print(f"| {layers} | {len(network)} | {mesh} | {rough:.2f} | {fine:.2f} | {solution.gap:.1e} |", flush=True)


def memory() -> None:
    """The same with 65 % of the memory that the best plan would use without a limit."""
    print("| layers | mesh | gap | seconds | cost over the unlimited one |\n|---|---|---|---|---|")
    for layers in (2, 8, 24):
        for mesh in MESHES:
            network = gpt(layers).network(mesh, memory=True)
            free, _ = timed(network, 1e-4)
            network.usage_limit = 0.65 * network.peak(free.choices)[0]
            solution, seconds = timed(network, 1e-3)
            ratio = solution.cost / free.cost
            print(f"| {layers} | {mesh} | {solution.gap:.1e} | {seconds:.1f} | {ratio:.3f} |", flush=True)


def methods() -> None:
    """Tofu's search and its rivals, on the networks that its paper compares them with."""
    names = ["auto", *(name for name, method in METHODS.items() if method.annotated)]
    print("| network | mesh | " + " | ".join(f"{name}: GB, s" for name in names) + " |")
    print("|---" * (len(names) + 2) + "|")
    for name, program in (("LSTM, 2 layers, 4 steps", lstm(2, 4)), ("ResNet", resnet())):
        for mesh in ((8,), (2, 2, 2)):
            network = program.network(mesh)
            cells = []
            for method in names:
                solution, seconds = timed(network, 1e-4, method)
                cells.append(f"{solution.cost / 1e9:.3f}, {seconds:.2f}")
            print(f"| {name} | {mesh} | " + " | ".join(cells) + " |", flush=True)


PARTS: dict[str, Callable[[], None]] = {"growth": growth, "memory": memory, "methods": methods}


def main() -> None:
    for name in sys.argv[1:] or PARTS:
        print(f"\n{PARTS[name].__doc__}\n")
        PARTS[name]()


if __name__ == "__main__":
    main()
