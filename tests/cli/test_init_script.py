"""``harness init --script``: a file that plans as it stands, from the options that a script's argparse names."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli.init import Option, options_of, script_text
from harness.config.load import load_experiment
from harness.config.script import ScriptExperiment
from harness.errors import ExperimentError
from harness.plan.planner import make_plan
from tests.conftest import ROOT, laptop

OPTIONS = """
parser.add_argument("-b", "--batch-size", type=int, default=64)
parser.add_argument("--epochs", default=90, type=int)
parser.add_argument("--lr", default=0.1)
parser.add_argument("--data", required=True)
parser.add_argument("--amp", action="store_true", default=False)
parser.add_argument("-v", action="count", default=0)
parser.add_argument("--sure", action="store_true", required=True)
parser.add_argument("--tune", action=argparse.BooleanOptionalAction, default=True)
parser.add_argument("file")
parser.add_argument("--width", default=WIDTH)
"""
CLICK = """
@click.command()
@click.option("--batch", "batch_size", default=16)
@click.option("--local_rank", type=int, required=True)
@click.option("--fast", is_flag=True, default=False)
@click.option("--sync/--no-sync", default=True)
def main(batch_size, local_rank): ...
"""


def written(folder: Path, text: str, name: str = "train.py") -> Path:
    (folder / name).write_text(text)
    file = folder / "train.yaml"
    file.write_text(script_text(folder / name, file))
    return file


def test_options_have_their_longest_name_and_a_constant_default() -> None:
    assert options_of(OPTIONS) == [
        Option("--batch-size", 64, False),
        Option("--epochs", 90, False),
        Option("--lr", 0.1, False),
        Option("--data", None, True),
        Option("--amp", None, False, takes_value=False),
        Option("-v", None, False, takes_value=False),
        Option("--sure", None, False, takes_value=False),
        Option("--tune", None, False, takes_value=False),
        Option("--width", None, False),
    ]


def test_batch_and_epochs_are_arguments_what_is_required_is_asked_and_the_rest_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, OPTIONS)
    experiment = load_experiment(file)
    assert isinstance(experiment, ScriptExperiment)
    assert experiment.arguments == ("--batch-size", "{per_device_batch_size}", "--epochs", "100000", "--data", "VALUE")
    assert experiment.grid and experiment.grid.per_device_batch_size == (64,)
    assert "Other options of the script: --lr 0.1; --data; --amp; -v; --sure; --tune; --width" in file.read_text()
    assert "# Replace each VALUE" in file.read_text()


def test_options_of_click_are_read_and_a_local_rank_is_that_of_the_rank(tmp_path: Path) -> None:
    file = written(tmp_path, CLICK)
    assert file.read_text().count("Other options of the script: --fast; --sync/--no-sync\n") == 1
    experiment = load_experiment(file)
    assert isinstance(experiment, ScriptExperiment)
    assert experiment.arguments == ("--batch", "{per_device_batch_size}", "--local_rank", "{local_rank}")
    assert experiment.grid and experiment.grid.per_device_batch_size == (16,)


@pytest.mark.parametrize("name", ["train.py", "3 d-é.py", ".py"])
def test_a_script_without_options_has_a_file_that_plans(tmp_path: Path, name: str) -> None:
    file = written(tmp_path, "print(1)", name)
    plan = make_plan(load_experiment(file), laptop(2))
    assert {trial.cell.devices for trial in plan.trials} == {1, 2}


def test_the_example_s_own_file_begins_like_this(tmp_path: Path) -> None:
    file = written(tmp_path, (ROOT / "experiments" / "my_script.py").read_text())
    experiment = load_experiment(file)
    assert isinstance(experiment, ScriptExperiment)
    assert experiment.arguments[:2] == ("--batch-size", "{per_device_batch_size}")


@pytest.mark.parametrize(("text", "problem"), [("def", "line 1: "), (None, "it cannot be read")])
def test_a_script_that_cannot_be_read_is_one_error(tmp_path: Path, text: str | None, problem: str) -> None:
    if text:
        (tmp_path / "train.py").write_text(text)
    with pytest.raises(ExperimentError, match=problem):
        script_text(tmp_path / "train.py", tmp_path / "train.yaml")


def test_names_and_defaults_that_yaml_would_read_otherwise_stand_as_they_are(tmp_path: Path) -> None:
    text = 'p.add_argument("--note", default="two\\nlines: [")'
    for name, called in (("train #2.py", "train--2"), ("3.py", "3")):
        experiment = load_experiment(written(tmp_path, text, name))
        assert isinstance(experiment, ScriptExperiment)
        assert (experiment.name, Path(str(experiment.script)).name) == (called, name)
    assert "Other options of the script: --note two lines: [\n" in (tmp_path / "train.yaml").read_text()


def test_batch_and_epochs_are_those_of_the_training_whatever_stands_before(tmp_path: Path) -> None:
    flags = (
        ("--sync-batch-norm", ", action='store_true'"),
        ("--save-all-epochs", ", action='store_true'"),
        ("--val-batch-size", ", default=1000"),
        ("--warmup-epochs", ", default=5"),
        ("--batch-size", ", default=64"),
        ("--num-epochs", ", default=3"),
    )
    text = "".join(f"p.add_argument('{flag}'{more})\n" for flag, more in flags)
    experiment = load_experiment(written(tmp_path, text))
    assert isinstance(experiment, ScriptExperiment)
    assert experiment.arguments == ("--batch-size", "{per_device_batch_size}", "--num-epochs", "100000")
    assert experiment.grid and experiment.grid.per_device_batch_size == (64,)
