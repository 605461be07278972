"""The request of a command line as the command that resumes its run."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest

from harness.cli.values import parse_only
from harness.errors import ExperimentError
from harness.launch.ray.job import JOB_VARIABLE
from harness.plan.inventory import Inventory
from harness.run.request import AUTO, Request, check_output, resume_command


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
    assert parts[3:] == [
        "e.yaml",
        "--no-user-code",
        "--no-preflight",
        "--address",
        "h:6379",
        "--only",
        "strategy=ddp,devices=2,devices=4,compile=true,device_ids=[0, 1]",
        "--resume",
        "r",
    ]
    assert parse_only(parts[parts.index("--only") + 1]) == request.only


@pytest.mark.parametrize("value", ["50", "null", "true", "[0, 1]", "resnet8"])
def test_a_text_that_looks_like_another_value_stays_a_text(value: str) -> None:
    parts = shlex.split(resume_command(Request(Path("e.yaml"), only={"model": [value]}), Path("r")))
    assert parse_only(parts[parts.index("--only") + 1]) == {"model": [value]}


@pytest.mark.parametrize(("more", "plans_only"), [({}, False), ({"dry_run": True}, True), ({"assumed": 1}, True)])
def test_a_dry_run_and_an_assumed_cluster_only_plan(more: dict[str, int], plans_only: bool) -> None:
    given = {"assumed": Inventory.assume(1, 8)} if "assumed" in more else more
    assert Request(Path("e.yaml"), **given).plans_only == plans_only


def test_a_job_s_output_is_absolute_and_the_error_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/harness", "run", "e.yaml"])
    monkeypatch.setattr(shutil, "which", {"harness": "/bin/harness"}.get)
    request = Request(Path("e.yaml"), address="10.0.0.1:6379", resume=AUTO, quiet=True)
    check_output(request)
    monkeypatch.setenv(JOB_VARIABLE, "{}")
    with pytest.raises(ExperimentError) as error:
        check_output(request)
    command = "ray job submit --working-dir . -- harness run e.yaml --quiet --output /shared/results --resume auto"
    assert str(error.value) == (
        "--output: 1 problem\n  - got 'results'; in a Ray job it is in the copy of the working directory that Ray "
        f"removes; allowed: an absolute path that outlives the job, on storage that you can read: {command}"
    )
    check_output(Request(Path("e.yaml"), output=Path("/shared/results")))
    check_output(Request(Path("e.yaml"), resume=Path("/shared/results/e/1")))
    with pytest.raises(ExperimentError, match=r"read: output='/shared/results'$"):
        check_output(Request(Path("e.yaml"), content="name: e"))


def test_a_job_resumes_as_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an address: the job's driver has it from Ray, and a later cluster has another."""
    monkeypatch.setattr(sys, "argv", ["/bin/harness", "run", "e.yaml"])
    monkeypatch.setattr(shutil, "which", {"harness": "/bin/harness"}.get)
    monkeypatch.setenv(JOB_VARIABLE, "{}")
    command = resume_command(Request(Path("e.yaml"), address="10.0.0.1:6379"), Path("/shared/r"))
    assert command == "ray job submit --working-dir . -- harness run e.yaml --resume /shared/r"
