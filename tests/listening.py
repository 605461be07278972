"""Who can be reached: the addresses that processes listen on."""

from __future__ import annotations

import socket

import psutil

LOOPBACK = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})


def own_processes() -> list[psutil.Process]:
    """This process and all that it started."""
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


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
