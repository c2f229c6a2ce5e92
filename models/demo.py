"""The demo: `make demo`, or `shardplan demo`.

The first part trains a small GPT on real text, planned for 8 emulated CPU devices, and compares its first losses with
the unplanned step. The second part plans a larger GPT for 8 H100, compiles the plan without these GPUs, and compares
the bytes that the compiled program sends with data parallelism and FSDP.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import shardplan
from shardplan.compiled.target import TargetNotInstalledError
from shardplan.models import gpt, text
from shardplan.models.demo_report import collective_table, compiled_table, layout_table, plan_summary
from shardplan.models.training import Batch, State, Training

DEVICES = 8
MESH = {"data": DEVICES}
COMPARED_STEPS = 5
LOSS_TOLERANCE = 1e-4
SMALL = gpt.Config(layers=2, width=128, heads=8, vocabulary=text.VOCABULARY, sequence=128, batch=16, learning_rate=2e-3)
LARGE = gpt.Config(layers=2, width=1024, heads=16, vocabulary=32768, sequence=1024, batch=16)


def main(arguments: list[str] | None = None) -> int:
    """Runs both parts. The exit status is 0 if planned and unplanned losses agree."""
    parser = argparse.ArgumentParser(
        prog="shardplan demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=125, help="training steps (default: %(default)s)")
    parser.add_argument("--no-audit", action="store_true", help="train only; plan and compile nothing for H100")
    options = parser.parse_args(arguments)
    emulate_devices(DEVICES)
    console = Console(highlight=False, soft_wrap=True)
    started = time.perf_counter()
    agree = train(console, options.steps)
    if not options.no_audit:
        audit(console)
    console.print(f"\nThe demo took {time.perf_counter() - started:.0f} s.")
    return 0 if agree else 1


def emulate_devices(count: int) -> None:
    """Makes JAX run on `count` emulated CPU devices. JAX refuses if a device has been used already."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def train(console: Console, steps: int) -> bool:
    """Plans the small GPT, compares its first losses with the unplanned step's, trains on. Returns whether the losses
    agree."""
    training = gpt.training(SMALL)
    corpus = text.load()
    console.rule("[bold]1. Train a GPT on 8 emulated devices")
    console.print(
        f"{training.parameters:,} parameters, {len(corpus):,} bytes of Python's own documentation, "
        f"mesh {MESH}, batches of {SMALL.batch} x {SMALL.sequence} bytes"
    )
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH))
    step = shardplan.auto(training.train_step, mesh, donate_argnums=(0,))
    with console.status("planning"):
        before = time.perf_counter()
        plan = step.plan(training.state, training.batch)
        seconds = time.perf_counter() - before
    console.print(plan_summary(plan, seconds))
    console.print(layout_table(plan))
    console.print(collective_table(plan))
    batches = text.batches(corpus, SMALL.batch, SMALL.sequence)
    first = list(islice(batches, COMPARED_STEPS))
    with console.status("compiling the planned and the unplanned step"):
        state, agree = compare_first_steps(console, training, step, first)
    train_on(console, step, state, batches, steps - COMPARED_STEPS)
    return agree


def compare_first_steps(console: Console, training: Training, step: Any, batches: list[Batch]) -> tuple[State, bool]:
    """Runs the same batches through the planned and the unplanned step. Returns the planned state, and whether losses
    agree."""
    plain_step = jax.jit(training.train_step)
    planned_state, plain_state = training.init(), training.init()
    worst = 0.0
    console.print("\n step   planned loss   unplanned loss   relative difference")
    for number, batch in enumerate(batches, start=1):
        planned_state, planned = step(planned_state, batch)
        plain_state, plain = plain_step(plain_state, batch)
        difference = abs(float(planned) - float(plain)) / abs(float(plain))
        worst = max(worst, difference)
        console.print(f"{number:5} {float(planned):14.6f} {float(plain):16.6f} {difference:21.1e}")
    agree = worst <= LOSS_TOLERANCE
    verdict = "[green]they agree" if agree else "[red]they differ"
    console.print(f"{verdict}[/] (at most {worst:.1e}; allowed {LOSS_TOLERANCE:.0e})\n")
    return planned_state, agree


def train_on(console: Console, step: Any, state: State, batches: Iterator[Batch], steps: int) -> None:
    """Continues the training and prints the loss, the mean since the last line."""
    every = max(1, steps // 6)
    losses: list[float] = []
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    started = time.perf_counter()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("training", total=steps)
        for number, batch in enumerate(islice(batches, max(0, steps)), start=1):
            state, loss = step(state, batch)
            losses.append(float(loss))
            progress.advance(task)
            if number % every == 0:
                mean = sum(losses) / len(losses)
                rate = (time.perf_counter() - started) / number
                console.print(f"step {COMPARED_STEPS + number:4}: loss {mean:.3f}, {1e3 * rate:.0f} ms per step")
                losses.clear()


def audit(console: Console) -> None:
    """Plans the large GPT for 8 H100, and compiles it, data parallelism and FSDP for them, if this JAX can."""
    training = gpt.training(LARGE)
    state, batch = training.state, training.batch
    console.print()
    console.rule("[bold]2. Plan a larger GPT for 8 H100, and compile it without one")
    console.print(
        f"{training.parameters / 1e6:.0f} million parameters, batch of {LARGE.batch} x {LARGE.sequence} tokens, "
        f"float32, mesh {MESH}"
    )
    mesh = jax.sharding.AbstractMesh(tuple(MESH.values()), tuple(MESH))
    with console.status("planning"):
        before = time.perf_counter()
        plan = shardplan.plan(training.train_step, mesh, state, batch, donate_argnums=(0,))
        seconds = time.perf_counter() - before
    console.print(plan_summary(plan, seconds))
    try:
        with console.status("compiling the plan for 8 H100"):
            held = shardplan.audit(plan, target="h100")
    except TargetNotInstalledError as error:
        console.print(f"\nThe audit is left out, since the GPU compiler is missing here: {error}", markup=False)
        return
    console.print()
    console.print(str(held), markup=False)
    with console.status("compiling data parallelism and FSDP for 8 H100"):
        table = compiled_table(held, training.train_step, state, batch)
    console.print()
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
