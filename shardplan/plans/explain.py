"""Explanations of the layouts of tensors and operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from math import isfinite, prod
from typing import Any

from shardplan import _jax, rules
from shardplan.common.checks import check_seconds
from shardplan.common.tables import megabytes, size_text
from shardplan.errors import ArgumentError
from shardplan.layout.layout import Layout, to_spec
from shardplan.layout.objectives import OBJECTIVES
from shardplan.plans.alternatives import Alternative, alternatives, priced_network
from shardplan.plans.plan_data import PlanData, PlannedCollective
from shardplan.plans.report import glob_of, objective_text, sizes_text
from shardplan.problem.strategy import Strategy
from shardplan.program.operation_kinds import moves_between_memories
from shardplan.program.program import Constant, Operation, operand_type

_MAX_SUBJECTS = 6
"""The most different arguments or operations of one explanation. It names the others."""

_MAX_LINES = 12
"""The most readers, collectives and alternatives of each."""

_MAX_NAMES = 4
"""The most names of equal arguments or operations."""

_MAX_NEAREST = 5
"""The most paths that an error offers."""


def explain_plan(plan: PlanData, pattern: str, time_limit: float) -> str:
    """The text of ``Plan.explain``. Raises ArgumentError if nothing matches."""
    if not isinstance(pattern, str):
        raise ArgumentError(f"explain takes a path, an operation or a source line, got `{pattern!r}`")
    check_seconds("time_limit", time_limit)
    program = plan.program
    arguments = [i for i in program.inputs if fnmatchcase(program.values[i].name or "", pattern)]
    operations = [] if arguments else [o for o in program.operations if _matches(o, pattern)]
    if not arguments and not operations:
        raise _no_match(plan, pattern)
    explainer = Explainer(plan)
    groups: dict[Any, list[Any]] = {}
    for subject in arguments or operations:
        groups.setdefault(explainer.signature(subject), []).append(subject)
    shown = list(groups.values())[:_MAX_SUBJECTS]
    explainer.time_limit = time_limit / len(shown)
    texts = [explainer.text(equal) for equal in shown]
    if len(groups) > _MAX_SUBJECTS:
        rest = [explainer.name(equal[0]) for equal in list(groups.values())[_MAX_SUBJECTS:]]
        texts.append(f"and {len(rest)} more: {', '.join(rest[:_MAX_LINES])}{', ...' if len(rest) > _MAX_LINES else ''}")
    return "\n\n".join(texts)


def _no_match(plan: PlanData, pattern: str) -> ArgumentError:
    """The error of a pattern without a match, with the nearest paths."""
    paths = list(dict.fromkeys(glob_of(argument.path) for argument in plan.arguments))
    nearest = get_close_matches(pattern, paths, n=_MAX_NEAREST, cutoff=0.0)
    listed = ", ".join(f"`{path}`" for path in nearest) + (", ..." if len(paths) > len(nearest) else "")
    return ArgumentError(
        f"`{pattern}` matches no argument and no operation: give a path (the nearest are {listed}), an operation such "
        "as `op12`, or a source line such as `model.py:31*`"
    )


def _matches(operation: Operation, pattern: str) -> bool:
    return fnmatchcase(operation.scope, pattern) or any(
        fnmatchcase(text, pattern)
        for text in (_named(operation), operation.source, operation.source.split(" ")[0], _place(operation))
    )


def _named(operation: Operation) -> str:
    return f"{operation.scope} {operation.primitive.name}"


def _place(operation: Operation) -> str:
    """The source line of an operation, and its modules."""
    modules = _jax.module_path(operation.equation)
    return f"{operation.source} in {modules}" if modules else operation.source


class Explainer:
    """Texts on one plan. ``time_limit`` in seconds is for the searches of each subject, ``most`` the number of other
    layouts of each that are priced, None for all."""

    time_limit = 0.0

    def __init__(self, plan: PlanData, most: int | None = None) -> None:
        self.most = most
        self._plan = plan
        self._schedule = plan.schedule
        self._program = plan.program
        self._problem = plan.schedule.problem
        self._mesh = plan.schedule.space.mesh

    def signature(self, subject: int | Operation) -> Any:
        """A key that arguments or operations of equal layers have in common."""
        if isinstance(subject, Operation):
            strategy = self._schedule.assignment.strategies.get(subject.index)
            kept = self._schedule.assignment.values
            return glob_of(_place(subject)), subject.primitive.name, strategy, *map(kept.get, subject.results)
        value = self._program.values[subject]
        readers = sorted(
            (o.primitive.name, glob_of(_place(o)), str(self._read(o, subject))) for o in self._readers.get(subject, ())
        )
        layouts = self._schedule.assignment.values[subject], self._schedule.copy(subject)
        return glob_of(value.name or ""), value.shape, str(value.dtype), layouts, tuple(readers)

    def name(self, subject: int | Operation) -> str:
        """The path of an argument, or the number of an operation."""
        return subject.scope if isinstance(subject, Operation) else self._program.values[subject].name or "argument"

    def text(self, equal: Sequence[Any]) -> str:
        """The text on the first one of equal arguments or operations."""
        first = equal[0]
        text = self.operation(first) if isinstance(first, Operation) else self.argument(first)
        if len(equal) == 1:
            return text
        title, rest = text.split("\n", 1)
        others = ", ".join(map(self.name, equal[1 : _MAX_NAMES + 1])) + (", ..." if len(equal) > _MAX_NAMES + 1 else "")
        return "\n".join((title, f"  {'the same for':14}{len(equal) - 1} more: {others}", rest))

    @cached_property
    def _readers(self) -> dict[int, list[Operation]]:
        """The operations that read each value."""
        found: dict[int, list[Operation]] = {}
        for operation in self._program.operations:
            for operand in dict.fromkeys(o for o in operation.operands if isinstance(o, int)):
                found.setdefault(operand, []).append(operation)
        return found

    def argument(self, index: int) -> str:
        """The text on one argument."""
        value = self._program.values[index]
        name = value.name or ""
        layout = self._schedule.assignment.values[index]
        readers = self._readers.get(index, [])
        spec = to_spec(self._mesh, layout)  # arguments are never partial
        degree = self._mesh.degree([axis for axes in layout for axis in axes])
        where = f" in {value.memory_kind}" if value.memory_kind else ""
        held = f"{size_text(value.stored_bytes / degree)} per device of {size_text(value.stored_bytes)}{where}"
        lines = [("layout", [f"{spec}: {value.dtype}[{sizes_text(value.shape, spec)}], {held}"])]
        copied = self._schedule.copy(index)
        if copied != layout:
            lines.append(("shared copy", [f"{self._described(index, copied)}, which most readers take"]))
        lines.append(("read by", [self._reading(o, index) for o in readers]))
        tensors = {name, f"value {index}"}
        outputs = [out for number, out in enumerate(self._program.outputs) if self._feeds(number, index)]
        if outputs:
            lines.append(("replaced by", [self._made(out) for out in outputs if isinstance(out, int)]))
            tensors |= {self._tensor(v) for out in outputs if isinstance(out, int) for v in self._update(out)}
        reading = {_named(o) for o in readers}
        moves = [c for c in self._plan.collectives if c.tensor in tensors or c.operation in reading]
        lines.append(("collectives", [_collective(c) for c in _largest(moves)]))
        several = self._problem.variables_of(index)[0] is not None and len(self._problem.domain(index).layouts) > 1
        lines.append(("other layouts", self._others(self.other_layouts(index), several)))
        return _paragraph(f"{name or 'argument'}", lines)

    def operation(self, operation: Operation) -> str:
        """The text on one operation."""
        if operation.bodies:
            regions = [self._program.regions[body] for body in operation.bodies]
            bodies = [f"{len(region.operations)} operations, {region.times} times" for region in regions]
            return _paragraph(_named(operation), [("at", [_place(operation)]), ("runs", bodies)])
        operands = [operand_type(self._program, operand) for operand in operation.operands]
        results = [self._program.values[result] for result in operation.results]
        rule = rules.derive(operation.primitive, operation.params, operands, results)
        lines = [("at", [_place(operation)]), ("computes", [str(rule.expression) if rule.known else str(rule.reason)])]
        strategy = self._schedule.assignment.strategies.get(operation.index)
        if strategy is None:
            lines.append(("split", ["generated in the layout of each reader"]))
            return _paragraph(_named(operation), lines)
        if moves_between_memories(self._program, operation):
            lines.append(
                (
                    "copies",
                    [
                        "to host memory, to fit or as the step says"
                        if results[0].memory_kind
                        else "from host memory, to fit or as the step says"
                    ],
                )
            )
        elif operation.again:
            lines.append(("again", ["computes in the backward part what the forward part did not keep, to fit"]))
        lines.append(("split", [self._strategy(operation, strategy)]))
        lines.append(("work", [f"shared by {strategy.degree} of {self._mesh.device_count} devices"]))
        kept = self._schedule.assignment.values
        planned = [f"{self._tensor(r)} as {self._described(r, kept[r])}" for r in operation.results]
        lines.append(("results kept", planned))
        moves = [c for c in self._plan.collectives if c.operation == _named(operation)]
        lines.append(("collectives", [_collective(c) for c in _largest(moves)]))
        variable = self._problem.variable_of_operation(operation.index)
        if variable is None:
            lines.append(("other splits", ["none of its own: the layout of its result decides"]))
        else:
            several = len(self._problem.choices[operation.index].strategies) > 1
            lines.append(("other splits", self._others(self.other_splits(operation), several)))
        return _paragraph(_named(operation), lines)

    def other_layouts(self, index: int) -> list[list[str]]:
        """The other layouts of an argument, each with its price, cheapest first."""
        domain = self._problem.domain(index)
        labels = [self._described(index, other) for other in domain.layouts]
        return self._priced(self._problem.variables_of(index)[0], labels)

    def other_splits(self, operation: Operation) -> list[list[str]]:
        """The other splits of an operation, each with its price, cheapest first. None for one without a choice."""
        variable = self._problem.variable_of_operation(operation.index)
        if variable is None or operation.bodies:
            return []
        options = self._problem.choices[operation.index].strategies
        return self._priced(variable, [self._strategy(operation, option) if option else "" for option in options])

    def _priced(self, variable: int | None, labels: Sequence[str]) -> list[list[str]]:
        if variable is None or len(labels) == 1:
            return []
        choices = self._plan.recipe.choices
        limits = self.time_limit, self._plan.gap, self.most
        found = alternatives(priced_network(self._plan), choices, variable, *limits)
        return [[labels[other.choice], self._extra(other)] for other in found]

    def _others(self, priced: Sequence[Sequence[str]], several: bool) -> list[str]:
        if not several:
            return ["none: nothing divides it"]
        return [f"{label}: {price}" for label, price in priced] or ["none: it is pinned"]

    def _extra(self, other: Alternative) -> str:
        """A price, or the interval that holds it."""
        if not isfinite(other.extra_cost):
            known = other.at_least > 0
            return f"+{self._amount(other.at_least)} or more" if known else "not found near the plan"
        if other.exact:
            return f"+{self._amount(other.extra_cost)} (exact)"
        least = self._amount(max(0.0, other.at_least))
        return f"+{least} to {self._amount(other.extra_cost)} (interval)"

    def _amount(self, amount: float) -> str:
        in_bytes = not OBJECTIVES[self._plan.recipe.options.objective].counts_time
        in_one_unit = in_bytes and amount >= 1e3  # for a comparison
        return f"{megabytes(amount)} MB" if in_one_unit else objective_text(self._plan, amount)

    def _reading(self, operation: Operation, index: int) -> str:
        return f"{_named(operation)} as {self._read(operation, index)}, {_place(operation)}"

    def _read(self, operation: Operation, index: int) -> str:
        """The layouts in which an operation reads a value, as text."""
        strategy = self._schedule.assignment.strategies.get(operation.index)
        layouts = strategy.operands if strategy else (None,) * len(operation.operands)
        wanted = {
            str(self._spec(layout))
            for o, layout in zip(operation.operands, layouts, strict=True)
            if o == index and layout is not None
        }
        return " and ".join(sorted(wanted)) or "it is"

    def _update(self, output: int) -> set[int]:
        """The tensors of equally many elements that a new state is computed from, back to their makers."""
        makers = self._program.makers
        elements = prod(self._program.values[output].shape)
        inputs = set(self._program.inputs)
        found: set[int] = set()
        waiting = [output]
        while waiting:
            value = waiting.pop()
            if value in found or value in inputs or prod(self._program.values[value].shape) != elements:
                continue
            found.add(value)
            maker = makers.get(value)
            if maker is not None and self._problem.variable_of_operation(maker.index) is None:
                waiting += [o for o in maker.operands if isinstance(o, int)]
        return found

    def _feeds(self, number: int, index: int) -> bool:
        tied = self._program.ties.get(number)
        return tied is not None and self._program.inputs[tied] == index

    def _made(self, value: int) -> str:
        maker = next((o for o in self._program.operations if value in o.results), None)
        made = f" of {_named(maker)}, {_place(maker)}" if maker else ""
        return f"{self._tensor(value)}{made}"

    def _strategy(self, operation: Operation, strategy: Strategy) -> str:
        reads = [self._operand(o, layout) for o, layout in zip(operation.operands, strategy.operands, strict=True)]
        gives = []
        for layout, pending, reducer in zip(strategy.results, strategy.pending, strategy.reducers, strict=True):
            partial = f" partial {reducer} over {self._names(pending)}" if pending else ""
            gives.append(f"{self._spec(layout)}{partial}")
        return f"{', '.join(reads)} -> {', '.join(gives)}"

    def _operand(self, operand: int | Constant, layout: Layout | None) -> str:
        return "literal" if not isinstance(operand, int) or layout is None else self._described(operand, layout)

    def _described(self, value: int, layout: Layout) -> str:
        """A layout of a value as text, after the mesh axes of a partial sum."""
        if self._schedule.is_partial(value, layout):
            return f"{self._spec(layout[1:])} as a sum over {self._names(layout[0])}"
        return self._spec(layout)

    def _spec(self, layout: Layout) -> str:
        return str(to_spec(self._mesh, layout))

    def _names(self, axes: Iterable[int]) -> str:
        return ", ".join(self._mesh.names[axis] for axis in axes)

    def _tensor(self, value: int) -> str:
        return self._program.values[value].name or f"value {value}"


def _largest(collectives: Sequence[PlannedCollective]) -> list[PlannedCollective]:
    return sorted(collectives, key=lambda c: -c.bytes * c.times)


def _collective(collective: PlannedCollective) -> str:
    times = f", {collective.times} times" if collective.times > 1 else ""
    place = f", {collective.source}" if collective.source else ""
    moved = f"{collective.kind} over {', '.join(collective.axes)} of {collective.tensor}"
    return f"{moved}, {size_text(collective.bytes)}{times}, for {collective.operation}{place}"


def _paragraph(title: str, entries: Sequence[tuple[str, Sequence[str]]]) -> str:
    lines = [title]
    for name, texts in entries:
        shown = [
            *texts[:_MAX_LINES],
            *([f"and {len(texts) - _MAX_LINES} more"] if len(texts) > _MAX_LINES else []),
        ] or ["none"]
        lines += [f"  {name if number == 0 else '':14}{text}" for number, text in enumerate(shown)]
    return "\n".join(lines)
