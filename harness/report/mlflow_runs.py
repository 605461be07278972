"""A run as MLflow stores it: one run for the whole, and one below it for each measured cell. Needs no MLflow."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from harness.analysis.results import Results
from harness.plan.comparison import CELL_AXES
from harness.report.markdown import verdict_lines
from harness.report.row import Row, Scalar, is_missing, number, rows_of, texts
from harness.report.sentence import Context, context_of
from harness.report.verdict import make_verdict

SPEED = {
    "throughput_per_s": "throughput_per_s",
    "low": "throughput_low",
    "high": "throughput_high",
    "per_device_per_s": "throughput_per_device_per_s",
    "step_s": "step_s",
    "peak_memory_bytes": "peak_memory_bytes",
    "mfu": "mfu",
    "blocks": "blocks",
}
"""Columns of the table cells that become metrics, each with its name there."""
RATIOS = {
    "speedup": "speedup",
    "low": "speedup_low",
    "high": "speedup_high",
    "efficiency": "efficiency",
    "efficiency_low": "efficiency_low",
    "efficiency_high": "efficiency_high",
}
"""The same of the table scaling."""
TARGET = {name: name for name in ("time_to_target_s", "samples_to_target", "epochs_to_target")}
"""The same of the table convergence, for each seed."""
CURVES = ("train_loss", "train_accuracy", "learning_rate", "val_")
"""How the names of the columns of a learning curve begin."""
LONGEST_PARAM, LONGEST_TAG = 500, 5000
"""The most characters that every version of MLflow accepts."""
NOT_IN_NAMES = re.compile(r"[^\w.\- :/]")
"""The characters that MLflow rejects in the name of a parameter or metric."""


class MlflowMetric(NamedTuple):
    """A value. ``step``: its epoch in a learning curve."""

    name: str
    value: float
    step: int = 0


@dataclass(frozen=True)
class MlflowRun:
    """One run of MLflow: its parameters, metrics and tags."""

    name: str
    params: Mapping[str, str]
    metrics: tuple[MlflowMetric, ...]
    tags: Mapping[str, str]


@dataclass(frozen=True)
class MlflowExport:
    """A run of the harness: its MLflow experiment, the run for the whole with its files, a run for each cell.

    ``identity``: the same for every export of one run, wherever its folder lies.
    """

    experiment: str
    identity: str
    whole: MlflowRun
    cells: tuple[MlflowRun, ...]
    files: Mapping[str, tuple[Path, ...]]
    start_ms: int
    end_ms: int

    @cached_property
    def digest(self) -> str:
        """A hash of all that is exported: the same if nothing has changed since an earlier export."""
        runs = [[run.name, dict(run.params), run.metrics, dict(run.tags)] for run in (self.whole, *self.cells)]
        found = hashlib.sha256(json.dumps(runs, sort_keys=True).encode())
        for path in (path for paths in self.files.values() for path in paths):
            found.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
        return found.hexdigest()


def mlflow_export(results: Results) -> MlflowExport:
    """Return what is exported: the run, and its cells with a throughput or a learning curve, from the tables."""
    invocations = [one for one in results.environment.get("invocations", []) if "started_at" in one]
    start_s = min((one["started_at"] for one in invocations), default=0.0)
    end_s = max((one["started_at"] + one.get("wall_s", 0.0) for one in invocations), default=0.0)
    name = results.experiment.name
    identity = json.dumps([name, start_s or results.folder.path.name])
    context = context_of(results)
    return MlflowExport(
        experiment=name,
        identity=hashlib.sha256(identity.encode()).hexdigest()[:16],
        whole=_whole(results, context),
        cells=tuple(_cells(results, context)),
        files=_files(results),
        start_ms=round(1000 * start_s),
        end_ms=round(1000 * end_s),
    )


def _files(results: Results) -> dict[str, tuple[Path, ...]]:
    """Return the files to upload by their folder there: the report, the experiment file and the tables, if written."""
    folder = results.folder
    top = (folder.report, folder.path / "experiment.yaml")
    return {"": tuple(path for path in top if path.is_file()), "tables": tuple(sorted(folder.tables.glob("*.csv")))}


def _whole(results: Results, context: Context) -> MlflowRun:
    """Return the run for the whole, whose description is the verdict."""
    outcomes = Counter(str(outcome) for outcome in results.trials.drop_duplicates("trial_id", keep="last")["outcome"])
    metrics = [MlflowMetric(f"trials_{name}", float(count)) for name, count in sorted(outcomes.items())]
    statements = rows_of(results.verdict)
    trust = [row for row in statements if row["topic"] == "trust"]
    reach = max((number(row["value"]) for row in trust if not is_missing(row["value"])), default=None)
    metrics += [] if reach is None else [MlflowMetric("aa_test_reach", reach)]
    invocations = results.environment.get("invocations", [])
    facts = invocations[-1] if invocations else {}
    levels = {str(row["code"]) for row in trust}
    tags = {
        "verdict": "; ".join(context.label(row["cell_id"]) for row in statements if row["topic"] == "fastest"),
        "trust": next((level for level in ("low", "medium", "high") if level in levels), ""),
        "version": facts.get("harness", ""),
        "git_commit": facts.get("git_commit") or "",
        "device": facts.get("device", ""),
    }
    note = "\n".join(verdict_lines(results.experiment.name, make_verdict(results)))
    params = {"workload": results.experiment.workload}
    return MlflowRun(results.folder.path.name, params, tuple(metrics), _tags(tags, {"mlflow.note.content": note}))


def _cells(results: Results, context: Context) -> Iterator[MlflowRun]:
    """Yield a run for each cell with a throughput, a ratio or a learning curve."""
    speeds = {row["cell_id"]: row for row in rows_of(results.cells)}
    ratios = {row["cell_id"]: row for row in rows_of(results.scaling)}
    curves, named = _curves(results), _named(results)
    for cell_id, row in context.cells.items():
        speed, ratio = speeds.get(cell_id), ratios.get(cell_id)
        metrics = (*_metrics(speed, SPEED), *_metrics(ratio, RATIOS), *curves.get(cell_id, ()))
        if metrics:
            tags = {"label": str(row["label"]), "cell": cell_id, "verdict": named.get(cell_id, "")}
            tags |= ({"unit": str(speed["unit"])} if speed else {}) | (_ratio_tags(ratio, context) if ratio else {})
            yield MlflowRun(str(row["label"]), _params(row, context.options[cell_id]), metrics, _tags(tags))


def _named(results: Results) -> dict[str, str]:
    """Return what the verdict says of the cells that it names first, by cell."""
    found: dict[str, str] = {}
    for row in rows_of(results.verdict):
        if row["topic"] == "fastest":
            found |= dict.fromkeys(texts(row["others"]), "cannot be told apart from what to use")
            found[str(row["cell_id"])] = "what to use"
    return found


def _ratio_tags(row: Row, context: Context) -> dict[str, str]:
    """Return the base of a cell's ratios, its doubts, and whether it trains as one device does."""
    return {
        "base": context.label(row["base_id"]),
        "doubts": "; ".join(texts(row["doubts"])),
        "equivalence": "" if is_missing(row["equivalence"]) else str(row["equivalence"]),
    }


def _tags(own: Mapping[str, str], others: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the tags that have a value; those of the harness have its name before theirs."""
    tags = {**{f"harness.{name}": text for name, text in own.items()}, **(others or {})}
    return {name: text[:LONGEST_TAG] for name, text in tags.items() if text}


def _params(row: Row, options: Mapping[str, object]) -> dict[str, str]:
    """Return the axes and options of a cell that have a value, as they stand in an experiment file."""
    values = {axis: row[axis] for axis in CELL_AXES if axis in row and axis != "options" and not is_missing(row[axis])}
    known = {**values, **{name: value for name, value in options.items() if value is not None}}
    return {
        _name(name): (value if isinstance(value, str) else json.dumps(value))[:LONGEST_PARAM]
        for name, value in known.items()
    }


def _metrics(row: Row | None, names: Mapping[str, str], suffix: str = "") -> Iterator[MlflowMetric]:
    """Yield the numbers of a row that are known."""
    for column, name in names.items():
        if row is not None and _is_known(row[column]):
            yield MlflowMetric(_name(f"{name}{suffix}"), number(row[column]))


def _curves(results: Results) -> dict[str, list[MlflowMetric]]:
    """Return the learning curves of each cell, ``val_accuracy/seed_0`` by epoch, and the time to the target."""
    epochs: dict[tuple[Scalar, Scalar], list[Row]] = {}
    for row in rows_of(results.epochs.sort_values("epoch")):
        epochs.setdefault((row["trial_id"], row["attempt"]), []).append(row)
    names = [str(name) for name in results.epochs.columns if str(name).startswith(CURVES)]
    found: dict[str, list[MlflowMetric]] = {}
    for row in rows_of(results.convergence):
        seed = f"/seed_{row['seed']}"
        metrics = found.setdefault(str(row["cell_id"]), [])
        for epoch in epochs.get((row["trial_id"], row["attempt"]), []):
            metrics += (one._replace(step=int(number(epoch["epoch"]))) for one in _metrics(epoch, _same(names), seed))
        metrics += _metrics(row, TARGET, seed)
    return found


def _same(names: list[str]) -> dict[str, str]:
    return {name: name for name in names}


def _is_known(value: Scalar) -> bool:
    return not is_missing(value) and math.isfinite(number(value))


def _name(name: str) -> str:
    return NOT_IN_NAMES.sub("_", name)
