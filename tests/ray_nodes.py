"""Ray nodes on loopback addresses of this machine: a cluster whose processes are known by its token."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import psutil


def own_variables() -> dict[str, str]:
    """Return this process's environment with the token of a new cluster, and no other variable of Ray's."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {**plain, **token, "RAY_USAGE_STATS_ENABLED": "0"}


def start_node(*words: str, variables: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, "--disable-usage-stats"]
    subprocess.run(command, env=variables, check=True, capture_output=True, timeout=120)


def of_the_cluster(token: str) -> list[psutil.Process]:
    """Return the living processes of the cluster with this token."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("RAY_AUTH_TOKEN") == token and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextmanager
def ended_afterwards(token: str) -> Iterator[None]:
    """Kill the cluster's processes at the end: ``ray stop`` would end every Ray of this machine."""
    try:
        yield
    finally:
        left = of_the_cluster(token)
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=10)
