"""The command line: its output, its files, its exit status, and the documentation's commands."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import jax
import pytest

import shardplan
from shardplan.audits.audit import Audit
from shardplan.cli import main

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "cli.md").read_text()
needs_compiler = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="the extra `audit` is not installed")

STEPS = """
import os
import signal
import jax
from types import SimpleNamespace
from shardplan.models import mlp

shape = jax.ShapeDtypeStruct((64, 64), "float32")
tuple_ = (lambda x, w: x @ w, shape, shape)
holder = SimpleNamespace(inner=lambda: tuple_)
number = 3
bare = lambda state, batch: state
def broken():
    raise RuntimeError("no data here")
def raises(x):
    raise ZeroDivisionError("the user's own")
step_that_raises = (raises, shape)
def interrupts(x):
    os.kill(os.getpid(), signal.SIGINT)
    return x
step_with_ctrl_c = (interrupts, shape)
odd = mlp.training(mlp.Config(widths=(64, 64), batch=13))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two modules of steps, which the command line finds there."""
    (block,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(block)
    (tmp_path / "steps.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("train", "steps"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def run(text: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main(shlex.split(text))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def documented() -> list[str]:
    return [line[2:] for line in DOCUMENT.splitlines() if line.startswith("$ shardplan ")]


@pytest.mark.long
def test_the_documented_commands_work(capsys: pytest.CaptureFixture[str]):
    commands = documented()
    assert len(commands) > 5
    for command in commands:
        if " audit " in command and find_spec("jax_plugins") is None:
            continue
        status, output, errors = run(command.removeprefix("shardplan "), capsys)
        assert (status, errors) == (0, ""), command
        assert output.strip(), command
        if "--json" in command:
            json.loads(output)


def test_every_command_is_documented(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert set(listed) == {"plan", "compare", "audit", "explain", "report", "diff", "rules", "demo"}
    assert all(f"| `{name}" in DOCUMENT for name in listed)


def test_plan_as_json(capsys: pytest.CaptureFixture[str]):
    status, output, _ = run("plan train:step --mesh data=2,model=4 --json", capsys)
    record = json.loads(output)
    assert status == 0
    assert record["mesh"] == {"data": 2, "model": 4}
    assert record["communication_bytes"] == sum(entry["bytes"] for entry in record["collectives"])
    assert "0/params/layer_0/kernel" in record["layouts"]


def test_pins_are_kept(capsys: pytest.CaptureFixture[str]):
    _, output, _ = run("plan train:step --mesh data=2,model=4 --pin '*/params/*/kernel=-,model+data' --json", capsys)
    assert json.loads(output)["layouts"]["0/params/layer_1/kernel"] == [None, ["model", "data"]]


@pytest.mark.parametrize("step", ["steps:tuple_", "steps:holder.inner"])
def test_forms_of_a_step(step: str, capsys: pytest.CaptureFixture[str]):
    status, output, _ = run(f"plan {step} --mesh 8", capsys)
    assert status == 0
    assert "float32[64" in output


def test_page_of_a_step(capsys: pytest.CaptureFixture[str], folder: Path):
    """The page names the command that makes it, with the options of the plan."""
    command = "report train:step --mesh data=2,model=4 --pin '0/params/layer_0/kernel=-,data' --compare -o page.html"
    status, output, errors = run(command, capsys)
    assert (status, errors) == (0, "")
    assert output.startswith("page.html: Plan of train_step")
    text = (folder / "page.html").read_text()
    assert "shardplan report train:step --mesh data=2,model=4" in text
    assert "--pin 0/params/layer_0/kernel=-,data" in text
    assert '"fsdp",' in text and "--compare" in text
    assert "exclude each other" in text  # what the pin leaves of data parallelism


def test_page_of_a_saved_plan(capsys: pytest.CaptureFixture[str], folder: Path):
    run("plan train:step --mesh data=8 --save plan.json", capsys)
    status, output, _ = run("report plan.json -o page.html --json", capsys)
    assert status == 0
    assert json.loads(output)["page"] == "page.html"
    assert (folder / "page.html").exists()


def test_page_in_a_missing_folder(capsys: pytest.CaptureFixture[str]):
    status, output, errors = run("report train:step --mesh data=8 -o missing/page.html", capsys)
    assert (status, output) == (2, "")
    assert errors.splitlines() == ["shardplan: cannot write the page to `missing/page.html`: No such file or directory"]


def test_compare_as_json(capsys: pytest.CaptureFixture[str]):
    status, output, _ = run("compare train:step --mesh data=8 --methods exact,fsdp --memory-limit 1GiB --json", capsys)
    rows = json.loads(output)["rows"]
    assert status == 0
    assert [row["method"] for row in rows] == ["exact", "fsdp"]
    assert rows[0]["communication_bytes"] <= rows[1]["communication_bytes"]


def test_difference_as_json(capsys: pytest.CaptureFixture[str]):
    run("plan train:step --mesh data=8 --save one.json", capsys)
    run("plan train:step --mesh data=8 --pin 0/params/layer_0/kernel=data --save two.json", capsys)
    status, output, _ = run("diff one.json two.json --json -o diff.html", capsys)
    assert status == 0 and "Two plans" in Path("diff.html").read_text()
    assert json.loads(output)["layouts"]["0/params/layer_0/kernel"][1] == ["data"]


@needs_compiler
def test_an_audit_outside_of_its_tolerance_is_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def off(plan: shardplan.Plan, target: str) -> Audit:
        found = shardplan.audit(plan, target)
        return replace(found, predicted_bytes=found.compiled.communication_bytes / 1.1)

    monkeypatch.setattr("shardplan.cli.audit", off)
    command = "audit train:step --mesh data=8 --pin 1/inputs=data --pin '0/*=' --json"
    for tolerance, expected in ((0.11, 0), (0.09, 1)):
        status, output, _ = run(f"{command} --tolerance {tolerance}", capsys)
        record = json.loads(output)
        assert status == expected
        assert record["ratio"] == pytest.approx(1.1) and record["within_tolerance"] == (not expected)
    run(f"{command} -o audit.html", capsys)
    assert "planned and compiled for h100" in Path("audit.html").read_text()


def test_exit_code_of_a_difference(capsys: pytest.CaptureFixture[str]):
    """The status is 1 for plans that differ, and 0 for equal ones and without the option."""
    run("plan train:step --mesh data=8 --save one.json", capsys)
    run("plan train:step --mesh data=8 --save same.json", capsys)
    run("plan train:step --mesh data=8 --pin 0/params/layer_0/kernel=data --save two.json", capsys)
    assert run("diff --exit-code one.json same.json", capsys)[:2] == (0, "the plans are equal\n")
    assert run("diff --exit-code one.json two.json", capsys)[0] == 1
    assert run("diff one.json two.json", capsys)[0] == 0
    Path("torn.json").write_text("{")
    assert run("diff --exit-code one.json torn.json", capsys)[0] == 2


@needs_compiler
def test_audit_as_a_junit_report(capsys: pytest.CaptureFixture[str]):
    """It has one test, which fails where the status is 1. A path that cannot be written is an error."""
    command = "audit train:step --mesh data=8 --pin 1/inputs=data --pin '0/*=' --junit"
    assert run(f"{command} good.xml", capsys)[0] == 0
    suite = ElementTree.parse("good.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("1", "0")
    assert "compiled / predicted bytes" in (suite.findtext("testcase/system-out") or "")
    status, _, errors = run(f"{command} nowhere/audit.xml", capsys)
    assert status == 2 and "cannot write the report to `nowhere/audit.xml`: No such file" in errors


@needs_compiler
def test_a_saved_plan_is_audited_without_naming_its_step(capsys: pytest.CaptureFixture[str]):
    run("plan train:step --mesh data=8 --pin 1/inputs=data --pin '0/*=' --save plan.json", capsys)
    status, output, errors = run("audit plan.json --tolerance 0.02 --json", capsys)
    record = json.loads(output)
    assert (status, errors) == (0, "")
    assert 0 <= record["overlapped_bytes"] <= record["compiled_bytes"]
    assert record["compiled_bytes"] == sum(c["bytes"] * c["times"] for c in record["collectives"]) > 0
    status, output, _ = run("audit plan.json", capsys)
    assert "kernels meanwhile" in output and "overlapped" in output


def test_a_plan_saved_from_python_does_not_name_its_step(capsys: pytest.CaptureFixture[str]):
    shape = jax.ShapeDtypeStruct((64, 64), "float32")
    shardplan.plan(lambda x, w: x @ w, 8, shape, shape).save("plan.json")
    status, _, errors = run("audit plan.json", capsys)
    assert status == 2
    assert "does not say which step it is for" in errors and "--plan plan.json" in errors


@pytest.mark.slow
@needs_compiler
def test_refined_by_the_compiler(capsys: pytest.CaptureFixture[str]):
    status, output, _ = run("plan train:step --mesh data=8 --refine 2 --json", capsys)
    assert status == 0
    rows = json.loads(output)["refined"]
    assert [row["way"] for row in rows] == ["as asked", "objective time"]
    assert sum(row["kept"] for row in rows) == 1
    assert "objective time" in run("plan train:step --mesh data=8 --refine 2", capsys)[1]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("audit train:step", "say which mesh to plan for"),
        ("audit plan.json --mesh 8", "leave out --plan and --mesh"),
        ("audit nothing.json", "cannot read the plan `nothing.json`"),
        ("plan train:step --mesh 8 --refine 99", "refine is a number of plans from 1 to 8"),
        ("plan nothere:step --mesh 8", "cannot import `nothere` for the step `nothere:step`"),
        ("plan steps.py:number --mesh 8", "write `steps:number`"),
        ("plan train:nothing --mesh 8", "there is no step `train:nothing`"),
        ("plan train --mesh 8", "a step is named `module:attribute`, got `train`"),
        ("plan steps:number --mesh 8", "`steps:number` is no step"),
        ("plan steps:bare --mesh 8", "`steps:bare` is no step"),
        ("plan steps:broken --mesh 8", "`steps:broken` raised RuntimeError when it was called: no data here"),
        ("plan train:step --mesh data=two", "a mesh is written `data=2,model=4`"),
        ("plan train:step --mesh a=2,a=4", "uses an axis name twice"),
        ("plan train:step --mesh 0", "a mesh needs at least one device"),
        ("plan train:step --mesh 8 --pin data", "a pin is written `path=spec`"),
        ("plan train:step --mesh data=8 --pin nothing=data", "the pin `nothing` matches no argument"),
        ("plan train:step --mesh 8 --memory-limit much", "a size is written `80GB`"),
        ("plan train:step --mesh 8 --memory-limit 1KB", "the arguments alone take"),
        ("plan train:step --mesh 8 --hardware abacus", "there is no hardware profile `abacus`"),
        ("plan train:step --mesh 8 --reduce-dtype wide", "there is no element type `wide`"),
        ("plan train:step --mesh 8 --reduce-dtype float8_e5m2", "`float8_e5m2`: 8 bits have neither the range"),
        ("plan train:step --mesh 8 --donate first", "positions of arguments are numbers"),
        ("plan train:step --mesh 8 --save nowhere/plan.json", "cannot write the plan to `nowhere/plan.json`"),
        ("explain train:step nothing --mesh 8", "`nothing` matches no argument and no operation"),
        ("explain train:step op0 --plan nothing.json", "cannot read the plan `nothing.json`"),
        ("diff steps.py steps.py", "is torn, or no plan at all"),
        ("compare train:step --mesh 8 --methods magic", "there is no method `magic`"),
        ("demo2", ""),
    ],
)
def test_errors_are_one_message_and_status_2(command: str, message: str, capsys: pytest.CaptureFixture[str]):
    status: object
    try:
        status = main(shlex.split(command))
    except SystemExit as end:  # argparse's own
        status = end.code
    errors = capsys.readouterr().err
    assert status == 2
    assert message in errors
    assert "Traceback" not in errors


def test_a_plan_of_another_step_is_refused(capsys: pytest.CaptureFixture[str]):
    run("plan steps:tuple_ --mesh 8 --save plan.json", capsys)
    status, _, errors = run("explain train:step op0 --plan plan.json", capsys)
    assert status == 2
    assert "the plan was made for another program" in errors


def test_exceptions_of_the_step(capsys: pytest.CaptureFixture[str]):
    """Its traceback is shown, and the exit status is not that of an audit outside of its tolerance."""
    status, _, errors = run("audit steps:step_that_raises --mesh 8", capsys)
    assert status == 2
    assert "ZeroDivisionError: the user's own" in errors and "in raises" in errors


def test_a_module_that_cannot_be_read(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "torn.py").write_text("def step(:")
    status, _, errors = run("audit torn:step --mesh 8", capsys)
    assert status == 2 and "SyntaxError" in errors


def test_a_path_is_pinned_once(capsys: pytest.CaptureFixture[str]):
    status, _, errors = run("plan train:step --mesh data=8 --pin 1/inputs=data --pin 1/inputs=-,data", capsys)
    assert status == 2 and "`1/inputs` is pinned twice: keep one of the layouts" in errors


@pytest.mark.parametrize("tolerance", ["-1", "nan"])
def test_impossible_tolerances(tolerance: str, capsys: pytest.CaptureFixture[str]):
    status, _, errors = run(f"audit train:step --mesh 8 --tolerance {tolerance}", capsys)
    assert status == 2 and f"a fraction of 0 or more, as 0.02, got `{float(tolerance)}`" in errors


@pytest.mark.long
def test_rules(capsys: pytest.CaptureFixture[str]):
    status, output, _ = run("rules --json", capsys)
    records = {record["name"]: record for record in json.loads(output)}
    assert status == 0
    assert "Sum" in records["dot_general"]["expression"]


@pytest.mark.long
def test_as_a_program(folder: Path):
    """In a process of its own, without a platform set, as users run it."""
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = [
        sys.executable,
        "-m",
        "shardplan.cli",
        "plan",
        "train:step",
        "--mesh",
        "data=2,model=4",
        "--save",
        "p.json",
    ]
    found = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=90
    )
    assert found.returncode == 0, found.stderr
    assert "Plan over mesh (data=2, model=4)" in found.stdout
    assert (folder / "p.json").exists()


def test_the_demo_is_run_by_name(capsys: pytest.CaptureFixture[str]):
    assert main(["demo", "--help"]) == 0
    assert "shardplan demo" in capsys.readouterr().out


@pytest.mark.long
def test_it_runs_as_a_module_and_warns_in_one_line(folder: Path):
    command = [sys.executable, "-m", "shardplan", "plan", "steps:odd", "--mesh", "data=8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    warned = [line for line in ran.stderr.splitlines() if "no mesh axis" in line]
    assert warned and all(line.startswith("shardplan: no mesh axis (data=8) divides") for line in warned)
    assert "main()" not in ran.stderr
    assert ran.stdout.startswith("Plan over mesh (data=8)")


@pytest.mark.slow
def test_interrupt_ends_the_command(folder: Path) -> None:
    """After Ctrl-C the exit status is that of shells, and one line says so."""
    command = [sys.executable, "-m", "shardplan", "plan", "steps:step_with_ctrl_c", "--mesh", "x=2"]
    path = os.pathsep.join([str(ROOT), str(folder)])
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert ended.returncode == 130
    assert "shardplan: interrupted" in ended.stderr and "Traceback" not in ended.stderr
