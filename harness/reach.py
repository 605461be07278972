"""Whether a Ray cluster answers at an address, found out before Ray itself tries, which may take minutes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from harness.errors import ClusterError

CONNECT_TIMEOUT_S, KNOCK_TIMEOUT_S = 25, 5
TRIES = "5"
"""How often a process that asks whether a cluster answers asks it, a second between."""


def check_reachable(address: str) -> None:
    """Raises ClusterError where none does. Asks in a process of its own, which can be stopped: Ray may end its own."""
    if address.startswith("ray://"):
        raise ClusterError(f"--address {address}: Ray Client is not supported; give the head's HOST:PORT (GCS)")
    _knock(address)
    script = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')"
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, address],
            env={"RAY_NUM_REDIS_GET_RETRIES": TRIES, **os.environ},
            capture_output=True,
            text=True,
            timeout=CONNECT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(_nobody(address, f"no answer within {CONNECT_TIMEOUT_S} s")) from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise ClusterError(_nobody(address, lines[-1][:300] if lines else f"exit code {done.returncode}"))


def _knock(address: str) -> None:
    """Whether something listens at HOST:PORT; Ray would try for half a minute. Other forms are for Ray to read."""
    host, colon, port = address.rpartition(":")
    if colon and port.isascii() and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_TIMEOUT_S).close()
        except (OSError, OverflowError, UnicodeError) as error:
            raise ClusterError(_nobody(address, str(error))) from None


def _nobody(address: str, reason: str) -> str:
    return (
        f"--address {address}: no Ray cluster answers there ({reason}). Start one with 'ray start --head', "
        "give its HOST:PORT and its RAY_AUTH_TOKEN, or leave --address out to use this machine"
    )
