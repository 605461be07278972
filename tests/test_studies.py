"""Every command of experiments/STUDIES.md parses, names files that are there, and plans on the hardware it is for."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.commands import app
from tests.conftest import ROOT

PAGE = (ROOT / "experiments" / "STUDIES.md").read_text()
COMMANDS = sorted(set(re.findall(r"^\|[^|]*\| `([^`]+)` \|", PAGE, re.M)))


PLANNED = {
    "harness plan": ["plan"],
    "python -m harness.run": ["plan", "--assume", "1x8"],
    "python -m harness.doctor": ["plan", "--assume", "1x8"],
}
"""How a command begins, and what stands for it in a test."""


def begins(command: str) -> str:
    """Return the key of PLANNED with which a command begins; empty if it is another command."""
    return next((start for start in PLANNED if command.startswith(f"{start} experiments/")), "")


def test_every_item_has_a_command_and_an_answer() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith(("|---", "| question"))]
    assert len(rows) > 25 and all(
        re.fullmatch(r"\| [^|`]+(`[^`]+`[^|`]*)* \| `[^`]+` \| [^|]+ \|", row) for row in rows
    )
    assert len(re.findall("^## ", PAGE, re.M)) == 6


@pytest.mark.parametrize("command", [command for command in COMMANDS if begins(command)])
def test_a_command_plans(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    start = begins(command)
    file, *options = [word for word in shlex.split(command.removeprefix(start)) if word != "--links"]
    assert Path(file).is_file()
    result = CliRunner().invoke(app, [*PLANNED[start], file, *options], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert re.search(r"Asked: [1-9]", result.stdout)


def test_every_experiment_answers_a_question_and_the_other_command_evaluates_a_model() -> None:
    assert [command for command in COMMANDS if not begins(command)] == ["harness evaluate RUN_FOLDER/checkpoints/TRIAL"]
    assert CliRunner().invoke(app, ["evaluate", "--help"]).exit_code == 0
    named = set(re.findall(r"experiments/(\w+\.yaml)", PAGE))
    assert {path.name for path in (ROOT / "experiments").glob("*.yaml")} - named == {"smoke.yaml"}
