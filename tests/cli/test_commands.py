"""The command line: plans without Ray, and bad input that ends in one clear error and code 2."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from harness.cli.arguments import exit_code_of
from harness.cli.commands import app, run
from harness.config.load import load_experiment
from harness.errors import ExperimentError
from harness.plan.planner import make_plan
from harness.record.folder import RunFolder
from harness.run.provenance import source_facts
from tests.conftest import EXAMPLE, ROOT, laptop

SMALL = "name: small\ngrid: {model: resnet8, strategy: [single, ddp], devices: [1, 2], per_device_batch_size: 8}\n"
Write = Callable[..., Path]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_dry_run_shows_the_plan_and_starts_nothing(write_experiment: Write, tmp_path: Path) -> None:
    result = call("run", write_experiment(SMALL), "--dry-run", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "Plan of small" in result.output
    assert "worker groups of" in result.output
    assert "No machine can run 1 cell: single runs on at most one device." in result.output
    assert "Takes at least" in result.output and "No earlier run of these cells was found" in result.output
    assert not (tmp_path / "out").exists()
    ray = sys.modules.get("ray")
    assert ray is None or not ray.is_initialized()


def test_a_dry_run_estimates_from_a_run_of_the_same_cells_and_names_those_it_lacks(write_experiment: Write) -> None:
    output = call("plan", ROOT / "experiments" / "scaling.yaml", "--assume", "1x0", "--like", EXAMPLE).output
    words = " ".join(output.split())
    assert re.search(rf"Estimated from {re.escape(str(EXAMPLE))} of 20\d\d-\d\d-\d\d, on \w+", words.replace("- ", "-"))
    other = call("plan", write_experiment(SMALL), "--like", EXAMPLE)
    assert other.exit_code == 0, other.output
    assert "Not in it, so at least: single x1; ddp x1; ddp x2." in " ".join(other.output.split())


def test_a_plan_for_an_assumed_cluster(write_experiment: Write) -> None:
    text = "name: big\ngrid: {model: resnet50, data: synthetic_device, strategy: [ddp, dp], devices: [8, 16], "
    text += "per_device_batch_size: 64, precision: bf16}\noptimizer: {name: SGD, lr: 1e-3}\n"
    result = call("plan", write_experiment(text), "--assume", "2x8:h100-80gb")
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "Plan of big" in words and "assumed: 2 nodes" in words and "16 GPUs (H100-80GB)" in words
    assert "too few devices: needs 16 on one node, has 8 + 8 GPUs" in words and "Added: 1 cell," in words
    output = call("plan", write_experiment(SMALL.replace("[1, 2]", "1")), "--assume", "1x1").output
    assert "1 GPU, " in output, "one device is one slot"
    output = call("run", write_experiment(SMALL), "--dry-run", "--only", "strategy=single").output
    assert "Plan of small" in output and "ddp" not in output


def test_help_names_the_commands_in_their_usual_order_and_how_to_begin(write_experiment: Write) -> None:
    output = call("--help").output
    places = [output.index(f"│ {name} ") for name in ("init", "plan", "run", "report", "compare")]
    assert places == sorted(places) and "Begin with: harness init QUESTION" in output
    assert "--links" in call("doctor", "--help").output
    result = call("run", write_experiment(SMALL), "--links")
    assert result.exit_code == 2 and "No such option" in result.output


BATCH = "per_device_batch_size: 8"
LANGUAGE, METRIC = "workload: language_model\n", "convergence.target.metric"
TARGET = "convergence: {epochs: 1, target: {metric: %s, at_least: 0.9}}\n"
PLATEAU, NO_USER = "ReduceLROnPlateau", "no such user, or the user has no home folder"
CIFAR = f"name: x\ngrid: {{data: cifar10, model: resnet8, {BATCH}}}\n"


def grid(axes: str = "", more: str = "") -> str:
    return f"name: x\n{more}grid: {{{axes}{BATCH}}}\n"


BAD_FILES = {
    "unknown precision": (grid("precision: fp8, "), "got 'fp8'; allowed: bf16, fp16, fp32, tf32"),
    "user module that fails": (SMALL + "workload: faulty:Own\n", "faulty failed with RuntimeError: half written"),
    "user module that exits": (SMALL + "workload: exits_0:Own\n", "failed with SystemExit: 0"),
    "missing data": (grid("data: ./none, model: resnet8, "), "files are missing"),
    "missing cifar10": (CIFAR + "workload_options: {data_folder: ./nowhere}\n", "cifar-10-batches-py on this machine"),
    "unknown target": (grid(more=TARGET % "accuracy"), f"{METRIC}: got 'accuracy'; did you mean 'val_accuracy'?"),
    "a target of another workload": (
        grid(more=LANGUAGE + TARGET % "val_accuracy"),
        f"{METRIC}: got 'val_accuracy'; allowed: train_loss, val_loss, val_perplexity",
    ),
    "missing texts": (grid("data: ./none, ", LANGUAGE), "files are missing"),
    "unknown size": (grid("model: larg, ", "workload: mlp\n"), "grid.model: got 'larg'; did you mean 'large'?"),
    "an optimizer that refuses": (SMALL + "optimizer: {name: SparseAdam}\n", "optimizer: SparseAdam does not take"),
    "a schedule that divides by zero": (SMALL + "schedule: {name: StepLR, step_size: 0}\n", "StepLR does not take"),
    "an empty axis": (SMALL + "optimizer: {name: SGD, lr: []}\n", "optimizer.lr: got an empty list"),
    "a home that is not there": (grid("data: '~nosuchuser/x', model: resnet8, "), NO_USER),
    "a name of 300 letters": (CIFAR + f"workload_options: {{data_folder: ./{'x' * 300}}}\n", "Unpack cifar-10-python"),
    "an optimizer that needs a closure": (SMALL + "optimizer: {name: LBFGS}\n", "optimizer: LBFGS does not take"),
    "a schedule that needs a metric": (f"{SMALL}schedule: {{name: {PLATEAU}}}\n", f"schedule: {PLATEAU} does not take"),
}
MODULES = {"faulty": "raise RuntimeError('half written')", "exits_0": "exit(0)"}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_error_with_exit_code_2(name: str, write_experiment: Write, tmp_path: Path) -> None:
    text, message = BAD_FILES[name]
    for module, code in MODULES.items():
        (tmp_path / f"{module}.py").write_text(code)
    result = call("run", write_experiment(text), "--output", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert "error: " in result.stderr and message in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--assume", "2"], "--assume: 1 problem"),
        (["--assume", "0x8"], "allowed: NODESxGPUS such as 1x8 or 2x8"),
        (["--assume", "2x8:H10-80GB"], "got the unknown device 'H10-80GB'; did you mean 'H100-80GB'?"),
        (["--assume", "2x8:"], "got the unknown device ''; (allowed: P100-12GB, "),
        (["--assume", "2x0:H100-80GB"], "no GPU that is one"),
        (["--only", "strategy"], "--only: 1 problem"),
        (["--only", "strategy=fsdp"], "no cell of small matches: strategy: got "),
        (["--only", "devices=true"], "devices: got [true]; its cells have "),
        (["--only", "strategy=[ddp"], "allowed: AXIS=VALUE"),
        (["--only", ""], "allowed: AXIS=VALUE"),
        (["--only", "model=" + "[" * 5000], "allowed: AXIS=VALUE"),
        (["--only", "devices=" + "9" * 5000], "allowed: AXIS=VALUE"),
        (["--resume", "/nonexistent/run"], "not a run folder"),
        (["--like", "/nonexistent/run"], "--like /nonexistent/run: not a run folder"),
        (["--like", "."], "not a run folder (plan.json or experiment.resolved.yaml is missing)"),
        (["--output", __file__], "the run folder cannot be created"),
        (["--output", "x" * 300], "the run folder cannot be created: File name too long"),
        (["--output", "s3://me:hunter2@bucket"], "got a URI with a user, a password or a key; allowed: one without"),
        (["--output", "file:///proc/x"], "file:///proc/x: is not there: [Errno 2] Cannot create directory"),
        (["--resume", "file:///nowhere/small/1"], "file:///nowhere: has no run small/1; allowed: URI/<experiment>/"),
        (["--address", "ray://host:10001"], "Ray Client is not supported"),
    ],
)
def test_bad_options_are_one_error_with_code_2(arguments: list[str], message: str, write_experiment: Write) -> None:
    result = call("run", write_experiment(SMALL), *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_all_mistakes_in_the_options_are_one_error_without_a_file() -> None:
    result = call("run", "--resume", "/nonexistent/run", "--assume", "foo", "--only", "stratgy=ddp")
    assert result.exit_code == 2, result.output
    for problem in ("error: 3 problems\n  - ", "\n  - /nonexistent/run: not a run folder", "--assume: got 'foo'"):
        assert problem in result.stderr and "--only: unknown axis" in result.stderr


def test_a_run_is_resumed_without_its_file_while_that_is_unchanged(write_experiment: Write, tmp_path: Path) -> None:
    file = write_experiment(SMALL)
    plan = make_plan(load_experiment(file), laptop())
    folder = RunFolder.create(tmp_path, plan.experiment, plan, SMALL)
    folder.set_invocation(0, {"source": source_facts(file, plan.experiment, sys.path)})
    result = call("run", "--resume", folder.path, "--dry-run")
    assert result.exit_code == 0 and "Plan of small" in result.output, result.output
    file.write_text(SMALL.replace("devices: [1, 2]", "devices: [1]"))
    result = call("run", "--resume", folder.path, "--dry-run")
    assert result.exit_code == 2, result.output
    assert f"{file} has changed since the run. Give the file: harness run FILE --resume" in result.stderr
    assert call("run", "--resume", tmp_path / "nowhere").exit_code == 2


def test_all_mistakes_that_only_an_import_shows_are_one_error(write_experiment: Write) -> None:
    text = SMALL.replace("[single, ddp]", "[single, 'nowhere:Mine', 'never:Mine']") + "workload: not_there:Own\n"
    text += "optimizer: {name: SGD, lrr: 1, momentun: 2}\nschedule: {name: Cosine}\n"
    result = call("plan", write_experiment(text))
    assert result.exit_code == 2 and "Traceback" not in result.output
    problems = [line.partition("; ")[0] for line in result.stderr.splitlines()]
    assert problems[0] == "error: 6 problems"
    beginnings = [f"strategy '{name}:Mine': importing {name} failed" for name in ("nowhere", "never")]
    beginnings += [f"optimizer.{name}: SGD has no such option" for name in ("lrr", "momentun")]
    beginnings += ["schedule.name: got 'Cosine'", "workload 'not_there:Own': importing not_there failed"]
    assert [line.startswith(f"  - {start}") for line, start in zip(problems[1:], beginnings, strict=True)] == [True] * 6
    text = SMALL + "workload_options: {widht: 8, normm: group}\noptimizer: {name: SGDD}\n"
    result = call("plan", write_experiment(text), "--only", "strategy=fsdp")
    assert result.exit_code == 2
    for problem in ("4 problems", "workload_options.widht: ", "workload_options.normm: ", "'SGDD'", "no cell of small"):
        assert problem in result.stderr


def test_an_empty_plan_is_an_error_and_starts_nothing(write_experiment: Write, tmp_path: Path) -> None:
    text = "name: big\ngrid: {model: resnet8, strategy: ddp, devices: 4096, global_batch_size: 8192}\nexclude: []\n"
    text += "device: cuda\n"
    result = call("run", write_experiment(text), "--output", tmp_path / "out")
    assert result.exit_code == 2 and not result.stdout and not (tmp_path / "out").exists()
    (line,) = result.stderr.splitlines()
    assert "no cell can run on 1 node, " in line and "needs 4096 on one node" in line and "(1 cell)" in line


def test_what_is_no_file_or_run_or_option_is_one_error(
    write_experiment: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    misfit = "torch and torchvision do not fit each other"
    monkeypatch.setitem(sys.modules, "torchvision", None)
    for arguments, message in (
        (["run", "nowhere.yaml"], "no such file"),
        (["run", tmp_path / "pipe"], "is not a regular file"),
        (["run", write_experiment(SMALL), "--adress", "x"], "No such option"),
        (["report", tmp_path], "not a run folder"),
        (["plan", write_experiment(grid("model: resnet18, "), "t.yaml")], misfit),
    ):
        result = call(*arguments)
        assert result.exit_code == 2 and message in result.stderr, result.output


@pytest.mark.parametrize(
    ("address", "reason"),
    [("127.0.0.1:9", "refused"), ("127.0.0.1:99999", ""), ("no.such.host.invalid:6379", ""), ("[::1]:9", "")],
)
def test_an_unreachable_address_is_one_error(write_experiment: Write, address: str, reason: str) -> None:
    result = call("run", write_experiment(SMALL), "--address", address)
    assert result.exit_code == 2
    assert "no Ray cluster answers there" in result.stderr and reason in result.stderr


def test_a_closed_output_pipe_does_not_end_the_command(
    write_experiment: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "argv", ["harness", "run", str(write_experiment(SMALL)), "--dry-run"])
        with pytest.raises(SystemExit) as ended:
            run(None)
        out.write("more")
        out.flush()  # as the interpreter does when it exits
    assert ended.value.code == 0 and capsys.readouterr().err == ""


def test_an_error_shows_no_secret_and_no_control_character(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        raise ExperimentError("f", ["cannot open https://me:hunter2@host/x \x1b[2J\x07 \u202e"])

    assert exit_code_of(work) == 2
    text = "error: f: 1 problem\n  - cannot open https://<redacted>@host/x \\x1b[2J\\x07 \\u202e\n"
    assert capsys.readouterr().err == text
