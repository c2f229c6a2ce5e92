"""The choices of one plan for a rewritten form of its program, without a search.

Values and operations keep their layouts. A clone has the layouts of its original, and what has passed a barrier those
of what it was. Most of these choices are the best ones: the rewritten program repeats work, and sends the same."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardplan.optimize.solve_once import Choices
from shardplan.problem.cost_network import Problem
from shardplan.problem.schedule import Schedule
from shardplan.program.control_flow import stack_layout


def carried_over(schedule: Schedule, problem: Problem, origins: Mapping[int, int]) -> Choices:
    """int [variables of the problem]: the choices of a schedule, in the problem of its rewritten program.

    ``origins``: the values of the schedule's program, by those of the rewritten one that stand for them. A choice that
    the rewritten program does not have is its first, which splits nothing."""
    given, variables, makers = schedule.assignment, problem.variables, schedule.program.makers
    found = np.zeros(len(variables.names), np.int64)
    same = {id(o.equation): o.index for o in schedule.program.operations}
    for of in (variables.values, variables.copies):
        for value, variable in of.items():
            origin = origins.get(value, value)
            layout = given.copies.get(origin) if of is variables.copies else None
            layout = given.values.get(origin) if layout is None else layout
            rank = len(schedule.program.values[origin].shape) if value in origins else -1
            if layout is not None and rank == len(problem.program.values[value].shape) - 1:  # a carry, stacked
                layout = stack_layout(layout, rank)
            found[variable] = problem.domain(value).position.get(layout, 0)  # type: ignore[arg-type]
    for index, variable in variables.operations.items():
        operation = problem.program.operations[index]
        if operation.results:
            result = operation.results[0]
            origin = makers[origins.get(result, result)].index
        else:  # a call back to Python
            origin = same[id(operation.equation)]
        strategy = given.strategies.get(origin)
        strategies = problem.choices[index].strategies
        found[variable] = strategies.index(strategy) if strategy in strategies else 0
    return found
