"""What is wrong is named, and where nothing is, nothing is: real processes with one planted fault each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import harness
from harness.config import Experiment
from harness.execute import Execution
from harness.plan import make_plan
from harness.record import RunFolder
from harness.results import Results
from harness.torchrun_launcher import TorchrunLauncher
from tests.conftest import laptop

pytestmark = pytest.mark.slow
Make = Callable[..., Experiment]
ROOT = str(Path(__file__).parents[1])


def study(make_experiment: Make, folder: Path, fault: str) -> Results:
    """single and ddp on one and two devices, each trial in processes of its own, with what explains them."""
    experiment = make_experiment(
        {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 4},
        diagnostics=True,
        workload="tests.injected_workload:Injected",
        workload_options={"fault": fault},
        launcher="torchrun",
        optimizer={"name": "SGD", "lr": 0.0001},
        throughput={
            "blocks": 1,
            "warmup_steps": 5,
            "windows": 2,
            "window_steps": 20,
            "window_seconds": 0.0,
            "twin": False,
        },
        equivalence=False,
    )
    plan = make_plan(experiment, laptop())
    run = RunFolder.create(folder, experiment, plan, "")
    Execution(plan, run, TorchrunLauncher(experiment, 1, ROOT), lambda event: None).run()
    results = harness.load(run.path)
    assert results.trials[results.trials["outcome"] != "skipped"]["outcome"].tolist() == ["ok"] * 3
    return results


def losses(results: Results) -> dict[str, float]:
    """The share of the step of ddp on two devices that each part takes."""
    rows = results.waterfall
    assert rows["share"].sum() == pytest.approx(1.0)
    return {str(part): float(share) for part, share in zip(rows["part"], rows["share"], strict=True) if part != "ideal"}


def all_doubts(results: Results) -> str:
    return " ".join(str(doubts) for doubts in results.trials["doubts"].dropna())


def test_a_healthy_study_loses_little_and_raises_no_doubt(make_experiment: Make, tmp_path: Path) -> None:
    results = study(make_experiment, tmp_path, "none")
    assert all(abs(share) < 0.15 for share in losses(results).values())
    for name in ("slow rank", "foreign load", "no steady state", "swapped", "differ"):
        assert name not in all_doubts(results)


def test_a_loader_that_sleeps_is_waiting_for_data(make_experiment: Make, tmp_path: Path) -> None:
    results = study(make_experiment, tmp_path, "loader")
    parts = losses(results)
    assert max(parts, key=lambda part: parts[part]) == "waiting for data"
    assert parts["waiting for data"] > 0.3  # 4 samples of 5 ms beside 20 ms of computing
    two = results.phases[results.phases["devices"] == 2].iloc[0]
    assert float(two["wait_s"]) > 0.018


def test_huge_gradients_are_exposed_communication(make_experiment: Make, tmp_path: Path) -> None:
    parts = losses(study(make_experiment, tmp_path, "gradients"))
    assert max(parts, key=lambda part: parts[part]) == "exposed communication"


def test_a_rank_that_sleeps_is_the_slowest_and_is_named(make_experiment: Make, tmp_path: Path) -> None:
    results = study(make_experiment, tmp_path, "rank1")
    parts = losses(results)
    assert max(parts, key=lambda part: parts[part]) == "slowest rank"
    assert parts["slowest rank"] > 0.3  # 20 ms of 40
    assert "slow rank 1" in all_doubts(results)


def test_a_foreign_process_that_burns_a_core_is_a_doubt(make_experiment: Make, tmp_path: Path) -> None:
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        results = study(make_experiment, tmp_path, "none")
    finally:
        burner.kill()
        burner.wait()
    timed = results.trials[results.trials["throughput_per_s"].notna()]
    assert all("foreign load" in str(doubts) for doubts in timed["doubts"])
    assert "slow rank" not in all_doubts(results)
