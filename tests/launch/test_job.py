"""Whether this process is the driver of a Ray job, and what the job decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.launch.ray import session

CACHED = "/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1/results"


@pytest.mark.parametrize(
    ("config", "ships"),
    [
        ('{"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip", "env_vars": {"A": "1"}}, "metadata": {}}', True),
        ('{"runtime_env": {"env_vars": {"A": "1"}}, "metadata": {}}', False),
        ('{"runtime_env": null}', False),
        ("{}", False),
        ("[]", False),
        ("{not json", False),
        (None, False),
    ],
)
def test_a_job_with_a_working_directory_is_recognised_and_relative_folders_in_it_are_lost(
    config: str | None, ships: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(session.JOB_VARIABLE, raising=False)
    if config is not None:
        monkeypatch.setenv(session.JOB_VARIABLE, config)
    assert session.in_job() == (config is not None) and session.has_working_dir() == ships
    for output, lost in (("results", True), (CACHED, True), ("/shared/results", False)):
        assert session.is_lost_with_job(Path(output)) == (lost and config is not None)
