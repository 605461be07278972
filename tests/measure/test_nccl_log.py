"""What NCCL's log says of its network."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.measure import nccl_log
from harness.measure.nccl_log import FILE, keep_log, logged_network, network_in
from harness.train.ranks import Ranks

INFINIBAND = """
n0:77:90 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal net plugin.
n0:77:90 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
n0:77:90 [0] NCCL INFO Using network IB
"""
SOCKETS = """
n0:77:90 [0] NCCL INFO NET/IB : No device found.
n0:77:90 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0> [1]ib0:10.1.0.1<0>
n0:77:90 [0] NCCL INFO Using network Socket
"""


@pytest.mark.parametrize(
    ("log", "network"),
    [
        (INFINIBAND, "IB: mlx5_0:1/IB, mlx5_1:1/RoCE"),
        (SOCKETS, "Socket: eth0, ib0"),
        (INFINIBAND.replace("Using network IB", "Assigned NET plugin IB to comm"), "IB: mlx5_0:1/IB, mlx5_1:1/RoCE"),
        ("n0:77:90 [0] NCCL INFO Using network AWS Libfabric\n", "AWS Libfabric"),
        (INFINIBAND + SOCKETS, "Socket: eth0, ib0"),  # a later communicator
        ("NCCL version 2.29.3+cuda13.0\n", None),
        ("", None),
    ],
)
def test_the_network_of_a_log(log: str, network: str | None) -> None:
    assert network_in(log) == network


class Group:
    """Stands for torch.distributed: the first collective makes the communicator, which writes the log."""

    def __init__(self, log: str) -> None:
        self.log, self.collectives = log, 0

    def is_initialized(self) -> bool:
        return True

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.collectives += 1
        Path(os.environ[FILE].replace("%h", "n0").replace("%p", str(os.getpid()))).write_text(self.log)


@pytest.mark.parametrize("file", [None, "own.%h.%p"])
def test_a_log_that_is_asked_for_is_read_after_the_first_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str | None
) -> None:
    others = [0.0]  # the ranks of the other node that are asked for a log
    monkeypatch.setattr(Ranks, "sum", lambda ranks, values: [values[0] + others[0]])
    two = Ranks(0, 2, 0, 0, "n", "10.0.0.1", (torch.device("cuda", 0),))
    group = Group(INFINIBAND)
    made: Any = SimpleNamespace(zeros=lambda count, device: torch.zeros(count), cuda=SimpleNamespace())
    made.cuda.synchronize = lambda device: None
    monkeypatch.setattr(nccl_log, "dist", group)
    monkeypatch.setattr(nccl_log, "torch", made)
    monkeypatch.setattr(nccl_log.socket, "gethostname", lambda: "n0.cluster")
    for name in (FILE, "NCCL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    keep_log(tmp_path)
    assert FILE not in os.environ and logged_network(two) is None and group.collectives == 0, "no log is asked for"
    monkeypatch.setenv("NCCL_DEBUG", "info")
    if file:
        monkeypatch.setenv(FILE, str(tmp_path / file))
    keep_log(tmp_path)
    assert logged_network(two) == "IB: mlx5_0:1/IB, mlx5_1:1/RoCE"
    assert [path.name for path in tmp_path.iterdir()] == [f"own.n0.{os.getpid()}" if file else nccl_log.NAME]
    assert ("Using network IB" in capsys.readouterr().err) is (file is None), "what has no file of the user's is shown"
    assert logged_network(Ranks(0, 1, 0, 0, "n", "10.0.0.1", (torch.device("cuda", 0),))) is None
    monkeypatch.delenv(FILE)
    monkeypatch.delenv("NCCL_DEBUG")
    others[0], group.all_reduce = 1.0, lambda tensor: made.seen.append(tensor)  # type: ignore[method-assign]
    made.seen = []
    assert logged_network(two) is None and len(made.seen) == 1, "this rank takes part in the other's collective"
