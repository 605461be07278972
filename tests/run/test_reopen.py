"""Resuming: what is left of a plan, which file and experiment go on in a run folder, and what differs since."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from harness.config import load as config
from harness.config.experiment import Experiment
from harness.config.load import load_experiment, parse_experiment
from harness.errors import ExperimentError, RunFolderError
from harness.measure.environment import git_commit
from harness.plan.cell import MEASURES
from harness.plan.comparison import base_cell, comparable
from harness.plan.planner import Plan, filter_plan, is_base, make_plan
from harness.record.folder import RunFolder
from harness.run.provenance import differences, file_to_resume, invocation_facts, source_facts
from harness.run.resume import OtherMeasuresError, check_measures, more_blocks, pending, reopen
from harness.run.skip_policy import SkipPolicy
from tests.any_experiment import experiments
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
    given = experiment_of(more="limits: {wall: 1h}\nhardware: {between_nodes: infiniband-ndr}\n")
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


def test_a_number_of_another_type_is_another_experiment_since_its_cells_have_other_ids(tmp_path: Path) -> None:
    one, other = (f"optimizer: {{name: SGD, lr: {lr}}}\n" for lr in ("1", "1.0"))
    folder, _ = folder_of(tmp_path, more=one)
    with pytest.raises(RunFolderError, match="another experiment: optimizer differ"):
        reopen(folder.path, FILE, experiment_of(more=other))
    reopen(folder.path, FILE, experiment_of(more="optimizer: {lr: 1, name: SGD}\n"))  # in another order


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
    for now in (experiment_of(2), experiment_of(5)):  # the file as it was, or brought up to date
        assert reopen(folder.path, FILE, now)[1].throughput == longer.throughput
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
        ({"throughput": {"blocks": "decide"}}, 1, r"is a rule \(at most 8\): more of them after its looks"),
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


@pytest.fixture
def plan(make_experiment: Make) -> Plan:
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": [8, 16]}
    settings = {"epochs": 1, "seeds": [0, 1], "only": {"per_device_batch_size": 8}}
    return make_plan(make_experiment(grid, throughput={"blocks": 2}, convergence=settings), laptop())


def lines_of(plan: Plan, outcome: str = "ok", keep: Callable[[Any], bool] = lambda trial: True) -> list[dict[str, Any]]:
    kept = [trial.id for trial in plan.trials if keep(trial)]
    return [{"trial_id": one, "outcome": outcome, "attempt": 1, "reason": "", "facts": {}} for one in kept]


@pytest.mark.parametrize("outcome", [None, "error", "timeout", "lost", "diverged", "skipped"])
def test_only_ok_counts_as_done(plan: Plan, outcome: str | None) -> None:
    assert pending(plan, lines_of(plan, outcome) if outcome else []) == plan.groups
    invocations = [line | {"invocation": number} for number, line in enumerate(lines_of(plan))]
    assert pending(plan, lines_of(plan)) == pending(plan, invocations) == ()


@pytest.mark.parametrize(
    ("kind", "strategy", "block"), [("throughput", "ddp", 1), ("throughput", "single", 1), ("convergence", "ddp", 0)]
)
def test_a_block_cut_in_two_measures_what_is_missing_alone(plan: Plan, kind: str, strategy: str, block: int) -> None:
    """Neither what it is compared with, nor what is compared with it."""
    missing = next(t for t in plan.trials if (t.kind, t.cell.strategy, t.block) == (kind, strategy, block))
    lines = lines_of(plan, keep=lambda trial: trial.id != missing.id)
    assert [trial.id for group in pending(plan, lines) for trial in group.trials] == [missing.id]


@pytest.mark.parametrize(("allow", "again"), [((), True), (("copies",), False), (("divergence",), True)])
def test_an_error_that_is_allowed_is_not_looked_for_again(plan: Plan, allow: tuple[str, ...], again: bool) -> None:
    allowing = replace(plan, experiment=plan.experiment.model_copy(update={"allow": allow}))
    found = {"findings": [{"check": "GPU copies", "severity": "error"}]}
    lines = lines_of(allowing)
    assert bool(pending(allowing, [lines[0] | {"facts": found}, *lines[1:]])) == again  # type: ignore[list-item]


def test_out_of_memory_is_not_retried_unless_configured(plan: Plan) -> None:
    lines: Any = lines_of(plan, "oom")
    assert pending(plan, lines) == () and all(map(SkipPolicy(plan, list, 0.0, lines).skipped, plan.trials))
    limits = plan.experiment.limits.model_copy(update={"prune_oom": False})
    examined = make_plan(plan.experiment.model_copy(update={"preflight": True}), laptop())
    of_doctor: Any = lines_of(examined, "oom", keep=lambda trial: trial.purpose == "doctor")
    assert of_doctor, "an examination says nothing of the cell's memory"
    assert not any(map(SkipPolicy(examined, list, 0.0, of_doctor).skipped, examined.trials))
    free = replace(plan, experiment=plan.experiment.model_copy(update={"limits": limits}))
    assert pending(free, lines) == free.groups and not any(map(SkipPolicy(free, list, 0.0, lines).skipped, free.trials))


@pytest.mark.parametrize(("outcome", "again"), [("oom", 0), ("error", 1), ("lost", 1)])
def test_a_base_that_failed_costs_no_more_than_itself(plan: Plan, outcome: str, again: int) -> None:
    base = next(t for t in plan.trials if t.kind == "throughput" and t.cell.strategy == "single" and t.block == 1)
    lines = [line | {"outcome": outcome if line["trial_id"] == base.id else "ok"} for line in lines_of(plan)]
    assert len([trial for group in pending(plan, lines) for trial in group.trials]) == again


def test_bases_come_first_in_a_block_that_was_begun(plan: Plan) -> None:
    begun = next(t for t in plan.trials if t.timed and t.block == 0 and not is_base(t))
    groups = pending(plan, lines_of(plan, keep=lambda trial: trial.id == begun.id))
    assert [is_base(t) for g in groups if g.block == 0 for t in g.trials if t.timed] == [True] * 2 + [False] * 3
    assert [g for g in groups if g.block == 1] == [g for g in plan.groups if g.block == 1]


class Resumed:
    """A run that is called again and again: each time it measures some of what is pending, then is interrupted."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.lines, self.invocations = plan, list[dict[str, Any]](), 0

    def invocation(self, most: int, failing: Collection[str] = ()) -> int:
        """Measure at most ``most`` trials; return how many are left. Trials of ``failing`` are lost."""
        before, invocation = pending(self.plan, self.lines), self.invocations  # type: ignore[arg-type]
        todo = [trial for group in before for trial in group.trials]
        begun = {line["block"] for line in self.lines if line["outcome"] == "ok"}
        for block in begun:
            timed = [t for t in todo if t.block == block and t.timed and not t.repeats]
            place = {t.cell: number for number, t in enumerate(timed)}
            for trial in timed:
                if comparable(trial.cell):
                    assert place.get(base_cell(trial.cell), -1) <= place[trial.cell], "its base comes first"
        done = {line["trial_id"] for line in self.lines if line["outcome"] == "ok"}
        assert not done & {trial.id for trial in todo} and len(done) + len(todo) == len(self.plan.trials)
        for trial in todo[:most]:
            outcome = "lost" if trial.id in failing else "ok"
            line = {"trial_id": trial.id, "outcome": outcome, "block": trial.block, "invocation": invocation}
            self.lines.append(line | {"facts": {}, "attempt": 1})
        self.invocations += 1
        return sum(len(group.trials) for group in pending(self.plan, self.lines))  # type: ignore[arg-type]


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[*HealthCheck])
@given(experiments(), st.integers(1, 40), st.randoms(use_true_random=False))
def test_any_plan_is_finished_however_it_is_interrupted(content: dict[str, Any], most: int, chance: Random) -> None:
    """Of any plan, with any number of trials an invocation: kills may lose all of an invocation, or trials of it."""
    try:
        plan = make_plan(parse_experiment(content, source="drawn"), laptop(4))
    except ExperimentError:
        assume(False)
    trials = len(plan.trials)
    assume(0 < trials <= 150)
    undisturbed, killed = Resumed(plan), Resumed(plan)
    while undisturbed.invocation(most):
        assert undisturbed.invocations < 2 * ceil(trials / most)
    assert undisturbed.invocations == ceil(trials / most) and len(undisturbed.lines) == trials
    for _ in range(chance.randint(1, 20)):
        lost = [trial.id for trial in plan.trials if chance.random() < 0.3]
        killed.invocation(chance.randint(0, most), lost)
    kills = killed.invocations
    while killed.invocation(most):
        assert killed.invocations < kills + 2 * ceil(trials / most)
    ok = [line["trial_id"] for line in killed.lines if line["outcome"] == "ok"]
    assert sorted(ok) == sorted(trial.id for trial in plan.trials)


def test_blocks_skipped_by_precision_stay_skipped_and_need_no_base(make_experiment: Make) -> None:
    rule = {"at_least": 2, "at_most": 3, "halfwidth": 0.1}
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
    plan = make_plan(make_experiment(grid, throughput={"blocks": rule}), laptop())
    lines = [
        {
            "trial_id": trial.id,
            "outcome": "skipped" if trial.block == 2 else "ok",
            "skip_code": "precise" if trial.block == 2 else None,
            "attempt": 1,
        }
        for trial in plan.trials
    ]
    assert pending(plan, lines) == ()


OWN_CODE = "name: x\nworkload: my_model:Net\ngrid: {strategy: [ddp, 'pkg.mine:Zero'], per_device_batch_size: 8}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An experiment file with a module and a package beside it, which fail if something imports them."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "results" / "run").mkdir(parents=True)
    for name in ("my_model.py", "pkg/__init__.py", "pkg/mine.py"):
        (tmp_path / name).write_text("raise RuntimeError('imported')\n")
    (tmp_path / "e.yaml").write_text(OWN_CODE)
    return tmp_path / "e.yaml"


def recorded(file: Path) -> dict[str, Any]:
    facts = source_facts(file, load_experiment(file), sys.path)
    return json.loads(json.dumps(facts))  # type: ignore[no-any-return]


def resume(file: Path, facts: object, run: Path | None = None) -> Path:
    return file_to_resume(run or file.parent / "results" / "run", [{"source": facts}, {}], sys.path)  # type: ignore[list-item]


def test_file_and_modules_are_recorded_by_path_and_hash_and_found_again_without_an_import(file: Path) -> None:
    facts = recorded(file)
    assert facts["file"] == str(file) and len(facts["sha256"]) == 64
    assert {name: Path(one["file"]).relative_to(file.parent).as_posix() for name, one in facts["modules"].items()} == {
        "my_model": "my_model.py",
        "pkg": "pkg/__init__.py",
        "pkg.mine": "pkg/mine.py",
    }
    assert "raise" not in json.dumps(facts)
    assert resume(file, facts) == file and not {"my_model", "pkg"} & set(sys.modules)
    run = file.parent / "results" / "run"  # the last invocation that names a file counts
    assert file_to_resume(run, [{"source": {"file": "/nowhere"}}, {"source": facts}, {}], sys.path) == file


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("e.yaml", "# edited", "e.yaml has changed since the run"),
        ("my_model.py", "# edited", "the module my_model .*my_model.py has changed since the run"),
        ("pkg/__init__.py", "# edited", "the module pkg .*__init__.py has changed since the run"),
        ("pkg/mine.py", "# edited", "the module pkg.mine .*mine.py has changed since the run"),
        ("my_model/__init__.py", "", "my_model.py is not what would be imported now"),
        ("e.yaml", None, "e.yaml is no longer there"),
        ("pkg/mine.py", None, "mine.py is no longer there"),
    ],
)
def test_a_changed_file_or_module_is_asked_for(name: str, text: str | None, reason: str, file: Path) -> None:
    facts = recorded(file)
    path = file.parent / name
    path.parent.mkdir(exist_ok=True)
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(RunFolderError, match=reason) as caught:
        resume(file, facts)
    assert f"Give the file: harness run FILE --resume {file.parent / 'results' / 'run'}" in str(caught.value)


def test_nothing_inside_the_run_folder_is_used(file: Path) -> None:
    facts = recorded(file)
    with pytest.raises(RunFolderError, match="lies inside the run folder, of which nothing is executed"):
        resume(file, facts, run=file.parent)
    (file.parent / "link").symlink_to(file.parent / "pkg")
    for run in ("pkg", "link"):
        with pytest.raises(RunFolderError, match=r"the module pkg .*lies inside the run folder"):
            resume(file, facts, run=file.parent / run)


@pytest.mark.parametrize(
    "facts", [None, 3, [], {}, {"file": 3}, {"file": "/dev/null", "sha256": "x"}, {"file": "a\0b", "sha256": []}]
)
def test_a_run_without_a_record_or_with_a_damaged_one_asks(facts: object, file: Path) -> None:
    with pytest.raises(RunFolderError, match="Give the file"):
        resume(file, facts)
    for modules in (None, 3, {}, {"my_model": 3}):
        with pytest.raises(RunFolderError, match="the module my_model is not recorded"):
            resume(file, {**recorded(file), "modules": modules})


def test_the_module_of_every_variant_is_as_it_was(file: Path) -> None:
    for name in ("before", "after"):
        (file.parent / name).mkdir()
        (file.parent / name / "my_model.py").write_text(f"raise RuntimeError({name!r})\n")
    (file.parent / "my_model.py").unlink()
    grid = "grid: {per_device_batch_size: 8}"
    file.write_text(f"name: x\nworkload: my_model:Net\nvariants: {{before: before, after: after}}\n{grid}\n")
    facts = recorded(file)
    assert list(facts["modules"]) == ["my_model of before", "my_model of after"]
    assert resume(file, facts) == file
    (file.parent / "after" / "my_model.py").write_text("")
    with pytest.raises(RunFolderError, match=r"the module my_model of after .* has changed since the run"):
        resume(file, facts)
