"""The command line: ``shardplan plan|compare|audit|explain|report|diff|rules|demo``.

A step has the name ``module:attribute``. Its plan only needs shapes, and no devices:

    shardplan plan train:step --mesh data=2,model=4 --save plan.json
    shardplan explain train:step '0/params/*/kernel' --plan plan.json

The exit status is 0, or 1 for an audit outside of its tolerance and for a difference with ``diff --exit-code``, 2 for
an error, and 130 after Ctrl-C. An error is one message, or the traceback of an exception from the step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from shardplan.common.quiet_imports import without_cuda_notice

with without_cuda_notice():
    import jax

import numpy as np

from shardplan.audits.audit import audit
from shardplan.audits.junit import save_junit
from shardplan.auto import plan as make_plan
from shardplan.cli_arguments import load_step, parse_blocks, parse_pins, parse_positions
from shardplan.compare import CHECKPOINTS, DEFAULT_METHODS, compare
from shardplan.compiled.target import targets
from shardplan.errors import ArgumentError, ShardplanError, ShardplanWarning
from shardplan.hardware import profiles
from shardplan.layout.objectives import OBJECTIVES
from shardplan.options import FITS
from shardplan.plans.file import library_version
from shardplan.plans.page_head import STEP
from shardplan.plans.plan import Plan
from shardplan.plans.report import plan_line, plan_record
from shardplan.problem.baselines import BASELINES
from shardplan.search import METHODS
from shardplan.timing.operator_placement import PLACEMENT_METHODS

_usual_format = warnings.formatwarning

_FROM_FILE = ("audit", "explain", "report")
"""The commands that take a saved plan."""

_INTERRUPTED = 130
"""The exit status after Ctrl-C, by the rule of shells: 128 plus the number of the signal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. Without ``arguments``, it runs those of the process, and Ctrl-C
    ends the process."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        print("shardplan: interrupted", file=sys.stderr)
    if arguments is None:
        sys.stdout.flush()
        os._exit(_INTERRUPTED)  # JAX 0.10.2 ends an interrupted compilation by a segmentation fault
    return _INTERRUPTED


def _run(given: list[str]) -> int:
    if given[:1] == ["demo"]:  # it has its own options
        return _demo(given[1:])
    options = _parser().parse_args(given)
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")  # no command runs on a GPU
    with without_cuda_notice(anyhow=True), suppress(RuntimeError):
        jax.devices()
    warnings.formatwarning, usual = _formatted, warnings.formatwarning
    try:
        status: int = options.run(options)
    except ShardplanError as error:
        print(f"shardplan: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the output has gone
        sys.stderr.close()
        return 1
    except Exception:  # most likely of the step: a traceback, and not the status of a failed audit
        traceback.print_exc()
        return 2
    finally:
        warnings.formatwarning = usual
    return status


def _formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """The format of warnings: a ShardplanWarning is a message like an error, without a source line."""
    if issubclass(category, ShardplanWarning):
        return f"shardplan: {message}\n"
    return _usual_format(message, category, filename, lineno, line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shardplan", description="Plans how a JAX program is split over devices.")
    parser.add_argument("--version", action="version", version=f"shardplan {library_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run, command=name)
        return added

    planning = command("plan", _plan, "Plan a step: layouts, collectives, memory, and how near the optimum that is.")
    _add_step(planning)
    planning.add_argument("--save", metavar="FILE", help="write the plan to a file")
    comparing = command("compare", _compare, "Plan a step by several methods, side by side.")
    _add_step(comparing)
    known = ", ".join(dict.fromkeys((*BASELINES, *METHODS, *CHECKPOINTS, *PLACEMENT_METHODS)))
    usual = f"{','.join(DEFAULT_METHODS)}, and the policies of jax.checkpoint where the step does not fit"
    comparing.add_argument("--methods", help=f"of {known} (default: {usual})")
    comparing.add_argument("--plot", metavar="FILE", help="draw the methods as bars, into a PNG, SVG or PDF file")
    auditing = command("audit", _audit, "Compile a plan for GPUs without one, and hold the plan against that.")
    _add_step(auditing, from_file=True)
    auditing.add_argument("--target", default="h100", choices=targets(), help="GPU type (default: %(default)s)")
    auditing.add_argument(
        "--tolerance",
        type=float,
        default=0.02,
        help="allowed difference of bytes, as a fraction (default: %(default)s)",
    )
    auditing.add_argument("--junit", metavar="FILE", help="write the result as a JUnit report")
    auditing.add_argument("-o", "--output", metavar="FILE", help="write the plan and the compiled program as a page")
    explaining = command("explain", _explain, "Say why an argument or an operation is laid out as it is.")
    _add_step(explaining, from_file=True)
    explaining.add_argument("path", help="a path of arguments (globs allowed), or an operation: op12, 'model.py:31*'")
    reporting = command("report", _report, "Write a plan as one HTML page: tensors, collectives, memory, timeline.")
    _add_step(reporting, from_file=True)
    reporting.add_argument("-o", "--output", metavar="FILE", default="plan.html", help="(default: %(default)s)")
    reporting.add_argument("--compare", action="store_true", help="put data parallelism, FSDP and others into the page")
    differing = command("diff", _diff, "Say what two saved plans do in different ways.")
    differing.add_argument("one", help="a file written by `shardplan plan --save`")
    differing.add_argument("other", help="another one")
    differing.add_argument("--json", action="store_true", help="print JSON")
    differing.add_argument("-o", "--output", metavar="FILE", help="write both plans side by side as a page")
    differing.add_argument(
        "--exit-code", action="store_true", help="exit with 1 if the plans differ, as `git diff` does"
    )
    ruling = command("rules", _rules, "List every primitive with what it computes and how it splits.")
    ruling.add_argument("--json", action="store_true", help="print JSON")
    command("demo", _no_demo, "Train a GPT on emulated devices, then plan and compile a larger one for 8 H100.")
    return parser


def _add_step(parser: argparse.ArgumentParser, from_file: bool = False) -> None:
    """Adds the options of every command that plans. With ``from_file``, a saved plan may replace the planning."""
    text = "module:attribute of a training step with its state and batch, or what makes one"
    if from_file:
        text += "; or the file of a plan that this command line saved, which names its step"
    parser.add_argument("step", help=text)
    mesh = parser.add_mutually_exclusive_group(required=not from_file)
    mesh.add_argument("--mesh", help="data=2,model=4, or a number of devices")
    if from_file:
        mesh.add_argument("--plan", metavar="FILE", help="a saved plan of this step, instead of planning")
    parser.add_argument("--memory-limit", metavar="SIZE", help="per device, as 80GB (default: the hardware's)")
    parser.add_argument("--objective", choices=(*OBJECTIVES,), default="bytes", help="(default: %(default)s)")
    parser.add_argument(
        "--hardware", help=f"a profile, {', '.join(profiles())}, or a file (default: that of the devices)"
    )
    parser.add_argument("--pin", action="append", default=[], metavar="PATH=SPEC", help="as 'w/*=-,data'; repeatable")
    parser.add_argument("--donate", metavar="POSITIONS", help="arguments to donate, as 0,1 (default: none)")
    parser.add_argument("--reduce-dtype", metavar="DTYPE", help="a narrower type in which partial sums may travel")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of search (default: %(default)s)")
    parser.add_argument("--refine", type=int, default=1, metavar="N", help="compile N plans and keep the best")
    parser.add_argument(
        "--fit",
        default=",".join(FITS),
        metavar="MEANS",
        help="what may make a step fit where no layout does, or none (default: %(default)s)",
    )
    parser.add_argument("--host-memory", metavar="SIZE", help="per device, for --fit host (default: as a device has)")
    parser.add_argument("--blocks", action="append", default=[], metavar="PATH=N", help="as 'batch=8'; repeatable")
    parser.add_argument("--verify", action="store_true", help="compile plans near the memory limit, and keep within it")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _plan_options(options: argparse.Namespace) -> dict[str, Any]:
    dtype = options.reduce_dtype
    if dtype is not None:
        try:
            dtype = np.dtype(dtype)
        except (TypeError, ValueError, SyntaxError):  # NumPy evaluates texts with commas and spaces
            raise ArgumentError(f"there is no element type `{dtype}`: give one such as bfloat16") from None
    return {
        "memory_limit": options.memory_limit,
        "objective": options.objective,
        "hardware": options.hardware,
        "pins": parse_pins(options.pin) or None,
        "donate_argnums": parse_positions(options.donate.split(",")) if options.donate else None,
        "reduce_dtype": dtype,
        "time_limit": options.time_limit,
        "refine": options.refine,
        "verify": options.verify,
        "host_memory": options.host_memory,
        "fit": () if options.fit == "none" else tuple(options.fit.split(",")),
        "blocks": parse_blocks(options.blocks) or None,
    }


def _make_plan(options: argparse.Namespace) -> Plan:
    """The plan of the options: from a file, bound to its step, or planned."""
    if options.command in _FROM_FILE and options.step.endswith(".json"):
        if options.plan or options.mesh:
            raise ArgumentError(f"the plan `{options.step}` has its mesh and its step: leave out --plan and --mesh")
        loaded = Plan.load(options.step)
        step = load_step(_step_of(loaded, options))
        return loaded.bind(step.fn, *step.args)
    step = load_step(options.step)
    if options.command in _FROM_FILE and options.plan:
        return Plan.load(options.plan).bind(step.fn, *step.args)
    if options.mesh is None:
        raise ArgumentError("say which mesh to plan for (--mesh data=2,model=4), or give a saved plan (--plan FILE)")
    plan = make_plan(step.fn, options.mesh, *step.args, **_plan_options(options))
    return replace(plan, statistics={**plan.statistics, STEP: options.step})


def _step_of(plan: Plan, options: argparse.Namespace) -> str:
    """The name of a saved plan's step."""
    name = plan.statistics.get(STEP)
    if not isinstance(name, str):
        raise ArgumentError(
            f"the plan `{options.step}` does not say which step it is for (it was saved from Python): name the step, "
            f"as `shardplan {options.command} module:attribute --plan {options.step}`"
        )
    return name


def _plan(options: argparse.Namespace) -> int:
    plan = _make_plan(options)
    if options.save:
        try:
            plan.save(options.save)
        except OSError as error:
            raise ArgumentError(f"cannot write the plan to `{options.save}`: {error.strerror}") from error
    _print(options, plan_record(plan), plan)
    return 0


def _compare(options: argparse.Namespace) -> int:
    step = load_step(options.step)
    asked = options.methods
    methods = None if asked is None else tuple(method.strip() for method in asked.split(",") if method.strip())
    plan_options = _plan_options(options)
    comparison = compare(step.fn, options.mesh, *step.args, methods=methods, **plan_options)
    rows = [
        {
            "method": row.method,
            "communication_bytes": _number(row.communication_bytes),
            "objective": _number(row.objective),
            "gap": _number(row.gap),
            "peak_bytes": _number(row.peak_bytes),
            "simulated_seconds": _number(row.simulated_seconds),
            "seconds": row.seconds,
            "note": row.note,
        }
        for row in comparison
    ]
    if options.plot:
        comparison.save_plot(options.plot)
    _print(options, {"mesh": comparison.mesh_axes, "rows": rows}, comparison)
    return 0


def _audit(options: argparse.Namespace) -> int:
    if not options.tolerance >= 0:
        raise ArgumentError(f"a tolerance is a fraction of 0 or more, as 0.02, got `{options.tolerance}`")
    found = audit(_make_plan(options), target=options.target)
    agrees = found.ok(options.tolerance)
    record = {
        "target": options.target,
        "predicted_bytes": found.predicted_bytes,
        "compiled_bytes": found.compiled.communication_bytes,
        "ratio": _number(found.ratio),
        "predicted_peak_bytes": float(found.predicted_peak_bytes),
        "compiled_peak_bytes": found.compiled.memory.peak,
        "predicted_host_bytes": float(found.predicted_host_bytes),
        "compiled_host_bytes": found.compiled.memory.host,
        "within_tolerance": agrees,
        "overlapped_bytes": found.overlapped_bytes,
        "seconds": {
            when: {name: getattr(time, name) for name in ("work", "exposed", "hidden")}
            for when, time in (("predicted", found.predicted_time), ("compiled", found.compiled_time))
        },
        "collectives": [
            {
                "kind": one.kind,
                "axes": one.axes(found.compiled.mesh_axes),
                "bytes": one.bytes_sent,
                "times": one.times,
                "synchronous": one.synchronous,
                "kernels_meanwhile": one.kernels_meanwhile,
                "source": one.source,
            }
            for one in found.compiled.collectives
        ],
        "rematerialized": [
            {"tensor": one.tensor, "before": one.before, "after": one.after, "operation": one.op_name, "source": source}
            for one, source in found.rematerialized
        ],
    }
    if options.junit:
        save_junit(found, options.junit, options.step, options.tolerance)
    if options.output:
        found.to_html(options.output)
    _print(options, record, f"{found}\n\n{found.overlap()}" if agrees else f"{found}\n\n{found.details()}")
    return 0 if agrees else 1


def _explain(options: argparse.Namespace) -> int:
    text = _make_plan(options).explain(options.path)
    _print(options, {"explanation": text.splitlines()}, text)
    return 0


def _report(options: argparse.Namespace) -> int:
    plan, comparison = _make_plan(options), None
    if options.compare:
        step = load_step(_step_of(plan, options) if options.step.endswith(".json") else options.step)
        own = plan.recipe.options
        names = ("memory_limit", "objective", "hardware", "pins", "donate_argnums", "reduce_dtype")
        chosen = {name: getattr(own, name) for name in names}
        comparison = compare(step.fn, plan.mesh, *step.args, methods=DEFAULT_METHODS[1:], **chosen)
    plan.to_html(options.output, comparison)
    _print(options, {"page": options.output, **plan_record(plan)}, f"{options.output}: {plan_line(plan)}")
    return 0


def _diff(options: argparse.Namespace) -> int:
    difference = Plan.load(options.one).diff(Plan.load(options.other))
    specs = {path: [None if s is None else list(s) for s in pair] for path, pair in difference.layouts.items()}
    traffic = [{"kind": k, "axes": axes, "bytes": pair} for (k, axes), pair in difference.traffic.items()]
    if options.output:
        difference.to_html(options.output)
    record = {"layouts": specs, "collectives": traffic, "figures": difference.measures, "programs": difference.programs}
    _print(options, record, difference)
    return int(options.exit_code and bool(difference))


def _rules(options: argparse.Namespace) -> int:
    from shardplan.rules import coverage_markdown, coverage_records  # imported here, since only this command needs it

    print(json.dumps(coverage_records(), indent=1) if options.json else coverage_markdown(), end="")
    return 0


def _no_demo(options: argparse.Namespace) -> int:
    raise ArgumentError("the options of the demo come behind `demo`: shardplan demo --help")


def _demo(arguments: list[str]) -> int:
    """Runs ``python -m shardplan.models.demo``. The models are an extra, which this package only knows by name."""
    before, sys.argv = sys.argv, ["shardplan demo", *arguments]
    try:
        sys.modules.pop("shardplan.models.demo", None)  # runs again after an earlier import
        runpy.run_module("shardplan.models.demo", run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        print(
            f"shardplan: the demo needs the extra `models` (pip install 'shardplan[models]'): {error}", file=sys.stderr
        )
        return 2
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before
    return 0


def _print(options: argparse.Namespace, record: dict[str, Any], text: object) -> None:
    print(json.dumps(record, indent=1) if options.json else text)


def _number(value: float) -> float | None:
    """JSON has no infinities."""
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    sys.exit(main())
