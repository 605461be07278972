"""The harness under torchrun over a plain script under torchrun: ``python -m tests.benchmarks.overhead_plain``.

Both train the same small MLP at the same batch on the same processes, in turn, each time in fresh ones; which of the
two goes first alternates. The script holds no code of the harness: its loader draws no seeds for single samples and it
marks no phases.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness.analysis.stats import geometric_mean
from harness.config.load import parse_experiment
from harness.launch.ray import cluster
from harness.launch.torchrun import TorchrunLauncher
from harness.plan.planner import Plan, make_plan
from harness.record.folder import RunFolder
from harness.run.execution import Execution
from tests.benchmarks.figures import SHORT, UNCHECKED, write_figures
from tests.benchmarks.plain_ddp import BATCH, STEPS, WARMUP
from tests.listening import free_port

ROOT = Path(__file__).parents[2]


def plain_step_s(devices: int) -> float:
    """Seconds a step of the plain script."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={devices}"]
    port = ["--master-addr=127.0.0.1", f"--master-port={free_port()}", str(ROOT / "tests/benchmarks/plain_ddp.py")]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, *port], env=variables, check=True, capture_output=True, text=True)
    return float(done.stdout.strip().splitlines()[-1])


def plan_for(devices: int) -> Plan:
    """The same training as an experiment of one trial."""
    strategy = "ddp" if devices > 1 else "single"
    content = {"name": "plain", "launcher": "torchrun", "device": "cpu", **UNCHECKED}
    content |= {"workload": "tests.benchmarks.overhead:SmallMlp", "optimizer": {"name": "SGD", "lr": 0.001}}
    content["grid"] = {"strategy": strategy, "devices": devices, "per_device_batch_size": BATCH}
    content["throughput"] = {**SHORT, "warmup_steps": WARMUP // 2, "window_steps": STEPS}
    return make_plan(parse_experiment(content, source="plain"), cluster.local_inventory())


def harness_step_s(plan: Plan, devices: int) -> float:
    """Seconds a step of the slowest rank, in the harness."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder.create(Path(folder), plan.experiment, plan, "")
        Execution(plan, run, TorchrunLauncher(plan.experiment, 1, str(ROOT)), lambda event: None).run()
        line = next(line for line in run.lines() if line["outcome"] == "ok" and line["devices"] == devices)
    return max(w["duration_s"] / w["steps"] for w in line["windows"] if w["window_kind"] == "timed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    asked = parser.parse_args()
    title = f"Harness over a plain script, both under torchrun, {asked.repeats} pairs of fresh processes"
    table = Table("devices", "plain step (ms)", "ratio", "95 % interval", title=title)
    figures = {devices: compare(devices, asked.repeats) for devices in asked.devices}
    for devices, seen in figures.items():
        pairs = zip(seen["harness_step_s"], seen["plain_step_s"], strict=True)
        ratio = geometric_mean([step_s / plain_s for step_s, plain_s in pairs])
        ends = "one pair has none" if ratio.low is None else f"{ratio.low:.3f} to {ratio.high:.3f}"
        step_ms = 1000 * statistics.median(seen["plain_step_s"])
        table.add_row(str(devices), f"{step_ms:.2f}", f"{ratio.value:.3f}", ends)
    Console(width=100).print(table)
    if asked.json:
        write_figures(asked.json, figures)


def compare(devices: int, repeats: int) -> dict[str, list[float]]:
    """Seconds a step of both, pair by pair."""
    plan = plan_for(devices)
    ways = {"plain_step_s": lambda: plain_step_s(devices), "harness_step_s": lambda: harness_step_s(plan, devices)}
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats):
        for name in sorted(ways, reverse=bool(number % 2)):
            seen[name].append(ways[name]())
    return seen


if __name__ == "__main__":
    main()
