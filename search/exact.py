"""The main searches: reductions, bounds, prices of usage, primal heuristics and branch and bound, in order."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from shardplan.search.bounds.lagrangian import Relaxation
from shardplan.search.budget import Budget, Callbacks
from shardplan.search.graph.graph import Graph, Infeasible
from shardplan.search.graph.mirror_symmetry import mirror_half
from shardplan.search.graph.reductions import reduce_graph
from shardplan.search.graph.tables import Tables
from shardplan.search.improve.branch_and_bound import BranchAndBound
from shardplan.search.improve.crossover import Crossover
from shardplan.search.improve.diversify import crossover, diversify
from shardplan.search.improve.large_neighbourhood import LargeNeighbourhoodSearch, excess
from shardplan.search.limits.usage_prices import Pricing
from shardplan.search.network import Network
from shardplan.search.run import Run, Stop
from shardplan.search.solution import relative_gap
from shardplan.search.solver.cp_sat import SECONDS_PER_UNIT
from shardplan.search.solver.graph_solver import GraphSolver
from shardplan.search.structure.restricted_starts import begin, originals, reduced_choices, solve_restricted

_BRANCH_BUDGET = Budget(sweeps=60, cp_sat_work=0.3, cp_sat_entries=5000, table_entries=3e6, promising_choices=3)
_MAX_BRANCH_CHOICES = 10_000
_SECONDS_PER_PART = 0.1
_WIDE_GAP = 0.01
"""The gap from which on restricted networks are solved, and primal heuristics run although little work is left. Below
it, heuristics rarely improve the assignment of the prices."""
_PRUNING_GAP = 0.02
_RESTRICTED_SHARE = 0.07
"""The share of the sweeps' work for each restricted network."""
_NEAR_GAP, _ENTRIES_TO_CHECK = 0.02, 1000
"""The gap at which `is_feasible` is called, and the table entries per variable from which on it is: there the proof
takes longer than the call."""
_SECONDS_PER_VARIABLE, _SECONDS_PER_ENTRY = 6e-5, 1e-7
"""The estimated time of the reductions, per variable of the network and per table entry that is left."""
_PATIENCE_SHARE = 0.12
_LEAST_GAIN = 0.02
"""The share of the work after which primal heuristics end unless they have closed this part of the gap."""
_PEAK_TOLERANCE, _SWEEPS_WITHOUT_LOWER_PEAK = 1e-3, 20
"""Where no assignment fits the limit, the search for the lowest peak ends this near its bound, or after so many sweeps
without a gain of as much."""
_PRICING_SHARE = 1.0
"""The share of the work that finding prices may take."""
_LEAST_PRICING_SHARE = 0.5
"""The least share of all work for prices and the stages behind them, after reductions of any length."""
_PEAK_SHARE, _LEAST_PEAK_SWEEPS = 0.3, 6
"""The share of the work for the lowest peak at any cost, and its least number of sweeps."""
_ACCEPTED_RATIO = 1.05
"""The ratio to the bound up to which a cost needs no further proof where work is limited."""
_CROSSOVER_SHARE = 0.4
"""The share of the work for CP-SAT on mixtures of the assignments at all prices."""
_DIVERSIFY_SHARE = 0.4
"""The share of the work for diversification."""

_CP_SAT_SHARE, _LEAST_CP_SAT_SECONDS = 0.8, 0.6
"""The share of the rest of the work up to which CP-SAT's model of the whole graph is built, and its least seconds. The
proof of a small graph is faster that way than by heuristics."""
_MAX_KNOWN = 8
"""The number of assignments that the next search, with another limit, gets."""
_MIN_EVALUATIONS = 3
"""The evaluations of prices that the rest of the work must allow before branch and bound starts."""
_BRANCHING_SHARE = 0.5
"""The share of the time limit for branch and bound with prices, where work is not limited."""

__all__ = ["auto", "exact", "lowest_peak", "take_restricted_solutions"]


def exact(run: Run) -> None:
    """Reductions, bounds, CP-SAT and branch and bound, until the optimum is proven or the time is over."""
    solver = _minimise(run, sweep_share=1.0, cp_sat_share=0.1)
    with run.stage("branch"):
        branching = BranchAndBound(solver, _BRANCH_BUDGET)
        before = run.work
        while not solver.closed and run.work < run.work_limit and branching.step():
            run.work = before + branching.estimate
            _report(run, solver)
    _report(run, solver)


def auto(run: Run) -> None:
    """The method for every network. Its stages:

    | usage limit | after reductions | then |
    |---|---|---|
    | none, or never reached | rounds of messages and cycle tightening until dynamic programming fits | proven |
    | at few times | usage prices, mixtures of their assignments, branch and bound with prices | as below |
    | at many times | rounds of messages | as below |
    | none | the gap stays open: restricted networks (`shardplan.search.structure.restricted_starts`) | as above |
    | any | some ten thousand table entries are left | CP-SAT, for a tenth of the time; then as below |
    | any | ten thousand choices are left | crossover, branch and bound and LNS in turns, until the time is over |
    | any | more are left | crossover and LNS until the time is over |

    Without a usage limit, the last two also end when they have not closed a good part of the gap for a while.

    Sweeps get three tenths of the time with a limit, and two thirds without one. All shares are of estimated work, so
    that the clock decides only the end.
    """
    limited = run.network.usage_limit is not None
    solver = _minimise(run, sweep_share=0.3 if limited else 0.65, cp_sat_share=0.1)
    little_left = run.work > 0.5 * run.work_limit and relative_gap(solver.upper, solver.lower) < _WIDE_GAP
    if not solver.closed and solver.graph.hint is not None and not little_left:
        with run.stage("improve"):
            _improve(run, solver)


def _minimise(run: Run, sweep_share: float, cp_sat_share: float) -> GraphSolver:
    """Minimises the reduced graph of a run. sweep_share, cp_sat_share: the shares of the time for these stages."""
    limited = run.network.usage_limit is not None
    known = run.network.hint if limited else None
    hint = run.choices if run.cost < math.inf else known.choices if known is not None else None
    with run.stage("reduce"):
        graph = Graph.of(run.network, hint, mirror_half(run.network) if hint is None else None)
    graph.tick = run.check

    def report() -> None:
        _report(run, solver)
        if not limited and run.reaches_acceptable_gap(work := run.work + solver.estimate):
            run.work = work
            raise Stop

    def on_plateau() -> None:
        report()
        run.check_feasibility()

    def on_infeasible_hint() -> None:
        if run.cost == math.inf and solver.upper == math.inf:
            _lowest_peak_fits(run)

    def on_stall() -> None:
        if not run.restrictions_solved and relative_gap(solver.upper, solver.lower) > _WIDE_GAP:
            take_restricted_solutions(run, solver)

    limit = min(run.time_limit, run.work_limit)
    acceptable_gap = 0.0 if limited else run.acceptable_gap
    budget = Budget(
        seconds=sweep_share * limit,
        cp_sat_work=cp_sat_share * limit,
        acceptable_gap=acceptable_gap,
        near_optimal_dp=not limited,
    )
    upper = graph.cost(graph.hint) if graph.hint is not None and run.cost < math.inf else math.inf
    solver = GraphSolver(
        graph, upper, budget, run.gap, Callbacks(report, run.seconds_left, on_plateau, on_infeasible_hint, on_stall)
    )
    run.work += _SECONDS_PER_VARIABLE * len(run.network)  # also where it turns out that nothing fits
    with run.stage("reduce"):
        solver.reduce()
        run.work += _SECONDS_PER_ENTRY * _distinct_entries(graph)
        if not limited and graph.entries() < _ENTRIES_TO_CHECK * len(run.network):
            run.is_feasible = None
        begun, graph.hint = graph.hint, graph.hint if run.cost < math.inf else None
    with run.stage("fold"):
        bound = begin(solver)
    _stop_at_acceptable_gap(run, solver, bound)
    with run.stage("price"):
        priced = _price(run, solver, begun)
    if not priced and not solver.closed:
        if limited and run.cost == math.inf and graph.live() and graph.hint is None and _lowest_peak_fits(run):
            run.work += solver.estimate
            return _minimise(run, sweep_share, cp_sat_share)
        if not limited or run.work + solver.estimate < run.work_limit:
            _search(run, solver, bound)
    run.work += solver.estimate
    _report(run, solver)
    if solver.lower == math.inf:
        raise Infeasible("nothing satisfies the exclusions and the usage limit")
    return solver


def _stop_at_acceptable_gap(run: Run, solver: GraphSolver, bound: float) -> None:
    """Ends the search where the gap of the warm start is acceptable."""
    if relative_gap(solver.upper, bound) <= solver.budget.acceptable_gap:
        run.accept_gap(run.work + solver.estimate)
        _report(run, solver)
        raise Stop


def _lowest_peak_fits(run: Run) -> bool:
    """Whether the lowest peak is within the limit. It is searched once, and ends the search where no assignment
    fits."""
    if not run.peak_searched:
        run.peak_searched = True
        with run.stage("fit"):
            lowest_peak(run)
    if run.proven_infeasible:
        raise Stop
    return run.cost < math.inf


def _search(run: Run, solver: GraphSolver, bound: float) -> None:
    """Solves the whole graph. Solutions of restricted networks help where the start has a wide gap, where messages
    stall at one, or where one is left in the end."""
    if solver.upper < math.inf and bound > -math.inf and relative_gap(solver.upper, bound) > _WIDE_GAP:
        take_restricted_solutions(run, solver)
    with run.stage("search"):
        solver.solve()
    open_wide = not solver.closed and relative_gap(solver.upper, solver.lower) > _WIDE_GAP
    if open_wide and not run.restrictions_solved and take_restricted_solutions(run, solver):
        with run.stage("search"):
            solver.solve()


def take_restricted_solutions(run: Run, solver: GraphSolver) -> bool:
    """Solves the restricted networks and accepts their solutions. True where one of them is the best so far."""
    if run.network.usage_limit is not None:
        return False
    before, budget, run.restrictions_solved = solver.upper, solver.budget, True
    budget = replace(
        budget, seconds=_RESTRICTED_SHARE * budget.seconds, cp_sat_work=_RESTRICTED_SHARE * budget.cp_sat_work
    )
    with run.stage("restrict"):
        for kept in run.network.restrictions:
            if relative_gap(solver.upper, solver.lower) < _WIDE_GAP:
                break
            callbacks = Callbacks(run.check, run.seconds_left)
            answer = solve_restricted(run.network, kept, budget, run.gap, callbacks, solver.upper)
            if answer is None:
                continue
            solver.estimate += answer.estimate
            choices = reduced_choices(solver.graph, answer.choices)
            if choices is not None:
                solver.accept(choices, solver.graph.cost(choices))
    return solver.upper < before


def _price(run: Run, solver: GraphSolver, begun: dict[int, int] | None) -> bool:
    """The bound of the best prices, and mixtures of the assignments at prices. False where too many times are critical,
    or where no assignment was found.

    begun: an assignment that may use too much.
    """
    if solver.graph.usage_limit is None or not solver.graph.live():
        return False
    known = run.network.hint
    if known is not None:
        solver.prices = dict(known.prices)
        solver.raise_lower(known.lower_bound)
    pricing = Pricing(solver)
    if not pricing.has_few_times:
        return False
    if begun is not None:
        pricing.take(begun)
    elif known is not None and np.isfinite(cost := run.network.cost(known.choices)):
        pricing.begin(cost, *run.network.profile(known.choices))
    if known is not None and known.known:
        pricing.recall(originals(solver.graph), known.known)
    try:
        return _price_within(run, solver, pricing)
    finally:
        run.work += pricing.estimate
        run.known = pricing.assignments(_MAX_KNOWN)
        run.prices, run.priced_bound = pricing.by_time(), pricing.bound


def _price_within(run: Run, solver: GraphSolver, pricing: Pricing) -> bool:
    """Prices, mixtures and branches, within the work. False where no assignment was found."""
    limit = min(run.time_limit, max(run.work_limit - run.work, _LEAST_PRICING_SHARE * run.work_limit))
    if run.work_limit < math.inf:
        pricing.near = _ACCEPTED_RATIO
    pricing.raise_bound(_PRICING_SHARE * limit)
    if pricing.until < limit:
        limit = pricing.until
        run.work_limit = run.work + limit
    if not solver.closed and pricing.planes:
        pricing.recombine()
    if not solver.closed and pricing.needs_assignments:
        diversify(pricing, min(limit - pricing.estimate, _DIVERSIFY_SHARE * limit))
    left = limit - pricing.estimate
    if not solver.closed and pricing.planes and solver.seconds_to_close < _CP_SAT_SHARE * left:
        solver.budget = replace(solver.budget, cp_sat_work=max(left, _LEAST_CP_SAT_SECONDS) / SECONDS_PER_UNIT)
        before = solver.estimate
        solver.finish()
        left -= solver.estimate - before
    far = solver.upper - solver.lower >= _PRUNING_GAP * abs(solver.lower)
    if not solver.closed and far and left > 0:
        crossover(pricing, min(left, _CROSSOVER_SHARE * limit))
    if not solver.closed and solver.upper - solver.lower < _PRUNING_GAP * abs(solver.lower):
        pricing.prune()
        branching = BranchAndBound(solver, _BRANCH_BUDGET, pricing)
        left = min(_BRANCHING_SHARE * run.time_limit, limit) - pricing.estimate
        few = left < _MIN_EVALUATIONS * pricing.longest  # too few for branches to close anything
        while not (few or solver.closed) and branching.estimate < left and branching.step(left - branching.estimate):
            solver.callbacks.report()
        pricing.estimate += branching.estimate
        if run.work + pricing.estimate + solver.seconds_to_close < run.work_limit:
            solver.finish()
    solver.callbacks.report()
    return solver.upper < math.inf


def _report(run: Run, solver: GraphSolver) -> None:
    run.bound(solver.lower)
    run.iterations = solver.sweeps
    if solver.graph.hint is not None:
        run.offer_reduced(solver.graph, solver.graph.hint, solver.upper)
        asks = run.is_feasible is not None and run.network.usage_limit is None and not solver.closed
        if asks and relative_gap(solver.upper, solver.lower) < _NEAR_GAP:
            run.check_feasibility()
            run.is_feasible = None
    run.check()


def _distinct_entries(graph: Graph) -> int:
    """The entries of all distinct tables. Repeated layers share theirs."""
    tables = (t for v in graph.live() for w, t in graph.neighbours[v].items() if v < w)
    return sum({id(table): table.size for table in tables}.values())


def _improve(run: Run, solver: GraphSolver) -> None:
    """Large-neighbourhood search and branch and bound in turns of equal work, until the time or the gap is used up."""
    graph = solver.graph
    assert graph.hint is not None
    limited = graph.usage_limit is not None
    if limited and run.work + _SECONDS_PER_PART > run.work_limit:  # not even one turn
        return
    relaxation = solver.relax_again()
    callbacks = Callbacks(run.check, run.seconds_left)
    _crossovers(run, solver, callbacks)
    local = LargeNeighbourhoodSearch(graph, solver.upper, solver.prices, excess(relaxation, graph.hint))
    small = sum(graph.size(v) for v in graph.live()) <= _MAX_BRANCH_CHOICES
    branching = BranchAndBound(solver, _BRANCH_BUDGET) if small else None
    turn = 1 + int(2 * _BRANCH_BUDGET.sweeps * relaxation.seconds_per_sweep / _SECONDS_PER_PART) if small else 1
    patience = math.inf if limited else _PATIENCE_SHARE * run.work_limit
    gained, open_before = run.work, solver.upper - solver.lower
    each = _SECONDS_PER_PART * (1 if branching is None else 2)  # by turns of equal work
    least = turn * each if limited else 0.0
    while not solver.closed and run.work + least < run.work_limit and run.work - gained < patience:
        if solver.upper - solver.lower < (1 - _LEAST_GAIN) * open_before:
            gained, open_before = run.work, solver.upper - solver.lower
        for _ in range(turn):
            if local.step(callbacks):
                solver.accept(graph.hint, local.upper)
        spent, local.estimate = local.estimate, 0.0
        if branching is not None:
            before, further = branching.estimate, branching.step()
            spent += branching.estimate - before if limited else 0.0
            branching = branching if further else None
            if solver.upper < local.upper:
                local.restart(solver.upper)
        run.work += max(turn * each, spent) if limited else turn * each + spent
        _report(run, solver)


def _crossovers(run: Run, solver: GraphSolver, callbacks: Callbacks) -> None:
    """Crossovers of assignments while they improve the best one, where their sweeps take a small part of the time."""
    if not solver.prices:
        return
    crossing = Crossover(solver)
    if crossing.seconds_of_sweeps > min(0.1 * run.time_limit, 0.5 * run.work_limit):
        return
    before = run.work
    while not solver.closed and run.work < run.work_limit and crossing.step(callbacks):
        run.work = before + crossing.estimate
        _report(run, solver)
    run.work = before + crossing.estimate


def lowest_peak(run: Run, sweeps: int = 300) -> None:
    """Searches an assignment within the usage limit, or else one of a low peak, and a lower bound of the peak.

    Without costs, prices that sum to 1 say: no assignment has a peak below the least sum of its priced usages. So the
    Lagrangian relaxation of the limit bounds the least peak, and what it decodes has low peaks.
    """
    if run.network.usage_limit is None:
        return
    graph = Graph.of(_without_costs(run.network))
    graph.tick = run.check
    reduce_graph(graph, dominance=False)
    if not graph.live():
        run.offer(graph.expand({}))
        run.peak_bound(run.peak[0])
        return
    relaxation = Relaxation(graph)
    before, waited = (0.0, math.inf), 0
    affordable = _PEAK_SHARE * run.work_limit / max(relaxation.seconds_per_sweep, 1e-9)
    for _ in range(int(min(sweeps, max(affordable, _LEAST_PEAK_SWEEPS)))):
        relaxation.improve(math.inf)
        run.check()
        run.iterations += 1
        run.work += relaxation.seconds_per_sweep
        total = float(relaxation.best_prices.sum())
        if relaxation.bound > 0 and total > 0:
            run.peak_bound(graph.usage_limit + relaxation.bound / total)  # type: ignore[operator]
        if relaxation.choices is not None:
            break
        now = run.least_peak_bound, relaxation.peak
        moved = now[0] > (1 + _PEAK_TOLERANCE) * before[0] or now[1] < (1 - _PEAK_TOLERANCE) * before[1]
        before, waited = (now, 0) if moved else (before, waited + 1)
        met = now[1] < (1 + _PEAK_TOLERANCE) * now[0]
        if run.proven_infeasible and (met or waited >= _SWEEPS_WITHOUT_LOWER_PEAK):
            break
    found = relaxation.choices if relaxation.choices is not None else relaxation.leanest
    if found is not None:
        run.offer(graph.expand(relaxation.by_variable(found)))


def _without_costs(network: Network) -> Network:
    """The same exclusions and usages, and no costs."""
    bare, tables = Network(network.usage_limit), Tables.shared_by(network.derived)
    bare.costs, bare.tables = ([*map(tables.without_costs, each)] for each in (network.costs, network.tables))
    bare.names, bare.multiplicities, bare.derived = network.names, network.multiplicities, network.derived
    bare.edges, bare.ties, bare.usages = network.edges, network.ties, network.usages
    return bare
