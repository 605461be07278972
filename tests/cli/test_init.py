"""``harness init``: each file is valid and commented, none is replaced; ``harness list``: every name."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from harness.cli.commands import app, lists_of_names
from harness.cli.init import QUESTIONS, TEMPLATES
from harness.config.builtin_workloads import BUILTIN_WORKLOADS
from harness.config.doctor_checks import LOOKS_AT
from harness.config.experiment import load_experiment
from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.plan.planner import make_plan
from tests.conftest import ROOT, gpu_cluster, laptop


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["init", *map(str, arguments)])


@pytest.mark.parametrize("question", QUESTIONS)
def test_each_file_is_valid_explained_and_plans_on_a_laptop_and_on_gpus(question: str, here: Path) -> None:
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
    for path in here.iterdir():
        path.unlink()
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
    named = {question.file for question in QUESTIONS.values()}
    named |= {f"{question.module}.txt" for question in QUESTIONS.values() if question.module}
    assert named == {path.name for path in TEMPLATES.iterdir()}, "every template belongs to a question"


def test_without_a_question_the_questions_are_shown(here: Path) -> None:
    result = init()
    assert result.exit_code == 0 and all(name in result.output for name in QUESTIONS)
    assert not list(here.iterdir())


@pytest.mark.parametrize("taken", ["my_workload.yaml", "my_workload.py"])
def test_no_file_is_replaced_and_nothing_is_half_written(taken: str, here: Path) -> None:
    (here / taken).write_text("mine")
    result = init("own-workload")
    assert result.exit_code == 2 and f"{taken}: 1 problem" in result.stderr and "is not replaced" in result.stderr
    assert [path.name for path in here.iterdir()] == [taken]
    assert (here / taken).read_text() == "mine"
    (here / "scaling.yaml").symlink_to(here / "elsewhere")
    assert init("scaling").exit_code == 2 and not (here / "elsewhere").exists(), "a dangling link is not followed"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["Strategy"], "did you mean 'strategies'?"),
        (["own-workload", "--output", "my_workload.py"], "which is the name of the module beside it"),
        (["scaling", "--output", "a\nb.yaml"], "allowed: a name of printable characters"),
        (["scaling", "--output", 300 * "a"], "File name too long"),
        (["batch", "--output", "nowhere/b.yaml"], "b.yaml: 1 problem - cannot be written: No such file or directory"),
    ],
)
def test_an_unknown_question_or_a_name_that_no_file_can_have_is_refused(
    arguments: list[str], problem: str, here: Path
) -> None:
    result = init(*arguments)
    assert result.exit_code == 2 and problem in " ".join(result.stderr.split())
    assert not [*here.iterdir()]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("workloads", [*BUILTIN_WORKLOADS, "package.module:ClassName", "cifar10"]),
        ("models", [*BUILTIN_WORKLOADS, "resnet8", "resnet152", "gpt2"]),
        ("strategies", [*BUILTIN_TRAITS, "bucket_cap_mb", *(traits.summary for traits in BUILTIN_TRAITS.values())]),
        ("checks", [*LOOKS_AT]),
    ],
)
def test_every_name_is_listed_and_an_unknown_list_offers_the_nearest(what: str, expected: list[str]) -> None:
    result = CliRunner().invoke(app, ["list", what], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    assert not [name for name in expected if name not in result.output]
    assert all(traits.summary for traits in BUILTIN_TRAITS.values())
    result = CliRunner().invoke(app, ["list", "Models"])
    assert result.exit_code == 2 and "did you mean 'models'?" in result.stderr
    assert {"workloads", "models", "strategies", "checks"} == set(lists_of_names())
