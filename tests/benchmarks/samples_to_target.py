"""The samples that a training needs at twice the largest measured batch, as ``harness decide`` predicts them.

``python -m tests.benchmarks.samples_to_target [--output FOLDER] [--json FILE]``

Three workloads on scikit-learn's digits, each with SGD and Adam under a declared rule of the learning rate, are trained
at four batches with three seeds. The law is fitted to the three smaller batches alone; the fourth, twice the largest of
them, is held out. The targets follow a rule: the loss that every training reaches, and 1.3 times it. The error: the law
over the geometric mean of the held-out trainings. The target of the project: its median at most 20 %.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.analysis.common import rows_of
from harness.analysis.results import Results
from harness.analysis.time_to_target import Work
from harness.analysis.trials import convergence
from harness.config.sections import Target
from harness.config.yaml_source import dump
from harness.report.notebook import load
from tests.benchmarks.figures import UNCHECKED, table_of_numbers, write_figures

BATCHES = (16, 32, 64, 128)
OPTIMIZERS = {"SGD": ("linear", {"momentum": 0.9}), "Adam": ("sqrt", {})}
WORKLOADS = {
    "image_classification": (
        {"data": ["digits"], "model": ["resnet8"], "workload.width": [8]},
        {"SGD": 0.002, "Adam": 0.0002},
    ),
    "mlp": ({"data": ["digits"], "model": ["small"]}, {"SGD": 0.002, "Adam": 0.0002}),
    "conv_stack": ({"data": ["digits"], "model": ["small"]}, {"SGD": 0.02, "Adam": 0.001}),
}
"""The axes of each workload, and its learning rates at the smallest batch."""
EASIER = (1.0, 1.3)
METRIC = "val_loss"
MOST_ERROR = 0.2


def trained(name: str, optimizer: str, epochs: int, output: Path) -> Results:
    """Return the results of the trainings of a workload with an optimizer; an earlier run in the folder is taken."""
    folder = output / f"{name}-{optimizer.lower()}"
    if not (found := sorted(folder.glob("*/report.html"))):
        (axes, rates), (rule, options) = WORKLOADS[name], OPTIMIZERS[optimizer]
        content = {
            "name": folder.name,
            "workload": name,
            "throughput": None,
            **UNCHECKED,
            "grid": {"strategy": ["single"], "devices": [1], "global_batch_size": list(BATCHES), **axes},
            "optimizer": {"name": optimizer, "lr": rates[optimizer], **options},
            "training": {"lr_scaling": rule, "lr_base_batch_size": BATCHES[0]},
            "convergence": {"epochs": epochs, "seeds": [0, 1, 2], "only": {"global_batch_size": list(BATCHES)}},
        }
        folder.mkdir(parents=True)
        file = folder / "experiment.yaml"
        file.write_text(dump(content, flow=None, width=100))
        command = [sys.executable, "-m", "harness.run", str(file), "--output", str(output), "--quiet"]
        subprocess.run(command, check=True)
        found = sorted(folder.glob("*/report.html"))
    return load(found[-1].parent)


def predictions(results: Results) -> Iterator[dict[str, Any]]:
    """Yield the law's samples at the held-out batch and the ones that were needed, for each target."""
    least = results.epochs.groupby("trial_id")[METRIC].min().max()
    for factor in EASIER:
        target = Target(metric=METRIC, at_most=float(factor * least))
        rows = rows_of(convergence(results.trials, results.epochs, target, results.verdicts))
        work = Work("", [row for row in rows if row.global_batch_size < BATCHES[-1]], [])
        refusal = work.refusal or work.refusal_of(BATCHES[-1])
        found: dict[str, Any] = {"target": target.at_most, "refusal": refusal}
        if refusal is None:
            known = [float(row.samples_to_target) for row in rows if row.global_batch_size == BATCHES[-1]]
            needed = statistics.geometric_mean(known)
            samples, half = work.law.at(BATCHES[-1], work.resolution)
            found |= {"predicted": samples, "needed": needed, "error": samples / needed - 1, "half": half}
            found |= {"critical": work.law.critical}
        yield found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    headings = ("workload", "loss", "critical batch", "predicted", "needed", "error")
    table = table_of_numbers(f"Samples to the target at batch {BATCHES[-1]}, fitted up to {BATCHES[-2]}", headings)
    figures: dict[str, list[dict[str, Any]]] = {}
    for name in WORKLOADS:
        for optimizer in OPTIMIZERS:
            results = trained(name, optimizer, asked.epochs, asked.output)
            figures[f"{name}, {optimizer}"] = list(predictions(results))
    for label, points in figures.items():
        for point in points:
            loss = f"{point['target']:.3g}"
            if point["refusal"]:
                table.add_row(label, loss, "", "", "", f"refused: {point['refusal']}")
            else:
                numbers = (f"{point[name]:,.0f}" for name in ("critical", "predicted", "needed"))
                table.add_row(label, loss, *numbers, f"{100 * point['error']:+.0f} %")
    errors = [abs(point["error"]) for points in figures.values() for point in points if not point["refusal"]]
    missed = not errors or statistics.median(errors) > MOST_ERROR
    middle = f"{100 * statistics.median(errors):.0f} %" if errors else "unknown"
    table.caption = f"Median error of {len(errors)} points: {middle}; target: {100 * MOST_ERROR:.0f} %"
    Console(width=130).print(table)
    if asked.json:
        write_figures(asked.json, figures)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
