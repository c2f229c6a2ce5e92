"""Hardware profiles: the shipped ones, and mistakes in a user's own."""

import json

import ml_dtypes
import numpy as np
import pytest

from shardplan.compiled.target import targets
from shardplan.errors import ArgumentError
from shardplan.hardware import HardwareProfile, load, profiles

GOOD = {
    "devices_per_host": 4,
    "memory_bytes": 16e9,
    "memory_bytes_per_second": 1e12,
    "launch_seconds": 1e-5,
    "flops_per_second": {"float32": 1e13, "bfloat16": 1e14},
    "intra_host": {"bytes_per_second": 1e11, "latency_seconds": 1e-6},
    "inter_host": {"bytes_per_second": 1e10, "latency_seconds": 1e-5},
    "axes": {"data": {"bytes_per_second": 5e9, "latency_seconds": 2e-5}},
    "host_bytes_per_second": 2e10,
}


def write(tmp_path, entries) -> str:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(entries))
    return str(path)


def test_every_target_has_a_profile():
    assert set(targets()) <= set(profiles())


@pytest.mark.parametrize("name", profiles())
def test_shipped_profiles(name):
    profile = load(name)
    assert isinstance(profile, HardwareProfile)
    assert load(profile) is profile
    assert profile.sources
    twice = profile.flops_per_second("bfloat16") == 2 * profile.flops_per_second("float32")
    assert twice or name in ("b200", "cpu", "k80")
    assert profile.intra_host.bytes_per_second > profile.inter_host.bytes_per_second
    assert profile.intra_host.latency_seconds < profile.inter_host.latency_seconds


def test_links_to_hosts(tmp_path):
    """Profiles may leave them out: that of emulated devices does."""
    rates = {name: load(name).host_bytes_per_second for name in ("a100", "h100", "gh200", "cpu")}
    assert rates["a100"] < rates["h100"] < rates["gh200"] == load("gh200").intra_host.bytes_per_second
    assert rates["cpu"] is None
    assert load(write(tmp_path, GOOD)).host_bytes_per_second == 2e10


def test_later_devices_are_faster():
    a100, h100, h200, b200 = (load(name) for name in ("a100", "h100", "h200", "b200"))
    for rate in (
        lambda profile: profile.flops_per_second("bfloat16"),
        lambda profile: profile.memory_bytes_per_second,
        lambda profile: profile.intra_host.bytes_per_second,
    ):
        assert rate(a100) < rate(h100) <= rate(h200) < rate(b200)


@pytest.mark.parametrize(
    ("dtype", "like"),
    [
        (np.float32, "float32"),
        (np.dtype("int32"), "float32"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (ml_dtypes.float8_e4m3fn, "float8"),
        ("float8_e5m2", "float8"),
        (np.bool_, "int8"),
        (np.complex64, "float32"),
        (np.complex128, "float64"),
    ],
)
def test_rates_of_element_types(dtype, like):
    profile = load("h100")
    assert profile.flops_per_second(dtype) == profile.flops[like]


def test_rates_of_missing_element_types():
    """A missing type has the rate of the next wider one."""
    assert load("a100").flops_per_second("float8_e4m3fn") == load("a100").flops["bfloat16"]


def test_an_axis_across_hosts_has_their_network():
    profile = load("h100")
    inside, across = profile.intra_host, profile.inter_host
    assert profile.links({"data": 2, "model": 8}) == {"data": across, "model": inside}
    assert profile.links({"model": 8, "data": 2}) == {"model": across, "data": inside}
    assert profile.links({"a": 2, "b": 2, "c": 2}) == {"a": inside, "b": inside, "c": inside}
    assert profile.links({"data": 16}) == {"data": across}
    assert profile.links({"one": 1, "data": 8}) == {"one": inside, "data": inside}
    assert profile.bytes_per_second_link("data") == inside.bytes_per_second


def test_a_profile_of_ones_own(tmp_path):
    profile = load(write(tmp_path, GOOD))
    assert (profile.name, profile.devices_per_host, profile.memory_bytes) == ("mine", 4, 16_000_000_000)
    assert profile.link("data", {"data": 2, "model": 2}).bytes_per_second == 5e9
    assert profile.link("model", {"data": 2, "model": 8}) == profile.inter_host


BAD = [
    # what to change, what the message must say
    ({"memory_bytes": None}, "`memory_bytes` is missing"),
    ({"memory_bytes": -1}, "`memory_bytes` is `-1`"),
    ({"memory_bytes": "80 GB"}, "`memory_bytes` is `'80 GB'`, not a number"),
    ({"host_bytes_per_second": 55}, "`host_bytes_per_second` is `55`: a number from 1e\\+07"),
    ({"launch_seconds": 5}, "`launch_seconds` is `5`: a number from 1e-09 to 1"),
    ({"devices_per_host": 2.5}, "`devices_per_host` is `2.5`, not a whole number"),
    ({"flops_per_second": {}}, "lists no element type"),
    ({"flops_per_second": {"float32": float("nan")}}, "`flops_per_second.float32` is `nan`"),
    ({"intra_host": None}, r"`\[intra_host\]` is missing"),
    ({"intra_host": {"bytes_per_second": 1e11}}, "`intra_host.latency_seconds` is missing"),
    ({"intra_host": 7}, r"`\[intra_host\]` is `7`, not a section"),
    ({"axes": {"data": 3}}, r"`\[axes.data\]` is `3`, not a section"),
    ({"colour": "green"}, "`colour` is unknown"),
    ({"flops_per_second": {"float32": 1e12, "floot16": 1e12}}, "`flops_per_second.floot16` is no element type"),
    ({"sources": 5}, "`sources` is `5`, not a list of texts"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_mistakes_in_a_profile(tmp_path, change, message):
    entries = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    with pytest.raises(ArgumentError, match=message):
        load(write(tmp_path, entries))


def test_all_mistakes_are_named_at_once(tmp_path):
    with pytest.raises(ArgumentError) as caught:
        load(write(tmp_path, {**GOOD, "memory_bytes": -1, "launch_seconds": 9}))
    assert "memory_bytes" in str(caught.value)
    assert "launch_seconds" in str(caught.value)


def test_no_such_profile(tmp_path):
    with pytest.raises(ArgumentError, match="`h1000`: choose one of a100, b200, cpu, gh200, h100, h200, k80"):
        load("h1000")
    with pytest.raises(ArgumentError, match="No such file"):
        load(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("memory_bytes = = 3")
    with pytest.raises(ArgumentError, match="no valid TOML"):
        load(tmp_path / "broken.toml")
