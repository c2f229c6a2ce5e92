"""Variables that reductions have taken out of a graph, put back around one of them.

A variable that `eliminate` has taken out has left its least cost on its neighbours. What its other choices cost more
is a factor over it and these neighbours, without negative entries. A neighbour may have been taken out later. Its
own factor follows then.

>>> from shardplan.search.graph.reductions import eliminate
>>> from shardplan.search.network import Network
>>> net = Network()
>>> a, b = net.add_variable([0.0, 5.0]), net.add_variable([4.0, 0.0])
>>> net.add_edge(a, b, np.array([[0.0, 9.0], [2.0, 1.0]]))
>>> graph = Graph.of(net)
>>> eliminate(graph)
2
>>> found = Eliminated(graph).around(a, 2)
>>> found.variable, [(names, table.tolist()) for names, table in found.factors]
(0, [((0, 1), [[0.0, 3.0], [7.0, 0.0]]), ((1,), [0.0, 2.0])])
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph.graph import Best, Follow, Graph, Keep
from shardplan.search.graph.table_elimination import Factor

__all__ = ["Eliminated", "Restored"]

Index = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Restored:
    """What stands for a variable of the network: a variable that the graph has, or that `factors` put back.

    labels: per choice of it, the choice of the network's variable. factors: of the variables that are put back, each
    named first in its own, in the order in which they were taken out.
    """

    variable: int
    labels: Index
    factors: list[Factor]


class Eliminated:
    """The steps that reduced a graph, by variable."""

    def __init__(self, graph: Graph) -> None:
        self._steps: dict[int, list[tuple[int, Best | Follow | Keep]]] = defaultdict(list)
        for number, step in enumerate(graph.undo):
            self._steps[step.variable].append((number, step))

    def around(self, variable: int, size: int) -> Restored:
        """What stands for a variable of the network that has so many choices."""
        stand_in, labels, taken = self._resolved(variable, -1, np.arange(size))
        found: dict[int, tuple[int, Factor]] = {}
        waiting = [taken] if taken is not None else []
        while waiting:
            number, step = waiting.pop()
            if step.variable in found:
                continue
            factor, later = self._factor(number, step)
            found[step.variable] = number, factor
            waiting += later
        return Restored(stand_in, labels, [factor for _, factor in sorted(found.values(), key=lambda one: one[0])])

    def _resolved(self, variable: int, number: int, labels: Index) -> tuple[int, Index, tuple[int, Best] | None]:
        """What stands for a variable after a step, the label per choice of that, and the step that took it out."""
        while True:
            for later, step in self._steps[variable]:
                if later <= number:
                    continue
                number = later
                if isinstance(step, Best):
                    return variable, labels, (number, step)
                if isinstance(step, Keep):
                    labels = labels[step.kept]
                else:
                    variable, labels = step.leader, labels[step.mapping]
                    break
            else:
                return variable, labels, None

    def _factor(self, number: int, step: Best) -> tuple[Factor, list[tuple[int, Best]]]:
        """What a variable's choices cost above its cheapest one, and the steps that took out its neighbours."""
        names, total, later = [step.variable], step.costs, list[tuple[int, Best]]()
        for neighbour, table in step.neighbours:
            stand_in, columns, taken = self._resolved(neighbour, number, np.arange(table.shape[1]))
            table = table[:, columns]
            if len(columns) == 1:  # settled: it has no edges left that would join it to the others
                total = total + table.reshape(-1, *[1] * (total.ndim - 1))
                continue
            if stand_in in names:
                total = total + table.reshape(-1, *[1] * (total.ndim - 2), table.shape[1])
            else:
                names.append(stand_in)
                total = total[..., None] + table.reshape(-1, *[1] * (total.ndim - 1), table.shape[1])
            later += [taken] if taken is not None else []
        least = total.min(axis=0)
        above = np.where(np.isfinite(total), total - np.where(np.isfinite(least), least, 0.0), np.inf)
        return (tuple(names), above), later
