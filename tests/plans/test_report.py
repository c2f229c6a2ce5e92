"""What plans say of themselves: printed, drawn, explained, and held against each other."""

import re
import time
from fnmatch import fnmatchcase

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import ArgumentError, Plan
from shardplan.common.tables import size_cell
from shardplan.layout.layout import to_spec
from shardplan.models import gpt, mlp
from shardplan.plans.alternatives import alternatives, without_transition
from shardplan.plans.report import layout_groups, plan_record, planned_traffic
from shardplan.search import Network

MESH = AbstractMesh((2, 4), ("data", "model"))
TRAINING = mlp.training(mlp.Config(widths=(512, 2048, 512, 2048, 512), batch=256))
KERNELS = "0/params/*/kernel"


def plan_of(**options) -> Plan:
    return shardplan.plan(TRAINING.train_step, MESH, TRAINING.state, TRAINING.batch, **options)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of()


@pytest.fixture(scope="module")
def pinned() -> Plan:
    return plan_of(pins={KERNELS: P(None, ("data", "model"))})


def test_text_has_mesh_evidence_traffic_and_layouts(plan: Plan):
    text = str(plan)
    assert "mesh (data=2, model=4), 8 devices" in text
    assert f"{plan.communication_bytes / 1e6:,.1f} MB sent" in text
    assert "% above the optimum" in text
    for kind, axes in planned_traffic(plan):
        assert re.search(rf"^{kind} +{', '.join(axes)} ", text, re.MULTILINE)
    assert "MB at the peak" in text


def test_traffic_and_groups_add_up(plan: Plan):
    assert sum(sent for _, sent in planned_traffic(plan).values()) == pytest.approx(plan.communication_bytes)
    groups = layout_groups(plan)
    assert sum(len(group.paths) for group in groups) == len(plan.arguments)
    whole = sum(argument.total_bytes for argument in plan.arguments)
    assert whole / 8 <= sum(group.bytes_per_device for group in groups) <= whole


def test_groups_of_equal_tensors(plan: Plan):
    """Every argument is in one group."""
    arguments = {argument.path: argument for argument in plan.arguments}
    for group in layout_groups(plan):
        for path in group.paths:
            member = arguments[path]
            assert (member.shape, member.dtype, member.spec) == (group.shape, group.dtype, group.spec)
        assert any(fnmatchcase(path, group.pattern) for path in group.paths)
    assert sorted(path for group in layout_groups(plan) for path in group.paths) == sorted(arguments)


def test_moments_are_in_the_row_of_their_parameter(plan: Plan):
    """The column `also in` has their globs."""
    groups = {group.pattern: group for group in layout_groups(plan)}
    same = [
        path
        for path in plan.layouts
        if path.endswith("layer_1/kernel") and plan.layouts[path] == plan.layouts["0/params/layer_1/kernel"]
    ]
    (group,) = [g for g in groups.values() if "0/params/layer_1/kernel" in g.paths]
    assert set(same) <= set(group.paths)
    assert set(group.also) <= {"opt_state/*/mu", "opt_state/*/nu"}


def test_html_draws_every_group(plan: Plan):
    text = plan._repr_html_()
    for group in layout_groups(plan):
        assert group.pattern in text
    assert text.count("<table") == text.count("</table>") == 2 + sum(1 for group in layout_groups(plan) if group.shape)
    assert "background:#" in text


def test_html_escapes_names():
    plan = shardplan.plan(lambda x: {"<b>": x["<i>"] * 2}, MESH, {"<i>": jax.ShapeDtypeStruct((8, 8), "float32")})
    assert "<i>" not in plan._repr_html_()


def test_record_is_the_plan(plan: Plan):
    record = plan_record(plan)
    assert record["communication_bytes"] == plan.communication_bytes
    assert record["layouts"]["0/params/layer_0/kernel"] == list(plan.layouts["0/params/layer_0/kernel"])
    assert sum(entry["bytes"] for entry in record["collectives"]) == pytest.approx(plan.communication_bytes)


def test_the_objective_time_is_told_in_milliseconds():
    plan = plan_of(objective="time")
    assert re.search(r"objective [\d.]+ ms, at most", str(plan))
    assert re.search(r": \+[\d.]+ ms ", plan.explain("0/params/layer_1/kernel", time_limit=0))


def test_many_devices_are_drawn_small():
    shape = jax.ShapeDtypeStruct((8192, 8192), "float32")
    mesh = AbstractMesh((4096,), ("data",))
    drawn = shardplan.plan(lambda x: x * 2, mesh, shape, pins={"0": P(None, "data")})._repr_html_()
    assert drawn.count("<td") < 200


def test_difference_of_two_plans(plan: Plan, pinned: Plan):
    """It has the layouts, the traffic and the objective."""
    difference = plan.diff(pinned)
    assert difference
    for path, (one, other) in difference.layouts.items():
        assert (plan.layouts[path], pinned.layouts[path]) == (one, other)
        assert one != other
    before, after = planned_traffic(plan), planned_traffic(pinned)
    moved = sum(other - one for one, other in difference.traffic.values())
    assert moved == pytest.approx(pinned.communication_bytes - plan.communication_bytes, abs=10)
    assert {*difference.traffic} <= {*before, *after}
    assert "objective" in str(difference)


def test_a_plan_does_not_differ_from_itself(plan: Plan):
    assert not plan.diff(plan)
    assert str(plan.diff(plan)) == "the plans are equal"
    for made_of in (plan.diff, shardplan.simulate):
        with pytest.raises(ArgumentError, match="a plan was expected, got `3`"):
            made_of(3)  # type: ignore[arg-type]


def test_difference_of_other_arguments_and_meshes(plan: Plan):
    other = shardplan.plan(lambda x: x + 1, AbstractMesh((8,), ("data",)), jax.ShapeDtypeStruct((8,), "float32"))
    difference = plan.diff(other)
    assert difference.layouts["0"] == (None, other.layouts["0"])
    assert difference.layouts["1/inputs"][1] is None
    assert difference.measures["mesh"] == ("data=2, model=4", "data=8")
    assert "no such argument" in str(difference)


def test_explained_argument(plan: Plan):
    text = plan.explain("0/params/layer_1/kernel")
    assert text.startswith("0/params/layer_1/kernel\n")
    assert str(plan.layouts["0/params/layer_1/kernel"]) in text.splitlines()[1]
    assert text.count("dot_general as") == 2  # forward, and the gradient of the activations
    assert "replaced by" in text
    assert "linear.py:" in text
    assert "(exact)" in text


def test_exact_prices_of_pinned_plans(plan: Plan):
    """The exact prices of the three cheapest layouts are those of plans with these layouts pinned, to 0.1 %."""
    path, problem = "0/params/layer_1/kernel", plan.schedule.problem
    (index,) = [i for i in plan.program.inputs if plan.program.values[i].name == path]
    variable, layouts = problem.variables_of(index)[0], problem.domain(index).layouts
    assert variable is not None
    found = alternatives(problem.network, plan.recipe.choices, variable, 20.0)
    for number, other in enumerate(found):
        if number not in (0, 1, 2, len(found) - 1):
            continue
        spec = to_spec(plan.schedule.space.mesh, layouts[other.choice])
        price = plan_of(pins={path: spec}).objective - plan.objective
        room = max(1e-3 * price, 1e-6 * plan.objective)
        assert other.at_least - room <= price <= other.extra_cost + room
        assert number > 2 or (other.exact and other.extra_cost == pytest.approx(price, abs=room))


def test_explained_with_and_without_time(plan: Plan):
    """A search without time gives intervals that hold the exact costs."""
    exact = dict(_prices(plan.explain("0/params/layer_1/kernel", time_limit=20)))
    loose = dict(_prices(plan.explain("0/params/layer_1/kernel", time_limit=0.0)))
    assert exact.keys() == loose.keys()
    assert all(loose[spec][0] - 0.11 <= exact[spec][0] and exact[spec][1] <= loose[spec][1] + 0.11 for spec in exact)


def _prices(text: str) -> list[tuple[str, tuple[float, float]]]:
    """The layouts of an explanation, each with the least and the most megabytes of its price."""
    found = []
    for spec, least, most in re.findall(r"(P\(.*?\)): \+([\d.,]+ \w+)(?: to ([\d.,]+ \w+))? \(", text):
        found.append((spec, (_megabytes(least), _megabytes(most or least))))
    return found


def _megabytes(text: str) -> float:
    amount, unit = text.replace(",", "").split()
    return float(amount) * {"B": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}[unit]


@pytest.mark.long
def test_explained_in_two_seconds():
    """Each path of a transformer of 24 layers, after the first. The three cheapest layouts have exact prices, and equal
    layers are one paragraph."""
    training = gpt.training(gpt.Config(layers=24, width=128, heads=4, vocabulary=512, sequence=64, batch=8))
    plan = shardplan.plan(training.train_step, MESH, training.state, training.batch)
    plan.explain("0/params/layer_0/mlp/up/kernel")  # which makes the bounds of all
    for path in ("0/params/layer_5/mlp/up/kernel", "0/params/layer_9/attention/query/kernel"):
        started = time.monotonic()
        text = plan.explain(path)
        assert time.monotonic() - started < 4  # of which half is for a busy machine
        assert text.count("(exact)") >= 3
    text = plan.explain("0/params/layer_*/mlp/*/kernel")
    assert len(text.splitlines()) < 60 and "more: 0/params/layer_" in text


def test_explained_operation(plan: Plan):
    text = plan.explain("op0", time_limit=0.5)
    assert text.startswith("op0 dot_general\n")
    assert "Sum(" in text
    assert re.search(r"shared by \d of 8 devices", text)
    assert "other splits" in text


@pytest.mark.long
def test_explained_by_source_and_glob(plan: Plan):
    text = plan.explain("* dot_general", time_limit=0.1)
    assert text.count("other splits") == 6
    assert "more: op" in text
    assert "dot_general" in plan.explain("linear.py:*", time_limit=0.1)
    assert plan.explain("*transpose(jvp(MLP))/layer_1", 0).count("in transpose(jvp(MLP))/layer_1\n") >= 3


def test_explained_parameter():
    """The text has its all-gather, and the reduction of its gradient."""
    step = TRAINING.train_step, MESH, TRAINING.state, TRAINING.batch
    plan = shardplan.compare(*step, methods=("fsdp",))["fsdp"].plan
    assert plan is not None
    text = plan.explain("0/params/layer_2/kernel", time_limit=0)
    assert "all-gather over data, model of 0/params/layer_2/kernel" in text
    assert "reduce-scatter over data, model of value" in text
    assert "none: it is pinned" in text


def test_explained_pin_has_no_other_layout(pinned: Plan):
    assert "none: it is pinned" in pinned.explain("0/params/layer_0/kernel")


def test_explained_loop():
    def scan(weights, x):
        return jax.lax.scan(lambda h, w: (jax.numpy.tanh(h @ w), None), x, weights)[0]

    shapes = jax.ShapeDtypeStruct((4, 128, 128), "float32"), jax.ShapeDtypeStruct((64, 128), "float32")
    plan = shardplan.plan(scan, MESH, *shapes)
    assert "4 times" in plan.explain("* scan", 0.1)
    assert "read by" in plan.explain("0", 0.1)


def test_explaining_an_unknown_name(plan: Plan):
    """The error offers the nearest paths."""
    with pytest.raises(ArgumentError, match=r"`nothing` matches no argument and no operation: give a path \(the near"):
        plan.explain("nothing")
    with pytest.raises(ArgumentError, match=r"the nearest are `0/params/layer_\*/kernel`"):
        plan.explain("0/param/layer1/kernel")


def test_explained_equal_layers():
    """Layers that only differ in their numbers are one paragraph, which names the others."""

    def step(state, x):
        for name in state:
            x = jax.numpy.tanh(x @ state[name])
        return x

    state = {f"w{n}": jax.ShapeDtypeStruct((64, 64), "float32") for n in range(9)}
    plan = shardplan.plan(step, MESH, state, jax.ShapeDtypeStruct((8, 64), "float32"))
    text = plan.explain("0/w*", 0)
    assert len(text.split("\n\n")) <= 3 and re.search(r"the same for  \d more: 0/w\d", text)
    assert "the same for" not in plan.explain("0/w3", 0)


def test_alternatives_against_brute_force():
    """Prices are those of the best assignments, whatever the time; choices without any are infinite."""
    generator = np.random.default_rng(0)
    for _ in range(10):
        network = Network()
        variables = [network.add_variable(generator.integers(0, 9, 3)) for _ in range(5)]
        for u, v in [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (1, 3)]:
            network.add_edge(variables[u], variables[v], generator.integers(0, 9, (3, 3)))
        costs = {choices: network.cost(choices) for choices in np.ndindex(3, 3, 3, 3, 3)}
        best = min(costs, key=costs.__getitem__)
        for other in alternatives(network, best, 1, time_limit=0.0):
            assert other.exact
            assert other.extra_cost == pytest.approx(_price(costs, best, other.choice), abs=1e-3 * costs[best])


def _price(costs: dict[tuple[int, ...], float], best: tuple[int, ...], choice: int) -> float:
    return min(cost for choices, cost in costs.items() if choices[1] == choice) - costs[best]


@pytest.mark.parametrize("seconds", [0.0, 20.0])
def test_alternatives_in_a_long_chain(seconds: float):
    """Intervals hold the prices; with time, the three cheapest are exact, and no other is below them."""
    generator, count = np.random.default_rng(1), 1200
    network = Network()
    costs = generator.integers(0, 9, (count, 5)).astype(float)
    tables = generator.integers(0, 9, (count - 1, 5, 5)).astype(float)
    for row in costs:
        network.add_variable(row)
    for number, table in enumerate(tables):
        network.add_edge(number, number + 1, table)
    best, least = _chain_optimum(costs, tables)
    found = alternatives(network, best, 600, seconds)
    for other in found:
        held = costs.copy()
        held[600, np.arange(5) != other.choice] = np.inf
        price = _chain_optimum(held, tables)[1] - least
        assert other.at_least - 1e-4 * least <= price <= other.extra_cost + 1e-9
        assert not seconds or found.index(other) > 2 or other.exact
    assert [one.at_least for one in found[3:]] >= [found[2].at_least] or not seconds


def _chain_optimum(costs: np.ndarray, tables: np.ndarray) -> tuple[list[int], float]:
    """The best choices of a chain, and their cost, by dynamic programming."""
    totals, pointers = [costs[0]], []
    for own, table in zip(costs[1:], tables, strict=True):
        through = totals[-1][:, None] + table
        pointers.append(through.argmin(0))
        totals.append(own + through.min(0))
    choices = [int(totals[-1].argmin())]
    for pointer in reversed(pointers):
        choices.append(int(pointer[choices[-1]]))
    return choices[::-1], float(totals[-1].min())


def test_table_of_collectives(plan: Plan):
    """Its shares and its total are those of the plan, also where rows are left out."""
    whole, short = plan.table().splitlines(), plan.table(limit=2).splitlines()
    assert size_cell(plan.communication_bytes) in whole[-1] and whole[-1].split() == short[-1].split()
    assert sum(float(line.split()[-2]) for line in whole[2:-1]) == pytest.approx(100, abs=1)
    assert len(short) == 6 and short[4].startswith("and ")


def test_table_of_equal_layers():
    """Collectives of layers that only differ in their numbers are one row."""

    def step(state, x):
        for w in state:
            x = jax.numpy.tanh(x @ w)
        return x

    pins = {"0/*": P("data"), "1": P("data")}
    plan = shardplan.plan(
        step, MESH, [jax.ShapeDtypeStruct((256, 256), "float32")] * 8, jax.ShapeDtypeStruct((4096, 256), "float32"),
        pins=pins, hardware="h100",
    )  # fmt: skip
    assert re.search(r"^all-gather +data .* 0/\* .* 8 ", plan.table(), re.MULTILINE)
    assert "in 8 equal layers" in plan.hotspots()


def test_hotspots(plan: Plan):
    """They are in the order of their costs, each with what would remove it."""
    text = plan.hotspots(5)
    costs = [_megabytes(cost) for cost in re.findall(r"^([\d.,]+ \w+) \(", text, re.MULTILINE)]
    assert len(costs) == 5 and costs == sorted(costs, reverse=True)
    assert text.count("  removed by  ") == 5 and len(re.findall(r", for \+[\d.,]+ \w+ each$", text, re.MULTILINE)) >= 3


def test_removal_against_brute_force():
    """The price of a free transition is that of the best assignment with it."""
    generator = np.random.default_rng(2)
    for _ in range(10):
        network = Network()
        for _ in range(4):
            network.add_variable(generator.integers(0, 9, 3))
        for u, v in [(0, 1), (1, 2), (2, 3), (3, 0)]:
            table = generator.integers(0, 9, (3, 3))
            table[0, 1] = 0
            network.add_edge(u, v, table)
        costs = {choices: network.cost(choices) for choices in np.ndindex(3, 3, 3, 3)}
        best = min(costs, key=costs.__getitem__)
        found = without_transition(network, best, 1)
        free = [choices for choices in costs if network.tables[1][choices[1], choices[2]] == 0]
        assert found is not None
        assert found[0] == min(costs[choices] for choices in free) - costs[best]


def test_hotspots_of_a_plan_that_sends_nothing():
    plan = shardplan.plan(lambda x: x + 1, MESH, jax.ShapeDtypeStruct((64,), "float32"))
    assert plan.hotspots() == "no transition sends anything"
    assert "total" in plan.table()


def test_no_module_of_the_reports_prints_addresses(plan: Plan):
    assert " at 0x" not in str(plan) + plan.explain("op0", time_limit=0.1) + plan._repr_html_()
