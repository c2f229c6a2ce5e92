"""CP-SAT runs that Ctrl-C ends at once with a `KeyboardInterrupt`.

CP-SAT's own handler takes the signal for a time limit, returns the solution so far, and leaves the process without a
handler: the next Ctrl-C kills it. Without CP-SAT's handler, Python's handler runs only after the search, which may take
seconds. The search therefore has its own thread. The caller waits for the thread and stops the search.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

from shardplan.search.or_tools import cp_model

__all__ = ["solve_model"]

_SECONDS_BETWEEN_SIGNALS = 0.1


def solve_model(solver: cp_model.CpSolver, model: cp_model.CpModel) -> cp_model.CpSolverStatus:
    """The status of a search with one worker; ``solver`` has what it found, and its limits.

    >>> model = cp_model.CpModel()
    >>> model.maximize(model.new_int_var(0, 7, "number"))
    >>> solve_model(solver := cp_model.CpSolver(), model) == cp_model.OPTIMAL, solver.objective_value
    (True, 7.0)
    """
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as pool:
        search = pool.submit(solver.solve, model)
        try:
            while not wait([search], _SECONDS_BETWEEN_SIGNALS).done:
                pass
        finally:
            while not search.done():
                solver.stop_search()
                wait([search], _SECONDS_BETWEEN_SIGNALS)
        return search.result()
