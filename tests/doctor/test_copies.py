"""Copies between GPUs are made in a process of their own."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch

from harness.doctor import copies
from harness.doctor.subject import Subject
from harness.train.ranks import Ranks
from tests.doctor.faulty import Healthy
from tests.doctor.ranks import cell_for


def on_gpus(*indices: int, local_rank: int = 0) -> Subject:
    """A rank with these GPUs, of which this machine needs none."""
    gpus = tuple(torch.device("cuda", index) for index in indices)
    ranks = Ranks(local_rank, 2, local_rank, 0, "n", "127.0.0.1", gpus)
    return Subject(cell_for("ddp", 2), Healthy(), (), 0, ranks)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of the processes that were started; each finds one corrupt pair."""
    started: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, 0, 'noise of a library\n[["cuda:0", "cuda:1", "directly"]]\n', "")

    def in_this_process(*arguments: Any) -> None:
        raise AssertionError("a CUDA context in the rank's own process")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(copies, "corrupt_pairs", in_this_process)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    return started


def test_the_first_rank_of_a_node_copies_between_all_gpus_in_a_child(commands: list[list[str]]) -> None:
    assert copies.observe(on_gpus(1)) == [("cuda:0", "cuda:1", "directly")]
    assert copies.observe(on_gpus(0, 2)) == [("cuda:0", "cuda:1", "directly")]
    assert [command[-3:] for command in commands] == [
        ["cuda:0", "cuda:1", "cuda:2"],
        [commands[1][-3], "cuda:0", "cuda:2"],
    ]
    assert copies.observe(on_gpus(1, local_rank=1)) == [] and len(commands) == 2


def test_an_error_of_the_child_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nRuntimeError: no CUDA-capable device\n")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: failed)
    with pytest.raises(RuntimeError, match="copies between cuda:0, cuda:1: RuntimeError: no CUDA-capable device"):
        copies.in_child(["cuda:0", "cuda:1"])


@pytest.mark.slow
def test_the_child_copies_between_two_names_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert copies.in_child(["cpu", "cpu:0"]) == []
