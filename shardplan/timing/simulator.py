"""A discrete-event simulator of devices that compute tasks and send tensors to each other.

Each worker computes its tasks one after another, in their order where several are ready. A task starts when all of its
tensors have arrived. A tensor that a task of another worker reads is sent there. The transfer occupies the sender's
outgoing link and the receiver's incoming link for its latency, and for its bytes over the bandwidth. Both workers go on
computing.

>>> tasks = [Task("a", 0, 2.0, makes=(0,)), Task("b", 0, 1.0, makes=(1,)), Task("c", 1, 3.0, reads=(0,), makes=(2,))]
>>> result = simulate_tasks(tasks, sizes={0: 4e9, 1: 1e9, 2: 1e9}, link=Link(4e9, 0.5))
>>> result.seconds  # 2 of a, 1.5 to send, while b runs, 3 of c
6.5
>>> result.busy_seconds, result.sent_bytes
((3.0, 3.0), (4000000000.0, 0.0))

A worker may stand for many devices that do the same at the same time: `simulate(plan)` has one. Its collectives are
tasks that occupy only its outgoing link, so that they overlap with other work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from pathlib import Path

from shardplan.common.tables import size_cell, text_table
from shardplan.errors import ArgumentError
from shardplan.hardware import Link
from shardplan.timing.task import Event, Task
from shardplan.timing.timeline import timeline_html, write_chrome_trace


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of a simulation, with times in seconds. It prints as a table, and draws a timeline in a notebook.

    Attributes:
        seconds: from the start of the first task to the end of the last one.
        busy_seconds, sent_bytes, peak_bytes: per worker, its computing time, the bytes that it sends, and the most
            bytes that it holds at a time.
        events: all tasks and transfers that took time, by their start.
    """

    seconds: float
    busy_seconds: tuple[float, ...]
    sent_bytes: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    events: tuple[Event, ...] = field(repr=False)

    def __str__(self) -> str:
        header = ("worker", "busy ms", "busy", "MB sent", "peak MB")
        rows = [
            (
                str(worker),
                f"{1e3 * busy:.2f}",
                f"{busy / self.seconds if self.seconds else 0:.0%}",
                size_cell(sent),
                size_cell(peak),
            )
            for worker, (busy, sent, peak) in enumerate(
                zip(self.busy_seconds, self.sent_bytes, self.peak_bytes, strict=True)
            )
        ]
        return f"{1e3 * self.seconds:.2f} ms\n{text_table(header, rows, numbers=range(5))}"

    def _repr_html_(self) -> str:
        return timeline_html(self.events, self.seconds, len(self.busy_seconds))

    def save_trace(self, path: str | Path) -> None:
        """Writes the timeline as a trace that `chrome://tracing` and ui.perfetto.dev show."""
        write_chrome_trace(self.events, len(self.busy_seconds), path)


def simulate_tasks(
    tasks: Sequence[Task],
    sizes: Mapping[int, float],
    link: Link,
    kept: frozenset[int] = frozenset(),
    overlap: bool = True,
) -> Simulation:
    """Runs tasks on their workers.

    Args:
        tasks: an earlier one goes first where a worker could do both.
        sizes: bytes of each tensor; one that is missing has none.
        link: between any two workers, in each direction.
        kept: tensors that stay where they were made until the end. Others are freed behind their last reader.
        overlap: whether workers compute while they send and receive.

    Raises:
        ArgumentError: tasks wait for each other, two make the same tensor, or a time is negative.
    """
    return _Simulator(tasks, sizes, link, kept, overlap).run()


Resource = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Activity:
    """A task or a transfer, and the resources that it occupies. `tensor` and `receiver` are those of a transfer."""

    event: Event
    seconds: float
    resources: tuple[Resource, ...]
    task: int | None
    tensor: int | None = None


class _Simulator:
    """The state of a simulation: the queue of each resource, and the tensors of each worker."""

    def __init__(
        self, tasks: Sequence[Task], sizes: Mapping[int, float], link: Link, kept: frozenset[int], overlap: bool
    ) -> None:
        self.tasks, self.sizes, self.link, self.kept, self.overlap = tasks, sizes, link, kept, overlap
        self.makers: dict[int, int] = {}
        for number, task in enumerate(tasks):
            if task.seconds < 0 or task.worker < 0:
                raise ArgumentError(f"task `{task.name}` has {task.seconds} seconds on worker {task.worker}")
            for tensor in task.makes:
                if tensor in self.makers:
                    raise ArgumentError(
                        f"tensor {tensor} is made by `{tasks[self.makers[tensor]].name}` and again by `{task.name}`"
                    )
                self.makers[tensor] = number
        self.readers: dict[tuple[int, int], list[int]] = {}
        for number, task in enumerate(tasks):
            for tensor in dict.fromkeys(task.reads):
                self.readers.setdefault((tensor, task.worker), []).append(number)
        self.receivers: dict[int, list[int]] = {}
        for tensor, worker in self.readers:
            if tensor in self.makers and tasks[self.makers[tensor]].worker != worker:
                self.receivers.setdefault(tensor, []).append(worker)
        self.missing = [sum(t in self.makers for t in dict.fromkeys(task.reads)) for task in tasks]
        self.workers = max((task.worker for task in tasks), default=-1) + 1
        self.left: dict[tuple[int, int], int] = {}
        self.holding, self.peak = [0.0] * self.workers, [0.0] * self.workers
        self.waiting: dict[Resource, list[tuple[int, int, _Activity]]] = {}
        self.ready: dict[Resource, None] = {}
        self.taken: set[Resource] = set()
        self.running: list[tuple[float, int, _Activity]] = []
        self.events: list[Event] = []
        self.finished: set[int] = set()
        self.now, self.count = 0.0, 0

    def run(self) -> Simulation:
        for tensor, worker in self.readers:
            if tensor not in self.makers:
                self._hold(tensor, worker)
        for number, missing in enumerate(self.missing):
            if not missing:
                self._enqueue_task(number)
        self._start_ready()
        while self.running:
            self.now, _, activity = heappop(self.running)
            self.taken.difference_update(activity.resources)
            self.ready.update(dict.fromkeys(activity.resources))
            self._finish(activity)
            self._start_ready()
        if len(self.finished) < len(self.tasks):
            stuck = [task.name for number, task in enumerate(self.tasks) if number not in self.finished]
            raise ArgumentError(f"tasks wait for each other: {', '.join(f'`{name}`' for name in stuck[:5])}")
        busy, sent = [0.0] * self.workers, [0.0] * self.workers
        for event in self.events:
            if event.kind == "compute":
                busy[event.worker] += event.end - event.start
            sent[event.worker] += event.bytes
        return Simulation(self.now, tuple(busy), tuple(sent), tuple(self.peak), tuple(self.events))

    def _enqueue_task(self, number: int) -> None:
        task = self.tasks[number]
        collective = task.sent_bytes is not None
        event = Event(
            "collective" if collective else "compute",
            task.name,
            task.worker,
            start=0.0,
            end=0.0,
            bytes=task.sent_bytes or 0,
            axes=task.axes,
            operation=task.operation,
        )
        resource = self._link_of("out", task.worker) if collective else ("compute", task.worker)
        self._enqueue(_Activity(event, task.seconds, (resource,), number), number)

    def _link_of(self, direction: str, worker: int) -> Resource:
        return (direction if self.overlap else "compute", worker)

    def _send(self, tensor: int, sender: int, receiver: int) -> None:
        size = self.sizes.get(tensor, 0.0)
        maker = self.tasks[self.makers[tensor]].name
        event = Event("transfer", maker, sender, 0.0, 0.0, size, receiver)
        ways = self._link_of("out", sender), self._link_of("in", receiver)
        seconds = self.link.latency_seconds + size / self.link.bytes_per_second
        # The tensor of the earliest waiting task goes first.
        self._enqueue(_Activity(event, seconds, ways, None, tensor), self.readers[tensor, receiver][0])

    def _enqueue(self, activity: _Activity, priority: int) -> None:
        self.count += 1
        heappush(self.waiting.setdefault(activity.resources[0], []), (priority, self.count, activity))
        self.ready[activity.resources[0]] = None

    def _start_ready(self) -> None:
        """Starts activities that can start now. Those that became ready at the same time go by priority."""
        resources, self.ready = self.ready, {}
        for resource in resources:
            self._start_queue(resource)

    def _start_queue(self, resource: Resource) -> None:
        """Starts the queue of a free resource. An activity that also needs an occupied one moves to its queue."""
        queue = self.waiting.get(resource, [])
        while queue and resource not in self.taken:
            priority, count, activity = heappop(queue)
            other = next((r for r in activity.resources if r in self.taken), None)
            if other is not None:
                heappush(self.waiting.setdefault(other, []), (priority, count, activity))
                continue
            self._start(activity)

    def _start(self, activity: _Activity) -> None:
        event, end = activity.event, self.now + activity.seconds
        self.taken.update(activity.resources)
        if activity.seconds:
            self.events.append(replace(event, start=self.now, end=end))
        if activity.task is not None:
            for tensor in self.tasks[activity.task].makes:
                self._hold(tensor, event.worker)
        elif activity.tensor is not None and event.receiver is not None:
            self._hold(activity.tensor, event.receiver)
        self.count += 1
        heappush(self.running, (end, self.count, activity))

    def _finish(self, activity: _Activity) -> None:
        worker = activity.event.worker
        if activity.task is not None:
            self.finished.add(activity.task)
            task = self.tasks[activity.task]
            for tensor in dict.fromkeys(task.reads):
                self._release(tensor, worker)
            for tensor in task.makes:
                self._arrived(tensor, worker)
                for receiver in self.receivers.get(tensor, ()):
                    self._send(tensor, worker, receiver)
                if not self.left[tensor, worker]:
                    self._free(tensor, worker)
        elif activity.tensor is not None and activity.event.receiver is not None:
            self._arrived(activity.tensor, activity.event.receiver)
            self._release(activity.tensor, worker)

    def _arrived(self, tensor: int, worker: int) -> None:
        for number in self.readers.get((tensor, worker), ()):
            self.missing[number] -= 1
            if not self.missing[number]:
                self._enqueue_task(number)

    def _hold(self, tensor: int, worker: int) -> None:
        """A tensor takes memory. It stays for its readers here, and on the worker that made it, for all readers."""
        uses = len(self.readers.get((tensor, worker), ()))
        if tensor not in self.makers or self.tasks[self.makers[tensor]].worker == worker:
            uses += len(self.receivers.get(tensor, ())) + (tensor in self.kept)
        self.left[tensor, worker] = uses
        self.holding[worker] += self.sizes.get(tensor, 0.0)
        self.peak[worker] = max(self.peak[worker], self.holding[worker])

    def _release(self, tensor: int, worker: int) -> None:
        self.left[tensor, worker] -= 1
        if not self.left[tensor, worker]:
            self._free(tensor, worker)

    def _free(self, tensor: int, worker: int) -> None:
        self.holding[worker] -= self.sizes.get(tensor, 0.0)
