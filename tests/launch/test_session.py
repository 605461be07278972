"""Whether a cluster can be used, and whether this process is the driver of a Ray job; no Ray is started."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from harness.errors import ClusterError
from harness.launch.ray import session

MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.59.0
    Python: 3.11.9
This process on node 10.0.0.1 was started with:
    Ray: 2.60.0
    Python: 3.12.3
"""


def message(monkeypatch: pytest.MonkeyPatch, *, stdout: str = "", stderr: str = "") -> str:
    """The error of an address at which a process ended with this output."""
    done = subprocess.CompletedProcess([], 1, stdout, stderr)
    monkeypatch.setattr(session.subprocess, "run", lambda *given, **named: done)
    monkeypatch.setattr(session, "_check_port", lambda address: None)
    with pytest.raises(ClusterError) as error:
        session.check_reachable("h:6379")
    assert "\n" not in str(error.value)
    return str(error.value)


def raised(kind: str, text: str) -> str:
    return f"2026 INFO something\n{json.dumps([kind, text])}\n"


def test_other_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = message(monkeypatch, stdout=raised("RuntimeError", MISMATCH))
    assert found == (
        "--address h:6379: the cluster has Ray 2.59.0 and Python 3.11.9, this process has Ray 2.60.0 and Python "
        "3.12.3; both must be the same. Start the command, or the cluster, in an environment with the other's "
        "versions; nothing was shipped or started"
    )


@pytest.mark.parametrize(
    ("kind", "text"),
    [("AuthenticationError", "Authentication failed: the token is wrong"), ("RpcError", "status: Unauthenticated")],
)
def test_a_refused_token_is_named(kind: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = message(monkeypatch, stdout=raised(kind, text))
    assert found.startswith("--address h:6379: the cluster refuses this process's token. Set RAY_AUTH_MODE=token, and ")
    stderr = "gcs_client.cc: Unauthenticated: RPC error: InvalidAuthToken"  # with an exception that does not say so
    unspecific = raised("ConnectionError", "Failed to connect to Ray cluster at h:6379")
    assert message(monkeypatch, stdout=unspecific, stderr=stderr) == found


def test_what_a_process_printed_last_is_the_reason_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    found = message(monkeypatch, stderr="a line\nFatal: the GCS is gone\n\n")
    assert found.startswith("--address h:6379: no Ray cluster answers there (Fatal: the GCS is gone). Start one")
    assert "(exit code 1)" in message(monkeypatch)
    assert "(no nodes)" in message(monkeypatch, stdout=raised("ConnectionError", "no nodes"))


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
