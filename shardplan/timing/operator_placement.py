"""Operator placement: a simulated program whose operations each run whole on one device, as a rival of plans.

The methods of `shardplan.search.rivals.operator_placement` place the operations of the step, and loops as a whole. An
array of the state is on the device of its readers and of its update. Operations take the time of the objective "time"
on one device. Tensors pass between devices of one host, or over the network for more devices than a host has.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardplan.hardware import HardwareProfile, Link
from shardplan.problem.baselines import parameters_of
from shardplan.problem.cost_network import Problem
from shardplan.program.program import Operation, Program
from shardplan.search.rivals.operator_placement import PLACEMENTS, WorkGraph, place
from shardplan.timing.simulator import Simulation, simulate_tasks
from shardplan.timing.step_time import regions_left_out, time_prices, work_seconds
from shardplan.timing.task import Task

PREFIX = "placement:"
PLACEMENT_METHODS = tuple(f"{PREFIX}{name}" for name in PLACEMENTS)
"""The placement methods, by the names that `compare` takes."""


@dataclass(frozen=True, slots=True)
class _Node:
    """An argument (``operation`` is None) or an operation of the step itself, with the values that it makes."""

    operation: Operation | None
    makes: tuple[int, ...]
    reads: tuple[int, ...]
    seconds: float


def simulate_placement(
    problem: Problem, method: str, hardware: HardwareProfile | str | Path | None = None
) -> Simulation:
    """Places a problem's program on the devices of its mesh by a method of ``PLACEMENT_METHODS``, and runs it there."""
    program, mesh = problem.program, problem.space.mesh
    prices = time_prices(problem, hardware)
    profile = prices.hardware
    link = profile.intra_host if mesh.device_count <= profile.devices_per_host else profile.inter_host
    nodes = _nodes(problem, hardware)
    devices = place(work_graph(program, nodes, link), mesh.device_count, method.removeprefix(PREFIX)).tolist()
    replaced = {o for number, o in enumerate(program.outputs) if number in program.ties}
    # A new state is written over the old one, which is live during the whole step.
    sizes = {v.index: 0.0 if v.index in replaced else float(v.total_bytes) for v in program.values}
    kept = frozenset({*_state(program), *(o for o in program.outputs if isinstance(o, int))})
    tasks = [
        Task(_name(program, node), device, node.seconds, node.reads, node.makes)
        for node, device in zip(nodes, devices, strict=True)
    ]
    ran = simulate_tasks(tasks, sizes, link, kept)
    idle = (0.0,) * (mesh.device_count - len(ran.busy_seconds))
    return Simulation(ran.seconds, ran.busy_seconds + idle, ran.sent_bytes + idle, ran.peak_bytes + idle, ran.events)


def work_graph(program: Program, nodes: list[_Node], link: Link) -> WorkGraph:
    """The nodes as plain data."""
    makers = {value: number for number, node in enumerate(nodes) for value in node.makes}
    tensors = {value: number for number, value in enumerate(makers)}
    state = set(_state(program))
    updates = {
        o: program.inputs[p] for number, p in program.ties.items() if isinstance(o := program.outputs[number], int)
    }
    together = []
    for number, node in enumerate(nodes):
        stays = [v for v in node.reads if v in state and program.values[v].shape]
        stays += [updates[v] for v in node.makes if v in updates and node.operation is not None]
        together += [(makers[value], number) for value in stays]
    held = [sum(float(program.values[v].total_bytes) for v in node.makes if v in state) for node in nodes]
    return WorkGraph(
        seconds=tuple(node.seconds for node in nodes),
        held_bytes=tuple(held),
        layers=tuple(_layers(program, nodes)),
        makers=tuple(makers.values()),
        sizes=tuple(float(program.values[value].total_bytes) for value in makers),
        reads=tuple(tuple(tensors[value] for value in node.reads) for node in nodes),
        seconds_per_byte=1 / link.bytes_per_second,
        together=tuple(together),
    )


def _nodes(problem: Problem, hardware: HardwareProfile | str | Path | None) -> list[_Node]:
    program, prices = problem.program, time_prices(problem, hardware)
    seconds = {o.index: work_seconds(problem, prices, o) for o in program.operations}
    left_out = regions_left_out(program, seconds)
    inside = [0.0] * len(program.regions)
    nodes = [_Node(None, (value,), (), 0.0) for value in (*program.inputs, *program.captured)]
    for operation in program.operations:  # the bodies of a loop come before it
        spent = seconds[operation.index] + sum(inside[body] for body in operation.bodies if body not in left_out)
        inside[operation.region] += spent
        if operation.region == 0:
            reads = tuple(dict.fromkeys(o for o in operation.operands if isinstance(o, int)))
            nodes.append(_Node(operation, operation.results, reads, spent))
    return nodes


def _layers(program: Program, nodes: list[_Node]) -> list[int]:
    """The number of each node's layer.

    A layer is the parameters of one name below the common prefix of all paths, numbered in the order of their first
    reader. Their readers belong to it, and the operations that only their update depends on. Forwards, the operations
    up to the next layer belong to it too. Backwards, an operation belongs to the layer whose activations it reads.
    """
    makers = {value: number for number, node in enumerate(nodes) for value in node.makes}
    layer = _read_layers(program, nodes)
    owner = _updates_of(program, nodes, layer, makers)
    forward = _needed_for(nodes, makers, [o for n, o in enumerate(program.outputs) if n not in program.ties])
    found: list[int] = []
    for number, node in enumerate(nodes):
        known = layer[number] if layer[number] >= 0 else owner[number]
        before = [found[makers[value]] for value in node.reads if found[makers[value]] >= 0]
        if known < 0 and before:
            known = max(before) if number in forward else min(before)
        found.append(known)
    for number in range(len(nodes) - 1, -1, -1):  # without an operand in a layer: the layer of its reader
        for value in nodes[number].reads:
            if found[makers[value]] < 0:
                found[makers[value]] = found[number]
    return found


def _read_layers(program: Program, nodes: list[_Node]) -> list[int]:
    """Per node, the layer of the largest parameter that it is or reads. -1 for none."""
    parameters = [value for value in program.inputs if value in parameters_of(program)]
    paths = {value: (program.values[value].name or "").split("/") for value in parameters}
    shared = 0
    while paths and len({tuple(path[: shared + 1]) for path in paths.values()}) == 1:
        shared += 1
        if any(len(path) <= shared for path in paths.values()):
            break
    names: dict[tuple[str, ...], int] = {}
    largest: list[int | None] = []
    for node in nodes:
        own = [value for value in (*node.reads, *(node.makes if node.operation is None else ())) if value in paths]
        largest.append(max(own, key=lambda value: program.values[value].total_bytes, default=None))
        if node.operation is not None and largest[-1] is not None:
            names.setdefault(tuple(paths[largest[-1]][: shared + 1]), len(names))
    return [-1 if value is None else names.get(tuple(paths[value][: shared + 1]), -1) for value in largest]


def _updates_of(program: Program, nodes: list[_Node], layer: list[int], makers: dict[int, int]) -> list[int]:
    """Per node, the only layer whose update depends on it. -1 where anything else depends on it too."""
    nothing, several = -1, -2
    state = {o for number, o in enumerate(program.outputs) if number in program.ties}
    others = {o for n, o in enumerate(program.outputs) if n not in program.ties and isinstance(o, int)}
    owner = [nothing] * len(nodes)
    for number in range(len(nodes) - 1, -1, -1):
        node = nodes[number]
        if others & {*node.makes}:
            owner[number] = several
        elif state & {*node.makes} and layer[number] >= 0 and owner[number] in (nothing, layer[number]):
            owner[number] = layer[number]
        for value in node.reads:
            maker = makers[value]
            # Other readers of a parameter, forwards or for the gradients of earlier layers, are no update.
            given = owner[number] if layer[number] < 0 or state & {*node.makes} else several
            owner[maker] = given if owner[maker] in (nothing, given) else several
    return [max(number, -1) for number in owner]


def _needed_for(nodes: list[_Node], makers: dict[int, int], outputs: list[object]) -> set[int]:
    """The nodes that some outputs depend on."""
    found: set[int] = set()
    waiting = [makers[o] for o in outputs if isinstance(o, int)]
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting += [makers[value] for value in nodes[number].reads]
    return found


def _state(program: Program) -> list[int]:
    return [program.inputs[position] for position in program.ties.values()]


def _name(program: Program, node: _Node) -> str:
    if node.operation is None:
        return program.values[node.makes[0]].name or "constant"
    return f"{node.operation.scope} {node.operation.primitive.name}"
