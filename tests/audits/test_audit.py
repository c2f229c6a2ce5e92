"""Audits: a plan's prediction and the compiled program."""

import os
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.audits.attribution import attribute
from shardplan.audits.audit import Audit, CompiledMemory, CompiledReport, _source_of, audit
from shardplan.audits.junit import junit_text
from shardplan.compiled.hlo.collectives import collectives
from shardplan.compiled.rematerialization import caught_rematerializations, rematerializations
from shardplan.compiled.target import gpu_mesh
from shardplan.errors import ArgumentError, ShardplanError
from shardplan.layout.collectives import CollectiveKind

MESH = {"data": 2, "model": 4}

compiles_for_gpus = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")


@dataclass(frozen=True)
class Planned:
    kind: str
    axes: tuple[str, ...]
    bytes: float
    times: int
    operation: str
    source: str = "train.py:3"


@dataclass(frozen=True)
class HandMadePlan:
    """`tanh(x @ w)` with its contraction split over `model`, its rows over `data`."""

    collectives: tuple[Planned, ...]
    mesh_axes: dict
    peak_bytes: float = 1e6

    @property
    def communication_bytes(self) -> float:
        return sum(c.bytes * c.times for c in self.collectives)

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        def function(x, w):
            with jax.named_scope("op7"):
                y = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("data")))
            with jax.named_scope("op8"):
                return jnp.tanh(y)

        shardings = (NamedSharding(mesh, P("data", "model")), NamedSharding(mesh, P("model")))
        step = jax.jit(function, in_shardings=shardings, out_shardings=NamedSharding(mesh, P("data")))
        return step.lower(jax.ShapeDtypeStruct((64, 256), jnp.float32), jax.ShapeDtypeStruct((256, 128), jnp.float32))


SENT = CollectiveKind.ALL_REDUCE.sent(4) * 32 * 128 * 4


def plan(*found: Planned) -> HandMadePlan:
    return HandMadePlan(found, MESH)


@compiles_for_gpus
def test_a_plan_that_compiles_as_planned():
    """The audit is ok, without differences."""
    checked = audit(plan(Planned("all-reduce", ("model",), SENT, 1, "op7 dot_general")), target="h100")
    assert checked.ratio == 1.0
    assert checked.ok(0.0)
    assert checked.differences() == {("all-reduce", ("model",)): 0}
    (operation,) = checked.operations
    assert (operation.operation, operation.predicted_bytes, operation.compiled_bytes) == (7, SENT, SENT)
    lines = str(checked).splitlines()
    assert lines[0].startswith("Audit for h100, mesh (data=2, model=4)")
    assert lines[-1] == "compiled / predicted bytes: 1.0000; 0.0 MB that no planned collective explains"
    assert len({len(line) for line in lines[2:3]}) == 1
    assert "op7 dot_general" in checked.details()
    assert checked._repr_html_().count("<tr>") == 4


@compiles_for_gpus
def test_a_plan_that_compiles_differently():
    """The audit has the differences."""
    planned = (
        Planned("all-gather", ("data",), 500, 2, "op3 dot_general"),
        Planned("all-reduce", ("model",), SENT / 2, 1, "op7 dot_general"),
    )
    checked = audit(plan(*planned), target="a100")
    assert checked.ratio == pytest.approx(SENT / (1000 + SENT / 2))
    assert not checked.ok(0.1)
    assert checked.differences() == {("all-gather", ("data",)): -1000, ("all-reduce", ("model",)): SENT / 2}
    assert [o.operation for o in checked.operations] == [7, 3]
    assert [o.difference for o in checked.operations] == [SENT / 2, -1000]
    assert checked.unexplained_bytes == SENT / 2


@compiles_for_gpus
def test_a_sum_that_is_planned_for_its_reader():
    """The compiled all-reduce has producer 7 and consumer 8, and belongs to 8."""
    checked = audit(plan(Planned("all-reduce", ("model",), SENT, 1, "op8 tanh")))
    assert checked.unexplained_bytes == 0
    (operation,) = checked.operations
    assert (operation.operation, operation.compiled_bytes) == (8, SENT)
    for other in (
        Planned("all-reduce", ("data",), SENT, 1, "op8 tanh"),
        Planned("all-reduce", ("model",), 9, 1, "op8"),
    ):
        assert audit(plan(other)).unexplained_bytes == SENT, "other axes or another size explain nothing"


@compiles_for_gpus
def test_axes_of_planned_and_compiled_collectives():
    """They are in the order of the mesh, without those of size one."""
    one = HandMadePlan(
        (Planned("all-reduce", ("model", "one"), SENT, 1, "op7 dot"),), {"data": 2, "one": 1, "model": 4}
    )
    assert audit(one).differences() == {("all-reduce", ("model",)): 0}


@compiles_for_gpus
def test_another_mesh_of_the_same_axes():
    checked = audit(plan(), mesh=gpu_mesh("h200", (2, 4), ("data", "model")))
    assert checked.target == ""
    assert str(checked).startswith("Audit, mesh (data=2, model=4)")
    with pytest.raises(ArgumentError, match=r"'data': 4, 'model': 2"):
        audit(plan(), mesh=gpu_mesh("h200", (4, 2), ("data", "model")))


def test_an_unknown_target():
    with pytest.raises(ArgumentError, match="`tpu`"):
        audit(plan(), target="tpu")


def test_a_step_in_the_place_of_its_plan():
    with pytest.raises(ArgumentError, match=r"a plan was expected, got `<function.*its \.plan\(\*args\)"):
        audit(lambda x: x)


@dataclass(frozen=True)
class CallingBack(HandMadePlan):
    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        def function(x):
            jax.debug.print("{}", x.sum())
            return x

        step = jax.jit(function, in_shardings=NamedSharding(mesh, P("data")))
        return step.lower(jax.ShapeDtypeStruct((8,), jnp.float32))


@compiles_for_gpus
@pytest.mark.skipif(any(d.platform == "gpu" for d in jax.devices()), reason="there is a GPU that can call back")
def test_a_program_that_calls_back():
    """The error says so."""
    with pytest.raises(ShardplanError, match=r"`jax.debug.print`.* needs a real GPU"):
        audit(CallingBack((), MESH))


def report(text: str) -> CompiledReport:
    return CompiledReport(MESH, collectives(text), CompiledMemory(0, 0, 0, 0, 0), 0.0, text)


@compiles_for_gpus
def test_a_ratio_of_nothing():
    nothing = report("HloModule m, num_partitions=8\n\nENTRY %main () -> f32[] {\n  ROOT %c = f32[] constant(0)\n}\n")
    assert Audit("", {}, 0, 0, nothing, ()).ok(0.0)
    assert not Audit("", {}, 10, 0, nothing, ()).ok(0.02)
    assert Audit("", {}, 0, 0, nothing, ()).ok
    assert not Audit("", {}, 10, 0, nothing, ()).ok  # not only its call tells
    something = audit(plan()).compiled
    assert Audit("", {}, 0, 0, something, ()).ratio == float("inf")


def test_a_collective_over_part_of_an_axis_has_a_row_of_its_own():
    text = """HloModule m, num_partitions=8

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4] parameter(0)
  ROOT %r = f32[4] all-reduce(%x), replica_groups=[4,2]<=[8], to_apply=%add
}
"""
    found = report(text)
    assert list(found.traffic()) == [("all-reduce", None)]
    assert "part of an axis" in str(found)
    assert "part of an axis" in found._repr_html_()


COLLECTIVES = """HloModule step, num_partitions=8
ENTRY %main (a: f32[64,8], b: f32[64,16]) -> f32[] {{
  %a = f32[64,8]{{1,0}} parameter(0), metadata={{op_name="jit(step)/op3/dot_general"}}
  %b = f32[64,16]{{1,0}} parameter(1), metadata={{op_name="jit(step)/op5/add"}}
  %c = f32[64,24]{{1,0}} concatenate(%a, %b), dimensions={{1}}, metadata={{op_name="jit(step)/op3/dot_general"}}
  ROOT %r = f32[64,{columns}]{{1,0}} all-reduce(%{operand}), replica_groups=[1,8]<=[8], to_apply=%add
}}
"""


def sent(columns: int) -> float:
    return 2 * 7 / 8 * 64 * columns * 4


@pytest.mark.parametrize(
    ("operand", "columns", "planned"),
    [
        ("b", 16, {5: 16}),  # the metadata leads to it
        ("b", 16, {4: 16, 9: 16}),  # nothing is planned for that operation: the nearest with the same size
        ("c", 24, {3: 16, 4: 8}),  # products of one source line that became one
    ],
)
def test_planned_collectives_by_source_and_size(operand: str, columns: int, planned: dict[int, int]):
    """All compiled bytes are attributed to planned operations, the first one in full."""
    compiled = collectives(COLLECTIVES.format(operand=operand, columns=columns))
    expected = [Planned("all-reduce", ("x",), sent(size), 1, f"op{number} dot") for number, size in planned.items()]
    found = {traffic.operation: traffic for traffic in attribute(expected, compiled, {"x": 8})}
    assert sum(traffic.compiled_bytes for traffic in found.values()) == sent(columns)
    assert all(traffic.difference <= 0 for traffic in found.values())
    assert found[min(planned)].difference == 0


def test_concatenated_tensors():
    """They are attributed together if their sizes add up."""
    compiled = collectives(COLLECTIVES.format(operand="c", columns=24))
    apart = [
        Planned("all-reduce", ("x",), sent(size), 1, f"op{number} dot", f"train.py:{number}")
        for number, size in ((7, 20), (8, 4))
    ]
    assert not any(traffic.difference for traffic in attribute(apart, compiled, {"x": 8}))
    unplanned, *missing = attribute(apart[:1], compiled, {"x": 8})
    assert (unplanned.operation, unplanned.difference, len(missing)) == (3, sent(24), 1)


def test_concatenated_tensors_and_a_missing_one():
    """Metadata attributes the concatenated tensors."""
    compiled = collectives(COLLECTIVES.format(operand="c", columns=24))
    planned = [
        Planned("all-reduce", ("x",), sent(size), 1, f"op{number} dot", f"train.py:{number}")
        for number, size in ((2, 4), (3, 8), (5, 16))
    ]
    left, *others = attribute(planned, compiled, {"x": 8})
    assert (left.operation, left.compiled_bytes) == (2, 0)
    assert [traffic.difference for traffic in others] == [0, 0]


@dataclass(frozen=True)
class GatheringPlan(HandMadePlan):
    """A reshape from one layout to another that XLA only knows by way of the whole tensor."""

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        def function(x):
            with jax.named_scope("op7"):
                y = jax.lax.with_sharding_constraint(2 * x, NamedSharding(mesh, P("data", "model", None)))
                y = y.reshape(64, 8, 16, 16)
                return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P(None, None, ("data", "model"), None)))

        step = jax.jit(function, in_shardings=NamedSharding(mesh, P("data")))
        return step.lower(jax.ShapeDtypeStruct((64, 128, 16), jnp.float32))


@compiles_for_gpus
def test_involuntary_full_rematerialization(capfd: pytest.CaptureFixture[str]):
    """The audit names the tensor and its operation, and XLA's lines do not reach stderr."""
    found = audit(GatheringPlan((), MESH))
    assert any(one.tensor.startswith("f32[") and "op7" in one.op_name for one, _ in found.rematerialized)
    assert "XLA gathers the whole f32[" in str(found)
    assert "Involuntary" not in capfd.readouterr().err
    assert not audit(plan()).rematerialized


def test_lines_of_other_writers_to_stderr(capfd: pytest.CaptureFixture[str]):
    """They are written after the compilation."""
    with caught_rematerializations() as found:
        os.write(2, b"another line\n")
        os.write(2, LOGGED.encode())
    assert capfd.readouterr().err == "another line\n"
    assert [one.tensor for one in found] == ["f32[32,16]"]


LOGGED = (
    "W0 1 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler cannot go from sharding "
    "{devices=[2,4]<=[8]} to {devices=[1,8]<=[8]} efficiently for HLO operation %a.1 = f32[32,16]{1,0} add(%b, %c), "
    'metadata={op_name="jit(f)/op0/add"}. As the last resort\n'
)


def test_source_line_of_a_rematerialization():
    """Its operation's number leads to the line of the user's code; without a number there is none."""
    shape = jax.ShapeDtypeStruct((8, 8), "float32")
    made = shardplan.plan(lambda x, y: x + y, "data=8", shape, shape)
    (found,) = rematerializations(LOGGED)
    assert _source_of(found, made).startswith("test_audit.py:")
    assert _source_of(replace(found, op_name="jit(f)/add"), made) == ""


@pytest.mark.parametrize("tolerance", [0.02, 0.5])
def test_junit_of_an_audit_with_odd_characters(tolerance: float):
    """The report is XML whatever the name, and its test fails outside of the tolerance."""
    memory = CompiledMemory(*(0,) * len(fields(CompiledMemory)))
    report = CompiledReport({"data": 8}, (), memory, 1.0, "", None, None)
    found = Audit("h100", {}, 100.0, 0.0, replace(report), ())
    suite = ElementTree.fromstring(junit_text(replace(found, predicted_bytes=0.0), "a<b>\x00&\u4e2d", tolerance))
    assert suite.get("failures") == "0"
    failed = ElementTree.fromstring(junit_text(found, "step", tolerance))
    failure = failed.find("testcase/failure")
    assert failure is not None and f"the tolerance is {tolerance:g}" in failure.get("message", "")
