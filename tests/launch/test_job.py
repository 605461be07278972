"""Whether this process is the driver of a Ray job, and what the job decides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.launch.ray import session

CACHED = "/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1/results"


@pytest.mark.parametrize(
    ("config", "ships"),
    [
        ({"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip", "env_vars": {"A": "1"}}, "metadata": {}}, True),
        ({"runtime_env": {"env_vars": {"A": "1"}}, "metadata": {}}, False),
        ({"runtime_env": None}, False),
        ({}, False),
        ([], False),
    ],
)
def test_a_job_with_a_working_directory_is_recognised(
    config: object, ships: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(session.JOB_VARIABLE, json.dumps(config))
    assert session.in_job()
    assert session.has_working_dir() == ships


def test_a_process_outside_jobs_and_an_unknown_format_have_no_working_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(session.JOB_VARIABLE, raising=False)
    assert not session.in_job() and not session.has_working_dir() and not session.is_lost_with_job(Path("results"))
    monkeypatch.setenv(session.JOB_VARIABLE, "{not json")
    assert session.in_job() and not session.has_working_dir()


@pytest.mark.parametrize(("output", "lost"), [("results", True), (CACHED, True), ("/shared/results", False)])
def test_a_relative_folder_of_a_job_is_lost(output: str, lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(session.JOB_VARIABLE, "{}")
    assert session.is_lost_with_job(Path(output)) == lost
