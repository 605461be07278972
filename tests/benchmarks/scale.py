"""What ranks and trials cost in messages, files, memory, seconds: ``python -m tests.benchmarks.scale``.

``[--ranks 8 64 512] [--trials 10 100 1000] [--steps 282] [--json FILE]``. The ranks are threads of the driver: each
runs the trials of its worker group as a process does (``launch/worker.py``), its windows are made up, and what it
exchanges with others goes through a store as between nodes, also on one. Driver, record, analysis and report are the
real ones. A size has two processes, one that records and one that reads and reports, whose peak of memory is that of a
report.

Counted are the bytes that a rank receives for a trial, those of the message to the driver, and those of the files. They
do not depend on cores. Seconds are of CPU unless they say "wall"; those of recording include the made-up ranks.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from harness.analysis.results import TABLES, load
from harness.config.known_hardware import KNOWN_DEVICES
from harness.config.load import parse_experiment
from harness.plan.inventory import Inventory
from harness.plan.planner import Plan, make_plan
from harness.record.folder import RunFolder
from harness.report.html import build_report
from tests.benchmarks.figures import UNCHECKED, measured_apart, table_of_numbers, write_figures

RANKS, TRIALS, STEPS = (8, 64, 512), (10, 100, 1000), 282
BLOCKS, PER_NODE = 5, 8
COLUMNS = {
    "ranks": "ranks",
    "trials": "trials",
    "received_kib": "KiB a rank receives",
    "received_first_kib": "KiB rank 0 receives",
    "message_kib": "message, KiB",
    "line_kib": "line, KiB",
    "by_rank_kib": "facts by rank, KiB",
    "steps_kib": "steps, KiB",
    "environment_kib": "environment, KiB a group",
    "files_mib": "all files, MiB",
    "pairs": "pairs of links",
    "record_s": "record, s a trial",
    "record_wall_s": "record, wall s",
    "read_s": "read, s",
    "analyse_s": "analyse, s",
    "report_s": "report, s",
    "report_wall_s": "read to report, wall s",
    "peak_mib": "peak of report, MiB",
}
"""Of a trial of all ranks, unless they say otherwise."""


def plan_of(ranks: int, trials: int, **more: object) -> Plan:
    """Return a plan of about ``trials`` trials of ddp on these ranks, in blocks, beside their bases.

    ``more``: of the section ``throughput``.
    """
    batches = list(range(1, max(1, trials // BLOCKS) + 1))
    grid = {"strategy": ["ddp"], "devices": [ranks], "per_device_batch_size": batches, "data": ["synthetic"]}
    throughput = {"blocks": BLOCKS, "links_seconds": 0, **more}
    content = {"name": "scale", "grid": grid, "throughput": throughput, **UNCHECKED}
    nodes = Inventory.assume(max(1, ranks // PER_NODE), PER_NODE, device=KNOWN_DEVICES["H100-80GB"])
    return make_plan(parse_experiment(content, source="scale"), nodes)


def recorded(ranks: int, trials: int, steps: int, folder: Path) -> dict[str, float]:
    """Record a run; return its bytes and seconds."""
    import torch  # not with the module: neither would be in the memory of a report

    from harness.measure import links
    from harness.run.execution import Execution
    from harness.train.ranks import Ranks
    from tests.benchmarks.thread_ranks import ThreadLauncher, make_up_ranks

    make_up_ranks(steps)
    sys.setswitchinterval(0.1)  # by default each of 511 waiting threads asks for Python's lock every 5 ms
    plan = plan_of(ranks, trials)
    run = RunFolder.create(folder, plan.experiment, plan, "name: scale\n")
    launcher = ThreadLauncher(plan, ranks)
    began, began_cpu = time.perf_counter(), time.process_time()
    Execution(plan, run, launcher, lambda event: None).run()
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    lines = [line for line in run.trial_lines() if line["devices"] == ranks]
    assert len(lines) == launcher.trials and {line["outcome"] for line in lines} == {"ok"}, run.path
    names = [f"{line['trial_id']}-{line['attempt']}" for line in lines]
    groups = [line for line in (run.path / "environment.jsonl").read_bytes().splitlines() if b'"start_s"' in line]
    nodes = [links.Device(f"node {rank // PER_NODE}", None, None) for rank in range(ranks)]
    place = Ranks(0, ranks, 0, 0, "node 0", "10.0.0.0", (torch.device("cpu"),))
    written = (run.path / "trials.jsonl").read_bytes().splitlines()
    return {
        "ranks": ranks,
        "trials": len(lines),
        "received_kib": sum(received[-1] for received in launcher.received) / len(lines) / 2**10,
        "received_first_kib": sum(received[0] for received in launcher.received) / len(lines) / 2**10,
        "message_kib": max(launcher.message_bytes) / 2**10,
        "line_kib": max(map(len, written)) / 2**10,
        "by_rank_kib": max((run.path / "raw" / f"{name}-ranks.json").stat().st_size for name in names) / 2**10,
        "steps_kib": max(
            file.stat().st_size for name in names if (file := run.path / "raw" / f"{name}.parquet").exists()
        )
        / 2**10,
        "environment_kib": max(map(len, groups)) / 2**10,
        "files_mib": sum(file.stat().st_size for file in run.path.rglob("*") if file.is_file()) / 2**20,
        "pairs": len(links.pairs(place, "gloo", nodes)),
        "record_s": cpu_s / len(lines),
        "record_wall_s": wall_s,
    }


def reported(folder: Path) -> dict[str, float]:
    """Read the run, make its tables and its report; return the seconds of each and the peak of memory in MiB."""
    (run,) = (folder / "scale").iterdir()
    results, seconds, began_wall = load(run), list[float](), time.perf_counter()
    for work in (
        lambda: (results.lines, results.steps, results.epochs, results.checks),
        lambda: [getattr(results, name) for name in TABLES],
        lambda: build_report(results),
    ):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    wall_s, peak_mib = time.perf_counter() - began_wall, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    of_parts = dict(zip(("read_s", "analyse_s", "report_s"), seconds, strict=True))
    return {**of_parts, "report_wall_s": wall_s, "peak_mib": peak_mib}


def measure(ranks: int, trials: int, steps: int) -> dict[str, float]:
    """Return the figures of one size, from two processes."""
    with tempfile.TemporaryDirectory() as folder:
        words = [str(number) for number in (ranks, trials, steps)]
        return measured_apart("scale", "--record", *words, folder) | measured_apart("scale", "--report", folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--trials", type=int, nargs="+", default=TRIALS)
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of a trial")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--record", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.record or given.report:
        *numbers, folder = given.record or [None]
        found = recorded(*map(int, numbers), Path(folder)) if given.record else reported(given.report)
        sys.stdout.write(json.dumps(found))
        return 0
    rows = [measure(ranks, trials, given.steps) for ranks in given.ranks for trials in given.trials]
    table = table_of_numbers(f"Ranks of {PER_NODE} a node, {given.steps} timed steps a trial", COLUMNS.values())
    for row in rows:
        table.add_row(*(f"{row[name]:,.4g}" for name in COLUMNS))
    Console(width=200).print(table)
    if given.json:
        write_figures(given.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
