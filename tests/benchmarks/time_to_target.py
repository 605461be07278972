"""The time to a target at twice the devices, as ``harness decide`` predicts it, against trainings there.

``python -m tests.benchmarks.time_to_target [--epochs 12] [--output FOLDER] [--json FILE]``

A network of scikit-learn's digits trains for real; each sample also takes SAMPLE_S in which its rank waits, so that
four ranks share two cores as four devices would, each on a node of its own, over links of RATE_MBIT. With SGD and with
Adam, under a declared rule of the learning rate, ddp trains on one and two nodes at global batches of 16, 32 and 64;
four nodes are held out, at the largest batch that was trained and at twice that. The target is the loss that every
training reaches. The time of a training is the median over seeds of its seconds to the target, with the start of a
worker group. The target of the project: each error at most 20 %. Needs root; nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor, nn

from harness.analysis.common import rows_of
from harness.analysis.prediction.predictions import Asked
from harness.analysis.results import Results, load
from harness.analysis.time_to_target import decision
from harness.analysis.trials import convergence
from harness.config.load import parse_experiment
from harness.config.sections import Target
from harness.plan.planner import make_plan
from harness.record.folder import RunFolder
from harness.run.execution import Execution
from harness.train.workloads.mlp import Mlp
from tests.benchmarks.emulated_links import NamespaceLauncher, World, why_not, world
from tests.benchmarks.figures import UNCHECKED, table_of_numbers, write_figures

MODULE = "tests.benchmarks.time_to_target"
SAMPLE_S = 0.001
RATE_MBIT = 1000.0
DEVICES, HELD_OUT = (1, 2), 4
BATCHES = (16, 32)
"""Samples of a device."""
OPTIMIZERS: dict[str, tuple[str, dict[str, float]]] = {
    "SGD": ("linear", {"lr": 0.002, "momentum": 0.9}),
    "Adam": ("sqrt", {"lr": 0.0002}),
}
METRIC = "val_loss"
MOST_ERROR = 0.2


class Waiting(Mlp):
    """The built-in network, each of whose training samples takes a device SAMPLE_S more."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if model.training:
            time.sleep(SAMPLE_S * len(batch[0]))
        return super().loss(model, batch)


def content_of(optimizer: str, epochs: int, *, held_out: bool) -> dict[str, Any]:
    """Return the experiment of the trainings with an optimizer, each cell with three seeds."""
    rule, options = OPTIMIZERS[optimizer]
    devices = [HELD_OUT] if held_out else list(DEVICES)
    trained_at = sorted({count * batch for count in devices for batch in BATCHES})
    return {
        "name": f"{optimizer.lower()}-{'held-out' if held_out else 'measured'}",
        "workload": f"{MODULE}:{Waiting.__name__}",
        "grid": {
            "data": ["digits"],
            "model": ["small"],
            "strategy": ["ddp"],
            "devices": devices,
            "nodes": devices,
            "per_device_batch_size": list(BATCHES),
        },
        "optimizer": {"name": optimizer, **options},
        "training": {"lr_scaling": rule, "lr_base_batch_size": min(BATCHES)},
        "throughput": None
        if held_out
        else {"blocks": 5, "windows": 2, "window_seconds": 0.5, "twin": False, "links_seconds": 10},
        "convergence": {"epochs": epochs, "seeds": [0, 1, 2], "only": {"global_batch_size": trained_at}},
        **UNCHECKED,
    }


def trained(optimizer: str, epochs: int, output: Path, emulated: World, *, held_out: bool) -> Results:
    """Return the results of the trainings with an optimizer."""
    experiment = parse_experiment(content_of(optimizer, epochs, held_out=held_out), source="time_to_target")
    plan = make_plan(experiment, emulated.inventory(1))
    folder = RunFolder.create(output, experiment, plan, "")
    Execution(plan, folder, NamespaceLauncher(experiment, emulated), lambda event: None).run()
    return load(folder.path)


def points(measured: Results, held_out: Results) -> Iterator[dict[str, Any]]:
    """Yield the predicted and the measured time at each batch of the held-out number of devices."""
    least = max(float(run.epochs.groupby("trial_id")[METRIC].min().max()) for run in (measured, held_out))
    target = Target(metric=METRIC, at_most=least)
    table, _ = decision(measured, target, Asked(devices=(HELD_OUT,), nodes=(HELD_OUT,)))
    known = rows_of(convergence(held_out.trials, held_out.epochs, target, held_out.verdicts))
    groups = held_out.ledger[held_out.ledger["level"] == "group"].groupby(["invocation", "group_id"])["seconds"].sum()
    for row in rows_of(table):
        times = [each.time_to_target_s for each in known if each.global_batch_size == row.global_batch_size]
        needed = statistics.median(times) + float(groups.mean()) if times else None
        found = {name: row[name] for name in ("global_batch_size", "time_s", "time_low_s", "time_high_s", "reason")}
        error = row.time_s / needed - 1 if needed and not row.reason else None
        yield {**found, "trained": bool(row.trained), "needed": needed, "error": error}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--output", type=Path, default=Path("results/time_to_target"))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    figures: dict[str, list[dict[str, Any]]] = {}
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    asked.output.mkdir(parents=True, exist_ok=True)
    with world(HELD_OUT) as emulated:
        emulated.set_rate(RATE_MBIT)
        for optimizer in OPTIMIZERS:
            runs = [trained(optimizer, asked.epochs, asked.output, emulated, held_out=own) for own in (False, True)]
            figures[optimizer] = list(points(*runs))
    table = table_of_numbers(f"Time to the target on {HELD_OUT} devices", ("", "batch", "predicted", "needed", "error"))
    for optimizer, found in figures.items():
        for each in found:
            batch = f"{each['global_batch_size']:.0f}{'' if each['trained'] else ', not trained'}"
            if each["error"] is None:
                table.add_row(optimizer, batch, "", "", f"refused: {each['reason']}")
            else:
                interval = f"{each['time_s']:.1f} s ({each['time_low_s']:.1f} to {each['time_high_s']:.1f})"
                table.add_row(optimizer, batch, interval, f"{each['needed']:.1f} s", f"{100 * each['error']:+.0f} %")
    Console(width=130).print(table)
    if asked.json:
        write_figures(asked.json, figures)
    errors = [abs(each["error"]) for found in figures.values() for each in found if each["error"] is not None]
    return int(not errors or max(errors) > MOST_ERROR)


if __name__ == "__main__":
    sys.exit(main())
