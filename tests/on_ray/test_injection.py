"""What is wrong is named, and where nothing is, nothing is: real processes with one planted fault each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

import harness
from harness.config import Experiment, parse
from harness.execute import Execution
from harness.plan import make_plan
from harness.record import RunFolder
from harness.results import Results
from harness.torchrun_launcher import TorchrunLauncher
from tests.conftest import laptop
from tests.on_ray.conftest import TESTS, Executed

pytestmark = pytest.mark.slow
FAULTS = ["none", "loader", "gradients", "rank1"]


def study(faults: list[str], **sections: object) -> Experiment:
    """single and ddp on one and two devices, with what explains them, for each fault."""
    content = {
        "name": "injected",
        "grid": {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 4},
        "workload": "tests.injected_workload:Injected",
        "workload_options": {"fault": faults},
        "optimizer": {"name": "SGD", "lr": 0.0001},
        "throughput": {
            "blocks": 1,
            "warmup_steps": 5,
            "windows": 2,
            "window_steps": 20,
            "window_seconds": 0.0,
            "twin": False,
        },
        "equivalence": False,
        "preflight": False,
        **sections,
    }
    return parse(content, source="injected.yaml")


@pytest.fixture(scope="module")
def injected(execute: Callable[[Experiment], Executed]) -> Results:
    """All faults in one study, in the same two worker groups."""
    results, _ = execute(study(FAULTS))
    assert results.trials[results.trials["outcome"] != "skipped"]["outcome"].tolist() == ["ok"] * 3 * len(FAULTS)
    return results


def of_fault(frame: pd.DataFrame, fault: str) -> pd.DataFrame:
    return frame[frame["options"].str.contains(f'"workload.fault": "{fault}"', regex=False)]


def losses(results: Results, fault: str) -> dict[str, float]:
    """The share of the step of ddp on two devices that each part takes."""
    rows = of_fault(results.waterfall, fault)
    assert rows["share"].sum() == pytest.approx(1.0)
    return {str(part): float(share) for part, share in zip(rows["part"], rows["share"], strict=True) if part != "ideal"}


def doubts(results: Results, fault: str) -> str:
    return " ".join(str(doubts) for doubts in of_fault(results.trials, fault)["doubts"].dropna())


def test_a_healthy_study_loses_little_and_raises_no_doubt(injected: Results) -> None:
    assert all(abs(share) < 0.15 for share in losses(injected, "none").values())
    for name in ("slow rank", "foreign load", "no steady state", "swapped", "differ"):
        assert name not in doubts(injected, "none")


def test_a_loader_that_sleeps_is_waiting_for_data(injected: Results) -> None:
    parts = losses(injected, "loader")
    assert max(parts, key=lambda part: parts[part]) == "waiting for data"
    assert parts["waiting for data"] > 0.3  # 4 samples of 5 ms beside 20 ms of computing
    phases = of_fault(injected.phases, "loader")
    assert float(phases[phases["devices"] == 2].iloc[0]["wait_s"]) > 0.018


def test_huge_gradients_are_exposed_communication(injected: Results) -> None:
    parts = losses(injected, "gradients")
    assert max(parts, key=lambda part: parts[part]) == "exposed communication"


def test_a_rank_that_sleeps_is_the_slowest_and_is_named(injected: Results) -> None:
    parts = losses(injected, "rank1")
    assert max(parts, key=lambda part: parts[part]) == "slowest rank"
    assert parts["slowest rank"] > 0.3  # 20 ms of 40
    assert "slow rank 1" in doubts(injected, "rank1")


def test_a_foreign_process_that_burns_a_core_is_a_doubt(tmp_path: Path) -> None:
    """Each trial in processes of its own, by torchrun."""
    experiment = study(["none"], launcher="torchrun")
    plan = make_plan(experiment, laptop())
    run = RunFolder.create(tmp_path, experiment, plan, "")
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        Execution(plan, run, TorchrunLauncher(experiment, 1, str(TESTS.parent)), lambda event: None).run()
    finally:
        burner.kill()
        burner.wait()
    results = harness.load(run.path)
    timed = results.trials[results.trials["throughput_per_s"].notna()]
    assert len(timed) == 3 and all("foreign load" in str(doubts) for doubts in timed["doubts"])
    assert "slow rank" not in doubts(results, "none")
