"""Calibration: curves, the profile that they give, its file, and its error on points held out."""

import math
import re
from dataclasses import replace
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from shardplan.audits.calibrate import Calibration, Measured, calibrate, profile_toml
from shardplan.audits.microbenchmarks import Curve, collective, matrix_product, measure_curve, memory_traffic
from shardplan.compiled.target import gpu_mesh
from shardplan.hardware import load
from shardplan.layout.collectives import CollectiveKind


def _mesh():
    count = len(jax.devices())
    if count < 2:
        pytest.skip("needs two devices")
    return jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))


def test_a_curve_stops_where_splitting_saves_nothing():
    curve = measure_curve(lambda size: lambda: None, 4096, 1, clock=lambda run, size: max(size, 1000) * 1e-9)
    assert curve.sizes == (512, 1024, 2048, 4096)
    assert curve.seconds(8192) == pytest.approx(8192e-9)
    assert curve.error() == pytest.approx(0, abs=0.01)
    assert len(curve.held_out) == 3


def test_curves_of_slow_programs():
    """They end at about a tenth of a second."""
    curve = measure_curve(lambda size: lambda: None, 2**20, 1, clock=lambda run, size: 1e-4 * size)
    assert 500 < curve.sizes[-1] <= 1000


def test_the_time_to_start_a_program():
    """The curve excludes it: on a GPU it is a tenth of a millisecond, more than a small size takes."""
    curve = measure_curve(lambda size: size, 2**28, 32, clock=lambda size, _: 1e-4 + size / 3e12)
    assert curve.sizes[-1] == 2**28


KINDS = ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_collective_runs(kind):
    for found in jax.tree.leaves(collective(_mesh(), kind, ("x",))(1024)(3)()):
        assert np.isfinite(found).all()


@pytest.mark.parametrize("kind", ["product", "memory", *KINDS])
def test_repetitions_are_all_there_when_compiled(kind, monkeypatch):
    """XLA leaves out what is computed before, and what nothing reads, and makes one kernel of what it can."""
    texts = []

    class Compiled:
        def __init__(self, function):
            self.jitted = jit(function)

        def __call__(self, *args):
            texts.append(self.jitted.lower(*args).compile().as_text())

    jit = jax.jit
    monkeypatch.setattr(jax, "jit", Compiled)
    made = {"product": lambda: matrix_product(_mesh(), "float32", 64), "memory": lambda: memory_traffic(_mesh())}
    made.get(kind, lambda: collective(_mesh(), kind, ("x",)))()(1024)(5)()
    name = {"product": "dot|custom-call|fusion", "memory": "multiply|fusion"}.get(kind, kind)
    entry = texts[-1][texts[-1].index("ENTRY") :]
    assert len(re.findall(rf" (?:{name})\(", entry)) == 5


def test_bytes_sent_are_those_of_rings():
    kind = CollectiveKind
    assert 80 * kind.ALL_REDUCE.sent(4) == 120
    assert 80 * kind.ALL_GATHER.sent(4) == 80 * kind.REDUCE_SCATTER.sent(4) == 60
    assert 80 * kind.PERMUTE.sent(4) == 80


@pytest.mark.long
def test_a_profile_is_measured_written_and_read(tmp_path, capsys):
    mesh = _mesh()
    step = lambda w, x: w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)  # noqa: E731
    arguments = (jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((128, 64), jnp.float32))
    plan = shardplan.plan(step, mesh, *arguments)
    found = calibrate(mesh, plan, tmp_path / "ours.toml", largest_bytes=2**16, largest_side=128)
    read = load(tmp_path / "ours.toml")
    assert read.flops == found.profile.flops and set(read.flops) == {"float32"}
    assert read.axes == found.profile.axes and set(read.axes) == {"x"}
    assert math.isfinite(found.error) and "mean error of interpolation" in str(found)
    assert {m.name for m in found.measured} >= {"product float32", "memory", "all-reduce over x", "all-gather over x"}
    assert "measuring 1 of 4: product float32\nmeasuring 2 of 4: memory\n" in capsys.readouterr().err
    assert found.simulation is not None and "the step takes" in str(found)
    again = shardplan.plan(step, mesh, *arguments, objective="time", hardware=str(tmp_path / "ours.toml"))
    assert again.objective > 0


def test_lanes_of_a_calibrated_step():
    """A notebook shows the step of the plan by the measured rates, each lane with the share of time that it is busy."""
    shapes = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 2
    plan = shardplan.plan(lambda x, w: (x @ w).sum(), "data=8", *shapes)
    measured = Measured("memory", Curve((8, 16), (1.0, 2.0), ((12, 1.5),)), 0.0, 0.0)
    shown = Calibration(load("h100"), (measured,), shardplan.simulate(plan, "h100"))._repr_html_()
    assert "<td" in shown and re.search(r">compute, \d+% busy<", shown)
    assert "<svg" not in Calibration(load("h100"), (measured,))._repr_html_()


def test_the_file_of_a_shipped_profile_is_read_back(tmp_path):
    profile = load("h100")
    (tmp_path / "copy.toml").write_text(profile_toml(profile))
    copy = load(tmp_path / "copy.toml")
    assert (copy.flops, copy.intra_host, copy.inter_host) == (profile.flops, profile.intra_host, profile.inter_host)
    assert replace(copy, name="h100") == profile


def test_axes_of_any_name_are_read_back(tmp_path):
    profile = replace(load("h100"), axes={'a "b" \\c': load("h100").inter_host})
    (tmp_path / "axes.toml").write_text(profile_toml(profile))
    assert load(tmp_path / "axes.toml").axes == profile.axes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "no/such/folder/ours.toml"}, "there is no folder `no/such/folder`"),
        ({"path": "ours.json"}, "end it in `.toml`"),
        ({"largest_side": -1}, "`largest_side` is a whole number above 0, got `-1`"),
        ({"largest_bytes": 1e6}, "`largest_bytes` is a whole number above 0, got `1000000.0`"),
    ],
)
def test_arguments_that_cannot_be_measured_or_saved(options, message, capsys):
    """The error comes before any measurement."""
    with pytest.raises(shardplan.ArgumentError, match=re.escape(message)):
        calibrate(_mesh(), **options)
    assert "measuring" not in capsys.readouterr().err


def test_a_profile_that_cannot_be_written(tmp_path):
    (tmp_path / "taken.toml").mkdir()
    with pytest.raises(shardplan.ArgumentError, match="Is a directory"):
        Calibration(load("h100"), ()).save(tmp_path / "taken.toml")


@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
def test_compile_only_devices():
    """They are refused, and nothing runs on them."""
    with pytest.raises(shardplan.ArgumentError, match="devices that are there"):
        calibrate(gpu_mesh("h100", (2,), ("x",)))
    with pytest.raises(shardplan.ArgumentError, match="nothing runs on them"):
        shardplan.auto(jnp.sin, gpu_mesh("h100", (2,), ("x",)))(jnp.ones(4))


def test_a_mesh_without_devices():
    """It is refused."""
    with pytest.raises(shardplan.ArgumentError, match="devices that are there"):
        calibrate(jax.sharding.AbstractMesh((2,), ("x",)))
