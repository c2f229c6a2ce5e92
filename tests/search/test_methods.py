"""`solve`: registry, determinism, interruption, time limits and statuses."""

import itertools
import subprocess
import sys
import time

import numpy as np
import pytest

from shardplan.search import METHODS, Network, NetworkError, Progress, Solution, solve
from shardplan.search.methods import Method, register
from shardplan.search.testing import random_networks
from shardplan.search.testing.einsum_networks import Program, gpt, lstm, resnet


def memory_bound_gpt(share: float) -> Network:
    """A GPT's network whose limit is this share of the peak that the unlimited best plan has."""
    net = gpt(2, batch=8, length=256, width=512, vocabulary=4096).network((2, 4), memory=True)
    net.usage_limit = None
    free = solve(net, gap=1e-3)
    net.usage_limit = net.peak(free.choices)[0] * share
    return net


def test_the_registry_refuses_duplicates_and_unknown_names() -> None:
    with pytest.raises(ValueError, match="`exact`"):
        register("exact", Method(lambda run: None, proves=False, limits=False, annotated=False))
    with pytest.raises(ValueError, match="all_row_greedy, auto, equal_chop, exact, largest_first, recursive"):
        solve(Network(), method="fastest")
    with pytest.raises(ValueError, match="time_limit"):
        solve(Network(), time_limit=0)


def test_methods_that_read_layouts_say_what_is_missing() -> None:
    net = Network()
    net.add_variable([0.0], name="weights")
    for name, method in METHODS.items():
        if method.annotated:
            with pytest.raises(NetworkError, match="`weights`"):
                solve(net, method=name)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_methods_are_valid_and_deterministic(method: str) -> None:
    for program in (gpt(1, batch=8, length=128, width=256, vocabulary=1024), lstm(1, 2), resnet((1, 1))):
        net = program.network((2, 2))
        first, second = (solve(net, method=method, time_limit=20) for _ in range(2))
        assert np.isfinite(first.cost)
        assert first.cost == net.cost(first.choices)
        assert first.choices.tolist() == second.choices.tolist()
        assert first.lower_bound == second.lower_bound
        best = solve(net, method="exact").cost
        assert best <= first.cost * (1 + 1e-9)
        assert first.lower_bound <= best * (1 + 1e-9)


def test_tofu_cuts_every_tensor_and_beats_its_rivals() -> None:
    net = resnet((2, 2)).network((2, 2))
    costs = {name: solve(net, method=name).cost for name, method in METHODS.items() if method.annotated}
    assert costs["recursive"] <= min(costs["equal_chop"], costs["largest_first"], costs["all_row_greedy"])
    choices = solve(net, method="recursive").choices
    for v, annotation in net.annotations.items():
        if annotation.size:
            assert None not in annotation.layouts[choices[v]]


def test_timesteps_of_a_group_are_cut_alike() -> None:
    program = Program()
    steps = []
    for _ in range(3):
        program.repeat("step")
        x, w = program.tensor("bi", b=64, i=64), program.tensor("io", o=64)
        steps.append(program.einsum("bi,io->bo", x, w))
    net = program.network((4,))
    choices = solve(net, method="recursive").choices
    assert len({choices[v] for v in range(0, 9, 3)}) == 1


@pytest.mark.long
def test_memory_limit_binds_and_is_kept() -> None:
    net = memory_bound_gpt(0.6)
    solution = solve(net, time_limit=60, gap=0.05)
    assert np.isfinite(solution.cost)
    assert net.usage_limit is not None and solution.peak_usage <= net.usage_limit
    assert net.cost(solution.choices) == solution.cost
    assert solution.lower_bound <= solution.cost


@pytest.mark.slow
def test_local_search_improves_and_keeps_the_limit() -> None:
    from shardplan.search.budget import Callbacks
    from shardplan.search.graph.graph import Graph
    from shardplan.search.improve.large_neighbourhood import LargeNeighbourhoodSearch

    rng = np.random.default_rng(3)
    net = random_networks.random_memory_bound(rng, 60, 0.6)
    graph = Graph.of(_with_limit_on_the_start(net))
    live = graph.live()
    graph.hint = {v: 0 for v in live}
    start = graph.cost(graph.hint)
    local = LargeNeighbourhoodSearch(graph, start, {}, dict.fromkeys(live, 1.0))
    costs = []
    for _ in range(15):
        local.step(Callbacks(lambda: None, lambda: 60.0))
        costs.append(local.upper)
        full = graph.expand(graph.hint)
        assert net.usage_limit is not None and net.peak(full)[0] <= net.usage_limit
        assert net.cost(full) == local.upper
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < start


def _with_limit_on_the_start(net: Network) -> Network:
    """The network with the limit that the assignment of all zeros just keeps."""
    net.usage_limit = net.peak([0] * len(net))[0]
    return net


def test_an_infeasible_limit_is_explained() -> None:
    net = Network(usage_limit=10)
    for v in range(3):
        net.add_variable([0.0, 1.0])
        net.add_usage(v, [9, 4], 0, 2)
    solution = solve(net)
    assert solution.status == "infeasible"
    assert solution.cost == np.inf
    assert solution.peak_usage == 12
    assert 10 < solution.least_peak_bound <= 12


def test_infeasible_exclusions() -> None:
    net = Network()
    a, b = net.add_variable([0.0, 1.0]), net.add_variable([0.0, 1.0])
    net.add_edge(a, b, np.full((2, 2), 1e18))
    solution = solve(net)
    assert (solution.status, solution.cost) == ("infeasible", np.inf)


def test_progress_can_end_the_search() -> None:
    net = memory_bound_gpt(0.5)
    seen: list[Progress] = []

    def stop_after_three(progress: Progress) -> bool:
        seen.append(progress)
        return len(seen) < 3

    solution = solve(net, progress=stop_after_three, gap=0)
    assert len(seen) == 3
    assert solution.status in ("interrupted", "unknown")
    assert all(later.lower_bound >= earlier.lower_bound for earlier, later in itertools.pairwise(seen))


def test_keyboard_interrupt_is_not_caught() -> None:
    """Ctrl-C ends a search, and what called it, also where an assignment is known already."""

    def interrupt(progress: Progress) -> None:
        if progress.cost < np.inf:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        solve(gpt(2).network((2, 4)), progress=interrupt, gap=0)


@pytest.mark.long
@pytest.mark.parametrize("seconds", [1.0, 4.0])
def test_time_limits_are_kept(seconds: float) -> None:
    net = gpt(12).network((2, 4), memory=True)
    net.usage_limit = net.peak([0] * len(net))[0] / 3
    begun = time.monotonic()
    solve(net, time_limit=seconds, gap=0)
    assert time.monotonic() - begun < seconds + 1


@pytest.mark.slow
def test_the_package_knows_no_jax() -> None:
    code = (
        "import sys, types; sys.modules['shardplan'] = package = types.ModuleType('shardplan');"
        "package.__path__ = ['shardplan']; import shardplan.search, shardplan.search.testing.einsum_networks;"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('jax', 'jaxlib')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("method", ["auto", "exact"])
def test_without_time_there_is_a_valid_solution(method: str):
    """The time is over before the first sweep: what is found then is poor, but keeps the exclusions."""
    network = gpt(4).network((2, 4))
    solution = solve(network, method=method, time_limit=1e-4)
    assert solution.status == "feasible"
    assert solution.cost == pytest.approx(network.cost(solution.choices))
    assert np.isfinite(solution.cost)
    assert solution.lower_bound <= solution.cost


@pytest.mark.long
def test_work_limit_on_a_slow_machine():
    """A search that its work limit ends gives the same result on a slow machine."""
    net = gpt(2).network((8,), memory=True)
    free = solve(net, gap=1e-4)
    net.usage_limit = 0.65 * net.peak(free.choices)[0]

    def solved(pause: float) -> Solution:
        slowly = lambda progress: time.sleep(pause)  # noqa: E731
        return solve(net, gap=1e-9, time_limit=300, work_limit=0.3, progress=slowly)

    quick, slow = solved(0), solved(0.002)
    assert quick.status == "feasible", "the work was too little to close the gap"
    assert (quick.choices == slow.choices).all()
    assert (quick.work, quick.lower_bound, quick.iterations) == (slow.work, slow.lower_bound, slow.iterations)
    assert slow.work >= 0.3


@pytest.mark.long
def test_lowest_peak_where_nothing_fits() -> None:
    """The search for the lowest peak goes on while it gains."""
    net = memory_bound_gpt(0.01)
    solution = solve(net)
    assert solution.status == "infeasible"
    assert solution.iterations < 200
    assert solution.least_peak_bound <= solution.peak_usage < 1.01 * solution.least_peak_bound


def test_a_search_ends_soon_after_it_has_found_enough() -> None:
    rng = np.random.default_rng(0)
    pairs = [(u, v) for u in range(40) for v in range(u + 1, 40) if rng.random() < 0.2]
    net = random_networks.random_graph(rng, pairs, 6)
    whole = solve(net, time_limit=2000, work_limit=1.0)
    first = solve(net, gap=2 * whole.gap + 0.1, time_limit=2000, work_limit=1.0)
    quick = solve(net, time_limit=2000, work_limit=1.0, acceptable_gap=2 * whole.gap + 0.1)
    assert first.work <= quick.work < whole.work
    assert quick.cost <= first.cost and quick.status == first.status == "optimal"
    assert quick.work <= 1.6 * first.work
