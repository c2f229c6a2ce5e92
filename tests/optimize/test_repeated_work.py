"""Work that is repeated: what it costs, and where its memory traffic counts."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import shardplan
from shardplan.hardware import load
from shardplan.layout.layout import MeshAxes
from shardplan.layout.objectives.bytes_sent import BytesSent
from shardplan.optimize import repeated_work as repeating
from shardplan.plans.pipeline import rebuild
from tests.problem.test_cost_network import priced_anew

MESH = AbstractMesh((8,), ("x",))


def ordered(x: Any) -> Any:
    return jnp.sort(jnp.sort(x, 0), 1)


def square(size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size, size), jnp.float32)


def test_the_price_of_repeated_work() -> None:
    """It is the bytes that a device could send in the longer time of FLOPs and memory traffic."""
    profile = load("h100")
    prices = BytesSent(profile, MeshAxes(("x",), (8,)))
    rates = profile.flops_per_second("float32"), profile.memory_bytes_per_second
    for flops, memory_bytes in ((1e12, 0), (1e12, 1e9), (1e9, 1e10)):
        seconds = max(flops / rates[0], memory_bytes / rates[1]) * (1 / 2 - 1 / 8)
        expected = seconds * profile.intra_host.bytes_per_second
        assert prices.work(flops, memory_bytes, jnp.float32, 2) == pytest.approx(expected)
        assert prices.work(flops, memory_bytes, jnp.float32, 8) == 0


def test_a_step_bound_by_memory(tmp_path: Path) -> None:
    """Memory traffic counts, and the plan splits the work."""
    plan = shardplan.plan(ordered, MESH, square(8192))
    assert plan.statistics["traffic"]
    assert plan.gap <= 1e-6
    assert plan.communication_bytes == 7 / 64 * 8192**2 * 4
    assert plan.objective == pytest.approx(priced_anew(plan), rel=1e-4)
    plan.save(tmp_path / "plan.json")
    again = rebuild(shardplan.Plan.load(tmp_path / "plan.json"), plan.program)
    assert again.explain("0") == plan.explain("0")


def test_the_time_limit_before_the_second_plan() -> None:
    """The first plan is kept, without memory traffic."""
    plan = shardplan.plan(ordered, MESH, square(8192), time_limit=1e-6)
    assert not plan.statistics["traffic"]
    assert plan.communication_bytes == 0


def test_an_infeasible_second_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan is kept."""
    search, searched = repeating.search_within, []

    def refusing(*given: Any) -> Any:
        searched.append(1)
        if len(searched) > 1:
            raise shardplan.InfeasibleError("nothing was found within the limit")
        return search(*given)

    monkeypatch.setattr(repeating, "search_within", refusing)
    assert shardplan.plan(ordered, MESH, square(8192)).communication_bytes == 0
    assert len(searched) == 2


@pytest.mark.parametrize(("size", "objective"), [(512, "bytes"), (8192, "time")])
def test_a_step_with_slow_collectives(size: int, objective: str) -> None:
    """Memory traffic does not count in bytes, and always counts in seconds."""
    plan = shardplan.plan(ordered, MESH, square(size), objective=objective)
    assert plan.statistics["traffic"] == (objective == "time")
    assert bool(plan.communication_bytes) == (objective == "time")


def test_a_step_bound_by_products() -> None:
    """It is planned once."""
    x = w = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    plan = shardplan.plan(lambda x, w: jax.nn.relu(x @ w) @ w, MESH, x, w)
    assert not plan.statistics["traffic"]
