"""Networks of cost tables: what every search method of this package solves.

A network has variables. Each takes one of a few numbered choices, and each choice has a cost. A table on a pair of
variables adds a cost for each pair of choices. The task: one choice per variable, with the least sum. `inf` excludes
a choice, or a pair of choices.

>>> import numpy as np
>>> net = Network()
>>> a = net.add_variable([0.0, 5.0], name="a")
>>> b = net.add_variable([4.0, 0.0], name="b")
>>> net.add_edge(a, b, np.array([[0.0, np.inf], [2.0, 1.0]]))
>>> net.cost([0, 0]), net.cost([1, 1]), net.cost([0, 1])
(4.0, 6.0, inf)

With memory, a choice also uses some units over a half-open interval of time, and the sum at every time must stay
within `usage_limit`:

>>> net.add_usage(a, [7, 1], start=0, end=3)
>>> net.add_usage(b, [2, 2], start=2, end=5)
>>> net.usage_limit = 8
>>> net.peak([0, 0]), net.peak([1, 1])
((9.0, 2), (3.0, 2))

Structure that a method may use but that has no cost is attached with `annotate` (see `Annotation`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["EXCLUDED", "Annotation", "Hint", "Network", "NetworkError", "Usage"]

EXCLUDED = 1e17
"""Costs from here on mean "excluded", as `inf` does (problem files write 1e18)."""


class NetworkError(ValueError):
    """The network, or a file that describes one, is malformed; the message names the variable."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Units that a variable uses at each time in `[start, end)`: `amounts[choice]`."""

    variable: int
    amounts: NDArray[np.float64]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Annotation:
    """What Tofu's search and its rivals need to know of a variable, beyond its costs.

    size: bytes of the whole tensor (0 for an operation).
    layouts: per choice, the dimension (or index) that each mesh axis splits, `None` where it splits none:
        `layouts[choice][axis]`. All variables of a network name the same mesh axes in the same order.
    group: variables of equal group are coarsened into one (an operation with its backward operations, elementwise
        chains, timesteps of a loop); `None` leaves the variable to be grouped by its place in the network.
    """

    size: float
    layouts: tuple[tuple[int | None, ...], ...]
    group: object = None


@dataclass(frozen=True, slots=True)
class Hint:
    """What a search within a usage limit may begin with.

    choices: an assignment, which may exceed the limit. prices: per time, what a unit of usage costs about.
    lower_bound: what no assignment within the limit costs less than. known: assignments that were best at some prices.
    served: whether the caller has an assignment within the limit, so that none is searched at any cost.
    """

    choices: NDArray[np.int64]
    prices: Mapping[int, float] = field(default_factory=dict)
    lower_bound: float = -math.inf
    known: Sequence[NDArray[np.int64]] = ()
    served: bool = False


class Network:
    """Variables, tables, ties and usages. Ids are given out in order, from 0.

    Arrays are taken as they are, without a copy, and must not be changed afterwards. A table object that is passed
    many times is stored and checked once.
    """

    def __init__(self, usage_limit: float | None = None) -> None:
        self.usage_limit = usage_limit
        self.costs: list[NDArray[np.float64]] = []
        self.names: list[str] = []
        self.multiplicities: list[int] = []
        self.edges: list[tuple[int, int, int]] = []
        self.tables: list[NDArray[np.float64]] = []
        self.ties: list[tuple[int, int]] = []
        self.usages: list[Usage] = []
        self.annotations: dict[int, Annotation] = {}
        self.hint: Hint | None = None
        self.twins: dict[int, NDArray[np.intp]] = {}
        """Per variable, a label per choice. Choices of equal label are taken to have twins of equal cost, whatever the
        other variables choose; where they have not, searches take longer, and give the same."""
        self.mirror: dict[int, NDArray[np.intp]] = {}
        """Per variable, its choices' mirror images: where all variables take these instead, an assignment may cost what
        it did before. Whether it does is looked up in the tables (see `shardplan.search.graph.mirror_symmetry`)."""
        self.restrictions: list[dict[int, NDArray[np.bool_]]] = []
        """Networks within this one, whose best assignments are good ones of the whole: per variable, which of its
        choices they have (see `shardplan.search.structure.restricted_starts`)."""
        self.derived: dict[object, Any] = {}
        """What others derive of the tables, for when they need it again."""
        self._known: dict[int, tuple[object, int]] = {}

    def __len__(self) -> int:
        return len(self.costs)

    def __repr__(self) -> str:
        return (
            f"Network({len(self.costs)} variables, {len(self.edges)} edges, {len(self.tables)} tables, "
            f"{len(self.ties)} ties, {len(self.usages)} usages, usage_limit={self.usage_limit})"
        )

    def copy(self) -> Network:
        """The same variables, edges, ties, usages and twins, to which others can be added."""
        other = Network(self.usage_limit)
        other.costs, other.names, other.multiplicities = list(self.costs), list(self.names), list(self.multiplicities)
        other.edges, other.tables, other.ties = list(self.edges), list(self.tables), list(self.ties)
        other.usages, other.twins, other._known = list(self.usages), dict(self.twins), dict(self._known)
        return other

    def add_variable(self, costs: ArrayLike, name: str = "", multiplicity: int = 1) -> int:
        """Adds a variable and returns its id.

        costs: per choice; `inf` (or 1e17 and more) excludes the choice.
        multiplicity: how many times the costs count, for a variable that stands for as many equal ones. It does not
            touch edges and usages, which are counted as they are added.
        """
        values = np.asarray(costs, dtype=np.float64)
        variable = len(self.costs)
        label = name or str(variable)
        if values.ndim != 1 or values.size == 0:
            raise NetworkError(f"variable `{label}`: costs must be one number per choice, got shape {values.shape}")
        # One pass finds both: the minimum is NaN where any entry is.
        least = values.min()
        if not least > -EXCLUDED:
            raise NetworkError(f"variable `{label}`: costs must be numbers above -1e17, got {least}")
        if multiplicity < 1:
            raise NetworkError(f"variable `{label}`: multiplicity must be at least 1, got {multiplicity}")
        self.costs.append(values)
        self.names.append(label)
        self.multiplicities.append(multiplicity)
        return variable

    def add_edge(self, u: int, v: int, table: ArrayLike) -> None:
        """Adds `table[choice of u, choice of v]` to the cost. Several edges on the same pair add up."""
        known = self._known.get(id(table))
        index = self._add_table(table, u, v) if known is None else known[1]
        shape = self.tables[index].shape
        if not (0 <= u < len(self.costs) and 0 <= v < len(self.costs)):
            raise NetworkError(f"edge ({u}, {v}): the network has {len(self.costs)} variables")
        if shape != (self.costs[u].size, self.costs[v].size):
            raise NetworkError(
                f"edge between `{self.names[u]}` and `{self.names[v]}`: expected a table of shape "
                f"{(self.costs[u].size, self.costs[v].size)}, got {shape}"
            )
        self.edges.append((u, v, index))

    def _add_table(self, table: ArrayLike, u: int, v: int) -> int:
        values = np.asarray(table, dtype=np.float64)
        if values.ndim != 2 or values.size == 0:
            raise NetworkError(f"edge between variables {u} and {v}: expected a table, got shape {values.shape}")
        least = values.min()
        if not least > -EXCLUDED:
            raise NetworkError(f"edge between variables {u} and {v}: costs must be numbers above -1e17, got {least}")
        index = len(self.tables)
        self.tables.append(values)
        # The object is kept with its index, so that its id is not given to another one.
        self._known[id(table)] = (table, index)
        return index

    def add_tie(self, u: int, v: int) -> None:
        """Makes both variables take the same choice; their numbers of choices must be equal."""
        if self.costs[u].size != self.costs[v].size:
            raise NetworkError(
                f"tie of `{self.names[u]}` and `{self.names[v]}`: {self.costs[u].size} and {self.costs[v].size} choices"
            )
        self.ties.append((u, v))

    def add_usage(self, v: int, usage: ArrayLike, start: int, end: int) -> None:
        """Adds `usage[choice of v]` units at every time in `[start, end)`. A variable may have several usages."""
        amounts = np.asarray(usage, dtype=np.float64)
        if amounts.shape != self.costs[v].shape:
            raise NetworkError(
                f"usage of `{self.names[v]}`: expected {self.costs[v].size} amounts, got shape {amounts.shape}"
            )
        if not (amounts.min() >= 0 and amounts.max() < np.inf):
            raise NetworkError(f"usage of `{self.names[v]}`: amounts must be finite and not negative")
        if start < end:
            self.usages.append(Usage(v, amounts, start, end))

    def annotate(self, v: int, size: float, layouts: Sequence[Sequence[int | None]], group: object = None) -> None:
        """Attaches an `Annotation` to a variable, for the methods that look at more than costs."""
        if len(layouts) != self.costs[v].size:
            raise NetworkError(
                f"annotation of `{self.names[v]}`: expected {self.costs[v].size} layouts, got {len(layouts)}"
            )
        self.annotations[v] = Annotation(float(size), tuple(tuple(layout) for layout in layouts), group)

    def cost(self, choices: Sequence[int] | NDArray[np.integer]) -> float:
        """The cost of an assignment, `inf` where it takes anything excluded or breaks a tie."""
        picked = [int(k) for k in choices]
        if len(picked) != len(self.costs):
            raise NetworkError(f"expected {len(self.costs)} choices, got {len(picked)}")
        if any(picked[u] != picked[v] for u, v in self.ties):
            return float("inf")
        terms = [float(c[k]) * m for c, k, m in zip(self.costs, picked, self.multiplicities, strict=True)]
        tables = self.tables
        terms += [float(tables[t][picked[u], picked[v]]) for u, v, t in self.edges]
        excluded = any(term >= EXCLUDED for term in terms)
        return float("inf") if excluded else float(np.sum(np.asarray(terms))) if terms else 0.0

    def profile(self, choices: Sequence[int] | NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Usage over time as steps: `usage[i]` units from `times[i]` until the next of the times."""
        if not self.usages:
            return np.zeros(1, dtype=np.int64), np.zeros(1)
        amounts = np.array([float(u.amounts[choices[u.variable]]) for u in self.usages])
        times = np.array([(u.start, u.end) for u in self.usages], dtype=np.int64)
        instants, places = np.unique(times.ravel(), return_inverse=True)
        signed = np.stack([amounts, -amounts], axis=1).ravel()
        steps = np.bincount(places.ravel(), weights=signed, minlength=instants.size)
        return instants, np.cumsum(steps)

    def peak(self, choices: Sequence[int] | NDArray[np.integer]) -> tuple[float, int]:
        """The highest usage at any time, and the first time that has it."""
        instants, usage = self.profile(choices)
        where = int(usage.argmax())
        return float(usage[where]), int(instants[where])
