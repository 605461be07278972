"""Copies between GPUs are made in a process of their own."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.doctor import communication
from harness.doctor.subject import Case, Subject
from harness.train.ranks import Ranks
from tests.doctor.conftest import only
from tests.doctor.healthy import Healthy
from tests.doctor.ranks import cell_for


def on_gpus(*indices: int, local_rank: int = 0) -> Subject:
    """A rank with these GPUs, of which this machine needs none."""
    gpus = tuple(torch.device("cuda", index) for index in indices)
    ranks = Ranks(local_rank, 2, local_rank, 0, "n", "127.0.0.1", gpus)
    return Subject(cell_for("ddp", 2), Healthy(), (), 0, ranks)


FOUND = communication.Copied([("cuda:0", "cuda:1", "directly")])


class Child:
    """A process that ends after this many polls."""

    polls, returncode, errors, killed = 0, 0, "", False

    def __init__(self, command: list[str], **options: Any) -> None:
        self.command = command

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *arguments: object) -> None: ...

    def communicate(self, timeout: float) -> tuple[str, str]:
        if self.polls:
            self.polls -= 1
            raise subprocess.TimeoutExpired(self.command, timeout)
        return 'noise of a library\n[["cuda:0", "cuda:1", "directly"]]\n', self.errors

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """The processes that were started; each finds one corrupt pair."""
    started: list[Child] = []

    def start(command: list[str], **options: Any) -> Child:
        started.append(Child(command))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(communication, "corrupt_pairs", None)  # it would make a CUDA context in the rank's own process
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    return started


def test_a_node_s_first_rank_copies_in_a_watched_child(children: list[Child], monkeypatch: pytest.MonkeyPatch) -> None:
    assert communication.observe_copies(on_gpus(1)) == FOUND
    assert communication.observe_copies(on_gpus(0, 2)) == FOUND
    first, second = (child.command for child in children)
    assert first[-3:] == ["cuda:0", "cuda:1", "cuda:2"]
    assert second == [*first[:-3], "cuda:0", "cuda:2"]
    assert communication.observe_copies(on_gpus(1, local_rank=1)) == communication.Copied() and len(children) == 2
    resets: list[None] = []
    monkeypatch.setattr(Child, "polls", 90)
    assert communication.observe_copies(replace(on_gpus(1), advance=lambda: resets.append(None))) == FOUND
    assert len(resets) == 90


@pytest.mark.parametrize(
    ("child", "text"),
    [
        ({"polls": 10**6}, "no result within 300 s"),
        ({"returncode": 1, "errors": "Traceback\nRuntimeError: no GPU\n"}, "RuntimeError: no GPU"),
        ({"returncode": -9}, "exit -9"),
    ],
    ids=["timeout", "error", "signal"],
)
def test_a_child_that_fails_is_a_finding_of_its_own(
    children: list[Child], child: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in child.items():
        monkeypatch.setattr(Child, name, value)
    seen, text = communication.observe_copies(on_gpus(0, 1)), f"{text}, between cuda:0, cuda:1"
    assert seen == communication.Copied(failed=text)
    assert children[0].killed
    found = communication.judge_copies([seen, communication.Copied()], Case(cell_for("dp", 2)))
    assert only(found, "warning", check=communication.COPIES, means="not compared").seen == text


@pytest.mark.parametrize(("devices", "repeats"), [(2, 3), (8, 3), (10, 2), (16, 1), (32, 1)])
def test_many_gpus_have_fewer_repetitions(devices: int, repeats: int) -> None:
    assert communication.repeats_of(devices) == repeats


@pytest.mark.slow
def test_the_child_copies_between_two_names_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert communication.in_child(["cpu", "cpu:0"], lambda: None) == communication.Copied([])
