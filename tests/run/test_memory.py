"""``--memory`` on a user's own workload: what the child process does with it, and what the console shows."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.config.known_hardware import KNOWN_DEVICES
from harness.config.load import load_experiment
from harness.config.values import GIB, MIB
from harness.plan.cell import Cell
from harness.plan.comparison import axes_of
from harness.plan.inventory import Inventory
from harness.plan.labels import Labels
from harness.plan.memory_forecast import CUDA_ALLOWANCE, Forecast, State
from harness.plan.planner import make_plan
from harness.run.console import ConsoleSink
from harness.run.dry_run import forecasts
from harness.run.events import MemoryForecast
from harness.run.request import Request, mistakes
from tests.conftest import laptop

FILE = """
name: kinds
workload: harness_kinds:Kinds
grid: {strategy: [single], devices: [1], per_device_batch_size: 8, workload.kind: [%s]}
throughput: {blocks: 1, twin: false, explain: false}
equivalence: false
preflight: false
"""
MODULE = """
import os, sys, time
import torch


class Kinds:
    unit = "samples"

    def __init__(self, kind):
        self.kind = kind

    def build_model(self):
        print("to the terminal")
        if self.kind == "raises":
            raise RuntimeError("first line\\nsecond line")
        return torch.nn.Linear(512, 512)

    def datasets(self):
        data = torch.utils.data.TensorDataset(torch.zeros(64, 512))
        return data, data

    def loss(self, model, batch):
        if self.kind == "exits":
            sys.stderr.write("gone\\n")
            sys.stderr.flush()
            os._exit(7)
        if self.kind == "hangs":
            time.sleep(1000)
        total = model(batch[0]).square().sum()
        return total * (2 if self.kind == "reads" and total.item() else 1), torch.tensor(len(batch[0]))
"""


@pytest.mark.slow
def test_a_workload_that_fails_hangs_or_ends_its_process_is_unknown_with_the_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "harness_kinds.py").write_text(MODULE)
    file = tmp_path / "kinds.yaml"
    found = {}
    for kinds, limit_s in (("prints, reads, exits, raises", 300.0), ("hangs", 8.0)):
        file.write_text(FILE % kinds)
        plan = make_plan(load_experiment(file), laptop())
        found |= {cell.workload_options["kind"]: each for cell, each in forecasts(plan, tmp_path, limit_s).items()}
    assert found["prints"].reason == ""
    assert found["prints"].activations is not None and 8 * 512 * 4 <= found["prints"].activations < MIB
    unknown = {kind for kind, each in found.items() if each.activations is None and each.verdict == "unknown"}
    assert unknown == {"reads", "exits", "raises", "hangs"}
    assert "reads the value of a tensor" in found["reads"].reason
    assert found["reads"].state is not None and found["reads"].state.parameters == 4 * (512 * 512 + 512)
    assert found["raises"].reason == "RuntimeError: first line second line"
    assert found["exits"].reason == "the process that traces it ended with exit code 7: gone"
    assert found["hangs"].reason == "the trace took longer than 8 s and was ended"
    assert "to the terminal" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "it belongs to a plan; add --dry-run, or leave it out: a run measures it"),
        ({"dry_run": True, "no_user_code": True}, "it runs the workload's code; leave it out, or --no-user-code"),
        ({"dry_run": True}, None),
        ({"assumed": Inventory.assume(1, 8)}, None),
    ],
)
def test_memory_is_part_of_a_plan_that_may_use_user_code(options: dict[str, Any], text: str | None) -> None:
    found = [str(one) for one in mistakes(Request(Path("e.yaml"), memory=True, **options))]
    assert found == ([f"--memory: 1 problem\n  - {text}"] if text else [])


STATE, DEVICE = State(100 * MIB, 0, 200 * MIB, 100 * MIB), KNOWN_DEVICES["H100-80GB"].memory_bytes


def gpu(batch: int, strategy: str = "ddp", device: str = "cuda") -> Cell:
    return Cell("w", None, None, strategy, device, 8, 1, "weak", batch, 8 * batch)


def shown(forecasts: dict[Cell, Forecast], width: int = 120) -> list[str]:
    out = StringIO()
    with ConsoleSink(Console(file=out, width=width)) as sink:
        sink(MemoryForecast(forecasts, Labels(axes_of(cell) for cell in forecasts)))
    return [line.strip() for line in out.getvalue().splitlines()]


def test_the_table_has_a_row_for_each_cell_and_the_lines_say_what_it_is_compared_with() -> None:
    forecasts = {
        gpu(64): Forecast(STATE, 40 * GIB, CUDA_ALLOWANCE, DEVICE),
        gpu(256): Forecast(STATE, 160 * GIB, CUDA_ALLOWANCE, DEVICE),
        gpu(64, "dp"): Forecast(STATE, 70 * GIB + MIB // 2, CUDA_ALLOWANCE, DEVICE, counted=True),
        gpu(8): Forecast(STATE, None, CUDA_ALLOWANCE, DEVICE, reason="why \x1b[1m"),
        gpu(16): Forecast(None, None, CUDA_ALLOWANCE, DEVICE, reason="why \x1b[1m"),
    }
    lines = shown(forecasts)
    text = " ".join(" ".join(lines).split())
    for row in (
        "ddp x8 · batch 8/device - 100 0 200 100 - 1,536 unknown",
        "ddp x8 · batch 16/device - - - - - - 1,536 unknown",
        "ddp x8 · batch 64/device 42,896 100 0 200 100 40,960 1,536 fits",
        "ddp x8 · batch 256/device 165,776 100 0 200 100 163,840 1,536 will not fit",
        "dp x8 · batch 64/device 73,616 100 0 200 100 71,680 1,536 may not fit (counted)",
    ):
        assert row in text, text
    assert "Memory of a GPU: 74.5 GiB. Above 0.9 of it a cell may not fit, above 1.5 it will not." in lines
    assert any(line.startswith("Allowance: 1,536 MiB, assumed and not measured") for line in lines)
    assert any(line.startswith("Counted: ") for line in lines)
    assert "Not traced: ddp x8 · batch 8/device and 1 more: why" in text and "\x1b" not in text
    narrow = [" ".join(line.split()) for line in shown({gpu(n): forecasts[gpu(n)] for n in (16, 64)}, width=80)]
    assert "ddp x8 · batch 64/device 42,896 400 40,960 1,536 fits" in narrow  # the parts of the state are one
    assert "ddp x8 · batch 16/device - - - 1,536 unknown" in narrow
    on_gpu = "\n".join(shown({gpu(64): Forecast(None, None, CUDA_ALLOWANCE, None)}))
    assert "The memory of a GPU is not known, so there is no verdict; --assume NODESxGPUS:NAME gives it" in on_gpu
    on_cpu = "\n".join(shown({gpu(64, device="cpu"): Forecast(None, None, 0, None)}))
    assert "The memory of a node is not known, so there is no verdict." in on_cpu
    assert "Allowance: the process with its libraries and data" in on_cpu
