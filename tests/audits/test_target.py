"""Compiling for GPU targets: what is sent in real programs, against the formulas worked out by hand."""

import os
import subprocess
import sys
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardplan.audits.audit import measure
from shardplan.compiled.target import TargetNotInstalledError, compile_for, gpu_mesh, targets
from shardplan.errors import ArgumentError

pytest.importorskip("jax_plugins.xla_cuda12", reason="needs the extra `audit`")


def test_saved_kernels(tmp_path):
    """They do not change the program."""
    mesh = gpu_mesh("h100", (2,), ("a",))
    rows = NamedSharding(mesh, P("a"))

    def lowered(factor):
        step = jax.jit(lambda x: (jnp.sin(x) * factor).sum(), in_shardings=rows)
        return step.lower(jax.ShapeDtypeStruct((64, 8), jnp.float32))

    def compiled(program, kernels):
        found, _ = compile_for(program, str(tmp_path / kernels))
        return found.as_text(), found.memory_analysis().peak_memory_in_bytes

    program = lowered(2.0)
    compiled(lowered(1.0), "shared")
    assert os.path.getsize(tmp_path / "shared")
    assert compiled(program, "shared") == compiled(program, "alone")


MESH_SHAPE = {"a": 2, "b": 2, "c": 4}


def explicit(kind: str, axes: tuple[str, ...]):
    """A function of one device's block that makes one collective over `axes`."""
    return {
        "all-reduce": lambda x: lax.psum(x, axes),
        "reduce-scatter": lambda x: lax.psum_scatter(x, axes, tiled=True),
        "all-gather": lambda x: lax.all_gather(x, axes, tiled=True),
        "all-to-all": lambda x: lax.all_to_all(x, axes, 0, 1, tiled=True),
        "collective-permute": lambda x: lax.ppermute(x, axes, [(0, 1), (1, 0)]),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "axes", "sent"),
    [  # blocks of 32 x 64 float32: 8192 bytes
        ("all-reduce", ("a",), 2 * 8192 // 2),
        ("all-reduce", ("a", "c"), 2 * 7 * 8192 // 8),
        ("all-reduce", ("a", "b", "c"), 2 * 15 * 8192 // 16),
        ("reduce-scatter", ("c",), 3 * 8192 // 4),
        ("reduce-scatter", ("b", "c"), 7 * 8192 // 8),
        ("all-gather", ("b",), 8192),
        ("all-gather", ("a", "b"), 3 * 8192),
        ("all-to-all", ("c",), 3 * 8192 // 4),
        ("collective-permute", ("b",), 8192),
    ],
)
def test_each_collective_is_read_back(kind, axes, sent):
    mesh = gpu_mesh("h100", tuple(MESH_SHAPE.values()), tuple(MESH_SHAPE))
    everywhere = P(("a", "b", "c"))
    function = jax.shard_map(
        explicit(kind, axes), mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    block = jax.ShapeDtypeStruct((32 * 16, 64), jnp.float32)
    report = measure(jax.jit(function, in_shardings=NamedSharding(mesh, everywhere)).lower(block))
    assert report.mesh_axes == MESH_SHAPE
    assert {key: t.bytes_sent for key, t in report.traffic().items()} == {(kind, axes): sent}


WIDTH, HIDDEN, BATCH, LAYERS = 1024, 4096, 512, 4
PARAMETER_BYTES = LAYERS * 2 * WIDTH * HIDDEN * 4
ACTIVATION_BYTES = BATCH * WIDTH * 4
SCALAR = 7  # an all-reduce of the loss


def mlp_step(constrain, params, batch):
    """Gradient descent with momentum on a chain of ReLU layers; `constrain` splits activations."""

    def loss(params):
        x = batch
        for up, down in params["weights"]:
            x = constrain(jax.nn.relu(constrain(x, "outer") @ up), "inner")
            x = constrain(x @ down, "outer")
        return jnp.mean(jnp.square(x))

    value, gradients = jax.value_and_grad(loss)({"weights": params["weights"]})
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, params["moments"], gradients["weights"])
    return {"weights": jax.tree.map(lambda w, m: w - m, params["weights"], moments), "moments": moments}, value


def lower_mlp(mesh, weight_specs, batch_spec, activation_specs):
    weights = [tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))] * LAYERS
    state = {"weights": weights, "moments": weights}
    split = [tuple(NamedSharding(mesh, spec) for spec in weight_specs)] * LAYERS
    shardings = {"weights": split, "moments": split}

    def constrain(x, place):
        if activation_specs is None:
            return x
        return lax.with_sharding_constraint(x, NamedSharding(mesh, activation_specs[place]))

    step = jax.jit(
        partial(mlp_step, constrain),
        in_shardings=(shardings, NamedSharding(mesh, batch_spec)),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    return step.lower(state, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))


ROWS = {"outer": P("x"), "inner": P("x")}
TENSOR = {"outer": P(), "inner": P(None, "x")}
SEQUENCE = {"outer": P("x"), "inner": P(None, "x")}
WAYS = {
    # weights, batch, activations, bytes sent per kind
    "data parallel": ((P(), P()), P("x"), None, {"all-reduce": 2 * 7 * PARAMETER_BYTES // 8 + SCALAR}),
    "ZeRO-3": (
        (P("x"), P("x")),
        P("x"),
        ROWS,
        {
            "all-gather": 7 * PARAMETER_BYTES // 8,
            "reduce-scatter": 7 * PARAMETER_BYTES // 8,
            "all-reduce": SCALAR,
        },
    ),
    "Megatron": ((P(None, "x"), P("x")), P(), TENSOR, {"all-reduce": 7 * 2 * 7 * ACTIVATION_BYTES // 8}),
    "Megatron, sequence parallel": (
        (P(None, "x"), P("x")),
        P("x"),
        SEQUENCE,
        {
            "all-gather": 8 * 7 * ACTIVATION_BYTES // 8,
            "reduce-scatter": 7 * 7 * ACTIVATION_BYTES // 8,
            "all-reduce": SCALAR,
        },
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_known_splits_of_an_mlp(way):
    """Their bytes are those of the formulas."""
    weights, batch, activations, expected = WAYS[way]
    report = measure(lower_mlp(gpu_mesh("h100", (8,), ("x",)), weights, batch, activations))
    sent = Counter()
    for (kind, axes), traffic in report.traffic().items():
        assert axes == ("x",)
        sent[kind] += traffic.bytes_sent
    assert dict(sent) == expected
    assert report.communication_bytes == sum(expected.values())
    reduced = sum(sent[kind] for kind in ("all-reduce", "reduce-scatter"))
    assert report.reduced_bytes() == pytest.approx({"f32": reduced})
    overlapped = sum(t.overlapped_bytes for t in report.traffic().values())
    assert 0 < overlapped <= report.communication_bytes
    # Weights and moments stay where they are: donated arguments take no room twice.
    state_bytes = 2 * PARAMETER_BYTES // (1 if way == "data parallel" else 8)
    assert report.memory.aliases == state_bytes
    assert 0 <= report.memory.arguments - state_bytes <= ACTIVATION_BYTES
    assert report.memory.arguments <= report.memory.peak <= report.memory.arguments + report.memory.temporaries + 4096


@pytest.mark.parametrize("target", targets())
def test_loops_count_their_steps_on_every_target(target):
    mesh = gpu_mesh(target, (2, 4), ("data", "model"))

    def inner(x, w):
        return lax.with_sharding_constraint(jnp.tanh(x @ w), NamedSharding(mesh, P("data", None))), None

    def outer(x, ws):
        return lax.scan(inner, x, ws)[0], None

    weights = jax.ShapeDtypeStruct((3, 5, 256, 256), jnp.float32)
    batch = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    lowered = jax.jit(
        lambda x, ws: lax.scan(outer, x, ws)[0],
        in_shardings=(NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, None, "model"))),
        out_shardings=NamedSharding(mesh, P("data")),
    ).lower(batch, weights)
    report = measure(lowered)
    block = 32 * 256 * 4
    (traffic,) = (t for (kind, axes), t in report.traffic().items() if (kind, axes) == ("all-reduce", ("model",)))
    assert (traffic.times, traffic.bytes_sent) == (15, 15 * 2 * 3 * block // 4)
    assert str(report).startswith("collective")


def test_meshes():
    mesh = gpu_mesh("h200", (2, 8), ("data", "model"))
    assert dict(mesh.shape) == {"data": 2, "model": 8}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert "H200" in mesh.devices.flat[0].device_kind
    assert [d.process_index for d in mesh.devices.flat] == [0] * 8 + [1] * 8
    assert {d.process_index for d in gpu_mesh("h100", (2, 8), ("data", "model"), hosts=1).devices.flat} == {0}
    assert gpu_mesh("h100", (6,), ("x",)).devices.size == 6
    # Devices of the same topology are the same, so that programs and shardings can meet.
    assert gpu_mesh("h200", (16,), ("x",)).devices[3] == mesh.devices.flat[3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("v100", (8,), ("x",)), "no GPU target `v100`: choose one of a100, b200, h100, h200"),
        (("h100", (2, 4), ("x",)), "1 axis names"),
        (("h100", (0,), ("x",)), "at least one"),
        (("h100", (8,), ("x",), 3), "`3` hosts: choose a divisor of 8"),
        (("h100", (8,), ("x",), 0), "`0` hosts"),
    ],
)
def test_bad_meshes(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        gpu_mesh(*arguments)


def test_a_missing_compiler_names_the_extra(monkeypatch):
    monkeypatch.setattr("shardplan.compiled.target._cuda_plugins", list)
    with pytest.raises(TargetNotInstalledError, match=r'pip install "shardplan\[audit\]"'):
        gpu_mesh("h100", (7,), ("x",))


def test_a_program_without_a_mesh_needs_one():
    with pytest.raises(ArgumentError, match="mesh_axes="):
        measure(jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), jnp.float32)))


def test_programs_for_other_backends_are_measured_too():
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), jnp.float32))
    report = measure(lowered, mesh_axes={"x": 1})
    assert (report.communication_bytes, report.memory.arguments, report.memory.outputs) == (0, 32, 32)


PROBE = """
import jax
if {early}:
    jax.devices()
from shardplan.compiled.target import gpu_mesh
print(gpu_mesh("h100", (2,), ("x",)).devices.size, jax.devices()[0].platform)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "early", [pytest.param(True, marks=pytest.mark.long), False], ids=["after JAX started", "before JAX started"]
)
@pytest.mark.parametrize("platforms", [None, "cpu"])
def test_nothing_has_to_be_set_in_the_environment(early, platforms):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    if platforms:
        environment["JAX_PLATFORMS"] = platforms
    command = [sys.executable, "-c", PROBE.format(early=early)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "2"
