"""The order of XLA's last scheduler, on graphs by hand: which node stands last, and which before it."""

from types import SimpleNamespace

import pytest

from shardplan.memory.placing import Placing


def _placed(needs, takes, parts=(), starts=None, arguments=None):
    """All nodes of a graph, the last one first; operations are those that are no collective's start or end."""
    starts = starts or {}
    operations = range(len(needs) - 2 * len(starts))
    graph = SimpleNamespace(
        needs={node: set(found) for node, found in needs.items()},
        takes=takes,
        place={node: float(node) for node in needs},
        starts=starts,
        arguments={node: (arguments or {}).get(node, set()) for node in needs},
        parts=set(parts),
        program=SimpleNamespace(operations=operations),
    )
    return Placing(graph).run()


@pytest.mark.parametrize(
    ("reader", "parts", "order"),
    [
        (5.0, (), [2, 1, 0]),  # it ran longer than a microsecond: what it needs can start
        (0.2, (), [2, 0, 1]),  # what can start before is placed in between
        (5.0, (1,), [2, 0, 1]),  # a library's result is taken from its workspace first
    ],
)
def test_what_waits_is_placed_behind_what_can_start(reader, parts, order):
    assert _placed({0: [], 1: [], 2: [1]}, {0: 9.0, 1: 9.0, 2: reader}, parts) == order


def test_what_fits_a_wait_is_placed_into_it():
    needs = {0: [], 1: [], 2: [], 3: [4], 4: [5], 5: []}
    takes = {0: 30.0, 1: 200.0, 2: 5.0, 3: 1.0, 4: 32.0, 5: 0.0}
    placed = _placed(needs, takes, starts={4: 5})
    assert placed[:3] == [3, 4, 0]


def test_what_reads_what_a_collective_brings_goes_before_what_leads_to_it():
    needs = {0: [4], 1: [4], 2: [1], 3: [], 4: [5], 5: []}
    takes = {0: 9.0, 1: 9.0, 2: 9.0, 3: 9.0, 4: 32.0, 5: 0.0}
    assert _placed(needs, takes, starts={4: 5})[0] == 0


def test_an_argument_that_nothing_else_reads_counts_as_what_can_be_placed():
    takes = {0: 9.0, 1: 9.0}
    assert _placed({0: [], 1: []}, takes) == [1, 0]
    assert _placed({0: [], 1: []}, takes, arguments={0: {7}}) == [0, 1]
