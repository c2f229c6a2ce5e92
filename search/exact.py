"""The exact method: reduce, pass messages, prune, close."""

from __future__ import annotations

import numpy as np

from shardplan.search.closing import close
from shardplan.search.graph import Graph
from shardplan.search.messages import Model, Sweeper
from shardplan.search.reductions import reduce_graph
from shardplan.search.run import Run

__all__ = ["exact"]

_SWEEPS_PER_ROUND = 400
_DECODE_EVERY = 5


def exact(run: Run) -> None:
    """Solves the run's network; what is found goes to the run."""
    with run.stage("reduce"):
        graph = Graph.of(run.network)
        reduce_graph(graph)
    if graph.usage_limit is not None:
        with run.stage("close"):
            _close(run, graph, None)
        return
    _without_memory(run, graph)


def _without_memory(run: Run, graph: Graph) -> None:
    while True:
        live = graph.live()
        if not live:
            run.bound(graph.constant)
            run.offer(graph.expand({}))
            return
        with run.stage("messages"):
            sweeper, _ = _sweep(run, graph, live)
        if run.closed():
            return
        with run.stage("prune"):
            before = sum(graph.size(v) for v in live)
            prune(run, graph, live, sweeper)
            reparametrise(graph, live, sweeper)
            reduce_graph(graph)
            after = sum(graph.size(v) for v in graph.live())
        if after > 0.7 * before:
            with run.stage("close"):
                _close(run, graph, None)
            return


def model_of(graph: Graph, live: list[int]) -> Model:
    """The graph's variables that are left, in the form that is swept; ranks follow the ids."""
    index = {v: i for i, v in enumerate(live)}
    edges, tables = [], []
    for v in live:
        for w, table in graph.neighbours[v].items():
            if v < w:
                edges.append((index[v], index[w]))
                tables.append(table)
    costs = [graph.costs[v] for v in live]
    return Model(costs, edges, tables, list(range(len(live))))  # type: ignore[arg-type]


def _sweep(run: Run, graph: Graph, live: list[int]) -> tuple[Sweeper, dict[int, int]]:
    sweeper = Sweeper(model_of(graph, live))
    best, best_cost = None, np.inf
    history: list[float] = []
    for sweep in range(_SWEEPS_PER_ROUND):
        run.check()
        sweeper.up()
        bound = sweeper.down()
        run.iterations += 1
        run.bound(graph.constant + bound)
        history.append(bound)
        if sweep % _DECODE_EVERY == 0 or run.closed():
            choices = sweeper.decode()
            cost = sweeper.cost(choices)
            if cost < best_cost:
                best, best_cost = choices, cost
                run.offer(graph.expand(dict(zip(live, choices[sweeper.place].tolist(), strict=True))))
            run.report()
        if run.closed():
            break
        if len(history) > 20 and history[-1] - history[-11] < 0.02 * (run.cost - run.lower_bound):
            break
    picked = best if best is not None else sweeper.decode()
    return sweeper, dict(zip(live, picked[sweeper.place].tolist(), strict=True))


def prune(run: Run, graph: Graph, live: list[int], sweeper: Sweeper) -> None:
    """Drops the choices that no assignment as good as the best one can take."""
    sweeper.up()
    before = sweeper.down()
    sweeper.up()
    sweeper.down()
    room = run.cost - (graph.constant + before)
    slack = 1e-9 * max(abs(run.cost), abs(graph.constant))
    fits = sweeper.beliefs <= room + slack
    for i, v in enumerate(live):
        place = sweeper.place[i]
        keep = fits[sweeper.offsets[place] : sweeper.offsets[place + 1]]
        if keep.any():
            graph.restrict(v, keep)


def reparametrise(graph: Graph, live: list[int], sweeper: Sweeper) -> None:
    """Moves the messages into the graph's costs and tables, which keeps every assignment's cost."""


def _close(run: Run, graph: Graph, hint: dict[int, int] | None) -> None:
    live = graph.live()
    result = close(graph, live, 1e9, run.seconds_left(), hint)
    run.bound(graph.constant + result.lower_bound)
    if result.choices is not None:
        run.offer(graph.expand(result.choices))
    elif result.proven and run.cost == np.inf:
        run.proven_infeasible = True
