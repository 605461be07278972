"""From ray.init to ray.shutdown: the variables that Ray reads, and the signals that it is not to take from us."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from harness.errors import ClusterError
from harness.system.signals import deferred_interrupts, sigterm_blocked


@contextlib.contextmanager
def session(**arguments: Any) -> Iterator[None]:
    """Ray inside, by ray.init with these arguments; raises ClusterError where it does not start."""
    import ray
    from ray._private import auto_init_hook

    # else a fit() that has not heard of the end yet would start another Ray when ours is gone
    auto_init_hook.enable_auto_connect = False
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        try:
            with sigterm_blocked():  # Ray ends a driver whose raylet is gone, at once and without a word
                ray.init(log_to_driver=False, logging_level="ERROR", configure_logging=True, **arguments)
        except Exception as error:  # where it does not come up in time, Ray raises no narrower one
            raise ClusterError(f"Ray did not start: {type(error).__name__}: {error}") from error
        except SystemExit:  # what Ray makes of a SIGTERM until ours is back
            raise KeyboardInterrupt from None
        finally:
            _handle(handlers)
        yield
    finally:
        with deferred_interrupts():
            try:
                _shutdown()
            finally:
                _handle(handlers)


@contextlib.contextmanager
def as_ray_reads(defaults: Mapping[str, str], fixed: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """The variables inside, and Ray with them.

    Ray reads how open it is when it is imported, and a token once; either may have been for another cluster.
    """
    try:
        with _variables(defaults, fixed):
            _read_again()
            yield
    finally:
        _read_again()


def _read_again() -> None:
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    on_linux = sys.platform.startswith("linux")  # elsewhere Ray keeps to the loopback interface of itself
    ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, on_linux)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _variables(defaults: Mapping[str, str], fixed: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Sets what the environment does not set itself, and what is fixed in any case; takes it back afterwards."""
    wanted = {**{name: value for name, value in defaults.items() if name not in os.environ}, **fixed}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _shutdown() -> None:
    """Ray's own, but that its processes, which do not hear SIGTERM, are not given a second each to obey it."""
    import ray

    node = getattr(ray._private.worker, "_global_node", None)
    if node is not None:
        node.kill_all_processes = functools.partial(_kill_at_once, node.kill_all_processes)
    ray.shutdown()


def _kill_at_once(kill_all_processes: Callable[..., None], *_: object, **__: object) -> None:
    kill_all_processes(check_alive=False, allow_graceful=False)


def _handle(handlers: Mapping[signal.Signals, Any]) -> None:
    """Puts these handlers back: Ray has its own while it starts, and leaves none when it ends."""
    for number, handler in handlers.items():
        with contextlib.suppress(ValueError, TypeError):  # not in the main thread, or not set from Python
            signal.signal(number, handler)


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
