"""Who can be reached: the addresses that processes listen on."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import psutil

LOOPBACK = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port of this address that nobody has."""
    with socket.socket() as free:
        free.bind((address, 0))
        return int(free.getsockname()[1])


def started_since(before: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """All living processes that this one started, but those before: an earlier test's fork server may live on."""
    known = set(before)
    return [process for process in psutil.Process().children(recursive=True) if process not in known]


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return f"a process that has ended: {process.pid}"


def listened_on(process: psutil.Process) -> set[str]:
    """Addresses of its TCP sockets that take connections, and of its UDP sockets."""
    try:
        sockets = process.net_connections("inet")
    except psutil.Error:
        return set()
    return {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN or (s.type == socket.SOCK_DGRAM and s.laddr)}


def outside(processes: list[psutil.Process]) -> dict[str, list[str]]:
    """Which of these processes can be reached from other machines, and at which addresses; empty where none can."""
    found = {process: listened_on(process) - LOOPBACK for process in processes}
    return {command_of(process): sorted(addresses) for process, addresses in found.items() if addresses}
