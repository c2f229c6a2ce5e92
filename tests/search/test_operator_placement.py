"""Operator placement on plain graphs: groups stay on one device, and cuts send few bytes."""

from itertools import pairwise

import numpy as np
import pytest

from shardplan.search.rivals.operator_placement import PLACEMENTS, WorkGraph, place


def chain(seconds, sizes, together=(), layers=None, held=None) -> WorkGraph:
    count = len(seconds)
    return WorkGraph(
        seconds=seconds,
        held_bytes=held or (0.0,) * count,
        layers=layers or tuple(range(count)),
        makers=tuple(range(count - 1)),
        sizes=sizes,
        reads=((), *((tensor,) for tensor in range(count - 1))),
        seconds_per_byte=1e-3,
        together=together,
    )


def drawn(seed: int, operations: int) -> WorkGraph:
    generator = np.random.default_rng(seed)
    reads = [()] + [
        tuple(sorted(set(generator.integers(max(0, n - 8), n, size=2).tolist()))) for n in range(1, operations)
    ]
    pairs = generator.integers(0, operations, size=(operations // 10, 2)).tolist()
    return WorkGraph(
        seconds=tuple(generator.uniform(0.1, 1.0, operations).tolist()),
        held_bytes=tuple(generator.uniform(0, 100, operations).tolist()),
        layers=tuple((np.arange(operations) // 5).tolist()),
        makers=tuple(range(operations)),
        sizes=tuple(generator.uniform(1, 100, operations).tolist()),
        reads=tuple(reads),
        seconds_per_byte=1e-2,
        together=tuple(map(tuple, pairs)),
    )


def cut_bytes(graph: WorkGraph, devices) -> float:
    return sum(
        graph.sizes[tensor]
        for operation, tensors in enumerate(graph.reads)
        for tensor in tensors
        if devices[graph.makers[tensor]] != devices[operation]
    )


@pytest.mark.parametrize("method", PLACEMENTS)
@pytest.mark.parametrize("count", [1, 3, 8])
def test_operations_and_groups_have_one_device(method: str, count: int):
    graph = drawn(3, 120)
    devices = place(graph, count, method)
    assert devices.shape == (120,)
    assert set(devices.tolist()) == set(range(count))
    assert all(devices[a] == devices[b] for a, b in graph.together)
    assert (devices == place(graph, count, method)).all()


@pytest.mark.parametrize("method", ["depth_first", "min_cut"])
def test_loads_are_balanced(method: str):
    graph = chain((1.0,) * 64, (10.0,) * 63)
    loads = np.bincount(place(graph, 4, method), minlength=4)
    assert loads.max() <= 1.2 * 16


def test_the_smallest_cut_is_found():
    """Two halves of equal load, one thin link between them, and thin ones elsewhere that part unequal loads."""
    graph = chain((1.0,) * 8, (9.0, 1.0, 9.0, 2.0, 9.0, 9.0, 1.0))
    assert place(graph, 2, "min_cut").tolist() in ([0, 0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0])


def test_the_cut_is_smaller_than_that_of_random_halves():
    graph = drawn(5, 200)
    found = cut_bytes(graph, place(graph, 2, "min_cut"))
    generator = np.random.default_rng(0)
    by_chance = [cut_bytes(graph, generator.integers(0, 2, 200)) for _ in range(50)]
    assert found < 0.5 * min(by_chance)


def test_a_weight_that_outweighs_the_rest_is_alone():
    graph = chain((0.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0), held=(8.0, 0.0, 0.0, 0.0))
    devices = place(graph, 2, "min_cut")
    assert (devices == devices[0]).tolist() == [True, False, False, False]


def test_layers_go_round():
    graph = chain((1.0,) * 6, (1.0,) * 5, layers=(0, 0, 1, 2, 3, -1))
    assert place(graph, 3, "round_robin").tolist() == [0, 0, 1, 2, 0, 0]


def test_a_path_goes_where_it_costs_least():
    """A chain whose tensors are dear to send and whose work is cheap stays on one device up to its share."""
    graph = chain((1e-6,) * 8, (1e6,) * 7)
    devices = place(graph, 2, "depth_first").tolist()
    assert sum(a != b for a, b in pairwise(devices)) == 1


def test_wrong_arguments():
    graph = chain((1.0, 1.0), (1.0,))
    with pytest.raises(ValueError, match="unknown placement `best`; there are depth_first, min_cut, round_robin"):
        place(graph, 2, "best")
    with pytest.raises(ValueError, match="at least one device, got 0"):
        place(graph, 0, "min_cut")
    with pytest.raises(ValueError, match="operation 0 reads tensor 0, which is made later"):
        WorkGraph((1.0,), (0.0,), (0,), (0,), (1.0,), ((0,),), 1.0)
    with pytest.raises(ValueError, match="an entry per operation"):
        WorkGraph((1.0,), (0.0, 1.0), (0,), (0,), (1.0,), ((),), 1.0)
