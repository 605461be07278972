"""Trials of different numbers of ranks in one worker group: real processes, without a launcher."""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.launch.protocol import Job, Sent
from harness.launch.subgroups import own_modules
from harness.launch.worker import run_group
from harness.plan.planner import make_plan
from harness.plan.trial import TrialResult
from harness.train.ranks import Ranks
from tests.conftest import Make, laptop

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
    context = multiprocessing.get_context("spawn")
    sent: Queue[tuple[int, Sent]] = context.Queue()
    processes = [context.Process(target=Process(job, rank, 2, tmp_path, sent).run) for rank in range(2)]
    for process in processes:
        process.start()
    found: dict[str, tuple[int, TrialResult]] = {}
    while len(found) < len(group.trials):
        rank, message = sent.get(timeout=120)
        if isinstance(message, TrialResult):
            found[message.trial_id] = rank, message
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
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
