"""``shardplan.simulate``: the discrete-event simulation of a plan."""

from __future__ import annotations

from pathlib import Path

from shardplan.errors import no_plan
from shardplan.hardware import HardwareProfile, Link
from shardplan.plans.plan_data import PlanData
from shardplan.timing.simulator import Simulation, simulate_tasks
from shardplan.timing.tasks import tasks_of


def simulate(plan: PlanData, hardware: HardwareProfile | str | Path | None = None) -> Simulation:
    """Runs a plan on simulated devices of a hardware profile, by default the one that it was planned for.

    All devices of a plan do the same, so there is one worker. Work takes its FLOPs over the peak rate, or its bytes
    over the memory bandwidth. Collectives have the time of the objective "time", wait for their operands and overlap
    with other work. A loop's body counts once, with the duration of all iterations. ``peak_bytes`` is the plan's own
    prediction. Raises ArgumentError for an object that is no plan, or no hardware profile.

    >>> import jax
    >>> import shardplan
    >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
    >>> square = jax.ShapeDtypeStruct((4096, 4096), "float32")
    >>> plan = shardplan.plan(lambda x, w: (x @ w) @ w.T, mesh, square, square)
    >>> result = shardplan.simulate(plan)
    >>> result.sent_bytes[0] == plan.communication_bytes, result.seconds >= result.busy_seconds[0]
    (True, True)
    """
    if not hasattr(plan, "schedule"):
        raise no_plan(plan)
    ran = simulate_tasks(tasks_of(plan.schedule, hardware), {}, Link(1.0, 0.0))
    return Simulation(ran.seconds, ran.busy_seconds, ran.sent_bytes, (float(plan.peak_bytes),), ran.events)
