"""Mistakes that are seen before torch, ray and the report's libraries are imported, which takes seconds."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.processes import run_without

HEAVY = ("torch", "torchvision", "ray", "seaborn", "matplotlib", "pandas")
DRAWING = ("seaborn", "matplotlib", "ray")
BAD = "name: x\ngrid: {devices: many, per_device_batch_size: 8}\n"
GOOD = "name: x\ngrid: {model: resnet8, per_device_batch_size: 8}\n"


def call_without(blocked: tuple[str, ...], *arguments: object, module: str = "cli") -> subprocess.CompletedProcess[str]:
    """``python -m harness.MODULE ARGUMENTS`` in a process in which these packages cannot be imported."""
    script = f"import runpy\nsys.argv = ['harness', *{[*map(str, arguments)]!r}]\n"
    script += f"runpy.run_module('harness.{module}', run_name='__main__')\n"
    return run_without(blocked, script, "RuntimeError")  # which no caller of an optional package expects


@pytest.mark.parametrize(
    ("command", "text", "option", "problem"),
    [
        ("run", BAD, "--quiet", "grid.devices[0]: got 'many'"),
        ("plan", BAD, "", "grid.devices[0]: got 'many'"),
        ("doctor", GOOD + "workload: own:Own\n", "--no-user-code", "workload: got 'own:Own'"),
        ("plan", GOOD, "--only=stratgy=ddp", "unknown axis 'stratgy'"),
        ("run", "a: [", "", "not valid YAML"),
    ],
    ids=["a value of a run", "a value of a plan", "user code", "an option", "no YAML"],
)
def test_a_mistake_in_the_file_is_reported_before_anything_heavy_is_imported(
    tmp_path: Path, command: str, text: str, option: str, problem: str
) -> None:
    (tmp_path / "e.yaml").write_text(text)
    done = call_without(HEAVY, command, tmp_path / "e.yaml", *([option] if option else []))
    assert done.returncode == 2, done.stdout + done.stderr
    assert problem in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr and done.stderr.count("error: ") == 1


@pytest.mark.slow
def test_a_non_run_folder_and_the_version_are_told_before_plotting_is_imported(tmp_path: Path) -> None:
    done = call_without((*DRAWING, "torch"), tmp_path, module="report")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "not a run folder" in done.stderr and "Traceback" not in done.stderr
    done = call_without(HEAVY, "--version")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"harness \S+( installed)? \(Python 3\.\d+\.\d+, torch \S+, ray \S+\)\n", done.stdout)
    assert f"torch {version('torch')}" in done.stdout


@pytest.mark.slow
def test_a_plan_imports_no_plotting(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text(GOOD)
    done = call_without(DRAWING, "plan", tmp_path / "e.yaml", "--assume", "1x2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Plan of x" in done.stdout


@pytest.mark.parametrize("command", ["--help", "run --help", "list strategies", "init"])
def test_help_and_lists_import_nothing_heavy(command: str) -> None:
    done = call_without((*HEAVY, "pyarrow", "numpy", "jinja2"), *command.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Usage: harness" in done.stdout or "--help" not in command


@pytest.mark.slow
def test_mistakes_in_options_and_in_the_file_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text(BAD + "limts: {}\n")
    done = call_without(HEAVY, "run", tmp_path / "e.yaml", "--only=stratgy=ddp", "--assume=3", "--add-blocks=2")
    assert done.returncode == 2 and done.stderr.count("error: ") == 1, done.stderr
    text = done.stderr.replace("\n", " ")
    problems = ("5 problems", "got 'many'", "limts: unknown key", "unknown axis 'stratgy'", "NODESxGPUS", "it adds")
    assert [problem for problem in problems if problem not in text] == []
    (tmp_path / "good.yaml").write_text(GOOD)
    for arguments, problem in (
        ([], "FILE: 1 problem"),
        (["--resume", "auto"], "FILE: 1 problem"),
        ([tmp_path / "good.yaml", "--add-blocks", "3"], "give its folder with --resume"),
    ):
        done = call_without(HEAVY, *arguments, module="run")
        assert done.returncode == 2 and problem in done.stderr, done.stderr
