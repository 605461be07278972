"""The request of a command line as the command that resumes its run."""

from __future__ import annotations

import shlex
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli.values import parse_only
from harness.errors import ExperimentError
from harness.launch.ray.session import JOB_VARIABLE
from harness.plan.inventory import Inventory
from harness.run.request import AUTO, Request, check_output, places_of, read_experiment, resume_command
from tests.conftest import Make


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
        (None, "here", None, "--local", "is for --output URI"),
        ("out", "here", "auto", "--local", "is for --output URI"),
        ("s3://b", None, "s3://a/e/1", "--output", "allowed: none, since the run stays where it is"),
        ("out", None, "s3://a/e/1", "--output", "allowed: none, since the run stays where it is"),
        (None, None, "s3://a/1", "--resume", "allowed: the URI of a run"),
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
