"""``harness init``: each file is valid, commented and planned as it stands; no file is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from harness.cli.commands import app
from harness.cli.init import QUESTIONS, TEMPLATES
from harness.config.experiment import load_experiment
from harness.plan.planner import make_plan
from tests.conftest import gpu_cluster, laptop

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["init", *map(str, arguments)])


@pytest.mark.parametrize("question", QUESTIONS)
def test_each_file_is_valid_and_plans_on_a_laptop_and_on_gpus(question: str, here: Path) -> None:
    result = init(question)
    assert result.exit_code == 0, result.output
    file = here / QUESTIONS[question].file
    assert f"harness run {file.name}" in result.output
    experiment = load_experiment(file)
    for inventory in (laptop(2), gpu_cluster(1, 8)):
        plan = make_plan(experiment, inventory)
        assert plan.trials and sum(map(plan.least_trial_seconds, plan.trials)) < 5 * 60
        assert {trial.cell.devices for trial in plan.trials} == ({1} if question == "loader" else {1, 2}) | (
            {4, 8} if question == "scaling" and inventory != laptop(2) else set()
        )


@pytest.mark.parametrize("question", QUESTIONS)
def test_each_file_names_its_question_its_commands_and_what_each_line_means(question: str, here: Path) -> None:
    init(question, "--output", "a b.yaml")
    lines = (here / "a b.yaml").read_text().splitlines()
    assert lines[0].startswith("# ") and "?" in lines[0] + lines[1]
    assert any("harness run 'a b.yaml'" in line for line in lines)
    assert not any(" FILE" in line for line in lines)
    assert max(map(len, lines)) <= 120
    assert sum("#" in line for line in lines) > len(lines) / 2


def test_the_module_of_an_own_workload_is_the_one_that_readme_shows() -> None:
    template = (TEMPLATES / "my_workload.py.txt").read_text()
    assert template == (ROOT / "experiments" / "my_workload.py").read_text()


def test_every_template_belongs_to_a_question() -> None:
    named = {question.file for question in QUESTIONS.values()}
    named |= {f"{question.module}.txt" for question in QUESTIONS.values() if question.module}
    assert named == {path.name for path in TEMPLATES.iterdir()}


def test_without_a_question_the_questions_are_shown(here: Path) -> None:
    result = init()
    assert result.exit_code == 0 and all(name in result.output for name in QUESTIONS)
    assert not list(here.iterdir())


def test_an_unknown_question_offers_the_nearest(here: Path) -> None:
    result = init("Strategy")
    assert result.exit_code == 2 and "did you mean 'strategies'?" in result.stderr
    assert not list(here.iterdir())


@pytest.mark.parametrize("taken", ["my_workload.yaml", "my_workload.py"])
def test_no_file_is_replaced_and_nothing_is_half_written(taken: str, here: Path) -> None:
    (here / taken).write_text("mine")
    result = init("own-workload")
    assert result.exit_code == 2 and f"{taken}: 1 problem" in result.stderr and "is not replaced" in result.stderr
    assert [path.name for path in here.iterdir()] == [taken]
    assert (here / taken).read_text() == "mine"


@pytest.mark.parametrize(
    ("question", "output", "problem"),
    [
        ("own-workload", "my_workload.py", "which is the name of the module beside it"),
        ("scaling", "a\nb.yaml", "allowed: a name of printable characters"),
        ("scaling", 300 * "a", "File name too long"),
    ],
)
def test_a_name_that_no_file_can_have(question: str, output: str, problem: str, here: Path) -> None:
    result = init(question, "--output", output)
    assert result.exit_code == 2 and problem in " ".join(result.stderr.split())
    assert not [*here.iterdir()]


def test_a_dangling_link_is_not_followed(here: Path) -> None:
    (here / "scaling.yaml").symlink_to(here / "elsewhere")
    assert init("scaling").exit_code == 2
    assert not (here / "elsewhere").exists()


def test_a_folder_that_is_not_there(here: Path) -> None:
    result = init("batch", "--output", "nowhere/b.yaml")
    assert result.exit_code == 2
    assert "nowhere/b.yaml: 1 problem" in result.stderr and "No such file or directory" in result.stderr
