"""The methods that prove what they find: a run's network, reduced, minimised, and improved part by part."""

from __future__ import annotations

import math

from shardplan.search.graph import Graph
from shardplan.search.neighbourhoods import LocalSearch, excess
from shardplan.search.run import Run
from shardplan.search.solver import Effort, GraphSolver, Watch

__all__ = ["auto", "exact"]


def exact(run: Run) -> None:
    """Reductions, bounds and closing, for as long as it takes (within the time limit)."""
    _minimise(run, sweeping=1.0, closing=1.0)


def auto(run: Run) -> None:
    """The method for every network. What it does:

    | usage limit | after reductions and rounds of messages | then |
    |---|---|---|
    | none, or never reached | dynamic programming fits | proven |
    | any | some ten thousand table entries are left | CP-SAT, for a tenth of the time; then as below |
    | any | more (or sweeping has taken three tenths of the time) | local search until the time is over |

    The tenths are of estimated work, so that the clock decides nothing but the end.
    """
    solver = _minimise(run, sweeping=0.3, closing=0.1)
    if not solver.closed and solver.graph.hint is not None:
        with run.stage("improve"):
            _improve(run, solver)


def _minimise(run: Run, sweeping: float, closing: float) -> GraphSolver:
    """sweeping, closing: the shares of the time that these may take."""
    with run.stage("reduce"):
        graph = Graph.of(run.network)
    graph.tick = run.check

    def report() -> None:
        run.bound(solver.lower)
        run.iterations = solver.sweeps
        if graph.hint is not None:
            run.offer_reduced(graph, graph.hint, solver.upper)
        run.check()

    effort = Effort(seconds=sweeping * run.time_limit, closing=closing * run.time_limit)
    solver = GraphSolver(graph, math.inf, effort, run.gap, Watch(report, run.seconds_left))
    with run.stage("search"):
        solver.solve()
    report()
    if solver.lower == math.inf:
        run.proven_infeasible = True
    return solver


def _improve(run: Run, solver: GraphSolver) -> None:
    """Local search until the time is over."""
    graph = solver.graph
    assert graph.hint is not None
    relaxation = solver.relax_again()
    local = LocalSearch(graph, solver.upper, solver.prices, excess(relaxation, graph.hint))
    while not run.closed():
        if local.step(Watch(run.check, run.seconds_left)):
            run.offer_reduced(graph, graph.hint, local.upper)
        run.check()
