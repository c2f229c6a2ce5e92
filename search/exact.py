"""The exact method: a run's network, reduced and minimised, then improved part by part while usage leaves a gap."""

from __future__ import annotations

import math

from shardplan.search.graph import Graph
from shardplan.search.neighbourhoods import LocalSearch, excess
from shardplan.search.run import Run
from shardplan.search.solver import Effort, GraphSolver, Watch

__all__ = ["exact"]

_SHARE_OF_SWEEPS = 0.3
_SHARE_OF_CLOSING = 0.1


def exact(run: Run) -> None:
    """Solves the run's network; what is found goes to the run."""
    with run.stage("reduce"):
        graph = Graph.of(run.network)
    graph.tick = run.check

    def report() -> None:
        run.bound(solver.lower)
        run.iterations = solver.sweeps
        if graph.hint is not None:
            run.offer_reduced(graph, graph.hint, solver.upper)
        run.check()

    seconds = run.time_limit
    effort = Effort(seconds=_SHARE_OF_SWEEPS * seconds, closing=_SHARE_OF_CLOSING * seconds)
    solver = GraphSolver(graph, math.inf, effort, run.gap, Watch(report, run.seconds_left))
    with run.stage("search"):
        solver.solve()
    report()
    if graph.usage_limit is None:
        return
    if solver.lower == math.inf:
        run.proven_infeasible = True
    elif not solver.closed and graph.hint is not None:
        with run.stage("improve"):
            _improve(run, solver)


def _improve(run: Run, solver: GraphSolver) -> None:
    """Local search until the time is over."""
    graph = solver.graph
    assert graph.hint is not None
    relaxation = solver.relax_again()
    local = LocalSearch(graph, solver.upper, solver.prices, excess(relaxation, graph.hint))
    while True:
        if local.step(Watch(run.check, run.seconds_left)):
            run.offer_reduced(graph, graph.hint, local.upper)
        run.check()
