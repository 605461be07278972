"""``--improve`` on runs whose best setting has a planted fault, and on runs whose candidates change nothing.

``python -m tests.benchmarks.improvements {planted,same} [--only NAME ...] [--runs 20] [--output FOLDER] [--json FILE]``

``planted``: four faults, each in three workloads on two devices; each run has 5 minutes. The target of the project: 11
of 12 found and proved, none made worse by its claim. ``same``: each candidate is another value of an option that the
workload ignores. The target: a gain is claimed in at most 3 of 20 runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor
from torch.utils.data import Dataset

from harness.analysis.common import rows_of
from harness.analysis.improvements import CONFIRMATION, SCREENING
from harness.cli.__main__ import main as harness
from harness.config.yaml_source import dump
from harness.report.notebook import load
from harness.run import improve
from harness.train.workloads import Datasets
from harness.train.workloads.mlp import Mlp
from tests.benchmarks.figures import UNCHECKED, measured_apart, table_of_numbers, write_figures

MODULE = "tests.benchmarks.improvements"
INERT = 6
"""The candidates of a run whose candidates change nothing."""
MOST_CLAIMS, LEAST_PROVED = 3, 11
WORKLOADS: Mapping[str, Mapping[str, Any]] = {
    "resnet": {"workload": "image_classification", "workload_options": {"width": 8}, "model": "resnet8"},
    "gpt": {"workload": "language_model", "workload_options": {}, "model": "micro"},
    "unet": {"workload": "segmentation", "workload_options": {}, "model": "small"},
    "mlp": {
        "workload": "mlp",
        "workload_options": {"layers": 20, "width": 64},
        "model": "small",
        "optimizer": {"name": "SGD", "lr": 1e-3},
    },
}
BATCHES = {"resnet": 64, "gpt": 16, "unet": 16, "mlp": 64}
LATE_S = 0.0004
"""The wait for a sample of a slow disk."""


class SlowDisk(Mlp):
    """The built-in network, whose samples come from a disk that takes its time; ``layers`` set the time of a step."""

    def datasets(self) -> Datasets:
        training, validation = super().datasets()
        return Late(training), validation


class Late(Dataset[tuple[Tensor, Tensor]]):
    """A data set that waits before each sample."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(LATE_S)
        sample: tuple[Tensor, Tensor] = self._data[index]
        return sample


class Ignoring(Mlp):
    """The built-in network with an option that it ignores."""

    def __init__(self, data: str = "digits", model: str = "small", ignored: int = 0) -> None:
        super().__init__(data, model)


Plant = Callable[[str], dict[str, Any]]


def slow_disk(name: str) -> dict[str, Any]:
    return {"workload": f"{MODULE}:{SlowDisk.__name__}", "workload_options": {"layers": int(name)}, "model": "small"}


FAULTS: Mapping[str, tuple[tuple[str, ...], Plant]] = {
    "no loader workers": (("2", "8", "20"), slow_disk),
    "accumulation": (("resnet", "gpt", "unet"), lambda name: {"training": {"accumulation": 8}}),
    "unused parameters": (("resnet", "gpt", "mlp"), lambda name: of_ddp({"find_unused_parameters": True})),
    "small buckets": (("resnet", "gpt", "mlp"), lambda name: of_ddp({"bucket_cap_mb": 0.01})),
}
"""By planted fault: the workloads that have it, and the sections of the file that plant it."""


def of_ddp(options: Mapping[str, object]) -> dict[str, Any]:
    return {"strategy_options": {"ddp": options}}


def experiment(name: str, batch: int, sections: Mapping[str, Any], *, explain: bool = True) -> dict[str, Any]:
    """Return an experiment file of ddp on two devices, with these sections and ``model``, an axis."""
    timed = {"blocks": 3, "windows": 2, "window_seconds": 0.4, "warmup_seconds": 0.4, "explain": explain}
    grid = {"strategy": ["ddp"], "devices": [1, 2], "per_device_batch_size": [batch], "model": [sections["model"]]}
    return {
        "name": name,
        "grid": grid,
        "throughput": {**timed, "twin": False, "traces": False, "links_seconds": 0},
        **UNCHECKED,
        **{key: value for key, value in sections.items() if key != "model"},
    }


def planted(fault: str, name: str) -> dict[str, Any]:
    """Return the experiment of a workload with a fault."""
    plant = FAULTS[fault][1](name)
    return experiment(f"{fault}-{name}".replace(" ", "-"), BATCHES.get(name, 32), {**WORKLOADS.get(name, {}), **plant})


def same(number: int) -> dict[str, Any]:
    """Return the experiment whose candidates change nothing."""
    workload = {"workload": f"{MODULE}:{Ignoring.__name__}", "model": "small"}
    return experiment(f"same-{number}", 64, workload, explain=False)


def improved(file: Path, minutes: str, *, inert: bool) -> dict[str, Any]:
    """Run an experiment with ``--improve``; return its seconds and what its confirmation found."""
    if inert:
        changes = [{"workload.ignored": number + 1} for number in range(INERT)]
        improve.candidates = lambda *_: changes  # type: ignore[assignment, attr-defined]
    sys.argv = ["harness", "run", str(file), "--improve", minutes, "--output", str(file.parent), "--quiet"]
    began = time.monotonic()
    try:
        harness()
    except SystemExit as ended:
        assert not ended.code, ended.code
    spent_s = time.monotonic() - began
    report = max((file.parent / file.stem).glob("*/report.html"))  # of several runs in the folder the newest
    rows = rows_of(load(report.parent).improvements)
    last = next((row for row in rows if row.step == CONFIRMATION), None)
    found = {} if last is None else {name: last[name] for name in ("changes", "ratio", "low", "high", "blocks")}
    proved = bool(last is not None and last.kept)
    return {"s": spent_s, "tried": sum(row.step == SCREENING for row in rows), "proved": proved, **found}


def asked_for(kind: str, runs: int) -> dict[str, dict[str, Any]]:
    """Return the experiments by name."""
    if kind == "same":
        return {f"same {number}": same(number) for number in range(runs)}
    return {f"{fault}, {name}": planted(fault, name) for fault, (names, _) in FAULTS.items() for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("planted", "same"))
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of the runs that are made")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--minutes", default="4m", help="the time of --improve; the run before it takes half a minute")
    parser.add_argument("--output", type=Path, default=Path("results/improvements"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.file:
        print(json.dumps(improved(asked.file, asked.minutes, inert=asked.kind == "same")))
        return 0
    headings = ("run", "s", "tried", "confirmed", "ratio", "95 %", "blocks", "")
    table = table_of_numbers(f"--improve {asked.minutes}", headings)
    figures: dict[str, Any] = {}
    asked.output.mkdir(parents=True, exist_ok=True)
    for name, content in asked_for(asked.kind, asked.runs).items():
        if not any(part in name for part in asked.only):
            continue
        file = asked.output / f"{content['name']}.yaml"
        file.write_text(dump(content, flow=None, width=100))
        one = measured_apart("improvements", asked.kind, "--minutes", asked.minutes, "--file", str(file))
        figures[name] = one
        ratio = "" if one.get("ratio") is None else "{ratio:.2f}"
        interval = "" if one.get("low") is None else "{low:.2f} to {high:.2f}"
        texts = ("{s:.0f}", "{tried}", one.get("changes") or "", ratio, interval, str(one.get("blocks") or ""))
        table.add_row(name, *(text.format(**one) for text in texts), "proved" if one["proved"] else "")
        print(name, one, file=sys.stderr, flush=True)
        if asked.json:
            write_figures(asked.json, figures)
    proved = sum(one["proved"] for one in figures.values())
    table.caption = f"Proved in {proved} of {len(figures)}"
    Console(width=130).print(table)
    return int(proved > MOST_CLAIMS if asked.kind == "same" else proved < LEAST_PROVED)


if __name__ == "__main__":
    sys.exit(main())
