"""Transitions and reductions: their planned bytes are the bytes that XLA compiles for the GPU target."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardplan
from shardplan.compiled.hlo.collectives import collectives
from shardplan.compiled.program import measure
from shardplan.compiled.target import compile_for, gpu_mesh
from shardplan.hardware import load
from shardplan.layout.collectives import Step
from shardplan.layout.layout import Domain, Layout, LayoutSpace, MeshAxes, replicated, to_spec
from shardplan.layout.objectives.bytes_sent import BytesSent
from shardplan.layout.shortest_paths import cheapest_paths
from shardplan.layout.transitions import Partial, Reductions, Transitions
from shardplan.problem.operation_collectives import halo_steps
from shardplan.problem.schedule import Schedule
from shardplan.problem.strategy import Halo
from shardplan.program.program import Value
from tests.helpers.random_programs import with_schedule

compiles_for_gpus = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")

NAMES = ("x", "y", "z")
MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2))
SHAPES = {1: (32,), 2: (32, 64), 3: (32, 16, 64)}


class Case:
    """Transitions and reductions over a mesh of compile-only GPUs."""

    def __init__(self, sizes: tuple[int, ...], padded: tuple[int, ...] = ()) -> None:
        self.axes = MeshAxes(NAMES[: len(sizes)], sizes)
        self.mesh: Mesh = gpu_mesh("h100", sizes, self.axes.names)
        self.transitions = Transitions(LayoutSpace(self.axes, frozenset(padded)), BytesSent(load("h100"), self.axes))
        self.reductions = Reductions(self.transitions)

    def domain(self, rank: int) -> Domain:
        return self.transitions.space.domain(SHAPES[rank])

    def sharding(self, layout: Layout) -> NamedSharding:
        return NamedSharding(self.mesh, to_spec(self.axes, layout))


@pytest.mark.parametrize("seed", range(5))
def test_paths_between_random_layouts(seed: int) -> None:
    """Paths are the cheapest ones, and their prices are the sums of their steps."""
    rng, count = np.random.default_rng(seed), 30
    costs = np.where(rng.random((count, count)) < 0.05, rng.integers(1, 9, (count, count)) / 8, np.inf)
    into = [
        {int(a): (costs[a, b], 1.0) for a in np.flatnonzero(np.isfinite(costs[:, b])) if a != b} for b in range(count)
    ]
    priced, previous = cheapest_paths(into)
    np.fill_diagonal(costs, 0.0)
    for middle in range(count):  # by the method of Floyd and Warshall
        costs = np.minimum(costs, costs[:, middle, None] + costs[middle])
    assert np.array_equal(priced.per_byte, costs) and 0 < np.isinf(costs).sum() < costs.size
    for source, target in itertools.product(range(count), repeat=2):
        length, total, node = 0, 0.0, target
        while node != source and np.isfinite(costs[source, target]):
            before = int(previous[source, node])
            length, total, node = length + 1, total + into[node][before][0], before
        assert (total, length) == (costs[source, target], priced.fixed[source, target]) or np.isinf(
            costs[source, target]
        )


def pairs_of(domain: Domain, count: int | None, seed: int = 0) -> list[tuple[Layout, Layout]]:
    every = list(itertools.permutations(domain.layouts, 2))
    return every if count is None else random.Random(seed).sample(every, min(count, len(every)))


def expected_bytes(paths: Sequence[Sequence[Step]], tensor_bytes: Sequence[float]) -> Counter[str]:
    sent: Counter[str] = Counter()
    for steps, size in zip(paths, tensor_bytes, strict=True):
        for step in steps:
            sent[step.kind] += round(step.fraction * size)
    return +sent


def transition_bytes(
    case: Case, moves: Sequence[tuple[Layout, Layout, Sequence[Step]]], shape: tuple[int, ...]
) -> Counter[str]:
    """Bytes by kind of collective of a program that makes all moves, each of a tensor of its own."""

    def program(arrays: list[jax.Array]) -> list[jax.Array]:
        results = []
        for array, (source, _, steps) in zip(arrays, moves, strict=True):
            held = jax.lax.with_sharding_constraint(array * 2.0, case.sharding(source))
            for step in steps:
                held = jax.lax.with_sharding_constraint(held, case.sharding(step.layout))
            results.append(held + 1.0)
        return results

    sources = [case.sharding(source) for source, _, _ in moves]
    targets = [case.sharding(target) for _, target, _ in moves]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32)] * len(moves)
    lowered = jax.jit(program, in_shardings=(sources,), out_shardings=targets).lower(arguments)
    return compiled_bytes(lowered)


def compiled_bytes(lowered: jax.stages.Lowered) -> Counter[str]:
    sent: Counter[str] = Counter()
    for found in collectives(compile_for(lowered)[0].as_text() or ""):
        sent[found.kind] += round(found.bytes_sent * found.times)
    return +sent


def check_transitions(case: Case, rank: int, count: int | None, at_once: int) -> None:
    domain, shape = case.domain(rank), SHAPES[rank]
    size = 4.0 * np.prod(shape)
    pairs = pairs_of(domain, count)
    wrong = []
    for start in range(0, len(pairs), at_once):
        moves = [(s, t, case.transitions.path(domain, s, t)) for s, t in pairs[start : start + at_once]]
        expected = expected_bytes([steps for _, _, steps in moves], [size] * len(moves))
        found = transition_bytes(case, moves, shape)
        if found != expected:
            wrong.append((moves, expected, found))
    assert not wrong


def test_transitions_that_begin_with_a_slice() -> None:
    """The table for all targets agrees with the paths."""
    axes = MeshAxes(NAMES, (2, 2, 2))
    transitions = Transitions(LayoutSpace(axes), BytesSent(load("h100"), axes))
    domain = transitions.space.domain(SHAPES[2])
    for source in domain.layouts:
        begins = transitions.begins_with_slice(domain, source)
        first = [transitions.path(domain, source, target)[:1] for target in domain.layouts]
        assert begins.tolist() == [bool(steps) and steps[0].kind == "slice" for steps in first]


@pytest.mark.slow
@compiles_for_gpus
@pytest.mark.parametrize(
    "sizes",
    [pytest.param((8,), marks=pytest.mark.long), (2, 4), pytest.param((2, 2, 2), marks=pytest.mark.long)],
    ids=str,
)
def test_compiled_bytes_of_sampled_transitions(sizes: tuple[int, ...]) -> None:
    """XLA sends the bytes of the path."""
    case = Case(sizes)
    for rank in SHAPES:
        check_transitions(case, rank, count=8, at_once=8)


@compiles_for_gpus
@pytest.mark.long
@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_compiled_bytes_of_transitions(sizes: tuple[int, ...], rank: int) -> None:
    """XLA sends the bytes of the path."""
    check_transitions(Case(sizes), rank, count=400, at_once=5)


# ---- sizes that the axes do not divide, inside of a step


def check_padded(case: Case, shape: tuple[int, ...], count: int, at_once: int) -> None:
    """Tensors that come and go whole, between them in uneven layouts."""
    domain, size = case.transitions.space.domain(shape), 4.0 * np.prod(shape)
    pairs = [(s, t) for s, t in pairs_of(domain, None) if {s, t} & domain.padded]
    pairs = random.Random(1).sample(pairs, min(count, len(pairs)))
    wrong = []
    for start in range(0, len(pairs), at_once):
        whole = replicated(len(shape))
        ways = [(whole, a, b, whole) for a, b in pairs[start : start + at_once]]
        routes = [[case.transitions.path(domain, *leg) for leg in itertools.pairwise(way)] for way in ways]

        def program(arrays: list[jax.Array]) -> list[jax.Array]:
            results = []
            for array, route in zip(arrays, routes, strict=True):  # noqa: B023
                held = array * 2.0
                for number, steps in enumerate(route):
                    held = jnp.sin(held) if number else held
                    for step in steps:
                        held = jax.lax.with_sharding_constraint(held, case.sharding(step.layout))
                results.append(jnp.cos(held))
            return results

        ends = [case.sharding(whole)] * len(routes)
        arguments = [jax.ShapeDtypeStruct(shape, jnp.float32)] * len(routes)
        found = compiled_bytes(jax.jit(program, in_shardings=(ends,), out_shardings=ends).lower(arguments))
        expected = expected_bytes([steps for route in routes for steps in route], [size] * 3 * len(routes))
        if abs(found.total() - expected.total()) > 3 * len(routes):  # rounding of each
            wrong.append((pairs[start : start + at_once], expected, found))
    assert not wrong


@pytest.mark.slow
@compiles_for_gpus
@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
def test_compiled_bytes_of_sampled_padded_transitions(sizes: tuple[int, ...]) -> None:
    """XLA sends the bytes of the path, padding included."""
    check_padded(Case(sizes, (101, 21)), (101, 16, 21), count=6, at_once=6)


@compiles_for_gpus
@pytest.mark.long
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("shape", [(101,), (21, 101), (101, 16), (101, 16, 12)], ids=str)
def test_compiled_bytes_of_padded_transitions(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """XLA sends the bytes of the path, padding included."""
    check_padded(Case(sizes, (101, 21, 12)), shape, count=60, at_once=1)


# ---- reductions

M, K, N = 64, 128, 256


def contractions(case: Case) -> list[tuple[Layout, tuple[int, ...], Layout, Layout]]:
    """Layouts of the operands and the result of a matrix product with pending axes, and layouts to end in."""
    space = case.transitions.space
    found: list[tuple[Layout, tuple[int, ...], Layout, Layout]] = []
    for places in itertools.product(range(4), repeat=len(case.axes.sizes)):
        groups = [tuple(a for a, place in enumerate(places) if place == n) for n in range(3)]
        for rows, columns, pending in itertools.product(*(space.orders(group) for group in groups)):
            if pending:
                found += [
                    ((rows, columns), pending, (rows, pending), target) for target in space.domain((M, N)).layouts
                ]
    return found


def check_reductions(case: Case, count: int | None) -> None:
    """XLA left alone: what a result costs that is constrained to its own layout and then along the planned path."""
    space = case.transitions.space
    domain = space.domain((M, N))
    wrong = []
    every = contractions(case)
    for own, pending, left, target in (
        every if count is None else random.Random(1).sample(every, min(count, len(every)))
    ):
        steps = case.reductions.path(domain, Partial(own, pending, island=False), target)
        if len([s for s in steps if s.kind == "reduce-scatter" and len(s.axes) > 1]):
            continue  # planned as an island
        right = (pending, own[1])

        def program(a: jax.Array, b: jax.Array) -> jax.Array:
            a = jax.lax.with_sharding_constraint(a * 2.0, case.sharding(left))  # noqa: B023
            b = jax.lax.with_sharding_constraint(b * 2.0, case.sharding(right))  # noqa: B023
            held = jax.lax.with_sharding_constraint(a @ b, case.sharding(own))  # noqa: B023
            for step in steps:  # noqa: B023
                if step.layout != own:  # noqa: B023
                    held = jax.lax.with_sharding_constraint(held, case.sharding(step.layout))
            return held + 1.0

        shapes = jax.ShapeDtypeStruct((M, K), jnp.float32), jax.ShapeDtypeStruct((K, N), jnp.float32)
        layouts = case.sharding(left), case.sharding(right)
        lowered = jax.jit(program, in_shardings=layouts, out_shardings=case.sharding(target)).lower(*shapes)
        expected, found = expected_bytes([steps], [4.0 * M * N]), compiled_bytes(lowered)
        if found != expected:
            wrong.append((own, pending, target, expected, found))
    assert not wrong


@pytest.mark.slow
@compiles_for_gpus
@pytest.mark.parametrize(
    "sizes",
    [pytest.param((8,), marks=pytest.mark.long), (2, 4), pytest.param((2, 2, 2), marks=pytest.mark.long)],
    ids=str,
)
def test_compiled_bytes_of_sampled_reductions(sizes: tuple[int, ...]) -> None:
    """XLA sends the bytes of the path."""
    check_reductions(Case(sizes), count=6)


@compiles_for_gpus
@pytest.mark.long
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_compiled_bytes_of_reductions(sizes: tuple[int, ...]) -> None:
    """XLA sends the bytes of the path."""
    check_reductions(Case(sizes), count=150)


# ---- the tables


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (2, 2, 2)], ids=str)
def test_paths_and_tables(sizes: tuple[int, ...]) -> None:
    """Paths have the prices of the tables, and no detour."""
    axes = MeshAxes(NAMES[: len(sizes)], sizes)
    transitions = Transitions(LayoutSpace(axes), BytesSent(load("h100"), axes))
    domain = transitions.space.domain((16, 32))
    table = transitions.table(domain, domain.layouts, 1 << 20)
    assert (np.diag(table) == 0).all()
    through = (table[:, :, None] + table[None, :, :]).min(axis=1)
    assert (table <= through + 1e-3).all()
    for (i, source), (j, target) in itertools.product(enumerate(domain.layouts), repeat=2):
        steps = transitions.path(domain, source, target)
        assert steps == () if source == target else steps[-1].layout == target
        priced = sum(transitions.price(step)[0] * (1 << 20) + transitions.price(step)[1] for step in steps)
        assert table[i, j] == pytest.approx(priced, abs=1e-3)


def test_splits_of_a_replicated_tensor() -> None:
    """They cost nothing."""
    axes = MeshAxes(("x", "y"), (2, 4))
    transitions = Transitions(LayoutSpace(axes), BytesSent(load("h100"), axes))
    domain = transitions.space.domain((16, 32))
    row = transitions.table(domain, domain.layouts, 1 << 20)[domain.position[replicated(2)]]
    assert (row < 1e-4).all()  # only that shorter paths go first


@pytest.mark.parametrize(
    ("source", "target", "kinds", "fraction"),
    [
        # ring costs of the whole tensor, on a mesh of 2 x 4 devices
        (((0,), ()), ((), ()), ["all-gather"], 1 / 2),
        (((1,), ()), ((), ()), ["all-gather"], 3 / 4),
        (((0, 1), ()), ((), ()), ["all-gather"], 7 / 8),
        (((0, 1), ()), ((0,), ()), ["all-gather"], 3 / 8),
        (((0, 1), ()), ((1,), ()), ["collective-permute", "all-gather"], 1 / 8 + 1 / 8),
        (((0,), ()), ((), (0,)), ["all-to-all"], 1 / 4),
        (((0, 1), ()), ((1, 0), ()), ["collective-permute"], 1 / 8),
        (((0,), ()), ((0,), (1,)), ["slice"], 0),
    ],
    ids=str,
)
def test_recipes(source: Layout, target: Layout, kinds: list[str], fraction: float) -> None:
    axes = MeshAxes(("x", "y"), (2, 4))
    transitions = Transitions(LayoutSpace(axes), BytesSent(load("h100"), axes))
    steps = transitions.path(transitions.space.domain((16, 32)), source, target)
    assert [step.kind for step in steps] == kinds
    assert sum(step.fraction for step in steps) == pytest.approx(fraction)


def test_corners_of_halos_are_sent_with_the_later_dimension():
    axes = MeshAxes(("x", "y"), (2, 4))
    layout: Layout = ((), (0,), (1,), ())
    image = Value(0, (2, 64, 64, 16), np.dtype("float32"))
    halos = [Halo(0, dim, (axis,), 1) for dim, axis in ((2, 1), (2, 1), (1, 0), (1, 0))]
    steps = halo_steps(axes, LayoutSpace(axes).domain(image.shape), layout, halos, image)
    # rows of 16 columns x 2 images x 16 channels x 4 bytes, then columns of 32 + 2 rows
    assert [(step.axes, round(step.fraction * image.total_bytes)) for step in steps] == [
        *[((0,), 2048)] * 2,
        *[((1,), 4352)] * 2,
    ]


@compiles_for_gpus
def test_transitions_per_reader_without_a_copy() -> None:
    """Without a shared copy, other readers still read the stored layout."""
    mesh, rows, columns = gpu_mesh("h100", (8,), ("x",)), PartitionSpec("x"), PartitionSpec(None, "x")

    def held(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def step(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        product = held(x @ y, rows)
        return jnp.sin(held(product, columns)), jnp.cos(held(product, columns)), x.T @ product

    tall, square = (jax.ShapeDtypeStruct((n, 512), jnp.float32) for n in (4096, 512))
    plan = shardplan.plan(step, mesh, tall, square, pins={"0": rows, "1": PartitionSpec()})
    assignment = plan.schedule.assignment
    product = plan.schedule.program.operations[-1].operands[1]
    assert isinstance(product, int)
    without_copy = replace(assignment, copies=assignment.copies | {product: assignment.values[product]})
    drawn = with_schedule(plan, Schedule(plan.schedule.problem, without_copy))
    planned = sum(sent.bytes for sent in drawn.schedule.collectives())
    assert measure(drawn.lower(mesh)).communication_bytes == pytest.approx(planned)
