"""Untrusted files: with --no-user-code nothing that lies beside them, or in the current folder, is imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.commands import app
from harness.config.load import load_experiment
from harness.errors import ExperimentError
from harness.run.request import check_no_user_code
from tests.conftest import FEW_STEPS
from tests.processes import ROOT, ended

SMALL = "name: small\ngrid: {model: resnet8, strategy: [single, ddp], devices: [1, 2], per_device_batch_size: 8}\n"
MARKS = "with open({mark!r}, 'a') as file:\n    file.write({name!r})\n"
MISTAKEN = SMALL.replace("devices: [1, 2]", "devices: many")
"""A file whose mistake is seen at once."""
STANDARD = ("pathlib", "typing", "sitecustomize")
OTHERS = ("seaborn", "torch", "yaml", "ray", "sklearn", "pandas", "matplotlib", "torchvision", "own_workload")


@pytest.fixture
def untrusted(tmp_path: Path) -> Path:
    """A folder whose modules leave a mark when they are imported, and whose repository runs a program of its own."""
    folder = tmp_path / "untrusted"
    folder.mkdir()
    for name in (*STANDARD, *OTHERS):
        (folder / f"{name}.py").write_text(MARKS.format(mark=str(tmp_path / "mark"), name=name))
    (folder / "matplotlibrc").write_text("backend: module://own_workload\n")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    spy = tmp_path / "spy"
    spy.write_text(f"#!/bin/sh\necho git >> {tmp_path / 'mark'}\n")
    spy.chmod(0o755)
    subprocess.run(["git", "-C", str(folder), "config", "core.fsmonitor", str(spy)], check=True)
    return folder


def call(*arguments: object, cwd: Path, module: str = "harness.run", code: int = 0) -> str:
    """The errors of a command that leaves with this exit code."""
    return ended(sys.executable, "-m", module, *arguments, cwd=cwd, code=code).stderr


def test_the_console_script_imports_nothing_of_the_current_folder(tmp_path: Path) -> None:
    """An empty entry of PYTHONPATH is the current folder, which Python then looks into before anything else."""
    folder = tmp_path / "untrusted"
    folder.mkdir()
    for name in ("typer", "rich"):
        (folder / f"{name}.py").write_text(MARKS.format(mark=str(tmp_path / "mark"), name=name))
    (folder / "e.yaml").write_text(MISTAKEN)
    script = "from harness.cli.__main__ import main; main()"
    command = [sys.executable, "-c", script, "plan", str(folder / "e.yaml"), "--no-user-code"]
    environment = {**os.environ, "PYTHONPATH": f":{ROOT}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "got 'many'" in done.stderr, done.stderr
    assert mark(folder) == ""


def mark(folder: Path) -> str:
    path = folder.parent / "mark"
    return path.read_text() if path.exists() else ""


def test_a_workload_of_its_own_is_refused_before_anything_of_it_is_imported(untrusted: Path) -> None:
    (untrusted / "e.yaml").write_text(SMALL + "workload: own_workload:Own\n")
    error = call("e.yaml", "--no-user-code", "--dry-run", cwd=untrusted, code=2)
    assert "workload: got 'own_workload:Own'; --no-user-code allows built-in workloads only" in error
    assert mark(untrusted) == ""


COMMANDS = ["harness.run e.yaml", "harness.doctor e.yaml", "harness.cli plan e.yaml", "harness.report ."]


@pytest.mark.parametrize("command", [*COMMANDS, "harness run e.yaml", "harness report ."])
def test_no_command_imports_modules_of_the_current_folder(untrusted: Path, command: str) -> None:
    """Modules of the standard library too: ``python -m`` puts the current folder before everything."""
    (untrusted / "e.yaml").write_text(MISTAKEN)
    module, *arguments = command.split()
    problem = "not a run folder" if arguments[-1] == "." else "got 'many'"
    assert problem in call(*arguments, "--no-user-code", cwd=untrusted, module=module, code=2)
    assert mark(untrusted) == ""


@pytest.mark.slow
def test_a_report_in_an_untrusted_folder_imports_nothing_of_it(untrusted: Path) -> None:
    shutil.copytree(ROOT / "results" / "example", untrusted / "example")
    (run_folder,) = {path.parent for path in (untrusted / "example").rglob("plan.json")}
    call(run_folder.relative_to(untrusted), "--no-user-code", cwd=untrusted, module="harness.report")
    assert mark(untrusted) == ""


def refused(file: Path) -> list[str]:
    """Why --no-user-code refuses a file; nothing where it does not."""
    experiment = load_experiment(file)
    try:
        check_no_user_code(experiment, file)
    except ExperimentError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("workload: os:system\n", "workload: got 'os:system'; --no-user-code allows built-in workloads only"),
        ("convergence: {epochs: 2}\ncheckpoint: {every: 1, folder: /tmp/elsewhere}\n", "checkpoint.folder: got '/tmp/"),
        ("workload_options: {data_folder: /tmp/x, download: true}\n", "with --no-user-code nothing is downloaded"),
        ("cells: [{per_device_batch_size: 8, workload.download: [true]}]\n", "nothing is downloaded"),
    ],
)
def test_options_refused_with_no_user_code(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "e.yaml").write_text(SMALL + text)
    (output,) = refused(tmp_path / "e.yaml")
    assert problem in output


def test_the_projects_own_experiments_and_a_disabled_download_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text(SMALL + "workload_options: {download: false}\n")
    own = (ROOT / "experiments" / f"{name}.yaml" for name in ("scaling", "smoke"))
    assert [*map(refused, (tmp_path / "e.yaml", *own))] == [[], [], []]


def test_without_the_option_the_workload_is_imported(untrusted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (untrusted / "e.yaml").write_text(SMALL + "workload: own_workload:Own\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    done = CliRunner(env={"RAY_ADDRESS": ""}).invoke(app, ["run", str(untrusted / "e.yaml"), "--dry-run"])
    sys.modules.pop("own_workload", None)
    assert done.exit_code == 2
    assert mark(untrusted) == "own_workload"


@pytest.mark.slow
def test_the_folder_of_a_file_with_a_built_in_workload_is_never_on_the_import_path(untrusted: Path) -> None:
    (untrusted / "e.yaml").write_text(SMALL)
    call(untrusted / "e.yaml", "--dry-run", cwd=ROOT)
    assert mark(untrusted) == ""


@pytest.mark.slow
def test_a_whole_run_imports_and_calls_nothing_of_the_folder(untrusted: Path) -> None:
    text = "name: small\ngrid: {model: resnet8, strategy: single, per_device_batch_size: 8}\n"
    text += f"throughput: {json.dumps(FEW_STEPS)}\nworkload_options: {{width: 4}}\n"
    text += "equivalence: false\npreflight: false\nlauncher: [ray, torchrun]\n"
    (untrusted / "e.yaml").write_text(text)
    call("e.yaml", "--no-user-code", "--quiet", cwd=untrusted)
    assert mark(untrusted) == ""
    assert [path.name for path in (untrusted / "results" / "small").iterdir()]
