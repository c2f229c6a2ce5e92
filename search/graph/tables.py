"""Memoised arithmetic on cost tables.

The layers of a model have the same tables, as the same objects. Each operation is remembered by the identity of its
operands, and its result is again one object. The reduction of 24 equal layers takes as much arithmetic as that of one.
Searches of one network within several limits share these results.

>>> import numpy as np
>>> tables = Tables()
>>> costs, table = np.array([0.0, 3.0]), np.array([[2.0, 9.0], [1.0, 1.0]])
>>> tables.project(costs, table)
array([2., 4.])
>>> tables.project(costs, table) is tables.project(costs, table)
True
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.search.network import EXCLUDED

__all__ = ["Tables", "beaten"]

Array = NDArray[np.float64]
_REMEMBERED_BYTES = 400_000_000
_SHARED_BYTES = 100_000_000
"""From so many on, what searches have left behind is forgotten before the next one, which needs the room itself."""
_LARGEST_BLOCK = 65_536
"""Entries that are compared at once: they stay in a processor's cache."""


class Tables:
    """Remembered operations. Results must not be changed by the caller."""

    def __init__(self) -> None:
        self._results: dict[tuple[object, ...], tuple[object, ...]] = {}
        self._by_content: dict[tuple[object, ...], Array] = {}
        self._mappings: dict[bytes, NDArray[np.intp]] = {}
        self._bytes = 0

    @classmethod
    def shared_by(cls, derived: dict[object, Any]) -> Tables:
        """Those of a network and of all that have its tables, for one search after another."""
        shared = derived.get(cls)
        if shared is None or shared._bytes > _SHARED_BYTES:
            shared = derived[cls] = cls()
        return shared

    def _remember(self, key: tuple[object, ...], make: Callable[[], Array], *operands: object) -> Array:
        found = self._results.get(key)
        if found is not None:
            return found[0]  # type: ignore[return-value]
        result = make()
        if self._bytes < _REMEMBERED_BYTES:
            self._bytes += result.nbytes
            # Operands are held, so that their ids stay theirs for as long as the key is used.
            self._results[key] = (result, *operands)
        return result

    def _known(self, key: tuple[object, ...], make: Callable[[], Array], array: Array) -> Array:
        """Likewise of one of a network's own arrays, however large: what is made may be that array itself."""
        found = self._results.get(key)
        if found is None:
            found = self._results[key] = (make(), array)
        return found[0]  # type: ignore[return-value]

    def excluded(self, array: Array) -> Array:
        """The same array with everything from `EXCLUDED` on set to `inf`."""
        return self._known(("excluded", id(array)), lambda: _exclude(array), array)

    def without_costs(self, array: Array) -> Array:
        """0 where the array is below `EXCLUDED`, else `inf`."""
        return self._known(("bare", id(array)), lambda: np.where(array >= EXCLUDED, np.inf, 0.0), array)

    def unique(self, array: Array) -> Array:
        """The first array seen with these contents."""
        if array.nbytes > 4096:
            return array
        return self._by_content.setdefault((array.shape, array.tobytes()), array)

    def transpose(self, table: Array) -> Array:
        """The transposed table, as a view; the transpose of the result is `table` itself."""
        found = self._results.get(("transpose", id(table)))
        if found is not None:
            return found[0]  # type: ignore[return-value]
        result = table.T
        self._results["transpose", id(table)] = (result, table)
        self._results["transpose", id(result)] = (table, result)
        return result

    def add(self, a: Array, b: Array) -> Array:
        """The sum of two arrays of one shape."""
        if id(a) > id(b) and a.ndim == b.ndim:
            a, b = b, a
        return self._remember(("add", id(a), id(b)), lambda: a + b, a, b)

    def scale(self, a: Array, factor: int) -> Array:
        """The array times a number."""
        return a if factor == 1 else self._remember(("scale", id(a), factor), lambda: a * factor, a)

    def project(self, costs: Array, table: Array) -> Array:
        """`min over i of costs[i] + table[i, j]`, per j: what an eliminated variable leaves on its neighbour."""
        return self._remember(
            ("project", id(costs), id(table)), lambda: (costs[:, None] + table).min(axis=0), costs, table
        )

    def join(self, costs: Array, left: Array, right: Array) -> Array:
        """`min over i of costs[i] + left[i, j] + right[i, k]`, per (j, k), what it leaves on two neighbours."""
        key = ("join", id(costs), id(left), id(right))
        return self._remember(key, lambda: _join(costs, left, right), costs, left, right)

    def rows(self, array: Array, mapping: NDArray[np.intp]) -> Array:
        """`array[mapping]`, along the first axis; equal mappings should be the same object."""
        return self._remember(("rows", id(array), id(mapping)), lambda: array[mapping], array, mapping)

    def followed(self, costs: Array, table: Array, mapping: NDArray[np.intp]) -> Array:
        """`costs[mapping[j]] + table[mapping[j], j]`, per j: what a variable whose choice follows j leaves there."""
        key = ("followed", id(costs), id(table), id(mapping))
        columns = np.arange(mapping.size)
        return self._remember(key, lambda: table[mapping, columns] + costs[mapping], costs, table, mapping)

    def mapping(self, table: Array) -> NDArray[np.intp] | None:
        """Where each row has one finite entry: the column of it, per row."""
        key = ("mapping", id(table))
        found = self._results.get(key)
        if found is None:
            where = self.finite(table)
            functional = where is not None and bool((where.sum(axis=1) == 1).all())
            mapping = where.argmax(axis=1) if functional else None  # type: ignore[union-attr]
            if mapping is not None:
                mapping = self._mappings.setdefault(mapping.tobytes(), mapping)
            found = (mapping, table)
            self._results[key] = found
        return found[0]  # type: ignore[return-value]

    def rise(self, table: Array) -> Array:
        """`max over j of table[l, j] - table[k, j]`, per (l, k), over the j that k does not exclude."""
        return self._remember(("rise", id(table)), lambda: _rise(table), table)

    def beaten(self, costs: Array, tables: tuple[Array, ...]) -> NDArray[np.intp]:
        """Per choice of a variable with these tables `[self, neighbour]` one that beats it whatever the neighbours do
        (Goldstein's criterion of dead-end elimination), or -1."""
        key = ("beaten", id(costs), *map(id, tables))
        found = self._results.get(key)
        if found is None:
            found = (beaten(self.worse(costs, tables)), costs, *tables)
            self._results[key] = found
        return found[0]  # type: ignore[return-value]

    def worse(self, costs: Array, tables: tuple[Array, ...]) -> Array:
        """At most by how much the total rises when choice k is replaced by l, per (l, k)."""
        worse: Array = costs[:, None] - costs[None, :]
        for table in tables:
            worse = worse + self.rise(table)
        return worse

    def restrict(self, array: Array, rows: bytes, columns: bytes | None = None) -> Array:
        """The rows (and columns) whose bytes are not 0."""
        key = ("restrict", id(array), rows, columns)
        keep = np.frombuffer(rows, dtype=bool)
        if columns is None:
            return self._remember(key, lambda: array[keep], array)
        keep_columns = np.frombuffer(columns, dtype=bool)
        return self._remember(key, lambda: array[keep].take(np.flatnonzero(keep_columns), axis=1), array)

    def covers(self, table: Array) -> bool:
        """Whether every column has a finite entry."""
        key = ("covers", id(table))
        found = self._results.get(key)
        if found is None:
            where = self.finite(table)
            found = (where is None or bool(where.any(axis=0).all()), table)
            self._results[key] = found
        return found[0]  # type: ignore[return-value]

    def is_level(self, array: Array) -> bool:
        """Whether all entries are equal."""
        key = ("level", id(array))
        found = self._results.get(key)
        if found is None:
            found = self._results[key] = (bool((array == array[0]).all()), array)
        return found[0]  # type: ignore[return-value]

    def finite(self, table: Array) -> NDArray[np.bool_] | None:
        """Where the array is finite, or `None` where it is so everywhere."""
        key = ("finite", id(table))
        found = self._results.get(key)
        if found is None:
            where = np.isfinite(table)
            found = (None if where.all() else where, table)
            self._results[key] = found
        return found[0]  # type: ignore[return-value]


def _exclude(values: Array) -> Array:
    if values.max() < EXCLUDED or np.count_nonzero(values >= EXCLUDED) == np.count_nonzero(values == np.inf):
        return values  # large tables are not copied
    return np.where(values >= EXCLUDED, np.inf, values)


def beaten(worse: Array) -> NDArray[np.intp]:
    """Per choice one that beats it, or -1, by how much replacing it costs at most."""
    beats = worse <= 0
    # Of choices that beat each other, the first stays.
    beats &= ~beats.T | np.tri(len(worse), k=-1, dtype=bool).T
    return np.where(beats.any(axis=0), beats.argmax(axis=0), -1)


def _join(costs: Array, left: Array, right: Array) -> Array:
    weighted = left + costs[:, None]
    result = weighted[0][:, None] + right[0][None, :]
    if result.size * len(costs) <= 20_000:
        return (weighted[:, :, None] + right[:, None, :]).min(axis=0)
    scratch = np.empty_like(result)
    for i in range(1, len(costs)):
        np.add(weighted[i][:, None], right[i][None, :], out=scratch)
        np.minimum(result, scratch, out=result)
    return result


def _rise(table: Array) -> Array:
    columns = np.ascontiguousarray(table.T)
    result = np.empty((len(table), len(table)))
    rows = max(1, _LARGEST_BLOCK // max(columns.size, 1))
    with np.errstate(invalid="ignore"):
        for first in range(0, len(table), rows):
            some = slice(first, first + rows)
            # inf - inf is no number, and left out: k is excluded there itself. Along the first dimension numpy takes
            # the maximum of whole rows at once.
            rise = columns[:, some, None] - columns[:, None, :]
            np.fmax.reduce(rise, axis=0, initial=-np.inf, out=result[some])
    return result
