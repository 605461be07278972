"""Environment variables as an axis: each rank starts with its cell's, under Ray and torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

import harness
from tests.processes import RUN, ended

pytestmark = pytest.mark.slow

FILE = """
name: variables
workload: own_model:Own
grid: {strategy: [single, ddp], devices: [1, 2], per_device_batch_size: 8, env.OWN_WIDTH: [null, 2]}
env: {NCCL_ALGO: Tree}
launcher: [ray, torchrun]
exclude: [{strategy: ddp, devices: 1}, {strategy: ddp, launcher: torchrun}]
throughput: {blocks: 1, warmup_steps: 2, warmup_rounds: 2, windows: 1, window_steps: 4, window_seconds: 0, twin: false,
  explain: false}
optimizer: {name: SGD, lr: 0.001}
equivalence: false
preflight: false
"""
WORKLOAD = """
import os

import torch

WIDTH = int(os.environ.get("OWN_WIDTH", 7))  # read at import, as NCCL reads its own at the first collective


class Own:
    unit = "samples"

    def build_model(self):
        return torch.nn.Linear(4, WIDTH, bias=False)

    def datasets(self):
        data = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
        return data, data

    def loss(self, model, batch):
        return model(batch[0]).square().sum(), torch.tensor(len(batch[0]))
"""


def test_every_rank_starts_with_the_variables_of_its_cell(tmp_path: Path) -> None:
    (tmp_path / "own_model.py").write_text(WORKLOAD)
    (tmp_path / "variables.yaml").write_text(FILE)
    ended(*RUN, "variables.yaml", "--output", "results", cwd=tmp_path)
    (folder,) = (tmp_path / "results" / "variables").iterdir()
    results = harness.load(folder)
    trials = results.trials
    assert set(trials["outcome"]) == {"ok"}
    seen = {
        (row.strategy, row.launcher, row.options["env.OWN_WIDTH"], row.parameters, row.group_id)
        for row in trials.itertuples()
    }
    started = {("single", "ray"), ("ddp", "ray"), ("single", "torchrun")}
    wanted = {(*one, width, 4 * (width or 7)) for one in started for width in (None, 2)}
    assert {row[:4] for row in seen} == wanted
    groups = {width: {row[4] for row in seen if row[2] == width} for width in (None, 2)}
    assert not groups[None] & groups[2], "a process has one value"
    nodes = [node for group in results.environment["groups"] for node in group["nodes"]]
    assert {node["variables"].get("NCCL_ALGO") for node in nodes} == {"Tree"}
    assert {label.partition("OWN_WIDTH=")[2] for label in results.cells["label"]} == {"null", "2"}
