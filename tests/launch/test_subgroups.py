"""Trials of different numbers of ranks in one worker group: real processes, without a launcher."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby
from multiprocessing.queues import Queue
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.doctor.gate import SKIP_RULES
from harness.launch.protocol import GroupStarted, Job, Measured, Sent, TrialStarted
from harness.launch.subgroups import Alternation, Sender, Subgroups, own_modules
from harness.launch.worker import run_group
from harness.plan.grid import OwnCode
from harness.plan.planner import make_plan
from harness.plan.trial import TrialResult
from harness.system.files import code_hash
from harness.system.user_code import CodeVersion
from harness.train.ranks import LOADER_WORKERS, Cache, Ranks
from tests.conftest import Make, experiment_of, laptop
from tests.forks import start

OWN = """
import os
import torch
import torch.distributed as dist
import own_helper

RANKS = int(os.environ["WORLD_SIZE"])


class Own:
    unit = "samples"

    def build_model(self):
        assert RANKS == own_helper.RANKS == dist.get_world_size() == int(os.environ["LOCAL_WORLD_SIZE"])
        assert int(os.environ["RANK"]) == dist.get_rank()
        return torch.nn.Linear(4, 1)

    def datasets(self):
        data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
        return data, data

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().sum(), torch.tensor(len(batch[0]))

    def metrics(self, model, batch):
        return {"loss": self.loss(model, batch)}
"""


ONCE = """
import builtins
assert not hasattr(builtins, "own_was_imported")
builtins.own_was_imported = True
"""


@dataclass
class Process:
    """What a rank's process needs, and where its messages go."""

    job: Job
    rank: int
    size: int
    folder: Path
    sent: Queue[tuple[int, Sent]]

    def run(self) -> None:
        store = dist.FileStore(str(self.folder / "ranks"), self.size)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.size, timeout=timedelta(seconds=60)
        )
        os.environ.update(WORLD_SIZE=str(self.size), LOCAL_WORLD_SIZE=str(self.size), RANK=str(self.rank))
        ranks = Ranks(self.rank, self.size, self.rank, 0, "n0", "127.0.0.1", (torch.device("cpu"),))
        run_group(self.job, ranks, self.send, lambda: None, self.folder / "trials")

    def send(self, message: Sent) -> bool:
        self.sent.put((self.rank, message))
        return True


def messages_of(job: Job, folder: Path) -> Iterator[tuple[int, Sent]]:
    """Yield what the ranks of a job send, with the rank, until each has ended."""
    sent: Queue[tuple[int, Sent]] = multiprocessing.get_context("forkserver").Queue()
    size = job.group.workers
    processes = [start(Process(job, rank, size, folder, sent).run) for rank in range(size)]
    try:
        results = 0
        while results < len(job.group.trials):
            rank, message = sent.get(timeout=120)
            results += isinstance(message, TrialResult)
            yield rank, message
            if isinstance(message, TrialResult) and message.outcome != "ok":
                return
        for process in processes:
            process.join(30)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()


ALTERNATING = """
from pathlib import Path

import torch

VARIANT = Path(__file__).parent.name
LOG = Path(__file__).parents[1] / "log"


class Own:
    unit = "samples"
    calls = 0

    def build_model(self):
        return torch.nn.Linear(4, 1)

    def datasets(self):
        data = torch.utils.data.TensorDataset(torch.randn(640, 4), torch.randn(640, 1))
        return data, data

    def loss(self, model, batch):
        self.calls += 1
        assert VARIANT != "wrong" or self.calls < 5, "planted"
        with LOG.open("a") as log:
            log.write(VARIANT + "\\n")
        return (model(batch[0]) - batch[1]).square().sum(), torch.tensor(len(batch[0]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("other", ["after", "wrong"])
def test_the_windows_of_two_variants_alternate_and_a_failure_of_one_costs_the_other_nothing(
    tmp_path: Path, other: str
) -> None:
    names = ("before", other)
    versions = {}
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "own.py").write_text(ALTERNATING)
        versions[name] = CodeVersion(name, str(folder), code_hash(folder), ("own",))
    timed = {"blocks": 1, "windows": 3, "window_steps": 2, "window_seconds": 0, "warmup_steps": 2, "warmup_rounds": 2}
    experiment = experiment_of(
        {"strategy": ["ddp"], "devices": [2], "per_device_batch_size": 8},
        workload="own:Own",
        variants={name: str(tmp_path / name) for name in names},
        optimizer={"name": "SGD", "lr": 0.01},
        throughput={**timed, "warmup_seconds": 0, "twin": False, "explain": False},
    )
    plan = make_plan(experiment, laptop(), variants={name: OwnCode(versions[name], {}) for name in names})
    group = plan.groups[0].keeping(lambda trial: trial.cell.devices == 2)
    (turn,) = group.turns()
    turn = tuple(sorted(turn, key=lambda trial: str(trial.cell.variant)))
    job = Job(experiment, replace(group, trials=turn), 1, None, versions)
    assert job.group.workers == 4
    sent = [message for rank, message in messages_of(job, tmp_path) if not isinstance(message, GroupStarted)]
    results = {message.trial_id: message for message in sent if isinstance(message, TrialResult)}
    order = [name for name, _ in groupby((tmp_path / "log").read_text().split())]
    if other == "after":
        assert {result.outcome for result in results.values()} == {"ok"}
        ids = [message.trial_id for message in sent if isinstance(message, TrialStarted | TrialResult)]
        assert ids == [trial.id for trial in turn for _ in range(2)]  # one after the other, for the driver
        kinds = [[row["window_kind"] for row in results[trial.id].windows if row["rank"] == 0] for trial in turn]
        last = [str(trial.cell.variant) for trial, own in zip(turn, kinds, strict=True) if "phases" in own]
        assert order == [name for name, _ in groupby([*(4 * ["after", "before"]), *last])]  # warm-up, three windows
    else:
        before, wrong = results.values()
        assert (before.trial_id, before.outcome) == (turn[0].id, "ok")
        assert (wrong.trial_id, wrong.outcome) == (turn[1].id, "error") and "planted" in wrong.reason


class FakeStore:
    """A store of one process, in which nobody waits."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def set(self, key: str, value: str) -> None:
        self.keys.add(key)

    def check(self, keys: list[str]) -> bool:
        return self.keys.issuperset(keys)


def test_a_later_trial_is_not_started_if_the_first_may_not_be_and_reports_before_its_explanation() -> None:
    store, done = FakeStore(), list[object]()
    sender = Sender(store, "refused", lambda message: done.append(message) or False, lambda: done.append("ended"))
    started, result = TrialStarted("b"), TrialResult("b", "ok")
    assert sender.hold(started) and not done
    assert sender.hold(Measured(result)) and done == ["ended", started, Measured(result)]
    assert sender.hold(result) and len(done) == 3
    sender.release()
    assert done[3:] == ["ended", result]
    assert not sender.send_first(TrialStarted("a")) and not sender.hold(started)  # the time is up
    sender.release()
    assert done[5:] == [TrialStarted("a")]


@pytest.mark.parametrize("trials", [2, 3])
@pytest.mark.parametrize("leaves", [None, 0, 1])
def test_at_each_time_one_trial_computes_though_another_leaves(trials: int, leaves: int | None, no_group: None) -> None:
    """Each is a thread, of which the first or second leaves after one window of four."""
    store = dist.HashStore()
    order, running = list[int](), threading.Lock()

    def compute(place: int) -> None:
        alternation = Alternation(store, "turns", place, trials, 4)
        alternation.wait_for_turn()
        for _ in range(1 if place == leaves else 4):
            assert running.acquire(blocking=False), "another computes"
            order.append(place)
            time.sleep(0.002)
            running.release()
            alternation.let_others_run()
        alternation.leave()

    with ThreadPoolExecutor(trials) as pool:
        list(pool.map(compute, range(trials)))
    left = [place for place in range(trials) if place != leaves]
    assert order == [*range(trials), *3 * left]


def test_what_the_doctor_finds_on_one_rank_is_known_to_the_others(
    make_experiment: Make, monkeypatch: pytest.MonkeyPatch, no_group: None
) -> None:
    """Ranks as threads, without process groups: one runs the trial, the other waits for its end."""
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
    experiment = make_experiment(grid, throughput={"blocks": 1, "twin": False})
    group = make_plan(experiment, laptop()).groups[0]
    trial = next(each for each in group.trials if each.cell.devices == 1)
    monkeypatch.setattr(Subgroups, "_connected", lambda self, trial, members: nullcontext(replace(self._ranks, rank=0)))
    store, job = dist.HashStore(), Job(experiment, group, 1)
    caches: tuple[Cache, Cache] = ({}, {})

    def run(rank: int) -> bool:
        subgroups = object.__new__(Subgroups)
        subgroups._job, subgroups._store = job, store
        subgroups._ranks = Ranks(rank, 2, rank, 0, "n0", "127.0.0.1", (torch.device("cpu"),))
        learned = {SKIP_RULES: ["rule"], LOADER_WORKERS: {("data",): 3}}
        return subgroups.run((trial,), lambda *_: not caches[rank].update(learned), lambda message: True, caches[rank])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, (0, 1))) == [True, True]
    assert caches[0] == caches[1] == {SKIP_RULES: ["rule"], LOADER_WORKERS: {("data",): 3}}


@pytest.mark.slow
@pytest.mark.parametrize("once", [False, True])
def test_trials_of_one_and_of_two_ranks_share_processes(make_experiment: Make, tmp_path: Path, once: bool) -> None:
    """Each with a process group of its size, with the variables of torchrun, and with the user's modules of its own.

    ``once``: of a module that cannot be imported twice, all sizes have the first.
    """
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "own_helper.py").write_text("import os\nRANKS = int(os.environ['WORLD_SIZE'])\n")
    if once:
        (tmp_path / "own.py").write_text(ONCE + OWN.replace(" == own_helper.RANKS", "").replace("RANKS == ", ""))
    experiment = make_experiment(
        {"strategy": ["single", "ddp", "fsdp"], "devices": [1, 2], "per_device_batch_size": 8},
        workload="own:Own",
        optimizer={"name": "SGD", "lr": 0.01},
        preflight=True,
        throughput={"blocks": 1, "twin": True, "windows": 1, "window_steps": 2, "window_seconds": 0, "warmup_steps": 2},
    )
    (group,) = make_plan(experiment, laptop()).groups
    job = Job(experiment, group, 1, str(tmp_path))
    sent = messages_of(job, tmp_path)
    found = {message.trial_id: (rank, message) for rank, message in sent if isinstance(message, TrialResult)}
    assert {result.outcome for _, result in found.values()} == {"ok"}, [result.reason for _, result in found.values()]
    for trial in group.trials:
        rank, result = found[trial.id]
        members = group.ranks_of(trial)
        assert rank == members.start and [row["rank"] for row in result.ranks] == list(range(len(members)))
    assert {members.start for trial in group.trials for members in [group.ranks_of(trial)]} == {0, 1}


def test_the_users_modules_are_those_beside_the_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("own_work", "own_tool"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("from own_package import part\n")
    (tmp_path / "own_package" / "part.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("own_work"), __import__("own_tool"), __import__("own_package")
    names = ["own_package", "own_package.part", "own_tool", "own_work"]
    for asked in (["own_work"], ["own_package"], ["own_package.part"]):
        assert sorted(own_modules(asked)) == names
    assert own_modules(["not_imported"]) == [] == own_modules([])
    (tmp_path / "own_folder").mkdir()
    (tmp_path / "own_folder" / "inside.py").write_text("")
    __import__("own_folder.inside")  # a package without __init__.py keeps its modules as attributes
    assert sorted(own_modules(["own_folder.inside"])) == ["own_folder", "own_folder.inside", *names]
    names += ["own_folder", "own_folder.inside"]
    for name in names:
        del sys.modules[name]
