"""Random networks for tests and benchmarks, and a brute-force solver for small ones.

>>> import numpy as np
>>> net = random_chain(np.random.default_rng(0), length=6)
>>> len(net), len(net.edges)
(6, 5)
>>> choices, cost = brute_force(net)
>>> net.cost(choices) == cost
True
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardplan.search.network import Network

__all__ = [
    "brute_force",
    "random_chain",
    "random_graph",
    "random_grid",
    "random_memory_bound",
    "random_tree",
    "random_twins",
]

_LARGEST_BRUTE_FORCE = 3_000_000


def _costs(rng: np.random.Generator, shape: int | tuple[int, int], excluded: float) -> NDArray[np.float64]:
    """Whole-number costs, so that sums are exact; a share `excluded` of them infinite, written in both ways."""
    values = rng.integers(0, 30, size=shape).astype(np.float64)
    drawn = rng.random(size=shape)
    values[drawn < excluded] = np.inf if rng.random() < 0.5 else 1e18
    return values


def random_graph(
    rng: np.random.Generator, pairs: list[tuple[int, int]], largest_domain: int = 4, excluded: float = 0.0
) -> Network:
    """A network over these pairs of variables, with random numbers of choices, tables partly shared."""
    net = Network()
    count = 1 + max((max(pair) for pair in pairs), default=0)
    for _ in range(count):
        net.add_variable(_costs(rng, int(rng.integers(1, largest_domain + 1)), excluded / 2))
    shared: dict[tuple[int, int], NDArray[np.float64]] = {}
    for u, v in pairs:
        shape = (net.costs[u].size, net.costs[v].size)
        if shape not in shared or rng.random() < 0.7:
            shared[shape] = _costs(rng, shape, excluded)
        net.add_edge(u, v, shared[shape])
    return net


def random_twins(rng: np.random.Generator, excluded: float = 0.0) -> Network:
    """A dense network of seven variables whose choices are called twins at random: few of them are true twins."""
    pairs = [(u, v) for u in range(7) for v in range(u + 1, 7) if rng.random() < 0.7]
    net = random_graph(rng, [*pairs, (0, 1), (5, 6)], 4, excluded)
    net.twins = {v: rng.integers(0, 2, len(costs)) for v, costs in enumerate(net.costs)}
    return net


def random_chain(rng: np.random.Generator, length: int, largest_domain: int = 4, excluded: float = 0.0) -> Network:
    """Each variable has an edge to the next."""
    return random_graph(rng, [(i, i + 1) for i in range(length - 1)], largest_domain, excluded)


def random_tree(rng: np.random.Generator, count: int, largest_domain: int = 4, excluded: float = 0.0) -> Network:
    """Each variable has an edge to an earlier one."""
    return random_graph(rng, [(int(rng.integers(0, i)), i) for i in range(1, count)], largest_domain, excluded)


def random_grid(
    rng: np.random.Generator, rows: int, columns: int, largest_domain: int = 4, excluded: float = 0.0
) -> Network:
    """Edges to the right and down."""
    pairs = [(r * columns + c, r * columns + c + 1) for r in range(rows) for c in range(columns - 1)]
    pairs += [(r * columns + c, (r + 1) * columns + c) for r in range(rows - 1) for c in range(columns)]
    return random_graph(rng, pairs, largest_domain, excluded)


def random_memory_bound(rng: np.random.Generator, count: int, tightness: float, excluded: float = 0.0) -> Network:
    """A random sparse network with usages, some of it over all times; cheap choices tend to use more.

    tightness: from 0, where the limit is the peak of the choices that use most, to 1, where it is that of those that
        use least.
    """
    pairs = [(int(rng.integers(max(0, i - 3), i)), i) for i in range(1, count)]
    pairs += [tuple(sorted(rng.choice(count, 2, replace=False).tolist())) for _ in range(count // 3)]
    net = random_graph(rng, pairs, 4, excluded)
    for v in range(count):
        amounts = (30.0 - np.minimum(net.costs[v], 30.0)) // 2 + rng.integers(0, 9, net.costs[v].size)
        start = 0 if rng.random() < 0.3 else v
        end = count if start == 0 and rng.random() < 0.5 else v + int(rng.integers(0, 4))
        net.add_usage(v, amounts, start, end)
    most = net.peak([int(_amounts(net, v).argmax()) for v in range(count)])[0]
    least = net.peak([int(_amounts(net, v).argmin()) for v in range(count)])[0]
    net.usage_limit = float(np.floor(most + (least - most) * tightness))
    return net


def _amounts(net: Network, v: int) -> NDArray[np.float64]:
    found = [usage.amounts for usage in net.usages if usage.variable == v]
    return found[0] if found else np.zeros(net.costs[v].size)


def brute_force(net: Network) -> tuple[NDArray[np.int64] | None, float]:
    """The best assignment by trying all of them, with its cost; `(None, inf)` where there is none."""
    sizes = [costs.size for costs in net.costs]
    if np.prod([float(size) for size in sizes]) > _LARGEST_BRUTE_FORCE:
        raise ValueError(f"too many assignments to try: choices per variable {sizes}")
    total = np.zeros(sizes)
    for v, costs in enumerate(net.costs):
        total += np.expand_dims(costs * net.multiplicities[v], [i for i in range(len(sizes)) if i != v])
    for u, v, index in net.edges:
        if u == v:
            total += np.expand_dims(np.diagonal(net.tables[index]), [i for i in range(len(sizes)) if i != v])
            continue
        table = net.tables[index] if u < v else net.tables[index].T
        total += np.expand_dims(table, [i for i in range(len(sizes)) if i not in (u, v)])
    for u, v in net.ties:
        same = np.arange(sizes[u])[:, None] == np.arange(sizes[v])[None, :]
        total[~np.broadcast_to(np.expand_dims(same, [i for i in range(len(sizes)) if i not in (u, v)]), sizes)] = np.inf
    if net.usage_limit is not None:
        for time in sorted({usage.start for usage in net.usages}):
            used = np.zeros(sizes)
            for usage in net.usages:
                if usage.start <= time < usage.end:
                    used += np.expand_dims(usage.amounts, [i for i in range(len(sizes)) if i != usage.variable])
            total[used > net.usage_limit] = np.inf
    total[total >= 1e17] = np.inf
    best = int(total.argmin())
    if not np.isfinite(total.ravel()[best]):
        return None, float("inf")
    return np.array(np.unravel_index(best, total.shape), dtype=np.int64), float(total.ravel()[best])
