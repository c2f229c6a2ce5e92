"""Kept measurements belong to the code that made them."""

from pathlib import Path

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
