"""interim"""

from shardplan.finding import *
from shardplan.memory.model import lifetimes_of


def search_within(problem: object, search: object) -> object:
    sol = solve(problem.network, method=search.method, gap=1e-5, enough=1e-3, time_limit=search.seconds)
    sol = replace(sol, choices=straightened(problem, sol.choices[: len(problem.network)]))
    s = Schedule(problem, problem.decode(sol.choices))
    peak = float(lifetimes_of(s, search.donated).profile(sol.choices).max())
    if peak > search.limit_bytes:
        raise InfeasibleError("interim", peak)
    return Found(s, sol, peak)
