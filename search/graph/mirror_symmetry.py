"""Mirror symmetry: one variable's choices are halved, since each assignment has an image of equal cost.

On a mesh (8, 8) an exchange of the two axes keeps the cost of every assignment. Messages cannot choose between the two
images: a choice looks as good as its image, and the bound stays below the cost of either. With one variable held to one
choice of each pair, every assignment or its image is left, and the bound rises.

>>> from shardplan.search import solve
>>> net = Network()
>>> a, b, c = (net.add_variable([9.0, 0.0, 0.0]) for _ in range(3))
>>> for u, v in ((a, b), (b, c), (a, c)):
...     net.add_edge(u, v, np.array([[0.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 4.0]]))
>>> net.mirror = {v: np.array([0, 2, 1]) for v in (a, b, c)}
>>> mirror_half(net)
(0, array([ True,  True, False]))
>>> solve(net).cost
4.0
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardplan.search.network import EXCLUDED, Network

__all__ = ["mirror_half"]

_ROUNDING = 1e-12
"""By what share the costs of images may differ: sums of the same numbers in another order."""
_MAX_OWN_IMAGES = 0.5
"""The share of a variable's choices that may be their own images: which of them it takes is not told."""


def mirror_half(network: Network) -> tuple[int, NDArray[np.bool_]] | None:
    """A variable, and which of its choices to keep, so that of each assignment or its mirror image one is left; None
    where images do not cost the same, or usages are to be kept within a limit.

    Of the variables most of whose choices are not their own images it is that on which the most depends: whose tables
    differ most between their least entry and their largest.
    """
    mirror = network.mirror
    limited = network.usage_limit is not None and network.usages
    if not mirror or limited or len(mirror) < len(network) or not _costs_the_same(network):
        return None
    spread: dict[int, float] = {}
    differences = [_difference(table) for table in network.tables]
    for u, v, table in network.edges:
        for end in (u, v):
            spread[end] = spread.get(end, 0.0) + differences[table]
    images = {id(mirror[v]): mirror[v] for v in spread}  # variables of equal choices share theirs
    shares = {key: float(np.mean(image == np.arange(len(image)))) for key, image in images.items()}
    own = {v: shares[id(mirror[v])] for v in spread}
    able = [v for v in spread if own[v] <= _MAX_OWN_IMAGES]
    if not able:
        return None
    chosen = max(able, key=lambda v: (spread[v], -v))
    return chosen, mirror[chosen] >= np.arange(len(mirror[chosen]))


def _costs_the_same(network: Network) -> bool:
    """Whether every assignment costs what its image does: each of its costs and tables does, and ties hold for both."""
    mirror = network.mirror
    images = [costs[mirror[v]] for v, costs in enumerate(network.costs)]
    if not _equal_up_to_rounding(np.concatenate(network.costs), np.concatenate(images)):
        return False
    if any((mirror[u] != mirror[v]).any() for u, v in network.ties):
        return False
    known: set[tuple[int, int, int]] = set()
    for u, v, number in network.edges:
        key = (number, id(mirror[u]), id(mirror[v]))
        if key not in known:
            table = network.tables[number]
            if not _equal_up_to_rounding(table, table[mirror[u][:, None], mirror[v]]):
                return False
            known.add(key)
    return True


def _equal_up_to_rounding(array: NDArray[np.float64], image: NDArray[np.float64]) -> bool:
    return np.array_equal(array, image) or np.allclose(array, image, rtol=_ROUNDING, atol=0.0)


def _difference(table: NDArray[np.float64]) -> float:
    finite = table[table < EXCLUDED]
    return float(finite.max() - finite.min()) if finite.size else 0.0
