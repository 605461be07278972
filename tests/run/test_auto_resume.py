"""``--resume auto``, and the request of a command line as the command that resumes its run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import harness
from harness.cli.arguments import parse_only
from harness.config import load as config
from harness.config.experiment import Experiment
from harness.errors import ExperimentError, RunFolderError, StoreError
from harness.launch.ray.session import JOB_VARIABLE
from harness.plan.inventory import Inventory
from harness.plan.planner import make_plan
from harness.plan.rows import Circumstances
from harness.plan.run_environment import Ended
from harness.plan.trial import SkipReason, TrialResult, skipped
from harness.record.folder import RunFolder
from harness.record.writer import Writer
from harness.run.auto_resume import choose_run, copied_run, prepare_run
from harness.run.events import Emit, Event, Note
from harness.run.request import AUTO, Request, check_output, places_of, read_experiment, resume_command, submit_command
from harness.run.resume import OtherMeasuresError
from tests.conftest import ROOT, Make, laptop
from tests.stores import watched

TEXT = (
    "name: test\ngrid: {strategy: [single, ddp], devices: [1, 2], per_device_batch_size: 8}\nthroughput: {blocks: 2}\n"
)
FACTS: Circumstances = {"attempt": 1, "invocation": 0, "group_id": "g", "position": 0}


def experiment_of(more: str = "") -> Experiment:
    return config.parse_experiment(yaml.safe_load(TEXT + more), source="test.yaml")


def run_folder(output: Path, stamp: str, ended: Ended | None, more: str = "", *, start: float = 0.0) -> RunFolder:
    """Make a run folder with one invocation that began at ``start``; ``ended`` None: its process was killed."""
    plan = make_plan(experiment_of(more), laptop())
    folder = RunFolder.create(output, plan.experiment, plan, TEXT + more)
    folder = RunFolder(folder.path.rename(folder.path.with_name(stamp)))
    folder.set_invocation(0, {"started_at": start})
    for trial in plan.trials if ended == "finished" else ():
        folder.append(trial, TrialResult(trial.id, "ok"), FACTS)
    if ended:
        folder.set_invocation(0, {"ended": ended})
    return folder


def chosen(output: Path, more: str = "") -> tuple[Path | None, str]:
    request, reason = choose_run(Request(Path("test.yaml"), resume=AUTO, output=output), experiment_of(more))
    return request.resume, reason


def test_the_newest_unfinished_run_of_the_experiment_that_can_be_read_is_chosen(tmp_path: Path) -> None:
    run_folder(tmp_path, "20260101-000000-aaaa", "interrupted", start=1.0)
    newest = run_folder(tmp_path, "20260102-000000-aaaa", None, start=2.0)
    run_folder(tmp_path, "20260103-000000-aaaa", "finished", start=3.0)
    run_folder(tmp_path, "20260104-000000-aaaa", "interrupted", "seed: 1\n", start=4.0)
    (tmp_path / "test" / "20260105-000000-aaaa").mkdir()
    damaged = run_folder(tmp_path, "20260106-000000-aaaa", "interrupted", start=5.0)
    (damaged.path / "experiment.resolved.yaml").write_text("name: test\nremoved_option: 1\n")
    path, reason = chosen(tmp_path)
    assert path == newest.path
    why = "its last invocation failed, was killed or still runs"
    assert reason == f"--resume auto: {newest.path}, the newest unfinished run: {why}"


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    run_folder(tmp_path, "20260101-000000-aaaa", "interrupted")
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(RunFolderError, match=rf"--resume auto: {tmp_path / 'test'} cannot be read: Permission denied"):
        chosen(tmp_path)


@pytest.mark.parametrize(
    ("made_with", "given"),
    [
        ("limits: {wall: 10m}\n", "limits: {wall: 2h}\n"),
        ("", "cluster: {wait_for: 10m}\n"),
        ("", "limits: {device_hours: 4, cost: 10}\ncost: {per_device_hour: 2.5, currency: USD}\n"),
    ],
)
def test_limits_prices_and_waits_are_no_part_of_the_experiment(tmp_path: Path, made_with: str, given: str) -> None:
    folder = run_folder(tmp_path, "20260101-000000-aaaa", "interrupted", made_with)
    assert chosen(tmp_path, given)[0] == folder.path


@pytest.mark.parametrize(
    ("ended", "limits", "more", "why"),
    [
        ("finished", [], {"outcome": "error"}, None),  # a failed trial alone
        ("finished", ["wall"], {}, "limits.wall left out 1 trials"),
        ("finished", ["wall"], {"outcome": "ok"}, None),  # measured since
        ("finished", ["device_hours", "cost"], {}, "limits.device_hours and limits.cost left out 2 trials"),
        ("interrupted", [], {"outcome": "ok", "facts": {"inline": True}}, None),  # a run for a debugger
    ],
)
def test_a_finished_run_is_chosen_if_a_limit_left_trials_out(
    tmp_path: Path, ended: Ended, limits: list[str], more: dict[str, Any], why: str | None
) -> None:
    folder = run_folder(tmp_path, "20260101-000000-aaaa", ended)
    trials = make_plan(experiment_of(), laptop()).trials
    for trial, limit in zip(trials, limits, strict=False):
        reason = SkipReason("time_up", f"time is up: limits.{limit} was reached (1)")
        folder.append(trial, skipped(trial, reason), FACTS)
    if more:
        folder.append(trials[0], TrialResult(trials[0].id, **more), FACTS)
    path, reason_given = chosen(tmp_path)
    assert path == (folder.path if why else None)
    assert reason_given.endswith(why or "the 1 of this experiment are finished")


def test_a_run_of_which_the_last_invocation_left_a_part_out_is_chosen(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "20260101-000000-aaaa", "finished")
    lines = (folder.path / "trials.jsonl").read_text().splitlines(keepends=True)
    (folder.path / "trials.jsonl").write_text("".join(lines[:-3]))
    path, reason = chosen(tmp_path)
    assert path == folder.path and reason.endswith("3 planned trials were no part of its last invocation")


@pytest.mark.parametrize("given", [".", "20260101-000000-aaaa"])
def test_the_run_of_a_short_path_has_its_experiments_name(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(tmp_path, "20260101-000000-aaaa", "interrupted")
    monkeypatch.chdir(folder.path if given == "." else folder.path.parent)
    assert places_of(None, None, given).resume == folder.path
    assert places_of(None, None, "results/test/run").resume == Path("results/test/run")


def test_a_run_whose_cells_mean_something_else_now_is_left_for_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(tmp_path, "20260101-000000-aaaa", "interrupted")
    prepared: list[Path | None] = []

    def prepare(request: Request, experiment: Experiment, stack: ExitStack, emit: Emit) -> object:
        prepared.append(request.resume)
        if request.resume:
            raise OtherMeasuresError("another training now. Start a new run")
        return "a plan"

    monkeypatch.setattr("harness.run.auto_resume.prepare", prepare)
    notes: list[Event] = []
    request = Request(Path("test.yaml"), resume=AUTO, output=tmp_path)
    with ExitStack() as stack:
        found, plan = prepare_run(request, experiment_of(), stack, notes.append)
        assert (found.resume, plan) == (None, "a plan") and prepared == [folder.path, None]
        assert Note("--resume auto: another training now. Start a new run") in notes
        with pytest.raises(OtherMeasuresError):
            prepare_run(Request(Path("test.yaml"), resume=folder.path), experiment_of(), stack, notes.append)


def test_the_start_of_the_last_invocation_decides_not_the_name(tmp_path: Path) -> None:
    renamed = run_folder(tmp_path, "older-by-name", "interrupted", start=1.0)
    other = run_folder(tmp_path, "z-newer-by-name", "interrupted", start=2.0)
    assert chosen(tmp_path)[0] == other.path
    renamed.set_invocation(1, {"started_at": 3.0})
    assert chosen(tmp_path)[0] == renamed.path


def test_a_copy_of_a_run_is_as_new_as_the_run(tmp_path: Path) -> None:
    run = run_folder(tmp_path, "20260101-000000-aaaa", "interrupted", start=1.0)
    copy = shutil.copytree(run.path, run.path.with_name("20260102-000000-copy"))
    with pytest.raises(RunFolderError, match=rf"equally new runs .*: {run.path}, {copy}; give one with --resume"):
        chosen(tmp_path)


def test_a_run_that_recorded_nothing_is_the_last_choice_before_a_new_one(tmp_path: Path) -> None:
    new = (None, f"--resume auto: a new run: below {tmp_path} there is none of this experiment")
    assert chosen(tmp_path) == new
    plan = make_plan(experiment_of(), laptop())
    older, newer = (RunFolder.create(tmp_path, plan.experiment, plan, TEXT).path for _ in range(2))
    older = older.rename(older.with_name("20260102-000000-aaaa"))
    newer = newer.rename(newer.with_name("20260103-000000-aaaa"))
    assert chosen(tmp_path)[0] == newer
    begun = run_folder(tmp_path, "20260101-000000-aaaa", "interrupted", start=1.0)
    assert chosen(tmp_path)[0] == begun.path


def test_a_folder_named_auto_can_be_given_and_blocks_are_added_to_a_named_run_alone(tmp_path: Path) -> None:
    (file := tmp_path / "test.yaml").write_text(TEXT)
    with pytest.raises(ExperimentError, match="give its folder with --resume instead of auto"):
        read_experiment(Request(file, resume=AUTO, add_blocks=1))
    given = ("auto", True), ("auto", False), ("./auto", False), ("results/x", False), (None, True)
    found = [places_of(None, None, resume, absolute=absolute).resume for resume, absolute in given]
    assert found == [AUTO, AUTO, Path("auto").absolute(), Path("results/x"), None]


# -- runs in a store -------------------------------------------------------------------------------------------------


def sent(output: Path, folder: RunFolder) -> str:
    """Send a run to a store in a folder; return its address."""
    store = watched(output)
    writer = Writer(store, f"test/{folder.path.name}", folder.path)
    writer.claim()
    assert writer.send(lambda: True, everything=True)
    writer.release()
    return store.address


def test_the_run_is_chosen_among_those_in_the_store_and_copied(tmp_path: Path) -> None:
    uri = sent(tmp_path / "store", run_folder(tmp_path / "a", "20260101-000000-aaaa", "interrupted", start=1.0))
    newest = run_folder(tmp_path / "a", "20260102-000000-aaaa", None, start=2.0)
    trial = make_plan(experiment_of(), laptop()).trials[0]
    newest.append(trial, TrialResult(trial.id, "ok", steps={"rank": [0], "step": [0], "loss": [1.0]}), FACTS)
    sent(tmp_path / "store", newest)
    sent(tmp_path / "store", run_folder(tmp_path / "a", "20260103-000000-aaaa", "finished", start=3.0))
    (tmp_path / "store" / "test" / "20260104-000000-aaaa" / "claims").mkdir(parents=True)  # nothing was started
    request = Request(Path("test.yaml"), resume=AUTO, output=tmp_path / "b", store=uri)
    with ExitStack() as stack:
        planned, reason = copied_run(replace(request, dry_run=True), experiment_of(), stack)
        assert not (tmp_path / "b").exists() and planned.resume and planned.resume.exists()
        found, again = copied_run(request, experiment_of(), stack)
    assert reason == again and reason.startswith(f"--resume auto: {uri}/test/20260102-000000-aaaa, the newest unfinish")
    assert found.resume == tmp_path / "b" / "test" / "20260102-000000-aaaa"
    assert harness.load(found.resume).lines == harness.load(newest.path).lines
    assert [path.name for path in (tmp_path / "b" / "test").iterdir()] == ["20260102-000000-aaaa"]
    assert len(list((found.resume / "raw").iterdir())) == 1


def test_equally_new_runs_of_a_store_are_named_as_they_can_be_given(tmp_path: Path) -> None:
    names = ("20260101-000000-aaaa", "20260101-000000-bbbb")
    for name in names:
        uri = sent(tmp_path / "store", run_folder(tmp_path / "a", name, "interrupted"))
    request = Request(Path("test.yaml"), resume=AUTO, output=tmp_path / "b", store=f"{uri}/")
    one, two = (f"{uri}/test/{name}" for name in names)
    with ExitStack() as stack, pytest.raises(RunFolderError, match=rf"equally new runs .*: {one}, {two}; give one"):
        copied_run(request, experiment_of(), stack)


def test_a_new_run_is_started_where_the_store_has_no_unfinished_one_but_not_where_it_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object, **options: object) -> object:
        raise StoreError("s3://b: does not answer") from OSError("reset")

    uri = sent(tmp_path / "store", run_folder(tmp_path / "a", "20260103-000000-aaaa", "finished", start=3.0))
    request = Request(Path("test.yaml"), resume=AUTO, output=tmp_path / "b", store=uri)
    found, reason = copied_run(request, experiment_of(), ExitStack())
    assert reason == f"--resume auto: a new run: below {uri} the 1 of this experiment are finished"
    assert found.resume is None and not (tmp_path / "b").exists()
    monkeypatch.setattr("harness.run.auto_resume.copy_down", fails)
    with pytest.raises(StoreError, match="does not answer"):
        copied_run(request, experiment_of(), ExitStack())


def test_a_run_of_another_file_in_a_store_is_refused(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", "20260101-000000-aaaa", "interrupted")
    store = sent(tmp_path / "store", folder)
    file = tmp_path / "test.yaml"
    file.write_text(TEXT.replace("[1, 2]", "[1]"))
    resume = tmp_path / "b" / "test" / folder.path.name
    request = Request(file, resume=resume, output=tmp_path / "b", store=store)
    with ExitStack() as stack, pytest.raises(RunFolderError, match=r"was made by another experiment: grid differ"):
        prepare_run(request, read_experiment(request), stack, lambda event: None)


@pytest.mark.parametrize(
    ("argv", "on_path", "begins"),
    [
        ("/site/harness/run/__main__.py", {"python": "/bin/python"}, "python -m harness.run"),
        ("/site/harness/run/__main__.py", {"python": "/other/python"}, "/bin/python -m harness.run"),
        ("/site/harness/__main__.py", {}, "/bin/python -m harness.run"),
        ("/bin/harness", {"harness": "/bin/harness"}, "harness run"),
        (".venv/bin/harness", {"harness": "/bin/harness"}, ".venv/bin/harness run"),
    ],
)
def test_a_run_resumes_as_it_was_started(
    argv: str, on_path: dict[str, str], begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command works as it is printed, with the Python that has the packages."""
    monkeypatch.setattr(sys, "argv", [argv, "e.yaml"])
    monkeypatch.setattr(sys, "executable", "/bin/python")
    monkeypatch.setattr(shutil, "which", on_path.get)
    command = resume_command(Request(Path("a b.yaml"), quiet=True), Path("results/x/1"))
    assert command == f"{begins} 'a b.yaml' --quiet --resume results/x/1"


def test_in_a_batch_job_the_resume_command_submits_the_script_without_the_address_that_ends_with_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = (ROOT / "experiments/clusters/slurm.sbatch").read_text()
    (lines,) = re.findall(r"^(HARNESS_SUBMIT=.*^export HARNESS_SUBMIT.*?)$", script, re.MULTILINE | re.DOTALL)
    request = Request(Path("e.yaml"), address="10.0.0.1:26379", quiet=True)
    assert "--address 10.0.0.1:26379" in resume_command(request, Path("r"))
    spaced = {"OUTPUT": "/my results/$x", "VENV": "/v"}
    for given, expected in (
        ({}, "env"),
        ({"VENV": "/v", "IFACE": "ib0"}, "env VENV=/v IFACE=ib0"),
        (spaced, "env VENV=/v 'OUTPUT=/my results/$x'"),
    ):
        known = {"SLURM_JOB_NUM_NODES": "64", "PATH": os.environ["PATH"], **given}
        said = subprocess.run(
            ["bash", "-uc", f"{lines}\nprintenv HARNESS_SUBMIT"], env=known, capture_output=True, text=True, check=True
        )
        monkeypatch.setenv("HARNESS_SUBMIT", said.stdout.strip())
        assert resume_command(request, Path("r")) == f"{expected} sbatch -N 64 slurm.sbatch e.yaml --quiet --resume r"
        assert submit_command(request, Path("r")) == resume_command(request, Path("r"))
    monkeypatch.delenv("HARNESS_SUBMIT")
    assert submit_command(request, Path("r")) is None


def test_a_resume_command_repeats_machine_selection_and_trust_options() -> None:
    text = "strategy=ddp,devices=2,devices=4,compile=true,device_ids=[0, 1]"
    request = Request(Path("e.yaml"), address="h:6379", only=parse_only(text), no_user_code=True, preflight=False)
    parts = shlex.split(resume_command(request, Path("r")))
    assert parts[3:8] == ["e.yaml", "--no-user-code", "--no-preflight", "--address", "h:6379"]
    assert parts[8:] == ["--only", text, "--resume", "r"] and parse_only(text) == request.only
    for value in ("50", "null", "true", "[0, 1]", "resnet8"):  # a text that looks like another value stays a text
        parts = shlex.split(resume_command(Request(Path("e.yaml"), only={"model": [value]}), Path("r")))
        assert parse_only(parts[parts.index("--only") + 1]) == {"model": [value]}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command was started as ``harness``."""
    monkeypatch.setattr(sys, "argv", ["/bin/harness", "run", "e.yaml"])
    monkeypatch.setattr(shutil, "which", {"harness": "/bin/harness"}.get)


@pytest.mark.usefixtures("installed")
def test_a_run_in_a_store_is_resumed_by_its_uri_and_a_job_as_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job without an address: its driver has it from Ray, and a later cluster has another."""
    request = Request(Path("e.yaml"), store="s3://b/a?region=x")
    command = "harness run e.yaml --resume 's3://b/a/e/1?region=x'"
    assert resume_command(request, Path("results/e/1")) == command
    assert resume_command(replace(request, output=Path("/x/here")), Path("/x/here/e/1")) == f"{command} --local /x/here"
    monkeypatch.setenv(JOB_VARIABLE, "{}")
    command = resume_command(Request(Path("e.yaml"), address="10.0.0.1:6379"), Path("/shared/r"))
    assert command == "ray job submit --working-dir . -- harness run e.yaml --resume /shared/r"


def test_a_dry_run_and_an_assumed_cluster_only_plan() -> None:
    plain = Request(Path("e.yaml"))
    planning = (replace(plain, dry_run=True), replace(plain, assumed=Inventory.assume(1, 8)))
    assert not plain.plans_only and all(request.plans_only for request in planning)


@pytest.mark.usefixtures("installed")
def test_a_job_s_output_is_absolute_and_the_error_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(Path("e.yaml"), address="10.0.0.1:6379", resume=AUTO, quiet=True)
    check_output(request)
    monkeypatch.setenv(JOB_VARIABLE, "{}")
    with pytest.raises(ExperimentError) as error:
        check_output(request)
    command = "ray job submit --working-dir . -- harness run e.yaml --quiet --output /shared/results --resume auto"
    assert str(error.value) == (
        "--output: 1 problem\n  - got 'results'; in a Ray job it is in the copy of the working directory that Ray "
        "removes; allowed: s3://BUCKET/FOLDER, or an absolute path that outlives the job, on storage that you can "
        f"read: {command}"
    )
    absolute = Path("/shared/results")
    for allowed in ({"output": absolute}, {"store": "s3://bucket/a"}, {"resume": absolute / "e" / "1"}):
        check_output(Request(Path("e.yaml"), **allowed))  # type: ignore[arg-type]
    with pytest.raises(ExperimentError, match=r"read: output='/shared/results'$"):
        check_output(Request(Path("e.yaml"), content="name: e"))


@pytest.mark.parametrize(
    ("output", "local", "resume", "places"),
    [
        (None, None, None, ("results", None, None)),
        ("out", None, "auto", ("out", None, "auto")),
        ("s3://b/a", None, None, ("results", "s3://b/a", None)),
        ("s3://b/a", "here", "auto", ("here", "s3://b/a", "auto")),
        ("s3://b/a", None, "out/e/1", ("results", "s3://b/a", "out/e/1")),
        (None, "here", "s3://b/a/e/1?region=x", ("here", "s3://b/a?region=x", "here/e/1")),
        ("s3://b/a", None, "s3://b/a/e/1", ("results", "s3://b/a", "results/e/1")),
        ("s3://b/a/", None, "s3://b/a/e/1/", ("results", "s3://b/a", "results/e/1")),
        ("s3://b/a/?region=x", None, "s3://b/a/e/1?region=x", ("results", "s3://b/a?region=x", "results/e/1")),
    ],
)
def test_places(
    output: str | None, local: str | None, resume: str | None, places: tuple[str, str | None, str | None]
) -> None:
    found = places_of(output, local, resume)
    assert (str(found.output), found.store, found.resume and str(found.resume)) == places


@pytest.mark.parametrize(
    ("output", "local", "resume", "source", "problem"),
    [
        ("s3://a:b@c", None, None, "--output", "a password or a key"),
        (None, None, "s3://a?secret_key=b", "--resume", "a password or a key"),
        (None, "here", None, "--local", "is for --output URI or --resume URI; a folder alone is given with --output"),
        ("out", "here", "auto", "--local", "is for --output URI"),
        ("s3://b", None, "s3://a/e/1", "--output", "got 's3://b', and a run in s3://a to resume; allowed: none, since"),
        ("out", None, "s3://a/e/1", "--output", "allowed: none, since the run stays where it is"),
        (None, None, "s3://a/1", "--resume", "allowed: the URI of a run, as URI/<experiment>/<time>-<id>"),
    ],
)
def test_wrong_places(output: str | None, local: str | None, resume: str | None, source: str, problem: str) -> None:
    with pytest.raises(ExperimentError) as error:
        places_of(output, local, resume)
    assert error.value.source == source and problem in str(error.value)


@pytest.mark.parametrize(("folder", "refused"), [(None, True), ("/shared/checkpoints", False)])
def test_checkpoints_beside_a_store_need_a_folder_of_their_own(
    make_experiment: Make, monkeypatch: pytest.MonkeyPatch, folder: str | None, refused: bool
) -> None:
    experiment = make_experiment(checkpoint={"folder": folder} if folder else {}, convergence={"epochs": 1})
    monkeypatch.setattr("harness.run.request.load_experiment", lambda file: experiment)
    assert read_experiment(Request(Path("e.yaml"))) == experiment
    with pytest.raises(ExperimentError, match="checkpoints are not sent") if refused else nullcontext():
        read_experiment(Request(Path("e.yaml"), store="s3://b"))
