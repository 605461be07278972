"""``harness init``: each file is valid and commented, none is replaced; ``harness list``: every name."""

from __future__ import annotations

import re
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from harness.cli.commands import app, lists_of_names
from harness.cli.init import OWN, QUESTIONS, TEMPLATES, experiment_text
from harness.config.builtin_workloads import BUILTIN_WORKLOADS
from harness.config.doctor_checks import LOOKS_AT
from harness.config.load import load_experiment, parse_experiment
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
    file = here / ("my_workload.yaml" if question == OWN else f"{question}.yaml")
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


@pytest.mark.parametrize(("one", "other"), [*combinations(QUESTIONS, 2)])
def test_two_questions_make_one_file_that_varies_what_both_do(one: str, other: str, here: Path) -> None:
    assert init(other, one, one).exit_code == 0
    both = varied((here / f"{one}-{other}.yaml").read_text())
    batches = {"per_device_batch_size", "global_batch_size"}  # the latter, if both ask
    given_by_class = {"data"} if OWN in (one, other) else set()
    asked = varied(text_of(one)) | varied(text_of(other))
    assert both >= asked - batches - given_by_class and len(both & batches) < 2
    assert make_plan(load_experiment(here / f"{one}-{other}.yaml"), laptop(2)).trials


@cache
def text_of(*questions: str) -> str:
    return experiment_text(questions, "", None, Path("x.yaml"))


def varied(text: str) -> set[str]:
    return {name for name, values in yaml.safe_load(text)["grid"].items() if len(values) > 1}


@pytest.mark.parametrize("asked", [each for n in (1, 2) for each in combinations([*QUESTIONS][:-1], n)])
def test_with_its_hint_for_gpus_a_file_is_valid_and_varies_what_it_did(asked: tuple[str, ...]) -> None:
    text = text_of(*asked)
    hint = " ".join(re.findall(r"On GPUs (?:.|\n# )*", text)[0].split())
    content, before = yaml.safe_load(text), varied(text)
    for name in re.findall(r"\w+", re.findall(r"remove (.*?), whose", hint)[0].replace(" and ", " ")):
        del content[name]
    for axis, value in re.findall(r"(\w+) \[(\w+)\]", hint):
        content["grid"][axis] = [yaml.safe_load(value)]
    experiment = parse_experiment(content, source="x.yaml")
    assert make_plan(experiment, gpu_cluster(1, 8)).trials
    assert {name for name, values in content["grid"].items() if len(values) > 1} == before
    if "convergence" in asked:
        assert content["grid"]["data"] != ["synthetic_device"]


def test_a_folder_of_data_is_found_from_the_file_s_own_folder(here: Path) -> None:
    (here / "images").mkdir()
    (here / "sub").mkdir()
    for given in ("images", "./images", str(here / "images")):
        assert init("batch", "--data", given, "--output", "sub/x.yaml").exit_code == 0
        (written,) = yaml.safe_load((here / "sub/x.yaml").read_text())["grid"]["data"]
        assert (here / "sub" / written).resolve() == here / "images" and "/" in written
        (here / "sub/x.yaml").unlink()


@pytest.mark.parametrize("workload", BUILTIN_WORKLOADS)
def test_every_question_can_be_asked_of_every_workload_and_of_a_folder(workload: str, here: Path) -> None:
    (here / "my data").mkdir()
    questions = [name for name in QUESTIONS if name != OWN]
    given = ["--data", "my data"] if BUILTIN_WORKLOADS[workload].folders else []
    result = init(*questions, "--workload", workload, *given)
    assert result.exit_code == 0, result.stderr
    experiment = load_experiment(here / f"{'-'.join(questions)}.yaml")
    assert experiment.workload == workload
    data = yaml.safe_load((here / f"{'-'.join(questions)}.yaml").read_text())["grid"]["data"]
    assert data[0] == ("./my data" if given else BUILTIN_WORKLOADS[workload].data)
    assert make_plan(experiment, gpu_cluster(1, 8)).trials


def test_a_class_of_one_s_own_has_no_axes_of_the_built_in_ones(here: Path) -> None:
    assert init("loader", "precision", "--workload", "my_train.parts:Net").exit_code == 0
    content = yaml.safe_load((here / "loader-precision.yaml").read_text())
    assert content["workload"] == "my_train.parts:Net" and not {"data", "model"} & {*content["grid"]}
    assert [path.name for path in here.iterdir()] == ["loader-precision.yaml"]


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
        (["own-workload", "--output", "my_workload.py"], "the name of the module beside it"),
        (["batch", "own-workload", "--workload", "mlp"], "which has my_workload:Regression; give one of both"),
        (["batch", "--workload", "mpl"], "got 'mpl'; did you mean 'mlp'?"),
        (["batch", "--workload", "a b:C"], "or module:ClassName of your own"),
        (["batch", "--data", "digit"], "did you mean 'digits'?"),
        (["batch", "--data", ""], "--data: 1 problem - got ''; allowed: cifar10"),
        (["batch", "--data", 300 * "a"], "--data: 1 problem - got 'aaa"),
        (["batch", "--data", "./none"], "--data: 1 problem - got './none': no such folder"),
        (["batch", "--data", ".", "--workload", "mlp"], "got '.'; allowed: digits, synthetic, synthetic_device"),
        (["batch", "--data", ".", "--workload", "a:B"], "a:B brings its own data"),
        (["scaling", "--output", "a\nb.yaml"], "allowed: a name of printable characters"),
        (["scaling", "--output", 300 * "a"], "File name too long"),
        (["batch", "--output", "nowhere/b.yaml"], "b.yaml: 1 problem - cannot be written: No such file or directory"),
    ],
)
def test_an_unknown_question_or_a_name_of_no_file_is_refused(arguments: list[str], problem: str, here: Path) -> None:
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
