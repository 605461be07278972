"""Claims about whole runs: their tables, failures and recovery, trainings that resume, shared and named GPUs."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.gpu.modules import requirement_of
from tests.gpu.planted import ON_CPU, PLANTED_S
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
ONE_BLOCK = TIMED.replace("blocks: 2", "blocks: 1")
HUNGRY = """
name: hungry
workload: hungry:Hungry
device: cuda
launcher: LAUNCHER
seed: 1  # of the order of trials: the one that fills the device is the first
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
  strategy: [single, fsdp]
  devices: [1]
  per_device_batch_size: [8]
  precision: [bf16, fp32]
exclude:
  - {strategy: fsdp, precision: fp32}
optimizer: {name: AdamW, lr: 0.0003}
throughput: {blocks: 2, windows: 2, window_steps: 10, window_seconds: 1, warmup_steps: 10, warmup_seconds: 2}
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
SHARED = """
name: shared
workload: mlp
device: cuda
oversubscribe: true
grid: {model: [small], strategy: [ddp], devices: [RANKS], per_device_batch_size: 8}
"""
SLOW = """
name: slow
workload: tests.gpu.planted:Planted
device: cuda
launcher: torchrun
grid: {strategy: [single], per_device_batch_size: [8]}
workload_options: {wait_s: WAIT}
optimizer: {name: SGD, lr: 1.0e-9}
env: {CUDA_LAUNCH_BLOCKING: 1}
"""
TRAINED = """
name: trained
workload: hungry:Hungry
device: cuda
launcher: torchrun
grid: {strategy: [single], per_device_batch_size: [64]}
workload_options: {folder: FOLDER}
optimizer: {name: SGD, lr: 0.01, momentum: 0.9}
throughput: null
convergence: {epochs: 2, seeds: [0]}
checkpoint: {}
equivalence: false
preflight: false
limits: {attempts: 1}
"""
KILLED = '''
"""Images of digits; the first process that begins the second epoch is killed."""
import os
import signal
from pathlib import Path

from harness.train.workloads.image_classification import ImageClassification


class Hungry(ImageClassification):
    def __init__(self, folder: str) -> None:
        super().__init__(model="resnet8", width=8)
        self.mark, self.evaluated = Path(folder, "killed"), False

    def loss(self, model, batch):
        self.evaluated |= not model.training
        if model.training and self.evaluated and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
'''
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
def harness_run(
    device: torch.device, text: str, workload: str = "", timed: str = TIMED, code: int = 0
) -> Iterator[Path]:
    """Run an experiment with ``harness run``; yield its run folder, whose tables are read before the block ends.

    ``workload``: the module hungry. ``timed``: further sections of the file. ``code``: the exit code on a CPU, where
    another raises AssertionError.
    """
    if importlib.util.find_spec("ray") is None:  # the command imports Ray whichever launcher is asked for
        raise NotRun(f"needs {requirement_of('ray')}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hungry.py").write_text(workload)
        file = folder / "experiment.yaml"
        file.write_text((text + timed).replace("device: cuda", f"device: {device.type}").replace("FOLDER", name))
        runs, experiment = (kept() or folder) / "runs", text.split()[1]  # its name; other claims' runs may be beside it
        before = set(runs.glob(f"{experiment}/*"))
        left = command(device, str(file), "--output", str(runs), code=code)
        made = [run for run in runs.glob(f"{experiment}/*") if run not in before]
        if len(made) != 1:
            raise RuntimeError(f"harness run made no run; exit code {left}")
        yield made[0]


def command(device: torch.device, *words: str, code: int = 0) -> int:
    """Return the exit code of ``harness run``: of a process of its own, or on a CPU of this one, with forks.

    This process is a fork there, which has what the command imports. Raises AssertionError if the code is not ``code``.
    """
    if device.type == "cuda":
        return subprocess.run([sys.executable, "-m", "harness.run", *words], cwd=ROOT).returncode
    import pytest

    from tests.forked_launch import command_here

    print(command_here(pytest.MonkeyPatch(), "run", *words, code=code))
    return code


def out_of_memory(device: torch.device, launcher: str) -> Verdict:
    """A trial that fills the device is a row "oom"; the next one, in fresh processes, is measured."""
    need_cuda(device)
    before = torch.cuda.mem_get_info(device)[0]
    with harness_run(device, HUNGRY.replace("LAUNCHER", launcher), WORKLOAD, ONE_BLOCK) as folder:
        lines = (folder / "trials.jsonl").read_text().splitlines()  # in the order in which the trials ended
    outcomes = [json.loads(line)["outcome"] for line in lines]
    held = before - torch.cuda.mem_get_info(device)[0]
    good = outcomes == ["oom", "ok"] and held < GIB
    return judged(good, f"outcomes {', '.join(outcomes)}; memory kept afterwards {max(0, held) / GIB:.2f} GiB")


def device_assert(device: torch.device) -> Verdict:
    """A trial with an assert on the device is a row "error"; the others, in fresh processes, are measured."""
    need_cuda(device)
    with harness_run(device, ASSERTING, OUT_OF_RANGE) as folder:
        lines = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    outcomes = [f"{line['outcome']}" for line in lines]
    reasons = {" ".join(line["reason"].split())[:80] for line in lines if line["outcome"] != "ok"}
    good = sorted(outcomes) == ["error", "error", "ok", "ok"]
    return judged(good, f"outcomes {', '.join(outcomes)}; {'; '.join(reasons) or 'no reason'}")


def whole(device: torch.device) -> Verdict:
    """A run with every part on, as a user's, has no null where a GPU can be read; its report is written."""
    need_cuda(device)
    import harness

    with harness_run(device, WHOLE, timed="") as run:
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
        speeds = cells["throughput_per_s"]
        ratio = speeds.get(("fsdp", "bf16"), math.nan) / speeds.get(("single", "bf16"), math.nan)
        told.append(f"fsdp x1 over single {ratio:.3f}")
        doubts = Counter(name for names in results.trials["doubts"] for name in names)
        told.append(f"doubts: {', '.join(f'{name} in {count}' for name, count in doubts.items()) or 'none'}")
        trust = results.verdict[results.verdict["topic"] == "trust"]
        told += [f"trust {row.code}: {', '.join(row.reasons) or 'no reason against it'}" for row in trust.itertuples()]
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


def shared(device: torch.device) -> Verdict:
    """A run through Ray with ``oversubscribe: true`` has one more rank than there are GPUs, and trains as one device.

    On a CPU Ray starts one more rank than there are processors, which takes too long there.
    """
    import harness

    count = torch.cuda.device_count() if device.type == "cuda" else len(os.sched_getaffinity(0))
    timed = TIMED.replace("equivalence: false", "equivalence: true")
    with harness_run(device, SHARED.replace("RANKS", str(count + 1)), timed=timed) as folder:
        results = harness.load(folder)
        trials = results.trials[results.trials["strategy"] == "ddp"]
        ranks = results.ranks[results.ranks["trial_id"].isin(trials["trial_id"][trials["kind"] == "throughput"])]
        placed = {", ".join(sorted(rows["devices"])) for _, rows in ranks.groupby(["trial_id", "attempt"])}
        devices = [name.split(", ") for name in placed]
        outcomes, checked = set(results.trials["outcome"]), results.equivalence["equivalent"].tolist()
        good = outcomes == {"ok"} and checked == [True] and bool(trials["oversubscribed"].all())
        least = count if device.type == "cuda" else 1  # every GPU is used
        good = good and bool(devices) and all(len(each) == count + 1 and len({*each}) == least for each in devices)
        off = f"the update differs by {100 * results.equivalence['difference'].max():.2g} %"
        return judged(good, f"outcomes {', '.join(sorted(outcomes))}; ranks on {' and '.join(sorted(placed))}; {off}")


def slow(device: torch.device) -> Verdict:
    """A run whose data set sleeps names the loader as the cause, and doubts; so it does of CUDA_LAUNCH_BLOCKING."""
    import harness

    cuda = device.type == "cuda"
    planted_s = PLANTED_S if cuda else ON_CPU * PLANTED_S
    with harness_run(device, SLOW.replace("WAIT", str(planted_s))) as folder:
        results = harness.load(folder)
        doubts = [set(names) for names in results.trials["doubts"]]
        blocking = "settings of the process: CUDA_LAUNCH_BLOCKING"
        raised = {"waits for data", *([blocking] if cuda else [])}
        causes = results.verdict[results.verdict["topic"] == "loss"]["subject"].tolist()
        waits_s = float(results.phases["idle_s" if cuda else "wait_s"].mean())
        good = bool(doubts) and all(raised <= names for names in doubts) and causes[:1] == ["waiting for data"]
        text = f"causes: {', '.join(causes) or 'none'}; doubts: {', '.join(sorted(set().union(*doubts))) or 'none'}; "
        text += f"the step waits {1000 * waits_s:.1f} ms, planted {1000 * planted_s:.0f} ms"  # bounds: planted:seconds
        return judged(good, text, waits_s=waits_s)


def resumed(device: torch.device) -> Verdict:
    """A training whose process is killed in its second epoch goes on from the checkpoint of the first by --resume."""
    import harness

    with harness_run(device, TRAINED, KILLED, timed="", code=1) as folder:
        command(device, "--resume", str(folder))
        results = harness.load(folder)
        kept_epochs = sorted(path.name for path in folder.glob("checkpoints/*/epoch-*"))
        outcomes, epochs = results.trials["outcome"].tolist(), results.epochs
        resumed_at = results.trials["resumed_epoch"].iloc[-1]
        losses = epochs["train_loss"].tolist()
        text = f"outcomes {', '.join(outcomes)}; resumed after epoch {resumed_at}; training losses "
        text += f"{', '.join(f'{loss:.3f}' for loss in losses)}; accuracy {epochs['val_accuracy'].iloc[-1]:.2f}"
        text += f"; checkpoints {', '.join(kept_epochs)}"
        good = outcomes == ["lost", "ok"] and resumed_at == 1 and epochs["epoch"].tolist() == [1, 2]
        good = good and losses[1] < losses[0] and bool(epochs["val_loss"].notna().all()) and "epoch-2" in kept_epochs
        return judged(good, text)


def named_gpus(device: torch.device) -> Verdict:
    """The GPUs that a cell names are those that its ranks use, in that order, and their link is known."""
    need_cuda(device)
    import harness

    with harness_run(device, NAMED) as folder:
        results = harness.load(folder)
        used = results.ranks.merge(
            results.trials[["trial_id", "strategy", "device_ids", "link", "outcome"]], on="trial_id"
        )
        used = used.sort_values(["trial_id", "rank"])
        both = used[used["device_ids"] == "1,0"]
        dp = set(both[both["strategy"] == "dp"]["devices"])
        ddp = [tuple(rows["devices"]) for _, rows in both[both["strategy"] == "ddp"].groupby("trial_id")]
        one = set(used[used["device_ids"] == "1"]["devices"])
        good = dp == {"cuda:1, cuda:0"} and set(ddp) == {("cuda:1", "cuda:0")} and one == {"cuda:1"}
        good = good and bool(both["link"].notna().all()) and set(results.trials["outcome"]) == {"ok"}
        return judged(good, f"[1,0]: dp {sorted(dp)}, ddp {sorted(set(ddp))}; [1]: {sorted(one)}")
