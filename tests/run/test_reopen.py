"""Which experiment goes on in a run folder, with how many blocks; and what differs since the last invocation."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from harness.config import experiment as config
from harness.config.experiment import Experiment
from harness.errors import ExperimentError, RunFolderError
from harness.measure.environment import git_commit
from harness.plan.cell import MEASURES
from harness.plan.planner import Plan, filter_plan, make_plan
from harness.record.folder import RunFolder
from harness.run.provenance import differences, invocation_facts
from harness.run.resume import OtherMeasuresError, check_measures, more_blocks, pending, reopen
from tests.conftest import Make, laptop

GRID = "grid: {strategy: [single, ddp], devices: [1, 2], per_device_batch_size: 8}"
TEXT = f"name: test\n{GRID}\nthroughput: {{blocks: %s}}\n"
FILE = Path("test.yaml")


def experiment_of(blocks: object = 2, more: str = "") -> Experiment:
    return config.parse_experiment(yaml.safe_load(TEXT % blocks + more), source="test.yaml")


def folder_of(tmp_path: Path, blocks: object = 2, more: str = "") -> tuple[RunFolder, Plan]:
    plan = make_plan(experiment_of(blocks, more), laptop())
    return RunFolder.create(tmp_path, plan.experiment, plan, TEXT % blocks + more), plan


def test_the_same_experiment_goes_on_even_with_other_limits(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path)
    given = experiment_of(more="limits: {wall: 1h}\n")
    found, experiment = reopen(folder.path, FILE, given)
    assert (found.path, experiment) == (folder.path, given)


@pytest.mark.parametrize(
    ("blocks", "more", "named"),
    [
        (3, "", "throughput"),
        (2, "seed: 1\n", "seed"),
        (3, "seed: 1\n", "throughput, seed"),
        (2, "strategy_options: {ddp: {bucket_cap_mb: 1}}\n", "strategy_options"),
    ],
)
def test_another_experiment_is_refused(tmp_path: Path, blocks: int, more: str, named: str) -> None:
    folder, _ = folder_of(tmp_path)
    with pytest.raises(RunFolderError, match=f"was made by another experiment: {named} differ from test.yaml"):
        reopen(folder.path, FILE, experiment_of(blocks, more))


def test_an_experiment_with_a_secret_goes_on_with_it_though_the_folder_does_not_hold_it(tmp_path: Path) -> None:
    more = (
        "workload: own:Own\nworkload_options:\n  hub_token: hunter2hunter2\n  data: 's3://me:hunter2hunter2@host/x'\n"
    )
    folder, plan = folder_of(tmp_path, more=more)
    assert "hunter2" not in "".join(file.read_text() for file in folder.path.rglob("*") if file.is_file())
    assert folder.given().workload_options == {"hub_token": "<redacted>", "data": "s3://<redacted>@host/x"}
    found, experiment = reopen(folder.path, FILE, experiment_of(more=more), add_blocks=1)
    assert experiment.workload_options["hub_token"] == "hunter2hunter2"
    found.extend(experiment, make_plan(experiment, laptop()))
    assert "hunter2" not in "".join(file.read_text() for file in folder.path.rglob("*") if file.is_file())
    assert make_plan(experiment, laptop()).trials[0].cell.id in {trial.cell.id for trial in plan.trials}
    with pytest.raises(RunFolderError, match="another experiment: workload_options"):
        reopen(folder.path, FILE, experiment_of(more=more.replace("@host", "@other")))
    with pytest.raises(ExperimentError, match="holds <redacted>, which stands for a secret"):
        reopen(folder.path, FILE, folder.given())


def test_added_blocks_are_planned_after_the_old_ones_which_stay_as_they_were(tmp_path: Path) -> None:
    folder, old = folder_of(tmp_path)
    _, longer = reopen(folder.path, FILE, experiment_of(2), add_blocks=3)
    plan = make_plan(longer, laptop())
    assert plan.groups[: len(old.groups)] == old.groups
    done = [{"trial_id": trial.id, "outcome": "ok", "attempt": 1} for trial in old.trials]
    added = [trial for group in pending(plan, done) for trial in group.trials]
    assert {trial.block for trial in added} == {2, 3, 4}
    assert {trial.seed for trial in added} == {trial.seed for trial in old.trials}
    timed = [trial for trial in old.trials if trial.timed]
    assert len(added) == 3 * len(timed) // 2
    orders = {tuple(t.cell.id for group in plan.groups if group.block == b for t in group.trials) for b in range(2, 5)}
    assert len(orders) > 1  # random as before
    folder.extend(longer, plan)
    for given in (experiment_of(2), experiment_of(5)):  # the file as it was, or brought up to date
        assert reopen(folder.path, FILE, given)[1].throughput == longer.throughput
    with pytest.raises(RunFolderError, match="throughput differ"):
        reopen(folder.path, FILE, experiment_of(4))
    assert more_blocks(longer, 2).throughput.blocks == 7  # type: ignore[union-attr]
    kept, written = folder.plan(), (folder.path / "plan.json").read_bytes()
    assert [trial for group in kept["groups"] for trial in group["trials"]] == [trial.id for trial in plan.trials]
    assert kept["groups"][: len(old.groups)] == [
        {"id": g.id, "block": g.block, "placement": str(g), "trials": [t.id for t in g.trials]} for g in old.groups
    ]
    folder.extend(longer, filter_plan(plan, {"strategy": "single"}))  # a part of the grid leaves the plan whole
    assert (folder.path / "plan.json").read_bytes() == written


def test_a_kill_between_the_two_files_of_an_extension_is_recovered(tmp_path: Path) -> None:
    folder, old = folder_of(tmp_path)
    _, longer = reopen(folder.path, FILE, experiment_of(2), add_blocks=1)
    folder.extend(longer, old)  # the experiment is there, the plan is not
    again = reopen(folder.path, FILE, experiment_of(2))[1]
    folder.extend(again, plan := make_plan(again, laptop()))
    assert {t for group in folder.plan()["groups"] for t in group["trials"]} == {trial.id for trial in plan.trials}


@pytest.mark.parametrize(
    ("sections", "added", "problem"),
    [
        ({"throughput": {"blocks": {"at_least": 3, "at_most": 12, "halfwidth": 0.05}}}, 3, r"is a rule \(at most 12\)"),
        ({"throughput": None, "convergence": {"epochs": 1}}, 1, "convergence repeats by its seeds"),
        ({"throughput": {"blocks": 6}}, 995, "less than or equal to 1000"),
    ],
)
def test_blocks_are_added_to_a_number_of_blocks_alone(
    make_experiment: Make, sections: dict[str, Any], added: int, problem: str
) -> None:
    with pytest.raises(ExperimentError, match=rf"--add-blocks: 1 problem\n.*{problem}"):
        more_blocks(make_experiment(**sections), added)


# --- what differs


BEFORE: dict[str, Any] = {
    "git_commit": "a" * 40,
    "python": "3.11.7",
    "packages": {"torch": "2.14.0", "ray": "2.60.0"},
    "nodes": ["a (2 cores)"],
    "threads_per_device": 1,
}


def test_differences_name_old_and_new_values() -> None:
    assert differences(BEFORE, BEFORE) == []
    assert differences({"started_at": 1.0, "python": "3.11.7"}, BEFORE) == []  # what is not recorded is no difference
    now = {
        **BEFORE,
        "git_commit": "b" * 40 + "-dirty-12345678",
        "packages": {"torch": "2.15.0", "ray": "2.60.0", "torchvision": "0.30.0"},
        "nodes": ["a (2 cores)", "b (2 cores)"],
        "threads_per_device": 2,
    }
    assert differences(BEFORE, now) == [
        f"git commit {'a' * 40} -> {'b' * 40}-dirty-12345678",
        "torch 2.14.0 -> 2.15.0",
        "torchvision none -> 0.30.0",
        "nodes a (2 cores) -> a (2 cores) + b (2 cores)",
        "threads per device 1 -> 2",
    ]


def test_an_invocation_records_code_versions_and_hardware(make_experiment: Make, tmp_path: Path) -> None:
    plan = make_plan(make_experiment(workload="own:Own"), laptop())
    (tmp_path / "own.py").write_text("x = 1\n")
    facts = invocation_facts(plan, tmp_path)
    assert facts["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert facts["nodes"] == ["laptop (2 cores)"]
    assert (facts["device"], facts["threads_per_device"], facts["blocks"]) == ("cpu", 2, 6)
    assert differences(facts, invocation_facts(plan, tmp_path)) == []
    (tmp_path / "own.py").write_text("x = 2\n")
    (found,) = differences(facts, invocation_facts(plan, tmp_path))
    assert found.startswith("the workload's code ")


def test_a_dirty_checkout_is_named_by_its_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", *identity, "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    assert git_commit(tmp_path) is None
    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "one")
    clean = git_commit(tmp_path)
    assert clean and len(clean) == 40
    seen = {clean}
    for text in ("two", "three"):
        (tmp_path / "file").write_text(text)
        dirty = git_commit(tmp_path)
        assert dirty and dirty.startswith(f"{clean}-dirty-")
        seen.add(dirty)
    assert len(seen) == 3


def test_a_run_whose_cells_measured_something_else_is_refused(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path)
    check_measures(folder)
    plan = json.loads((folder.path / "plan.json").read_text())
    (folder.path / "plan.json").write_text(json.dumps({**plan, "measures": MEASURES + 1}))
    with pytest.raises(OtherMeasuresError) as caught:
        check_measures(RunFolder.open(folder.path))
    assert str(caught.value) == (
        f"{folder.path}: was made by a harness whose cells measure something else (measures {MEASURES + 1}; here "
        f"{MEASURES}), so that its trials and new ones cannot be compared. "
        "Resume it with that harness, or start a new run"
    )
