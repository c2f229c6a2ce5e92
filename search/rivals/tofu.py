"""Tofu's search, and the methods that it was compared with (Wang et al., EuroSys 2019, sections 4 and 7).

They look at layouts, not only at costs, so every variable must be annotated (`Network.annotate`): which dimension (of
a tensor) or index (of an operation) each mesh axis splits, per choice.

- `recursive`: one mesh axis after another; each step cuts every tensor along one dimension, with what the steps before
  have decided, by dynamic programming on the coarsened network: an elementwise operation takes the layout of what it
  works on, and variables of equal `group` (timesteps, a forward operation and its backward ones) take equal layouts.
- `equal_chop`: the same dynamic programming in a single step: each tensor is cut along one dimension by all axes.
- `largest_first`: tensors from the largest on; each takes what is cheapest given those before it (Spartan).
- `all_row_greedy`: every tensor is cut along its first dimension; operations take what is cheapest.

None of them looks at usage limits, and none gives a lower bound.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph.dynamic_programming import Elimination, plan
from shardplan.search.graph.graph import Graph, Infeasible
from shardplan.search.network import Annotation, Network, NetworkError
from shardplan.search.run import Run

__all__ = ["all_row_greedy", "equal_chop", "largest_first", "recursive"]

Allowed = list[NDArray[np.bool_]]
_LARGEST_TABLE = 1e6


def recursive(run: Run) -> None:
    """Tofu: one mesh axis after another, each step by dynamic programming on the coarsened network."""
    annotations = _annotations(run.network)
    allowed: Allowed = [np.isfinite(_costs(run.network, v)) for v in range(len(run.network))]
    choices = np.zeros(len(run.network), dtype=np.int64)
    for axis in range(len(annotations[0].layouts[0])):
        run.check()
        step = [_cut(a, mask, axis) for a, mask in zip(annotations, allowed, strict=True)]
        choices = _programme(run, step, _coarse(run.network, annotations))
        for v, a in enumerate(annotations):
            prefix = a.layouts[choices[v]][: axis + 1]
            same = np.array([layout[: axis + 1] == prefix for layout in a.layouts])
            allowed[v] = allowed[v] & same
    run.offer(choices)


def equal_chop(run: Run) -> None:
    """Each tensor is cut along one dimension by all axes; which one is found by dynamic programming."""
    annotations = _annotations(run.network)
    allowed: Allowed = []
    for v, a in enumerate(annotations):
        finite = np.isfinite(_costs(run.network, v))
        one = np.array([len(set(layout) - {None}) <= 1 for layout in a.layouts])
        allowed.append(_most_axes(a, _if_any(finite & one, finite)) if a.size else finite)
    run.offer(_programme(run, allowed, _coarse(run.network, annotations)))


def all_row_greedy(run: Run) -> None:
    """Every tensor is cut along its first dimension; operations take what is cheapest then."""
    annotations = _annotations(run.network)
    greedy = _Greedy(run.network)
    for v, a in enumerate(annotations):
        if a.size:
            # As many axes as can be on the first dimension, and on no other.
            score = [sum(d == 0 for d in layout) - sum(d not in (0, None) for d in layout) for layout in a.layouts]
            greedy.take(v, np.where(np.isfinite(greedy.costs[v]), -np.array(score, dtype=np.float64), np.inf))
    run.offer(greedy.finish())


def largest_first(run: Run) -> None:
    """Tensors from the largest on, each with what is cheapest given those before it."""
    annotations = _annotations(run.network)
    greedy = _Greedy(run.network)
    order = sorted(range(len(annotations)), key=lambda v: (-annotations[v].size, v))
    for v in order:
        if annotations[v].size:
            mask = _most_axes(annotations[v], np.isfinite(greedy.costs[v]))
            greedy.take(v, np.where(mask, greedy.outlook(v), np.inf))
    run.offer(greedy.finish())


def greedy(network: Network) -> NDArray[np.int64]:
    """One variable after another, each with what is cheapest given those before it; it may end in an exclusion."""
    return _Greedy(network).finish()


def _annotations(network: Network) -> list[Annotation]:
    missing = [network.names[v] for v in range(len(network)) if v not in network.annotations]
    if missing:
        shown = ", ".join(f"`{name}`" for name in missing[:5])
        raise NetworkError(
            f"this method needs the layouts of all variables, and {len(missing)} have none ({shown}); "
            "give them with `Network.annotate`, or use the method `auto`"
        )
    return [network.annotations[v] for v in range(len(network))]


def _costs(network: Network, v: int) -> NDArray[np.float64]:
    return np.where(network.costs[v] >= 1e17, np.inf, network.costs[v])


def _if_any(mask: NDArray[np.bool_], otherwise: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return mask if mask.any() else otherwise


def _most_axes(annotation: Annotation, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of the choices in the mask, those in which the most axes split anything."""
    counts = np.array([sum(d is not None for d in layout) for layout in annotation.layouts])
    return mask & (counts == counts[mask].max()) if mask.any() else mask


def _cut(annotation: Annotation, allowed: NDArray[np.bool_], axis: int) -> NDArray[np.bool_]:
    """What a step may choose from: this axis cuts a dimension where it can, and the later ones none yet."""
    layouts = annotation.layouts
    unsplit = allowed & np.array([all(d is None for d in layout[axis + 1 :]) for layout in layouts])
    options = _if_any(unsplit, allowed)
    if not annotation.size:
        return options
    return _if_any(options & np.array([layout[axis] is not None for layout in layouts]), options)


def _coarse(network: Network, annotations: list[Annotation]) -> list[tuple[int, int]]:
    """Pairs that are coarsened into one: elementwise neighbours, and variables of equal group and layouts."""
    pairs = []
    elementwise: dict[int, bool] = {}
    for u, v, index in network.edges:
        if index not in elementwise:
            table = network.tables[index]
            square = table.shape[0] == table.shape[1]
            elementwise[index] = square and bool((np.diagonal(table) == 0).all() and (table >= 0).all())
        if elementwise[index] and annotations[u].layouts == annotations[v].layouts:
            pairs.append((u, v))
    first: dict[object, int] = {}
    for v, annotation in enumerate(annotations):
        if annotation.group is not None:
            leader = first.setdefault((annotation.group, annotation.layouts), v)
            if leader != v:
                pairs.append((leader, v))
    return pairs


def _programme(run: Run, allowed: Allowed, coarse: list[tuple[int, int]]) -> NDArray[np.int64]:
    """The best assignment within the allowed choices, with the coarsened variables equal, by dynamic programming."""
    network = run.network
    step = Network()
    step.names, step.edges, step.tables = network.names, network.edges, network.tables
    step.multiplicities, step.ties = network.multiplicities, [*network.ties]
    step.costs = [np.where(mask, _costs(network, v), np.inf) for v, mask in enumerate(allowed)]
    for u, v in coarse:
        # What an earlier step or an exclusion keeps apart cannot be made equal.
        if (allowed[u] & allowed[v]).any():
            step.ties.append((u, v))
    try:
        graph = Graph.of(step)
    except Infeasible:
        step.ties = [*network.ties]
        graph = Graph.of(step)
    graph.tick = run.check
    live = graph.live()
    sizes = {v: graph.size(v) for v in live}
    keep = {v: np.arange(size) for v, size in sizes.items()}
    order = plan(sizes, {v: set(graph.neighbours[v]) for v in live}, _LARGEST_TABLE)
    assert order is not None
    costs: dict[int, NDArray[np.float64]] = {v: graph.costs[v] for v in live}  # type: ignore[misc]
    cheapest = {v: int(costs[v].argmin()) for v in live}
    found, _ = Elimination(graph, costs, keep).solve(order, cheapest)
    return graph.expand(found)


class _Greedy:
    """An assignment that is made variable by variable; ties are taken together."""

    def __init__(self, network: Network) -> None:
        self.graph = Graph.of(network)
        graph = self.graph
        self.leaders = list(range(len(network)))
        for u, v in network.ties:
            a, b = self._leader(u), self._leader(v)
            self.leaders[max(a, b)] = min(a, b)
        self.costs = [_costs(network, v) for v in range(len(network))]
        self.kept = self._kept(network)
        self.left = {v: graph.costs[v] for v in graph.live()}
        self.chosen: dict[int, int] = {}

    def _leader(self, v: int) -> int:
        while self.leaders[v] != v:
            v = self.leaders[v]
        return v

    def _kept(self, network: Network) -> dict[int, NDArray[np.intp]]:
        """Per variable of the graph, the network's numbers of its choices."""
        kept = {v: np.arange(network.costs[v].size) for v in self.graph.live()}
        for step in self.graph.undo:
            if hasattr(step, "kept"):
                kept[step.variable] = kept[step.variable][step.kept]
        return kept

    def take(self, v: int, score: NDArray[np.float64]) -> None:
        """Gives a variable the allowed choice of the least score, unless one tied to it has one."""
        leader = self._leader(v)
        if leader in self.chosen:
            return
        score = score[self.kept[leader]]
        # Choices that leave a neighbour nothing are out.
        cost = self.left[leader]
        possible = np.isfinite(cost)  # type: ignore[arg-type]
        picked = int(np.where(possible, score, np.inf).argmin())
        self._choose(leader, picked if np.isfinite(score[picked]) else int(np.argmin(cost)))  # type: ignore[arg-type]

    def outlook(self, v: int) -> NDArray[np.float64]:
        """Per choice of the network, the cost with the best that undecided neighbours could do."""
        leader = self._leader(v)
        total = self.left[leader]
        for w, table in self.graph.neighbours[leader].items():
            if w not in self.chosen:
                total = total + (table + self.left[w][None, :]).min(axis=1)  # type: ignore[index]
        full = np.full(len(self.costs[v]), np.inf)
        full[self.kept[leader]] = total
        return full

    def _choose(self, v: int, picked: int) -> None:
        self.chosen[v] = picked
        for w, table in self.graph.neighbours[v].items():
            if w not in self.chosen:
                self.left[w] = self.left[w] + table[picked]

    def finish(self) -> NDArray[np.int64]:
        """Gives the rest, operations mostly, what is cheapest."""
        for v in self.graph.live():
            if v not in self.chosen:
                self._choose(v, int(np.argmin(self.left[v])))  # type: ignore[arg-type]
        return self.graph.expand(self.chosen)
