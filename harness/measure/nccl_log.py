"""The network that NCCL has chosen, by the log that NCCL_DEBUG=INFO asks for."""

from __future__ import annotations

import os
import re
import socket
import sys
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from harness.train.ranks import Ranks

FILE, NAME = "NCCL_DEBUG_FILE", "harness-nccl.log"
LEVELS = ("INFO", "TRACE")
"""The values of NCCL_DEBUG with which NCCL logs its choice."""
CHOSEN = re.compile(r"Using network (\S.*?)\s*$|Assigned NET plugin (\S+) to comm", re.MULTILINE)
FOUND = re.compile(r"NET/(\S+) ?: Using (.+?)(?: \[RO\])?(?:;.*)?$", re.MULTILINE)
"""The adapters or interfaces of a network, as in 'NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:..'."""


def keep_log(folder: Path) -> None:
    """Have NCCL write its log to a file in this folder, if it is asked for one and the user has named no other.

    NCCL reads this when its first communicator is made.
    """
    if _is_asked_for():
        os.environ.setdefault(FILE, str(folder / NAME))


def _is_asked_for() -> bool:
    return os.environ.get("NCCL_DEBUG", "").upper() in LEVELS


def logged_network(ranks: Ranks) -> str | None:
    """Return the network of NCCL between these ranks, as 'IB: mlx5_0:1/IB, mlx5_1:1/IB'; None without a log of it.

    Collective: makes the first communicator if some rank is asked for a log. A log in no file of the user's is printed
    as far as it goes by then.
    """
    if ranks.devices[0].type != "cuda" or ranks.world_size == 1 or not dist.is_initialized():
        return None
    if not ranks.sum([float(_is_asked_for())])[0]:  # a variable may be set on one node alone
        return None
    dist.all_reduce(torch.zeros(1, device=ranks.devices[0]))
    torch.cuda.synchronize(ranks.devices[0])
    host = socket.gethostname().partition(".")[0]
    with suppress(OSError, KeyError):
        file = Path(os.environ[FILE].replace("%h", host).replace("%p", str(os.getpid())))
        log = file.read_text(errors="replace")
        if file.name == NAME:
            sys.stderr.write(log)
        return network_in(log)
    return None


def network_in(log: str) -> str | None:
    """Return the network that a log of NCCL names last, with what it found there; None if it names none."""
    chosen = [one or other for one, other in CHOSEN.findall(log)]
    if not chosen:
        return None
    places = dict(FOUND.findall(log)).get(chosen[-1], "")
    names = [re.sub(r"^\[\d+\]|:\d+\.\d+\.\d+\.\d+<\d+>$", "", place) for place in places.split()]
    return f"{chosen[-1]}: {', '.join(names)}" if names else chosen[-1]
