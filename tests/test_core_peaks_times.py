"""How long XLA's last scheduler takes kernels and collectives to run, as its log says, and what they wait for."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from shardplan.memory.coalescing import is_scattered, moves_apart
from shardplan.memory.graph import Graph
from shardplan.memory.joining import join_kernels
from shardplan.memory.measured import product_microseconds
from shardplan.memory.measured_collectives import collective_microseconds
from shardplan.memory.merging import merge_nodes
from shardplan.memory.recomputing import kernels_of
from shardplan.memory.times import BYTES_MOVED, UNKNOWN, kernel_microseconds
from shardplan.memory.turning import turn_operands
from shardplan.schedule import Schedule

MESH = jax.sharding.AbstractMesh((8,), ("x",))


def _graph(step, *args, mesh=1, **options):
    schedule = shardplan.plan(step, mesh, *args, **options).schedule
    kernels = kernels_of(schedule.problem)
    return Graph(schedule, kernels, [], []), kernels


def _matrix(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


@pytest.mark.parametrize(
    ("kind", "size", "devices", "microseconds"),  # as XLA says of a compiled collective
    [
        ("all-to-all", 2**20, 8, 54.88),
        ("all-to-all", 1_310_720, 8, 68.6),  # at the rate of the nearest size that was measured
        ("all-to-all", 1_572_864, 8, 18.816),
        ("all-gather", 2**22, 4, 42.176),
        ("all-gather", 2**26, 2, 161.056),
        ("reduce-scatter", 2**31, 2, 5512.64),  # larger than all, and smaller
        ("all-reduce", 256, 8, 12.328),
        ("collective-permute", 2**26, 8, 877.273),
    ],
)
def test_a_collective_takes_as_long_as_xla_says(kind, size, devices, microseconds):
    assert collective_microseconds(kind, size, devices) == pytest.approx(microseconds, rel=1e-3)


def test_a_kernel_of_random_bits_takes_longer_than_writing_them():
    def drop(x, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0)

    key = jax.eval_shape(lambda: jax.random.key(0))
    graph, _ = _graph(drop, _matrix(4096, 4096), key)
    plain, _ = _graph(lambda x: jnp.where(x > 0.5, x, 0.0), _matrix(4096, 4096))
    assert max(plain.takes.values()) == pytest.approx(2 * 4 * 4096**2 / BYTES_MOVED)
    drawn = 360 / 20 * 4096**2 / BYTES_MOVED  # by the cycles that XLA counts; it reads and writes beside that
    assert max(graph.takes.values()) == pytest.approx(drawn + 0.05 * max(plain.takes.values()))


@pytest.mark.parametrize(
    ("compute", "microseconds"),  # as XLA says of a kernel
    [(jnp.tanh, 99.289), (jnp.exp, 82.231), (jnp.log, 126.37), (jnp.sin, 335.998), (jax.lax.erfc, 137.403)],
)
def test_a_kernel_takes_as_long_as_xla_says(compute, microseconds):
    graph, _ = _graph(compute, _matrix(2**25))
    assert [*graph.takes.values()] == [pytest.approx(microseconds, rel=0.01)]


def test_a_product_of_rows_that_are_reduced_takes_as_long_as_others():
    graph, _ = _graph(lambda x, w: jax.nn.softmax(x, axis=1) @ w, _matrix(1024, 1024), _matrix(1024, 1024))
    assert graph.takes[max(graph.takes)] == product_microseconds((1, 1024, 1024, 1024), 4)


def test_kernels_of_triton_take_no_time_as_xla_counts():
    graph, _ = _graph(lambda x: jax.nn.softmax(x, axis=1), _matrix(4096, 4096))
    assert graph.takes[max(graph.takes)] == UNKNOWN


def test_products_that_are_merged_take_as_long_as_one():
    def step(x, *weights):
        return sum(jnp.tanh(x @ w) for w in weights)

    graph, _ = _graph(step, _matrix(1024, 1024), *[_matrix(1024, 512)] * 4)
    assert sum(time == product_microseconds((1, 1024, 1024, 512), 4) for time in graph.takes.values()) == 4
    merge_nodes(graph)
    assert product_microseconds((1, 1024, 1024, 2048), 4) in graph.takes.values()
    assert product_microseconds((1, 1024, 1024, 512), 4) not in graph.takes.values()


def test_an_update_reads_once_what_its_moments_are_computed_from():
    def step(state, slope):
        weight, mean, square = state
        mean, square = 0.9 * mean + 0.1 * slope, 0.9 * square + 0.1 * slope**2
        return weight - mean / (1e-8 + square), mean, square

    graph, kernels = _graph(step, [_matrix(1024, 1024)] * 3, _matrix(1024, 1024), donate_argnums=0)
    join_kernels(graph, kernels)
    [time] = graph.takes.values()  # of four matrices that are read, and three that are written
    assert time == pytest.approx(7 * 4 * 1024**2 / BYTES_MOVED)


@pytest.mark.parametrize(
    ("x", "w", "unpacked"),
    [
        ((_matrix(1024, 1024), jax.P(None, "x")), (_matrix(1024, 8192), jax.P()), 1),  # it gathers columns
        ((_matrix(64, 8192), jax.P("x", None)), (_matrix(8192, 8192), jax.P("x", None)), 0),  # and rows
    ],
)
def test_parts_that_are_gathered_behind_other_dimensions_are_put_side_by_side_for_a_product(x, w, unpacked):
    pins = {"0": x[1], "1": w[1]}
    graph, kernels = _graph(lambda x, w: x @ w, x[0], w[0], mesh=MESH, pins=pins)
    [[gather, end]] = graph.gathers.items()
    assert graph.schedule.route(gather.value, gather.layout).steps[-1].kind == "all-to-all"
    [product] = [o.index for o in graph.program.operations if o.primitive.name == "dot_general"]
    assert end in graph.needs[product]
    turn_operands(graph, kernels)
    assert len(graph.further) == unpacked
    assert {end} == (graph.needs[min(graph.further)] if unpacked else graph.needs[product] & {end})
    assert (end in graph.needs[product]) != bool(unpacked) and graph.further <= graph.needs[product]


def test_parts_are_brought_from_the_copy_that_readers_share_where_the_value_lies_otherwise():
    pins = {"0": jax.P(None, "x"), "1": jax.P()}
    graph, kernels = _graph(lambda x, w: x @ w, _matrix(1024, 1024), _matrix(1024, 8192), mesh=MESH, pins=pins)
    [[gather, _]], assignment = graph.gathers.items(), graph.schedule.assignment
    copies = {**assignment.copies, gather.value: assignment.values[gather.value]}
    stored = {**assignment.values, gather.value: ((), ())}
    otherwise = Schedule(graph.schedule.problem, replace(assignment, values=stored, copies=copies))
    graph = Graph(otherwise, kernels, [], [])
    turn_operands(graph, kernels)
    assert len(graph.further) == 1  # as from a value that lies where the copy does


def test_a_product_of_a_graph_takes_as_long_as_it_is_measured():
    graph, _ = _graph(lambda x, w: x @ w, _matrix(1024, 1024), _matrix(1024, 1024))
    [index] = graph.takes
    product = graph.program.operations[index]
    assert graph.takes[index] == kernel_microseconds(graph.schedule, product, product.operands)


def _attention(heads):
    """A graph of a training step of attention, of which so many heads share keys, on one of 2 devices."""

    def loss(q, k, v):
        scores = jnp.einsum("bqkgd,btkd->bkgqt", q, k).astype("float32")
        mixed = jnp.einsum("bkgqt,btkd->bqkgd", jax.nn.softmax(scores, axis=-1).astype("bfloat16"), v)
        return jnp.sum(mixed.astype("float32") ** 2)

    queries, keys = (jax.ShapeDtypeStruct((4, 512, 2, *own, 64), "bfloat16") for own in ((heads,), ()))
    step, mesh = jax.grad(loss, argnums=(0, 1, 2)), jax.sharding.AbstractMesh((2,), ("x",))
    graph, kernels = _graph(step, queries, keys, keys, mesh=mesh, pins={"*": jax.P("x")})
    turn_operands(graph, kernels)
    join_kernels(graph, kernels)
    return graph


def test_scores_of_few_heads_that_share_keys_are_read_one_by_one():
    graph = _attention(4)
    names = {node: graph.program.operations[node].primitive.name for node in graph.reads}
    [turned] = graph.scattered
    assert names[turned] == "convert_element_type"
    assert graph.takes[turned] == pytest.approx(85.0888, rel=1e-3)  # by XLA's log; 3.8 if all was read at once
    copying = [graph.takes[node] for node in graph.further]
    assert max(copying) == pytest.approx(83.0018, rel=1e-3)  # so the forward pass turns what keys are weighed by
    assert not graph.joined  # for no sum reads all else so that the kernel reads


def test_scores_of_many_heads_that_share_keys_are_turned_in_tiles():
    graph = _attention(16)
    assert not graph.scattered
    assert graph.tiled
    assert graph.tiled.isdisjoint(graph.joined)  # such kernels add nothing up


def test_what_a_kernel_copies_twice_is_taken_from_its_results_after_a_sum():
    graph = _attention(4)
    last = max(node for node in graph.reads if graph.program.operations[node].primitive.name == "convert_element_type")
    assert last in graph.parts  # the scores' gradient, for queries' and keys' gradients
    sums = [node for node in graph.reads if graph.program.operations[node].primitive.name == "reduce_sum"]
    assert sums[-1] in graph.needs[last]  # nothing is made of a sum in the kernel that makes it
    [turned] = graph.scattered
    assert turned not in graph.parts


@pytest.mark.parametrize(
    ("shape", "order", "item", "scattered"),  # as XLA compiles a transposition: in tiles, or not
    [
        ((16, 2048, 8), (0, 2, 1), 4, False),
        ((16, 512, 8, 512), (0, 1, 3, 2), 4, True),
        ((16, 512, 16, 512), (0, 1, 3, 2), 4, False),
        ((16, 512, 512, 2), (0, 3, 2, 1), 1, False),
        ((16, 2, 512, 512), (0, 3, 2, 1), 1, True),
        ((16, 512, 512, 3), (0, 3, 2, 1), 2, True),  # two are packed into a bank, but not three times 21
        ((16, 512, 512, 5), (0, 3, 2, 1), 2, False),
        ((16, 512, 3, 6), (0, 3, 2, 1), 2, True),  # and fill ten banks at least
        ((16, 512, 512, 4), (0, 3, 2, 1), 4, True),
        ((16, 512, 512, 4), (0, 2, 1, 3), 4, False),  # what lies innermost stays
        ((1, 64, 1), (2, 1, 0), 4, False),
    ],
)
def test_what_is_turned_is_read_as_xla_does(shape, order, item, scattered):
    assert is_scattered(shape, range(len(shape)), order, item) is scattered


@pytest.mark.parametrize("waits", [(), ((1,),)])
@pytest.mark.parametrize(("split", "apart"), [((), False), ((0,), True)])
def test_a_sum_that_waits_is_moved_as_its_part_on_one_device_is(waits, split, apart):
    value = SimpleNamespace(shape=(64, 64, 16), dtype=np.dtype("float32"))
    schedule = SimpleNamespace(
        assignment=SimpleNamespace(values={0: (*waits, (), (), split)}),
        program=SimpleNamespace(values=[value]),
        space=SimpleNamespace(mesh=SimpleNamespace(degree=lambda axes: 4 ** len(axes))),
    )
    assert moves_apart(schedule, 0, None, (0, 2, 1)) == apart
