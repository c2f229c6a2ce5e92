"""The tasks of a plan's devices, for the simulator.

One worker stands for all devices of a plan. Every operation and every collective is a task, with the duration of the
objective "time". A task reads the value itself, or a resharded copy that a collective of the schedule made of it.
"""

from __future__ import annotations

from pathlib import Path

from shardplan.hardware import HardwareProfile
from shardplan.layout.layout import Layout
from shardplan.problem.schedule import Schedule, Sent
from shardplan.program.program import Operation
from shardplan.timing.step_time import regions_left_out, sent_seconds, time_prices, work_seconds
from shardplan.timing.task import Task


def tasks_of(schedule: Schedule, hardware: HardwareProfile | str | Path | None = None) -> list[Task]:
    """The tasks of the devices of a plan in the order of the program. A loop's body counts once, with the duration of
    all iterations."""
    return _Tasks(schedule, hardware).tasks


class _Tasks:
    """Numbers for the tensors of tasks: values, and their resharded copies for some reader."""

    def __init__(self, schedule: Schedule, hardware: HardwareProfile | str | Path | None) -> None:
        self.schedule = schedule
        self.problem, self.program = self.schedule.problem, self.schedule.program
        self.prices = time_prices(self.problem, hardware)
        self.numbers: dict[object, int] = {}
        self.resharded: dict[tuple[int, Layout], int] = {}
        self.last: dict[tuple[int | None, int], int] = {}
        self.tasks: list[Task] = []
        self.reading: dict[int | None, list[Sent]] = {}
        self.making: dict[int, list[Sent]] = {}
        for sent in self.schedule.collectives():
            if sent.operation is not None and sent.tensor.index in sent.operation.results:
                self.making.setdefault(sent.operation.index, []).append(sent)
            else:
                self.reading.setdefault(sent.operation.index if sent.operation else None, []).append(sent)
        seconds = {o.index: self._seconds(o) for o in self.program.operations}
        left_out = regions_left_out(self.program, seconds)
        for operation in self.program.operations:
            if operation.region not in left_out:
                self._add(operation, seconds[operation.index])
        for sent in self.reading.get(None, ()):
            self._collective(sent, None)

    def _number(self, key: object) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def _seconds(self, operation: Operation) -> float:
        strategy = self.schedule.assignment.strategies.get(operation.index)
        return work_seconds(self.problem, self.prices, operation, strategy.degree) if strategy else 0.0

    def _add(self, operation: Operation, seconds: float) -> None:
        for sent in self.reading.get(operation.index, ()):
            self._collective(sent, operation.index)
        if operation.bodies:
            self._add_loop(operation)
            return
        strategy = self.schedule.assignment.strategies.get(operation.index)
        layouts = strategy.operands if strategy else (None,) * len(operation.operands)
        reads = tuple(
            self._operand_tensor(operation.index, operand, layout)
            for operand, layout in zip(operation.operands, layouts, strict=True)
            if isinstance(operand, int)
        )
        sums = {sent.tensor.index for sent in self.making.get(operation.index, ())}
        makes = tuple(self._number(("own", result) if result in sums else result) for result in operation.results)
        name = f"{operation.scope} {operation.primitive.name}"
        self.tasks.append(Task(name, 0, seconds, reads, makes, operation=operation.index))
        for result in sums:
            self._finish(operation, result)

    def _operand_tensor(self, reader: int | None, value: int, layout: Layout | None) -> int:
        """The tensor that a reader of a value in a layout waits for: its last resharded copy, or the value itself."""
        own = self.last.get((reader, value))
        if own is not None:
            return own
        stored = self.schedule.assignment.values.get(value)
        while layout is not None and stored is not None and layout != stored:
            route = self.schedule.route(value, layout)
            for step in reversed(route.steps):
                if (value, step.layout) in self.resharded:
                    return self.resharded[value, step.layout]
            layout = route.source if route.source != layout else None
        return self._number(value)

    def _collective(self, sent: Sent, reader: int | None) -> None:
        value = sent.tensor.index
        made = self._number(("sent", len(self.tasks)))  # halos are sent in both directions in the same layout
        self._append(sent, self._operand_tensor(reader, value, None), made)
        self.last[reader, value] = made
        self.resharded.setdefault((value, sent.step.layout), made)

    def _finish(self, operation: Operation, result: int) -> None:
        """The collectives that reshard a result to its layout, one after another."""
        steps = [sent for sent in self.making[operation.index] if sent.tensor.index == result]
        before = self._number(("own", result))
        for place, sent in enumerate(steps, start=1):
            made = self._number(result if place == len(steps) else ("own", result, place))
            self._append(sent, before, made)
            before = made

    def _append(self, sent: Sent, source: int, made: int) -> None:
        name = f"{sent.step.kind} {sent.tensor.name or sent.tensor.index}"
        seconds = sent_seconds(self.prices, sent)
        axes = tuple(self.schedule.space.mesh.names[axis] for axis in sorted(sent.step.axes))
        operation = sent.operation.index if sent.operation else None
        self.tasks.append(Task(name, 0, seconds, (source,), (made,), sent.bytes * sent.times, axes, operation))

    def _add_loop(self, operation: Operation) -> None:
        """Passes a loop's inputs on to its body, and the body's outputs to the loop's results."""
        links = self.problem.links[operation.index]
        for link in links.enter:
            if isinstance(link.source, int):
                source = self._operand_tensor(operation.index, link.source, self.schedule.link_layout(link))
                self._add_forwarding((source,), (self._number(link.target),), operation)
        outputs = [o for body in operation.bodies for o in self.program.regions[body].outputs if isinstance(o, int)]
        reads = tuple(dict.fromkeys(self._operand_tensor(operation.index, output, None) for output in outputs))
        self._add_forwarding(reads, tuple(self._number(result) for result in operation.results), operation)

    def _add_forwarding(self, reads: tuple[int, ...], makes: tuple[int, ...], operation: Operation) -> None:
        self.tasks.append(Task(f"{operation.scope} {operation.primitive.name}", 0, 0.0, reads, makes))
