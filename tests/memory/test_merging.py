"""What XLA merges: collectives up to a size, products of one operand, kernels with several results; and the order."""

import jax
import jax.numpy as jnp
import pytest

from shardplan.memory.graph import Graph
from shardplan.memory.kernels import kernels_of
from shardplan.memory.merging import join, joined_kernels, merge_collectives, merged_products, ordered
from shardplan.memory.order import Nodes, backward_schedule
from shardplan.memory.timeline import Timeline
from tests.helpers.memory_programs import MESH, graph_of, planned, shape


def _gradients(width):
    def loss(weights, x, mixing):
        for w in weights:
            x = jnp.tanh(mixing @ jnp.tanh(x @ w))
        return jnp.sum(x)

    pins = {"0/*": jax.P(), "1": jax.P("x", None, None), "2": jax.P()}
    arguments = [shape(width, width)] * 4, shape(1024, 16, width), shape(16, 16)
    return planned(jax.grad(loss), *arguments, mesh=MESH, pins=pins)


def _groups(plan):
    """How many collectives each that starts is merged of."""
    graph = graph_of(plan)
    owner = merge_collectives(graph)
    starts = [owner[n] for n, node in enumerate(graph.nodes) if node.kind == "start"]
    return sorted(starts.count(own) for own in set(starts))


def test_reductions_are_merged_up_to_a_size():
    """Gradients are reduced together, but for those of 32 MiB each."""
    assert _groups(_gradients(64)) == [4]
    assert _groups(_gradients(8192)) == [1] * 4


def test_a_reduction_is_not_merged_with_one_it_needs():
    """Else it would wait for itself."""

    def step(x):
        factors = jnp.mean(jnp.square(x), axis=0)
        update = x * jax.lax.rsqrt(factors)
        return update / jnp.sqrt(jnp.mean(jnp.square(update), axis=0)), factors

    assert _groups(planned(step, shape(4096, 64), mesh=MESH, pins={"0": jax.P("x", None)})) == [1, 1]


def test_reductions_of_different_kinds_are_apart():
    """A maximum and a sum of one array are two collectives."""
    plan = planned(lambda x: (x.max(0), x.sum(0)), shape(4096, 64), mesh=MESH, pins={"0": jax.P("x", None)})
    assert _groups(plan) == [1, 1]


def merged_anywhere(schedule):
    """The products that are merged, as lists of operations' indices."""
    kernels, found = kernels_of(schedule), []
    for region in schedule.program.regions:
        graph = Graph(schedule, kernels, region.index, {})
        found += [[graph.nodes[number].place for number in group] for group in merged_products(graph)]
    return found


def test_products_of_one_operand_are_merged():
    """Queries, keys and values; not what needs another one of them, nor two large ones."""
    square, rows = shape(256, 256), shape(512, 256)
    three = planned(lambda x, q, k, v: (x @ q, x @ k, x @ v), rows, *[square] * 3)
    assert [len(group) for group in merged_anywhere(three.schedule)] == [3]
    chain = planned(lambda x, w: (x @ w, x @ (x.T @ (x @ w))), rows, square)
    assert all(len(group) < 3 for group in merged_anywhere(chain.schedule))
    large = shape(8192, 8192)
    assert not merged_anywhere(planned(lambda x, q, k: (x @ q, x @ k), large, large, large).schedule)


def test_the_result_of_merged_products_is_one_buffer():
    """All parts are live until the last one is read."""

    def step(x, q, k, v):
        late = x @ v
        return jnp.sum(jnp.tanh(x @ q) @ jnp.tanh(x @ k)) + jnp.sum(jnp.sort(jnp.tanh(late @ v), 0))

    timeline = Timeline(planned(step, *[shape(512, 512)] * 4).schedule)
    [group] = merged_anywhere(timeline.schedule)
    results = {timeline.program.operations[index].results[0] for index in group}
    spans = [(span.start, span.end) for item, span in timeline.spans.items() if item.value in results]
    assert len(group) == 3
    assert len(set(spans)) == 1


def test_updates_of_a_parameter_and_its_moment_are_one_kernel():
    """They read the same gradient, and go through as many elements."""

    def step(w, m, x):
        g = x.T @ x
        m = 0.9 * m + g
        return w - 0.1 * m, m

    graph = graph_of(planned(step, shape(256, 256), shape(256, 256), shape(512, 256)))
    [group] = joined_kernels(graph)
    assert {graph.nodes[number].place for number in group} == {3, 5} or len(group) == 2


def test_a_sum_runs_with_the_kernel_that_makes_what_it_adds_up():
    """A gradient that a product reads, and its sum for a bias."""

    def loss(w, b, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w + b) @ w))

    graph = graph_of(planned(jax.grad(loss, (0, 1)), shape(512, 512), shape(512), shape(4096, 512)))
    names = [{graph.program.operations[graph.nodes[n].place].primitive.name for n in g} for g in joined_kernels(graph)]
    assert any("reduce_sum" in group and len(group) > 1 for group in names)


def test_groups_that_would_wait_for_themselves_are_left_out():
    """A group that would need itself is not joined, the others are."""
    graph = graph_of(planned(lambda x: jnp.sort(jnp.sort(x, 0), 1) @ x, shape(64, 64)))
    owner = list(range(len(graph.nodes)))
    cyclic, fine = [0, 2], []
    assert join(graph, [group for group in (cyclic, fine) if group], owner) == owner
    assert len(ordered(graph, owner)) == len(graph.nodes)
    assert not merged_products(graph)


def test_a_collective_is_hidden_behind_what_needs_it_not():
    """The start of a collective (1) comes before work (3) that does not need its end (2)."""
    needs = {0: set(), 1: {0}, 2: {1}, 3: {0}, 4: {2, 3}}
    takes = {0: 5.0, 1: 50.0, 2: 50.0, 3: 20.0, 4: 5.0}
    order = backward_schedule(Nodes(needs, takes, {n: n for n in needs}, {2: 1}))[::-1]
    assert order.index(1) < order.index(3) < order.index(2)


@pytest.mark.parametrize("width", [64, 256])
def test_everything_runs_once_and_behind_what_it_needs(width):
    """The timeline of a plan with collectives."""
    timeline = Timeline(_gradients(width).schedule)
    made = {}
    for position, _, node in timeline.nodes():
        assert all(made.get(item, -1) <= position for item in node.reads)
        made |= dict.fromkeys(node.makes, position)
    makers = [item for _, _, node in timeline.nodes() for item in node.makes]
    assert len(makers) == len(set(makers))
