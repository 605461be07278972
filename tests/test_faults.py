"""Every fault for real: it costs the trial that it hits, the row says why, and the run goes on to its end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest

import harness
from harness.analysis.results import Results
from tests.cluster.machines import wait_for
from tests.conftest import FEW_STEPS
from tests.processes import MARK, RUN, ended, lives, marked

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
LIMIT_S = 8.0
SEED = 5
"""Puts the group of two before that of one, so that each fault has something after it."""
FREED_S = 30.0
"""Seconds within which the peers of a failed rank are gone: a collective would wait for minutes."""


@dataclass(frozen=True)
class Fault:
    """What its row must say."""

    name: str
    outcome: str
    reason: str
    log: str
    kind: str = "throughput"
    outcomes: tuple[str, ...] = ()
    """Of all attempts, if there are several."""


FAULTS = (
    Fault("step", "error", r"ValueError on rank 1: a bad sample", "last words before step"),
    Fault("nan", "diverged", r"the loss became nan on rank 1 in step 7", "step 6: "),
    Fault("nan", "diverged", r"the loss became nan on rank 1 in step 7", "step 6: ", "convergence"),
    Fault("sleeps", "timeout", r"; rank 1 in sleeps", "_engine_run_backward"),
    Fault("loader", "timeout", r"; rank 1 in ", "__getitem__"),
    Fault("sigkill", "ok", "", "last words before sigkill", outcomes=("lost", "ok")),
)
"""One of each kind. Others are in launch/test_worker.py; a busy loop and os._exit in launch/test_torchrun.py."""
ONCE = ("sigkill",)


def experiment(folder: Path) -> dict[str, Any]:
    """One cell a fault, and what each needs; every second of them healthy, since one rank alone has no fault."""

    def cells(names: list[str], **more: Any) -> dict[str, Any]:
        return {"strategy": "ddp", "devices": 2, "workload.fault": names, "per_device_batch_size": 8, **more}

    names = list(dict.fromkeys(fault.name for fault in FAULTS if fault.name not in (*ONCE, "loader")))
    workload = {"workload": "faulty_workload:Faulty", "workload_options": {"folder": str(folder)}}
    apart = [cells(list(ONCE), **{"workload.once": True}), cells(["loader"], **{"loader.workers": 1})]
    training = {"epochs": 3, "seeds": [0], "only": {"workload.fault": "nan", "devices": 2}}
    more = {"equivalence": False, "preflight": False, "limits": {"trial": LIMIT_S, "attempts": 2}}
    more |= {"optimizer": {"name": "SGD", "lr": 0.01}, "throughput": {**FEW_STEPS, "warmup_steps": 3}}
    grid = cells(["none", *names])
    return {"name": "faults", "seed": SEED, **workload, "grid": grid, "cells": apart, "convergence": training, **more}


@dataclass(frozen=True)
class Run:
    """What one call of the command left."""

    results: Results
    lines: list[dict[str, Any]]
    marks: dict[str, list[float]]
    """When each fault was injected (unix time)."""
    home: Path

    def of(self, name: str, kind: str = "throughput") -> list[dict[str, Any]]:
        """The rows of one fault's trial, in the order of recording."""
        found = [line for line in self.lines if line["strategy"] == "ddp" and line["kind"] == kind]
        return [line for line in found if line["options"].get("workload.fault") == name]

    def recovery_s(self, fault: Fault) -> float | None:
        """From the injection until the next worker group was ready."""
        groups = [group for group in self.results.environment["groups"] if group["start_s"] is not None]
        ready = [group["started_at"] + group["start_s"] for group in groups]
        first = min(self.marks[fault.name])
        return min((at - first for at in ready if at > first), default=None)


def run(home: Path, content: dict[str, Any], **environment: str) -> Run:
    """Calls the command on an experiment, which leaves with 1; faults note their moments in a folder of their own."""
    shutil.copy(HERE / "faulty_workload.py", home)
    (home / "faults.yaml").write_text(json.dumps(content))
    variables = {**os.environ, MARK: str(home), **environment}
    ended(*RUN, "faults.yaml", "--output", "out", cwd=home, code=1, variables=variables)
    folder = next((home / "out" / content["name"]).iterdir())
    marks: dict[str, list[float]] = {}
    for file in (home / "marks").iterdir():
        name, at = file.name.rsplit("-", 1)
        marks.setdefault(name, []).append(float(at))
    results = harness.load(folder)
    return Run(results, [dict(line) for line in results.lines], marks, home)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    home = tmp_path_factory.mktemp("faults")
    (home / "marks").mkdir()
    return run(home, experiment(home / "marks"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.name}-{fault.kind}")
def test_a_fault_is_a_row_with_its_reason(done: Run, fault: Fault) -> None:
    rows = done.of(fault.name, fault.kind)
    assert [row["outcome"] for row in rows] == list(fault.outcomes or (fault.outcome,))
    assert [row["attempt"] for row in rows] == list(range(1, len(rows) + 1))
    first = rows[0]
    assert first["error_rank"] == 1
    assert re.search(fault.reason or r"rank 1 terminated unexpectedly", first["reason"]), first["reason"]
    log = (done.results.folder.path / first["log"]).read_text()
    assert re.search(fault.log, log), log
    if first["outcome"] != "diverged":  # its group goes on
        assert first["facts"]["freed_s"] < FREED_S


def test_every_other_trial_is_measured_and_the_run_ends_with_1(done: Run) -> None:
    trials = done.results.trials.drop_duplicates("trial_id", keep="last")
    fault = trials["options"].map(lambda options: options["workload.fault"])
    healthy = trials[(trials["strategy"] == "single") | (fault == "none")]
    assert len(healthy) == 8  # on one device each, and one without a fault on two
    assert set(healthy["outcome"]) == {"ok"}
    failed = trials[~trials["outcome"].isin(["ok", "skipped"])]
    assert set(fault[failed.index]) == {fault.name for fault in FAULTS if fault.outcome != "ok"}


def test_finite_losses_before_divergence_are_kept(done: Run) -> None:
    speed = done.of("nan")[0]
    assert speed["facts"]["diverged_step"] == 7
    steps = done.results.steps
    mine = steps[steps["trial_id"] == speed["trial_id"]]
    assert [math.isfinite(loss) for loss in mine["loss"].astype(float)][:7] == [True] * 6 + [False]  # nan is kept
    training = done.of("nan", "convergence")[0]
    epochs = done.results.epochs
    curve = epochs[epochs["trial_id"] == training["trial_id"]]
    assert curve["epoch"].tolist() == [1, 2]
    assert pd.notna(curve["val_loss"].iloc[0]) and pd.isna(curve["train_loss"].iloc[1])


def test_a_hang_ends_within_the_limit_and_no_process_is_left(done: Run) -> None:
    for fault in FAULTS:
        if fault.outcome == "timeout":
            recovery_s = done.recovery_s(fault)
            assert recovery_s is None or recovery_s < 1.25 * LIMIT_S + 120  # with the start of a group
    wait_for(lambda: not _of_the_run(done), FREED_S, lambda: _of_the_run(done))


GIB = 1 << 30


def test_a_kill_by_the_memory_monitor_is_out_of_memory(tmp_path: Path) -> None:
    memory = psutil.virtual_memory()
    if memory.available < 12 * GIB:
        pytest.skip("needs 12 GiB of memory")
    (tmp_path / "marks").mkdir()
    content = experiment(tmp_path / "marks")
    grid = {**content["grid"], "workload.fault": ["hog", "none"]}
    options = {**content["workload_options"], "stop_bytes": 10 * GIB}
    content = {**content, "grid": grid, "cells": [], "workload_options": options, "convergence": None}
    content["limits"] = {"trial": 60.0, "attempts": 2}  # which filling the memory of a busy machine may take
    # a real limit, 5 GiB above what the host uses now, of which this run and what runs beside it take a part
    limit = (memory.total - memory.available + 5 * GIB) / memory.total
    seen = run(tmp_path, content, RAY_memory_usage_threshold=f"{limit:.4f}", RAY_memory_monitor_refresh_ms="100")
    (row,) = seen.of("hog")
    assert row["outcome"] == "oom", row["reason"]  # the monitor ends whom it likes, and others with it
    assert re.search(r"Ray's memory monitor killed rank \d", row["reason"]), row["reason"]
    assert "low on memory" in (seen.results.folder.path / row["log"]).read_text()
    others = [line["outcome"] for line in seen.lines if line is not row]
    assert others == ["ok"] * 3  # though Ray itself lost what it needed to free the group's devices


def _of_the_run(done: Run) -> list[str]:
    """Return what lives of a run: its ranks, whose title hides their environment, and what inherited that."""
    ranks = {rank["pid"] for group in done.results.environment["groups"] for rank in group["ranks"]}
    assert len(ranks) > len(FAULTS)
    found = marked(str(done.home))
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            # the title too: another process may have got the id of one that has ended
            if process.pid in ranks and "ray::" in " ".join(process.cmdline()) and lives(process):
                found.append(process)
    return [str(process) for process in found]
