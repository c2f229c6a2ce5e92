"""The exact method: a run's network, reduced and minimised."""

from __future__ import annotations

import math

from shardplan.search.graph import Graph
from shardplan.search.run import Run
from shardplan.search.solver import Effort, GraphSolver

__all__ = ["exact"]


def exact(run: Run) -> None:
    """Solves the run's network; what is found goes to the run."""
    with run.stage("reduce"):
        graph = Graph.of(run.network)

    def report() -> None:
        run.bound(solver.lower)
        run.iterations = solver.sweeps
        if graph.hint is not None:
            run.offer_reduced(graph, graph.hint, solver.upper)
        run.check()

    solver = GraphSolver(graph, math.inf, Effort(), run.gap, report)
    with run.stage("search"):
        solver.solve()
    report()
    if graph.usage_limit is not None and solver.lower == math.inf:
        run.proven_infeasible = True
