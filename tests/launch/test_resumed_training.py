"""Real kills: a training whose worker is killed goes on from its checkpoint as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.launch.torchrun import TorchrunLauncher
from harness.plan.planner import make_plan
from harness.record.folder import RunFolder
from harness.report.html import write_report
from harness.run.execution import Execution
from tests.conftest import ROOT, experiment_of, laptop
from tests.forked_launch import use_forks

pytestmark = pytest.mark.slow

EXACT = ["epoch", "samples", "train_loss", "learning_rate", "val_loss"]
"""What an epoch's row holds besides clocks."""


def test_a_ddp_training_with_a_killed_worker_resumes_to_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_figures: None
) -> None:
    use_forks(monkeypatch)
    tests = str(ROOT / "tests")
    monkeypatch.syspath_prepend(tests)
    kept = tmp_path / "kept"
    grid = {"strategy": "ddp", "devices": 2, "global_batch_size": 16, "workload.kills": [0, 2]}
    sections: dict[str, Any] = {"workload": "ray_workload:Killed", "workload_options": {"folder": str(tmp_path)}}
    sections |= {"schedule": {"name": "MultiStepLR", "milestones": [[2, 4]], "gamma": 0.5}, "limits": {"attempts": 2}}
    sections |= {"optimizer": {"name": "SGD", "lr": 0.01, "momentum": 0.9}, "throughput": None, "launcher": "torchrun"}
    sections |= {"convergence": {"epochs": 5, "seeds": 0, "only": {"strategy": "ddp"}}}
    experiment = experiment_of(grid, checkpoint={"every": 1, "folder": str(kept)}, **sections)
    plan = make_plan(experiment, laptop())
    folder = RunFolder.create(tmp_path, experiment, plan, "x: y\n")
    for _ in range(2):  # both attempts of the first invocation are killed; the second invocation is --resume
        launcher = TorchrunLauncher(experiment, plan.machine.threads_per_device, tests)
        Execution(plan, folder, launcher, lambda event: None).run()
    results = write_report(folder.path)
    assert "1 training resumed from a checkpoint" in folder.report.read_text()
    ddp = results.trials[results.trials["strategy"] == "ddp"]
    kills = ddp["options"].map(lambda options: options["workload.kills"]).astype(int)
    assert ddp[kills == 0]["outcome"].tolist() == ["ok"], ddp[["trial_id", "reason"]].to_dict("records")
    killed = ddp[kills == 2]
    assert killed["outcome"].tolist() == ["lost", "lost", "ok"]
    assert killed["invocation"].tolist() == [0, 0, 1]
    assert killed["resumed_epoch"].iloc[-1] == 2  # the second attempt had gone on from 1
    once, again = (frame["trial_id"].iloc[-1] for frame in (ddp[kills == 0], killed))
    for part in ("model", "optimizer", "rng"):
        one, other = ((kept / trial / "epoch-5" / f"{part}.safetensors").read_bytes() for trial in (once, again))
        assert one == other, part
    rows = {trial: results.epochs[results.epochs["trial_id"] == trial][EXACT] for trial in (once, again)}
    assert rows[again].to_numpy().tolist() == rows[once].to_numpy().tolist()
    assert rows[once]["learning_rate"].tolist() == pytest.approx([0.01, 0.01, 0.005, 0.005, 0.0025])
    assert results.convergence["epochs"].tolist().count(5) == len(results.convergence)
