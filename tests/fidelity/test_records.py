"""The compiled peaks on file: what they say, and that their choices still fit the programs."""

import pytest

from shardplan.memory.model import lifetimes_of
from shardplan.plans.pipeline import donated_leaves
from tests.fidelity.records import FOLDER, PARTS, in_words, problem_of, read, schedule_of
from tests.fidelity.steps import MESHES, part_of, step_of

_SMALL = "layers/"


def test_parts_are_disjoint_and_small():
    """No step is in two parts, and all files together take less than 3 MB."""
    steps = {part: {record.step for record in read(part)} for part in PARTS}
    assert steps["fit"] and steps["decide"]
    assert not steps["fit"] & steps["decide"]
    assert all(part_of(step) == part for part in ("fit", "decide") for step in steps[part])
    assert sum(path.stat().st_size for path in FOLDER.glob("*.jsonl.gz")) < 3e6


def test_a_record_has_the_bytes_of_its_operations():
    """Nothing is held above the peak, and the operation that runs at the peak is on file."""
    for record in read("decide"):
        assert record.mesh in MESHES
        assert 0.98 * record.peak <= 1024 * (max(record.live) + 1) <= 1.001 * record.peak + 1024


@pytest.mark.long
def test_recorded_choices_make_the_same_schedule_again():
    """Choices are words: they fit whatever the network's numbers are, and the count of their peak needs no search."""
    for record in [one for one in read("decide") if one.step.startswith(_SMALL)][:4]:
        problem = problem_of(record.step, record.mesh)
        schedule = schedule_of(record, problem)
        assert {name: getattr(record, name) for name in in_words(schedule)} == in_words(schedule)
        donated = donated_leaves(problem.program, step_of(record.step).donated)
        choices = problem.encode(schedule.assignment)
        predicted = lifetimes_of(schedule, donated).profile(choices).max()
        assert predicted == pytest.approx(record.peak, rel=0.25)
