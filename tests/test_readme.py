"""What README shows works as it stands."""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from harness.analysis.results import load
from harness.cli.commands import app
from harness.config import load as config
from harness.config.sections import Checkpoint, Convergence, Grid, Limits, Loader, Throughput, TrainingOptions
from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.config.yaml_source import parse_mapping
from harness.plan.grid import device_counts
from harness.plan.inventory import Inventory
from harness.plan.planner import make_plan
from harness.report.html import write_report
from harness.report.tables.text import NO_BREAK
from harness.report.verdict import make_verdict
from harness.run.prepare import check_code, check_optimizers
from harness.train.workloads import load_class
from tests.conftest import EXAMPLE, FEW_STEPS, ROOT, experiment_of, laptop
from tests.run_folders import run_inline

README, REFERENCE = (ROOT / "README.md").read_text(), (ROOT / "experiments" / "README.md").read_text()
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))


def block(language: str, text: str = README) -> str:
    found = re.search(rf"```{language}\n(.*?)```", text, re.S)
    assert found
    return found[1]


def test_the_first_experiment_has_ten_lines_and_the_reference_shows_every_section() -> None:
    assert len(block("yaml").strip().splitlines()) <= 10
    experiment = config.parse_experiment(parse_mapping(block("yaml"), source="README.md"), source="README.md")
    assert make_plan(experiment, laptop()).trials
    content = parse_mapping(block("yaml", REFERENCE), source="experiments/README.md")
    experiment = config.parse_experiment(content, source="experiments/README.md")
    assert set(content) == set(config.Experiment.model_fields)
    assert device_counts(experiment) == (1, 2, 4, 8)
    check_optimizers(make_plan(experiment, laptop()))


def test_every_option_of_a_section_is_explained() -> None:
    sections = [Throughput, Convergence, Checkpoint, Limits, TrainingOptions, Loader, Grid]
    options = [name for section in sections for name in section.model_fields if name not in ("options", "seeks_max")]
    options += [name for traits in BUILTIN_TRAITS.values() for name in traits.options.model_fields]
    builtin = ("image_classification", "conv_stack", "mlp", "segmentation")
    options += [name for workload in builtin for name in inspect.signature(load_class(workload)).parameters]
    assert [name for name in dict.fromkeys(options) if not re.search(rf"\b{name}\b", REFERENCE)] == []


def test_the_workload_that_is_shown_is_the_file_that_runs() -> None:
    source = (ROOT / "experiments" / "my_workload.py").read_text()
    assert source.partition("\n\n")[2] == block("python")


@pytest.mark.slow
def test_the_workload_is_short_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = block("python")
    assert len(source.strip().splitlines()) <= 25
    (tmp_path / "my_workload.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    grid = {"strategy": ["single", "dp"], "devices": [1, 2], "per_device_batch_size": 128}
    own = {"workload": "my_workload:Regression", "workload_options": {"width": 16}}
    training = {"epochs": 2, "seeds": 0, "target": {"metric": "val_loss", "at_most": 4.0}}
    sections = {"throughput": {**FEW_STEPS, "explain": True}, "convergence": training, **own}
    experiment = experiment_of(grid, diagnostics=True, optimizer={"name": "SGD", "lr": 0.001}, **sections)
    plan = make_plan(experiment, laptop())
    check_code(plan)
    results = write_report(run_inline(experiment, tmp_path).path)
    done = results.trials[results.trials["trial_id"].isin({trial.id for trial in plan.trials})]
    assert set(done["outcome"]) == {"ok"}, done["reason"].tolist()
    assert results.epochs.groupby("trial_id")["train_loss"].is_monotonic_decreasing.all()
    sys.modules.pop("my_workload", None)


def test_the_command_has_the_options_that_are_shown() -> None:
    text = re.sub(r"\s+", "", CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).output)
    for option in set(re.findall(r"--[a-z-]+", README.split("## The command")[1].split("`harness run` is")[0])):
        assert option in text, option


def test_the_output_that_is_shown_is_the_examples() -> None:
    lines = [line[4:] for line in README.split("## What you see")[1].split("##")[0].splitlines() if line[:4] == " " * 4]
    verdict = make_verdict(load(EXAMPLE))
    said = [
        f"{'' if at else label} {one.lead}{': ' if one.lead else ''}{one.text}".replace(NO_BREAK, " ")
        for label, parts in verdict.lines.items()
        for at, one in enumerate(parts)
    ]
    assert " ".join(" ".join(lines[:-1]).split()) == " ".join(" ".join(said).split())
    assert lines[-1].partition("results/")[0] == verdict.command.partition(str(EXAMPLE))[0]


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("inventory", [laptop(), Inventory.assume(1, 8), Inventory.assume(2, 8)], ids=str)
def test_every_experiment_file_plans_on_every_machine(path: Path, inventory: Inventory) -> None:
    plan = make_plan(config.load_experiment(path), inventory)
    allowed = {"too few devices", "single runs on at most one device"}
    assert plan.trials or {skip.text.split(":")[0] for skip in plan.skips.values()} <= allowed


@pytest.mark.slow
def test_the_example_run_reads_back_and_can_be_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.report.html.FIGURES", {})  # drawn from this folder in test_no_user_code
    copy = tmp_path / "run"
    shutil.copytree(EXAMPLE, copy)
    results = write_report(copy)
    assert set(results.trials["outcome"]) == {"ok", "skipped"}
    rebuilt, then = (pd.read_csv(folder / "tables" / "scaling.csv") for folder in (copy, EXAMPLE))
    pd.testing.assert_frame_equal(rebuilt[then.columns], then)  # columns that came later are empty
    assert results.steps["step_s"].notna().all()
    figure = re.search(r"!\[.*\]\((.*)\)", README)
    assert figure and (ROOT / figure[1]).is_file()
