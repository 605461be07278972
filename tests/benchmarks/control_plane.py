"""What ranks and trials cost the driver as ranks become more: ``python -m tests.benchmarks.control_plane``.

Each number of ranks has a process of its own, the driver, with a Ray that offers as many slots, and a worker group of
four trials of ddp. Their layers wait instead of computing (``emulated_compute``), so that 16 ranks run on 2 cores.
Counted are the messages from ranks to the driver, their bytes when pickled, the bytes recorded, the driver's threads
and memory. These do not depend on cores. Seconds do: here ranks contend for cores, so that they are no measurement.
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import sys
import tempfile
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from rich.console import Console
from rich.table import Table

from tests.benchmarks.figures import SHORT, UNCHECKED, measured_apart, table_of_numbers, write_figures

if TYPE_CHECKING:
    from harness.launch.ray.launcher import RayGroup
    from harness.launch.startup import Received
    from harness.plan.planner import Plan

RANKS = (2, 4, 8, 16)
TRIALS, STEPS = 4, 50
AT_START = ("Registration", "GroupStarted", "ResourcesRequested")
MORE = 1.1
"""What a rank may cost at the largest size, as a multiple of the smallest."""
MORE_MIB, MORE_THREADS = 64.0, 4
"""What the driver may need more at the largest size than at the smallest."""
COLUMNS = {
    "ranks": "ranks",
    "start_messages_per_rank": "messages a rank, start",
    "messages_per_trial": "messages a trial",
    "start_bytes_per_rank": "bytes a rank, start",
    "bytes_per_rank_and_trial": "bytes a rank and trial",
    "recorded_bytes_per_rank_and_trial": "recorded bytes a rank and trial",
    "threads": "driver's threads",
    "peak_mib": "driver's peak, MiB",
    "start_s": "start (s, contention)",
    "trial_s": "trial (s, contention)",
}
Row = dict[str, float]


@dataclass
class Traffic:
    """What the driver has received: messages and bytes by the class of the message; the most threads it had."""

    messages: Counter[str] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)
    threads: int = 0

    def count(self, group: type[RayGroup]) -> None:
        """Count what worker groups receive from now on."""
        take = group.take

        def counted(self_: RayGroup, timeout_s: float) -> list[Received]:
            received = take(self_, timeout_s)
            for message in received:
                self.messages[type(message).__name__] += 1
                self.sizes[type(message).__name__] += len(pickle.dumps(message))
            self.threads = max(self.threads, psutil.Process().num_threads())
            return received

        group.take = counted  # type: ignore[method-assign]


def experiment_of(ranks: int) -> dict[str, object]:
    """Return trials of the same number of steps on so many ranks, in one worker group."""
    grid = {"strategy": "ddp", "devices": ranks, "per_device_batch_size": list(range(8, 8 + TRIALS))}
    sections = {"throughput": {**SHORT, "warmup_steps": 2, "window_steps": STEPS}, **UNCHECKED}
    workload = {"workload": "emulated_compute", "workload_options": {"mebibytes": 0.1, "step_ms": 5}}
    return {"name": "control_plane", "grid": grid, **workload, **sections}


def without_bases(plan: Plan, ranks: int) -> Plan:
    """Return the plan with nothing but the trials on so many ranks."""
    groups = (group.keeping(lambda trial: trial.cell.devices == ranks) for group in plan.groups)
    return replace(plan, groups=tuple(group for group in groups if group.trials))


def measure(ranks: int, folder: Path) -> Row:
    """Run the trials on so many ranks; return the counts, each a rank, a trial or both."""
    from harness.config.load import parse_experiment
    from harness.launch.ray import cluster
    from harness.launch.ray.launcher import RayGroup, RayLauncher
    from harness.plan.inventory import Inventory
    from harness.plan.planner import make_plan
    from harness.record.folder import RunFolder
    from harness.run.execution import Execution

    inventory = Inventory((replace(cluster.local_inventory().nodes[0], cores=ranks),))
    experiment = parse_experiment(experiment_of(ranks), source="control_plane")
    plan = without_bases(make_plan(experiment, inventory), ranks)
    run = RunFolder.create(folder, experiment, plan, "name: control_plane\n")
    traffic = Traffic()
    traffic.count(RayGroup)
    with cluster.start_embedded(inventory) as ready, closing(RayLauncher(ready, experiment, plan.machine)) as launcher:
        Execution(plan, run, launcher, lambda event: None).run()
    lines = run.lines()
    assert [line["outcome"] for line in lines] == ["ok"] * TRIALS, [line["reason"] for line in lines]
    (group,) = run.environment()["groups"]
    recorded = [run.path / "trials.jsonl", *(run.path / "raw").iterdir()]
    messages, size = (sum(counted[name] for name in AT_START) for counted in (traffic.messages, traffic.sizes))
    return {
        "ranks": ranks,
        "start_messages_per_rank": messages / ranks,
        "messages_per_trial": (traffic.messages.total() - messages) / TRIALS,
        "start_bytes_per_rank": size / ranks,
        "bytes_per_rank_and_trial": (traffic.sizes.total() - size) / ranks / TRIALS,
        "recorded_bytes_per_rank_and_trial": sum(file.stat().st_size for file in recorded) / ranks / TRIALS,
        "threads": traffic.threads,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "start_s": group["start_s"],
        "trial_s": sum(line["trial_s"] for line in lines) / TRIALS,
    }


def missed(rows: list[Row]) -> list[str]:
    """Return what the largest size costs more, a rank and a trial, than the smallest by the limits above."""
    least, most = rows[0], rows[-1]
    counted = [name for name in COLUMNS if name.endswith(("per_rank", "per_trial", "and_trial"))]
    grown = [name for name in counted if most[name] > MORE * least[name]]
    found = [f"{COLUMNS[name]}: {least[name]:.1f}, then {most[name]:.1f}" for name in grown]
    more = {name: most[name] - least[name] for name in ("threads", "peak_mib")}
    limits = {"threads": MORE_THREADS, "peak_mib": MORE_MIB}
    return found + [f"{COLUMNS[name]}: {more[name]:.0f} more" for name in more if more[name] > limits[name]]


def table_of(rows: list[Row]) -> Table:
    title = f"{TRIALS} trials of ddp, {STEPS} timed steps each; seconds are no measurement"
    table = table_of_numbers(title, COLUMNS.values())
    for row in rows:
        table.add_row(*(f"{row[name]:,.{1 if name.endswith('_s') or 'messages' in name else 0}f}" for name in COLUMNS))
    result = "; ".join(found) + " MISSED" if (found := missed(rows)) else "met"
    table.caption = f"Ranks and trials cost no more if there are more ranks: {result}"
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.write(json.dumps(measure(asked.one, Path(folder))) + "\n")
        return 0
    rows = [measured_apart("control_plane", "--one", str(ranks)) for ranks in sorted(asked.ranks)]
    Console(width=150).print(table_of(rows))
    if asked.json:
        write_figures(asked.json, rows)
    return int(bool(missed(rows)))


if __name__ == "__main__":
    sys.exit(main())
