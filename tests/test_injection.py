"""What is wrong is named, and where nothing is, nothing is: real processes with one planted fault each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import harness
from harness.analysis.doubts import kind_of
from harness.analysis.results import Results
from harness.config.experiment import Experiment
from harness.launch.torchrun import TorchrunLauncher
from harness.plan.planner import make_plan
from harness.record.folder import RunFolder
from harness.run.execution import Execution
from tests.conftest import ROOT, experiment_of, laptop
from tests.forked_launch import use_forks

pytestmark = pytest.mark.slow
PARTS = {"loader": "waiting for data", "rank1": "slowest rank"}
"""Where each delay shows."""
FAULTS = ["none", "gradients", *PARTS]

THROUGHPUT = {"blocks": 1, "warmup_steps": 3, "windows": 2, "window_steps": 10, "window_seconds": 0.0, "twin": False}


def study(faults: list[str], **sections: object) -> Experiment:
    """single and ddp on one and two devices, with what explains them, for each fault; fsdp on two for one of them."""
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 4}
    workload = {"workload": "tests.injected_workload:Injected", "workload_options": {"fault": faults}}
    sharded = {"strategy": "fsdp", "devices": 2, "per_device_batch_size": 4, "workload.fault": "gradients"}
    cells = {"grid": grid, "cells": [sharded]}
    timed = {"throughput": {**THROUGHPUT, "explain": True}, "optimizer": {"name": "SGD", "lr": 0.0001}}
    timed["launcher"] = "torchrun"
    return experiment_of(**{**cells, **timed, **workload, **sections})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def injected(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All faults in one study, in the same worker groups."""
    results = under_torchrun(study(FAULTS), tmp_path_factory.mktemp("injected"))
    measured = results.trials[results.trials["outcome"] != "skipped"]
    assert set(measured["outcome"]) == {"ok"} and (measured["purpose"] == "").sum() == 3 * len(FAULTS) + 1
    return results


def of_fault(frame: pd.DataFrame, fault: str) -> pd.DataFrame:
    return frame[[options.get("workload.fault") == fault for options in frame["options"]]]


def losses(results: Results, fault: str) -> dict[str, float]:
    """The share of the step of ddp on two devices that each part takes."""
    rows = of_fault(results.waterfall, fault)
    rows = rows[rows["strategy"] == "ddp"]
    assert rows["share"].sum() == pytest.approx(1.0)
    return {str(part): float(share) for part, share in zip(rows["part"], rows["share"], strict=True) if part != "ideal"}


def doubts(results: Results, fault: str) -> set[str]:
    return {name for names in of_fault(results.trials, fault)["doubts"] for name in names}


OF_THE_MACHINE = {"impossible efficiency", "waits for data", "no steady state", "wide spread", "windows drift"}
OF_THE_MACHINE |= {"stalled", "slow rank", "foreign load", "memory swapped"}
"""Doubts that other processes and pauses of the machine bring."""


def test_a_study_without_injection_has_no_doubt_of_its_own(injected: Results) -> None:
    healthy = losses(injected, "none")
    for fault, part in PARTS.items():
        assert healthy.get(part, 0.0) < losses(injected, fault)[part], part
    withheld = of_fault(injected.waterfall, "none").query("strategy == 'ddp'")["reason"].dropna()
    assert set(PARTS.values()) <= set(healthy) or len(withheld) == 1, "a part is missing only for a stated reason"
    assert {kind_of(name) for name in doubts(injected, "none")} <= OF_THE_MACHINE


def test_a_sleeping_loader_is_data_wait(injected: Results) -> None:
    parts = losses(injected, "loader")
    assert max(parts, key=lambda part: parts[part]) == "waiting for data"
    assert parts["waiting for data"] > 0.3  # 4 samples of 25 ms beside 20 ms of computing
    phases = of_fault(injected.phases, "loader")
    waits = phases[phases["devices"] == 2]["wait_s"].astype(float)
    assert len(waits) == 1 and (waits > 0.09).all()


def test_a_sleeping_rank_is_the_slowest(injected: Results) -> None:
    parts = losses(injected, "rank1")
    assert max(parts, key=lambda part: parts[part]) == "slowest rank"
    assert parts["slowest rank"] > 0.3  # 100 ms of 120
    assert "slow rank 1" in doubts(injected, "rank1")


def test_a_collectives_duration_is_measured(injected: Results) -> None:
    trials = of_fault(injected.trials, "gradients").set_index(["strategy", "devices", "purpose"])
    exchange_s = trials.loc[("ddp", 2, ""), "exchange_s"]
    assert exchange_s["all-reduce"] > 0.001  # DDP's own clock: 25 MB in a step
    assert exchange_s["CPU time of the exchange"] > 0.001  # copied and summed by the processors that compute
    fsdp = trials.loc[("fsdp", 2, "profile"), "exchange_s"]
    assert fsdp["all-gather"] > 0.001 and fsdp["reduce-scatter"] > 0.001
    rows = injected.waterfall[injected.waterfall["strategy"] == "fsdp"]
    assert {"all-gather", "reduce-scatter"} <= set(rows["part"]) or rows["reason"].notna().any()


def test_a_foreign_process_on_a_core_is_a_doubt(tmp_path: Path) -> None:
    grid = {"strategy": "ddp", "devices": [2], "per_device_batch_size": 4}
    experiment = study(["none"], grid=grid, cells=[], throughput={**THROUGHPUT, "explain": False})
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        burnt = under_torchrun(experiment, tmp_path)
    finally:
        burner.kill()
        burner.wait()
    timed = burnt.trials[burnt.trials["throughput_per_s"].notna()]
    assert len(timed) == 2 and all("foreign load" in doubts for doubts in timed["doubts"])


def under_torchrun(experiment: Experiment, folder: Path) -> Results:
    """Run an experiment on ranks that are forks: the processes of a launcher, and none of its own beside them."""
    plan = make_plan(experiment, laptop())
    run = RunFolder.create(folder, experiment, plan, "")
    with pytest.MonkeyPatch.context() as patch:
        use_forks(patch)
        Execution(plan, run, TorchrunLauncher(experiment, 1, str(ROOT)), lambda event: None).run()
    return harness.load(run.path)
