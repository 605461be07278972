"""From ray.init to ray.shutdown: the variables that Ray reads, its signal handlers, a submitted job."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, MappingProxyType

from harness.errors import ClusterError
from harness.launch.ray import private
from harness.system.process import deferred_interrupts, sigterm_blocked, variables

JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray for the driver of a job, alone: the job's runtime environment and metadata."""
CACHE = "working_dir_files"
"""The folder of each node in which Ray unpacks working directories, and from which it removes them."""
Handler = Callable[[int, FrameType | None], object] | int | None
NO_AUTO_INIT = {"RAY_ENABLE_AUTO_CONNECT": "0"}
"""Ray reads it when it is imported."""
CONNECT_TIMEOUT_S, PORT_TIMEOUT_S = 25, 5
TRIES = "5"
"""Retries of the process that checks whether a cluster answers, one second apart."""
TRY = """
import json, sys, ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]))
    sys.exit(1)
"""
REFUSED = ("Unauthenticated", "InvalidAuthToken")
"""In what Ray's C++ code prints if the cluster refuses the token; its exception does not say so."""
_VERSIONS = re.compile(r"Version mismatch.*?Ray: (\S+)\s+Python: (\S+).*?Ray: (\S+)\s+Python: (\S+)", re.DOTALL)
"""Matches Ray's error about versions: the cluster's, and this process's."""


def in_job() -> bool:
    """Return whether this process, or one that started it, is the driver of a Ray job."""
    return JOB_VARIABLE in os.environ


def has_working_dir() -> bool:
    """Return whether this is the driver of a Ray job that gives its workers a working directory.

    They then import the user's code from there, or from a folder that every node sees. Ray refuses a second one.
    """
    try:
        environment = json.loads(os.environ.get(JOB_VARIABLE, "{}")).get("runtime_env") or {}
    except (ValueError, AttributeError):  # another version's format: Ray reads it later, and says so
        return False
    return bool(environment.get("working_dir"))


def is_lost_with_job(folder: Path) -> bool:
    """Return whether Ray removes what a job writes to a folder: it is below the copy of the working directory."""
    return in_job() and (not folder.is_absolute() or CACHE in folder.parts)


@contextlib.contextmanager
def session(folder: Path | None = None, **arguments: object) -> Iterator[None]:
    """Run Ray inside, started with these arguments and this session folder; raise ClusterError if it does not start."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    quiet = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    try:
        try:
            with sigterm_blocked():  # Ray ends a driver whose raylet is gone, at once and without a message
                private.init(folder, **quiet, **arguments)
        except Exception as error:  # if it does not come up in time, Ray raises no narrower one
            raise ClusterError(f"Ray did not start: {type(error).__name__}: {error}") from error
        except SystemExit:  # Ray's reaction to a SIGTERM until our handler is back
            raise KeyboardInterrupt from None
        finally:
            _handle(handlers)
        yield
    finally:
        with deferred_interrupts():
            try:
                private.shut_down()
            finally:
                _handle(handlers)


@contextlib.contextmanager
def as_ray_reads(defaults: Mapping[str, str], fixed: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Set these variables inside, for Ray too; raise ClusterError, before anything starts, if that is uncertain.

    Ray reads the loopback rule when it is imported, and a token once; either may have been for another cluster.
    """
    imported_before = "ray" in sys.modules
    try:
        with variables(defaults, {**fixed, **NO_AUTO_INIT}):
            import ray  # which reads the variables, if it was not imported before

            certain = all([private.reread_configuration(), private.disable_auto_init()])
            if imported_before and not certain:
                raise ClusterError(
                    f"Ray {ray.__version__} was imported before its authentication token and its network interface "
                    "were set, and this version cannot be made to read them again: nothing was started. Start from a "
                    "process that has not imported ray, one cluster a process, or install another version of Ray"
                )
            yield
    finally:
        private.reread_configuration()


def _handle(handlers: Mapping[signal.Signals, Handler]) -> None:
    """Restore these handlers: Ray sets its own while it starts, and removes them when it ends."""
    for number, handler in handlers.items():
        with contextlib.suppress(ValueError, TypeError):  # not in the main thread, or not set from Python
            signal.signal(number, handler)


def check_reachable(address: str) -> None:
    """Raise ClusterError if no cluster answers, it has other versions, or it refuses the token.

    Asks in a new process with a timeout: Ray may end the asking one. Ships nothing.
    """
    if address.startswith("ray://"):
        raise ClusterError(f"--address {address}: Ray Client is not supported; give the head's HOST:PORT (GCS)")
    _check_port(address)
    plain = {name: value for name, value in os.environ.items() if name != JOB_VARIABLE}  # the job's driver is another
    try:
        done = subprocess.run(
            [sys.executable, "-c", TRY, address],
            env={"RAY_NUM_REDIS_GET_RETRIES": TRIES, **plain},
            capture_output=True,
            text=True,
            timeout=CONNECT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(_no_answer(address, f"no answer within {CONNECT_TIMEOUT_S} s")) from None
    if done.returncode != 0:
        raise ClusterError(_refusal(address, done))


def _refusal(address: str, done: subprocess.CompletedProcess[str]) -> str:
    """Return the message for a process that could not connect: what it raised or, if Ray ended it, printed last."""
    try:
        kind, text = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        kind, text = "", done.stderr
    if versions := _VERSIONS.search(text):
        theirs, their_python, ours, our_python = versions.groups()
        return (
            f"--address {address}: the cluster has Ray {theirs} and Python {their_python}, this process has Ray {ours} "
            f"and Python {our_python}; both must be the same. Start the command, or the cluster, in an environment "
            "with the other's versions; nothing was shipped or started"
        )
    if kind == "AuthenticationError" or any(sign in text + done.stderr for sign in REFUSED):
        return (
            f"--address {address}: the cluster refuses this process's token. Set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) to the cluster's; nothing was shipped or started"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _no_answer(address, lines[-1][:300] if lines else f"exit code {done.returncode}")


def _check_port(address: str) -> None:
    """Raise ClusterError if nothing listens at HOST:PORT, where Ray would try for half a minute."""
    host, colon, port = address.rpartition(":")
    if colon and port.isascii() and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=PORT_TIMEOUT_S).close()
        except (OSError, OverflowError, UnicodeError) as error:
            raise ClusterError(_no_answer(address, str(error))) from None


def _no_answer(address: str, reason: str) -> str:
    return (
        f"--address {address}: no Ray cluster answers there ({reason}). Start one with 'ray start --head', "
        "give its HOST:PORT and its RAY_AUTH_TOKEN, or leave --address out to use this machine"
    )
