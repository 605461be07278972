"""Claims about whole runs: out of memory in a worker group and the recovery, the GPUs that are named."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.gpu.modules import requirement_of
from tests.gpu.setting import kept, need_cuda
from tests.gpu.verdict import NotRun, Verdict, judged

ROOT = Path(__file__).parents[2]
GIB = 2**30
TIMED = """
throughput:
  {blocks: 2, warmup_steps: 3, warmup_seconds: 0.0, windows: 1, window_steps: 3, window_seconds: 0.0, twin: false,
   explain: false}
equivalence: false
preflight: false
"""
HUNGRY = """
name: hungry
workload: hungry:Hungry
device: cuda
launcher: LAUNCHER
grid:
  strategy: [single]
  per_device_batch_size: [32]
  workload.blocks: [1, 100_000]
limits: {trial: 60s, prune_oom: false}
"""
WHOLE = """
name: whole
workload: language_model
device: cuda
grid:
  model: [small]
  strategy: [single, ddp, fsdp]
  devices: [1]
  per_device_batch_size: [8]
  precision: [bf16, fp32]
exclude:
  - {strategy: [ddp, fsdp], precision: fp32}
optimizer: {name: AdamW, lr: 0.0003}
throughput: {blocks: 2, windows: 2, window_seconds: 1, warmup_seconds: 2}
"""
NEVER_NULL = {
    "trials": ("throughput_per_s", "step_s", "wait_fraction", "flops_per_unit", "measured_peak_flops_per_s"),
    "ranks": ("peak_memory_bytes", "power_w", "sm_clock_fraction", "temperature_c", "gpu_utilisation", "throttled"),
    "cells": ("mfu", "of_measured_peak", "peak_memory_bytes", "estimated_peak_bytes"),
    "gpus": ("busy", "power_w", "sm_clock_fraction", "temperature_c"),
    "phases": ("idle_s", "copy_s", "forward_s", "backward_s", "optimizer_s"),
    "host_phases": ("host_wait_s", "host_forward_s"),
}
"""The columns that a run on GPUs has in each row of a timed trial or a cell, by table."""
NAMED = """
name: named
device: cuda
grid: {model: [resnet8], strategy: [dp, ddp], device_ids: [[1, 0], [1]], per_device_batch_size: 8}
"""
ASSERTING = """
name: asserting
workload: hungry:Hungry
device: cuda
grid:
  strategy: [single]
  per_device_batch_size: [32]
  workload.labels: [8, 9]
limits: {trial: 60s}
"""
OUT_OF_RANGE = '''
"""A workload whose labels may be beyond its classes: an assert on the device, after which the process is of no use."""
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Hungry:
    unit = "samples"

    def __init__(self, labels: int = 8) -> None:
        self.labels = labels

    def build_model(self):
        return nn.Linear(8, 8)

    def datasets(self):
        data = TensorDataset(torch.randn(320, 8), torch.arange(320) % self.labels)
        return data, data

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, reduction="sum"), torch.tensor(len(x))
'''
WORKLOAD = '''
"""A workload that takes memory block by block, as activations do."""
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Hungry:
    unit = "samples"

    def __init__(self, blocks: int = 1) -> None:
        self.blocks = blocks

    def build_model(self):
        return nn.Linear(8, 1)

    def datasets(self):
        data = TensorDataset(torch.randn(320, 8))
        return data, data

    def loss(self, model, batch):
        (x,) = batch
        taken = [torch.ones(2**28, device=x.device) for _ in range(self.blocks)]  # until the device is full
        return model(x).square().sum() + 0 * taken[-1][0].detach(), torch.tensor(len(x))
'''


@contextmanager
def harness_run(text: str, workload: str = "", timed: str = TIMED) -> Iterator[Path]:
    """Run an experiment with ``python -m harness.run``; yield its run folder. ``workload``: the module hungry.

    ``timed``: further sections of the file.
    """
    if importlib.util.find_spec("ray") is None:  # the command imports Ray whichever launcher is asked for
        raise NotRun(f"needs {requirement_of('ray')}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hungry.py").write_text(workload)
        file = folder / "experiment.yaml"
        file.write_text(text + timed)
        runs = (kept() or folder) / "runs"
        before = set(runs.glob("*/*"))
        command = [sys.executable, "-m", "harness.run", str(file), "--output", str(runs)]
        done = subprocess.run(command, cwd=ROOT)
        made = [run for run in runs.glob("*/*") if run not in before]
        if len(made) != 1:
            raise RuntimeError(f"harness.run made no run; exit code {done.returncode}")
        yield made[0]


def out_of_memory(device: torch.device, launcher: str) -> Verdict:
    """A trial that fills the device is a row "oom"; the next one, in fresh processes, is measured."""
    need_cuda(device)
    before = torch.cuda.mem_get_info(device)[0]
    with harness_run(HUNGRY.replace("LAUNCHER", launcher), WORKLOAD) as folder:
        lines = (folder / "trials.jsonl").read_text().splitlines()  # in the order in which the trials ended
    outcomes = [json.loads(line)["outcome"] for line in lines]
    after_first = outcomes[outcomes.index("oom") :] if "oom" in outcomes else []
    held = before - torch.cuda.mem_get_info(device)[0]
    good = sorted(outcomes) == ["ok", "ok", "oom", "oom"] and "ok" in after_first and held < GIB
    return judged(good, f"outcomes {', '.join(outcomes)}; memory kept afterwards {max(0, held) / GIB:.2f} GiB")


def device_assert(device: torch.device) -> Verdict:
    """A trial with an assert on the device is a row "error"; the others, in fresh processes, are measured."""
    need_cuda(device)
    with harness_run(ASSERTING, OUT_OF_RANGE) as folder:
        lines = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    outcomes = [f"{line['outcome']}" for line in lines]
    reasons = {" ".join(line["reason"].split())[:80] for line in lines if line["outcome"] != "ok"}
    good = sorted(outcomes) == ["error", "error", "ok", "ok"]
    return judged(good, f"outcomes {', '.join(outcomes)}; {'; '.join(reasons) or 'no reason'}")


def whole(device: torch.device) -> Verdict:
    """A run with every part on, as a user's, has no null where a GPU can be read; its report is written."""
    need_cuda(device)
    import harness

    with harness_run(WHOLE, timed="") as run:
        results = harness.load(run)
        report = (run / "report.html").exists()
    nulls = [f"{table}.{name}" for table, name in nulls_of(results)]
    outcomes = sorted(set(results.trials["outcome"]))
    cells = results.cells.set_index(["strategy", "precision"])
    told = [
        f"{'/'.join(map(str, name))}: {row.throughput_per_s:,.0f} a second, MFU {_percent(row.mfu)}, peak "
        f"{row.peak_memory_bytes / GIB:.2f} GiB of {(row.estimated_peak_bytes or 0) / GIB:.2f} estimated"
        for name, row in cells.iterrows()
    ]
    text = "; ".join([*told, f"outcomes {', '.join(outcomes)}", f"null: {', '.join(nulls) or 'none'}"])
    return judged(outcomes == ["ok"] and not nulls and report, text)


def nulls_of(results: Any) -> list[tuple[str, str]]:
    """Return the tables and columns that have a null, or no row, where a GPU can be read."""
    found = []
    timed = results.trials.loc[results.trials["kind"] == "throughput", "trial_id"]
    for table, names in NEVER_NULL.items():
        rows = getattr(results, table)
        rows = rows[rows["trial_id"].isin(timed)] if "trial_id" in rows else rows
        found += [(table, name) for name in names if rows.empty or rows[name].isna().any()]
    return found


def _percent(share: object) -> str:
    return f"{100 * share:.0f} %" if isinstance(share, float) else "unknown"


def named_gpus(device: torch.device) -> Verdict:
    """The GPUs that a cell names are those that its ranks use, in that order, and their link is known."""
    need_cuda(device)
    import harness

    with harness_run(NAMED) as folder:
        results = harness.load(folder)
    used = results.ranks.merge(results.trials[["trial_id", "strategy", "device_ids", "link", "outcome"]], on="trial_id")
    used = used.sort_values(["trial_id", "rank"])
    both = used[used["device_ids"] == "1,0"]
    dp = set(both[both["strategy"] == "dp"]["devices"])
    ddp = [tuple(rows["devices"]) for _, rows in both[both["strategy"] == "ddp"].groupby("trial_id")]
    one = set(used[used["device_ids"] == "1"]["devices"])
    good = dp == {"cuda:1, cuda:0"} and set(ddp) == {("cuda:1", "cuda:0")} and one == {"cuda:1"}
    good = good and bool(both["link"].notna().all()) and set(results.trials["outcome"]) == {"ok"}
    return judged(good, f"[1,0]: dp {sorted(dp)}, ddp {sorted(set(ddp))}; [1]: {sorted(one)}")
