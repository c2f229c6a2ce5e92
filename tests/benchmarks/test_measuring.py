"""Kept measurements: they belong to the code that made them, and no program is compiled twice."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import measuring


@pytest.mark.parametrize("changed", ["planner/top.py", "planner/below/deeper.py", "planner/devices/one.toml"])
def test_a_change_anywhere_below_a_folder_is_another_digest(changed: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(measuring, "ROOT", tmp_path)
    for name in ("planner/top.py", "planner/below/deeper.py", "planner/devices/one.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("first")
    before = measuring.code.__wrapped__(("planner",))
    assert measuring.code.__wrapped__(("planner",)) == before
    (tmp_path / changed).write_text("second")
    assert measuring.code.__wrapped__(("planner",)) != before


def test_the_same_program_is_compiled_once(tmp_path: Path, monkeypatch):
    rows = jax.NamedSharding(jax.make_mesh((2,), ("a",)), jax.P("a"))
    compiled = []

    def measure(lowered, kernels):
        compiled.append(lowered)
        return real(lowered)

    real = measuring.measure
    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr(measuring, "KEPT", tmp_path)

    def program(factor: float):
        step = jax.jit(lambda x: jnp.sum(x * factor), in_shardings=rows)
        return lambda: step.lower(jax.ShapeDtypeStruct((8,), jnp.float32))

    first, again, other = (measuring.compile_once(program(factor), None) for factor in (1.0, 1.0, 2.0))
    assert first == again and first.bytes_sent == other.bytes_sent
    assert len(compiled) == 2
