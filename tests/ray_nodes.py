"""Ray nodes on loopback addresses of this machine: a cluster whose processes are known by its token."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import psutil

from tests.cluster.machines import new_token
from tests.processes import marked


def own_variables() -> dict[str, str]:
    """Return this process's environment with the token of a new cluster, and no other variable of Ray's."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | new_token()


def start_node(*words: str, variables: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, "--disable-usage-stats"]
    subprocess.run(command, env=variables, check=True, capture_output=True, timeout=120)


def of_the_cluster(token: str) -> list[psutil.Process]:
    return marked(token, "RAY_AUTH_TOKEN")


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
