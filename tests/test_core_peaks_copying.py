"""Predicted peaks: copies that kernels make of what products read."""

from types import SimpleNamespace

from shardplan.memory.combining import Gather
from shardplan.memory.copying import copying_kernel


def _graph(gathers):
    """A graph of one product, 5, which reads value 1, an argument."""
    added = []
    graph = SimpleNamespace(
        sources=lambda value: frozenset((value,)),
        maker=lambda value: None,
        brought=lambda value: (),
        add=lambda *node: added.append(node) or 9,
        reduced={},
        gathers=gathers,
        needs={5: {2, 4}},
        values={5: {1}},
    )
    return graph, added


def test_a_copy_waits_for_what_its_reader_has_gathered_anew_and_not_for_a_later_copy():
    shared, layout = Gather(1, ((), ())), ((), ())
    for gathers, needed in (({shared: 4, Gather(1, layout, 5): 2}, {2}), ({shared: 4}, {4}), ({}, set())):
        graph, added = _graph(gathers)
        assert copying_kernel(graph, (5, SimpleNamespace(index=5)), shared, 1.5) == 9
        assert added == [(4.5, needed, {1}, 1.5)]
