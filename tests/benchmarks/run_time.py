"""What trials cost beside their steps, three ways in one go: ``python -m tests.benchmarks.run_time``.

One block of experiments/scaling.yaml, at more batch sizes, so that a worker group holds 12 trials and more, and with
one seed. The same trials with the same numbers of steps: by the harness, which gives a worker group many; each under
torchrun, in processes of its own; each in a ``TorchTrainer.fit()`` of its own. Time outside steps is the wall time less
the warm-up steps, windows and epochs. The targets: at most 1/3 of torchrun's and 1/6 of the fits', and at most 0.5 s
beside its steps for any timed trial inside a worker group. The harness's trials run once more with twins and what
explains them on, as they are by default: its steps are steps, copying state, profiling and counting are not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.config.experiment import Experiment
from harness.config.load import parse_experiment
from harness.config.yaml_source import read_mapping
from harness.launch.protocol import Launcher
from harness.launch.ray import cluster
from harness.launch.torchrun import TorchrunLauncher
from harness.plan.planner import Plan, make_plan
from harness.plan.trial import WorkerGroup
from harness.record.folder import RunFolder
from harness.run.execution import Execution
from tests.benchmarks.figures import UNCHECKED, write_figures

DEFAULT = Path(__file__).parents[2] / "experiments" / "scaling.yaml"
WAYS = {"harness": None, "torchrun": 1 / 3, "fit() each": 1 / 6}
"""What the harness's time outside steps may be of theirs."""
TRIAL_MOST_S = 0.5
"""What a trial may cost beside its steps."""


def experiment_of(batches: list[int], strategies: list[str], *, explained: bool) -> Experiment:
    """One block of the default experiment with these batch sizes and strategies, and the same steps whoever runs it."""
    content, _ = read_mapping(DEFAULT)
    content["grid"] |= {"per_device_batch_size": batches, "strategy": strategies}
    content["exclude"] = [{"strategy": ["dp", "fsdp"], "devices": 1}]
    # windows of a fixed number of steps, and warm-ups of one length
    fixed = {"blocks": 1, "warmup_rounds": 2, "window_steps": 8, "window_seconds": 0.0}
    content["throughput"] = {**fixed, "twin": explained, "explain": explained}
    content["convergence"] |= {"seeds": [0], "only": {"model": "resnet8", "per_device_batch_size": batches[0]}}
    return parse_experiment(content | UNCHECKED, source="run_time")


def apart(plan: Plan) -> Plan:
    """The same trials, each in a worker group of its own."""
    numbered = [(group, *each) for group in plan.groups for each in enumerate(group.trials)]
    alone = [(group.keeping(lambda each, wanted=trial: each is wanted), number) for group, number, trial in numbered]
    return replace(plan, groups=tuple(replace(group, id=f"{group.id}-{number}") for group, number in alone))


def measure(plan: Plan, launcher: Launcher, folder: Path) -> dict[str, float]:
    """Wall time of all trials, seconds of their steps, and what a trial costs beside its steps in its process."""
    run = RunFolder.create(folder, plan.experiment, plan, "")
    start = time.perf_counter()
    Execution(plan, run, launcher, lambda event: None).run()
    wall = time.perf_counter() - start
    lines = [line for line in run.lines() if line["outcome"] == "ok"]
    assert len(lines) == len(plan.trials), [line["reason"] for line in run.lines()]
    steps = sum(line["steps_s"] for line in lines)
    beside = sorted(line["trial_s"] - line["steps_s"] for line in lines if line["kind"] != "convergence")
    groups = [group["whole_s"] for group in run.environment()["groups"]]
    within = sum(line["trial_s"] for line in lines)
    found = {"wall_s": wall, "steps_s": steps, "outside_s": wall - steps, "trials": len(lines), "groups": len(groups)}
    found["group_beside_trials_s"] = (sum(groups) - within) / len(groups)
    return found | {"trial_beside_steps_median_s": beside[len(beside) // 2], "trial_beside_steps_max_s": beside[-1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 24, 32, 40, 48, 64])
    parser.add_argument("--strategies", nargs="+", default=["single", "dp", "ddp", "fsdp"])
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    asked = parser.parse_args()
    inventory = cluster.local_inventory()
    experiment = experiment_of(asked.batches, asked.strategies, explained=False)
    plan = make_plan(experiment, inventory)
    explained = make_plan(experiment_of(asked.batches, asked.strategies, explained=True), inventory)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        alone = apart(plan)
        rows["torchrun"] = measure(alone, TorchrunLauncher(experiment, plan.machine.threads_per_device), Path(folder))
        began = time.perf_counter()
        with cluster.start_embedded(inventory) as ready:
            from harness.launch.ray.launcher import RayLauncher

            ray_start = time.perf_counter() - began
            with closing(RayLauncher(ready, experiment, plan.machine)) as launcher:
                rows["harness"] = measure(plan, launcher, Path(folder))
                rows["fit() each"] = measure(alone, launcher, Path(folder))
            with closing(RayLauncher(ready, explained.experiment, plan.machine)) as launcher:
                rows["explained"] = measure(explained, launcher, Path(folder))
    for way in ("harness", "fit() each"):  # starting Ray belongs to both
        rows[way]["wall_s"] += ray_start
        rows[way]["outside_s"] += ray_start
    Console(width=130).print(_table(rows, plan.groups))
    if asked.json:
        write_figures(asked.json, rows)
    return int(any(missed for _, missed in _verdicts(rows).values()))


def _verdicts(rows: dict[str, dict[str, Any]]) -> dict[str, tuple[str, bool]]:
    """Of each way that has a target: 'met' or 'MISSED' with that, and whether it was missed."""
    ours = rows["harness"]["outside_s"]
    values = {way: (ours / rows[way]["outside_s"], most) for way, most in WAYS.items() if most is not None}
    values |= {way: (rows[way]["trial_beside_steps_max_s"], TRIAL_MOST_S) for way in ("harness", "explained")}
    met = {way: "MISSED" if value > most else "met" for way, (value, most) in values.items()}
    return {way: (f"{met[way]}: {most:.3g}", value > most) for way, (value, most) in values.items()}


def _table(rows: dict[str, dict[str, Any]], groups: tuple[WorkerGroup, ...]) -> Table:
    sizes = ", ".join(str(len(group.trials)) for group in groups)
    table = Table(title=f"{rows['harness']['trials']} trials; the harness's worker groups hold {sizes}")
    for title in ("", "wall (s)", "steps (s)", "outside steps (s)", "harness / this", "wall, harness / this"):
        table.add_column(title, justify="left" if not title else "right")
    ours, verdicts = rows["harness"], _verdicts(rows)
    for way, most in WAYS.items():
        row = rows[way]
        outside, wall = ours["outside_s"] / row["outside_s"], ours["wall_s"] / row["wall_s"]
        verdict = "" if most is None else f" ({verdicts[way][0]})"
        numbers = (row["wall_s"], row["steps_s"], row["outside_s"])
        table.add_row(way, *(f"{number:.1f}" for number in numbers), f"{outside:.3f}{verdict}", f"{wall:.3f}")
    words = {"harness": "In a worker group a timed trial costs", "explained": "With twins and what explains them:"}
    result = [
        f"{word} {rows[way]['trial_beside_steps_median_s']:.3f} s beside its steps (median; most "
        f"{rows[way]['trial_beside_steps_max_s']:.3f} s, {verdicts[way][0]})."
        for way, word in words.items()
    ]
    table.caption = f"{' '.join(result)} A group's own start and end {ours['group_beside_trials_s']:.1f} s."
    return table


if __name__ == "__main__":
    sys.exit(main())
