"""Results -> an MLflow tracking server or folder: one run for the whole, and one below it for each cell.

MLflow is the extra ``mlflow``. An export is made from the tables of a run folder, at any time after the run. The new
one is complete before an earlier one of the same run is deleted, so that a failure at any instant loses nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from harness.analysis.results import Results
from harness.config.axes import CELL_AXES
from harness.errors import ExportError
from harness.report.row import Row, is_missing, number, rows_of, texts
from harness.report.sentence import Context, context_of
from harness.report.verdict import make_verdict, verdict_lines
from harness.system.sanitize import redact_text

if TYPE_CHECKING:
    from mlflow import MlflowClient

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
"""Columns of the table scaling that become metrics, each with its name there."""
TARGET = {name: name for name in ("time_to_target_s", "samples_to_target", "epochs_to_target")}
"""Columns of the table convergence that become metrics for each seed, each with its name there."""
CURVES = ("train_loss", "train_accuracy", "learning_rate", "val_")
"""How the names of the columns of a learning curve begin."""
LONGEST_PARAM, LONGEST_TAG = 500, 5000
"""The most characters that every version of MLflow accepts."""
NOT_IN_NAMES = re.compile(r"[^\w.\- :/]")
"""The characters that MLflow rejects in the name of a parameter or metric."""
IDENTITY, DIGEST = "harness.run", "harness.digest"
"""The tags by which the runs of an earlier export are found, and by which a complete one is known."""
PARENT = "mlflow.parentRunId"
MOST_METRICS, MOST_PARAMS, MOST_RUNS = 1000, 100, 1000
"""The most metrics and parameters of one request, and the most runs of one answer, that MLflow accepts."""
SETTINGS = {
    "MLFLOW_ALLOW_FILE_STORE": "true",  # a folder is a target like any other; MLflow asks for a database
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # by default a server that is down is reported after minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""Variables that MLflow reads; those that the user has set stay."""


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

    ``identity``: the same for every export of one run, wherever its folder lies. ``files``: those to upload, by their
    folder there: the report, the experiment file and the tables, if written.
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
    folder, context = results.folder, context_of(results)
    identity = json.dumps([name, start_s or folder.path.name])
    top = (folder.report, folder.path / "experiment.yaml")
    return MlflowExport(
        experiment=name,
        identity=hashlib.sha256(identity.encode()).hexdigest()[:16],
        whole=_whole(results, context),
        cells=tuple(_cells(results, context)),
        files={"": tuple(path for path in top if path.is_file()), "tables": tuple(sorted(folder.tables.glob("*.csv")))},
        start_ms=round(1000 * start_s),
        end_ms=round(1000 * end_s),
    )


def _whole(results: Results, context: Context) -> MlflowRun:
    """Return the run for the whole, whose description is the verdict."""
    outcomes = Counter(str(outcome) for outcome in results.trials.drop_duplicates("trial_id", keep="last")["outcome"])
    metrics = [MlflowMetric(f"trials_{name}", float(count)) for name, count in sorted(outcomes.items())]
    statements = rows_of(results.verdict)
    trust = [row for row in statements if row.topic == "trust"]
    invocations = results.environment.get("invocations", [])
    facts = invocations[-1] if invocations else {}
    levels = {str(row.code) for row in trust}
    tags = {
        "verdict": "; ".join(context.label(row.cell_id) for row in statements if row.topic == "fastest"),
        "trust": next((level for level in ("low", "medium", "high") if level in levels), ""),
        "version": facts.get("harness", ""),
        "git_commit": facts.get("git_commit") or "",
        "device": facts.get("device", ""),
    }
    note = "\n".join(verdict_lines(results.experiment.name, make_verdict(results)))
    params = {"workload": results.experiment.workload}
    described = {**_tags(tags), "mlflow.note.content": note[:LONGEST_TAG]}
    return MlflowRun(results.folder.path.name, params, tuple(metrics), described)


def _cells(results: Results, context: Context) -> Iterator[MlflowRun]:
    """Yield a run for each cell with a throughput, a ratio or a learning curve."""
    speeds = {row.cell_id: row for row in rows_of(results.cells)}
    ratios = {row.cell_id: row for row in rows_of(results.scaling)}
    curves, named = _curves(results), dict[str, str]()
    for row in rows_of(results.verdict[results.verdict["topic"] == "fastest"]):
        named |= dict.fromkeys(texts(row.others), "cannot be told apart from what to use")
        named[row.cell_id] = "what to use"
    for cell_id, row in context.cells.items():
        speed, ratio = speeds.get(cell_id), ratios.get(cell_id)
        metrics = (*_metrics(speed, SPEED), *_metrics(ratio, RATIOS), *curves.get(cell_id, ()))
        if metrics:
            tags = {"label": row.label, "cell": cell_id, "verdict": named.get(cell_id, "")}
            if speed:
                tags["unit"] = str(speed.unit)
            if ratio:
                equivalence = "" if is_missing(ratio.equivalence) else ratio.equivalence
                doubts = "; ".join(texts(ratio.doubts))
                tags |= {"base": context.label(ratio.base_id), "doubts": doubts, "equivalence": equivalence}
            yield MlflowRun(row.label, _params(row), metrics, _tags(tags))


def _tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that have a value, each with the harness's name before its own."""
    return {f"harness.{name}": text[:LONGEST_TAG] for name, text in tags.items() if text}


def _params(row: Row) -> dict[str, str]:
    """Return the axes and options of a cell that have a value, as they stand in an experiment file."""
    axes = {axis: row[axis] for axis in CELL_AXES if axis in row and axis != "options" and not is_missing(row[axis])}
    options = {name: value for name, value in (row.options or {}).items() if value is not None}
    return {
        NOT_IN_NAMES.sub("_", name): (value if isinstance(value, str) else json.dumps(value))[:LONGEST_PARAM]
        for name, value in (axes | options).items()
    }


def _metrics(row: Row | None, names: Mapping[str, str], suffix: str = "") -> Iterator[MlflowMetric]:
    """Yield the numbers of a row that are known."""
    for column, name in names.items():
        if row is not None and math.isfinite(value := number(row[column])):
            yield MlflowMetric(NOT_IN_NAMES.sub("_", f"{name}{suffix}"), value)


def _curves(results: Results) -> dict[str, list[MlflowMetric]]:
    """Return the learning curves of each cell, ``val_accuracy/seed_0`` by epoch, and the time to the target."""
    epochs = results.epochs.sort_values("epoch")
    names = {str(name): str(name) for name in epochs.columns if str(name).startswith(CURVES)}
    found: dict[str, list[MlflowMetric]] = {}
    for row in rows_of(results.convergence):
        seed = f"/seed_{row.seed}"
        metrics = found.setdefault(str(row.cell_id), [])
        for epoch in rows_of(epochs[(epochs["trial_id"] == row.trial_id) & (epochs["attempt"] == row.attempt)]):
            metrics += (one._replace(step=epoch.epoch) for one in _metrics(epoch, names, seed))
        metrics += _metrics(row, TARGET, seed)
    return found


def export_to_mlflow(results: Results, target: str) -> str:
    """Export a run to a tracking URI or a folder; return a sentence on what was done. Raises ExportError."""
    uri = tracking_uri(target)
    with _settings():
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise ExportError(
                f"--mlflow: MLflow cannot be imported ({error}); install it: pip install 'mlflow-skinny>=3.17'"
            ) from None
        export = mlflow_export(results)
        if not export.cells:
            raise ExportError(f"{results.folder.path}: no cell was measured, so there is nothing to export")
        try:
            return _export(MlflowClient(tracking_uri=uri), export)
        except ExportError:
            raise
        except Exception as error:  # of MLflow, or of its libraries for networks, databases and files
            raise _failed(uri, error) from error


def tracking_uri(target: str) -> str:
    """Return the URI of a target, which may be a folder. Raises ExportError if it holds a user, password or token.

    A command stands in the shell's history and in the list of processes.
    """
    try:
        parts = urlsplit(target)
    except ValueError as error:
        raise ExportError(f"--mlflow: got {redact_text(target)!r}, which is no URI: {error}") from None
    if not target.strip():
        raise ExportError("--mlflow: got nothing; allowed: a folder, or a URI such as http://HOST:5000")
    said = [target, *(f"{name}={value}" for name, value in parse_qsl(parts.query))]
    if parts.username or parts.password or any(redact_text(text) != text for text in said):
        raise ExportError(
            "--mlflow: got a URI with a user, a password or a token; allowed: a URI without. Set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, instead"
        )
    is_uri = parts.scheme or target.startswith("databricks")
    return target if is_uri else Path(target).absolute().as_uri()


@contextmanager
def _settings() -> Iterator[None]:
    """Set the variables that MLflow reads, and ignore its warnings."""
    added = {name: value for name, value in SETTINGS.items() if name not in os.environ}
    os.environ.update(added)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _failed(uri: str, error: Exception) -> ExportError:
    """Return the error of a store that fails, in one line with the cause that is the deepest."""
    causes = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)  # type: ignore[arg-type]
    said = redact_text(" ".join(f"{type(causes[-1]).__name__}: {causes[-1]}".split()))[:300]
    return ExportError(f"--mlflow: {uri}: {said}. Nothing that was exported before is lost; export again to repeat")


def _export(client: MlflowClient, export: MlflowExport) -> str:
    """Write the runs, the digest last, then delete those of earlier exports; return a sentence on it."""
    experiment_id = _experiment(client, export.experiment)
    place = f"MLflow experiment {export.experiment!r}, run {export.whole.name!r}"
    earlier = _earlier(client, experiment_id, export.identity)
    same = next((run_id for run_id, tags in earlier.items() if tags.get(DIGEST) == export.digest), None)
    whole = same or _write_all(client, experiment_id, export)
    stale = [run_id for run_id, tags in earlier.items() if whole not in (run_id, tags.get(PARENT))]
    for run_id in stale:
        client.delete_run(run_id)
    if same:
        return f"{place}: is there already, unchanged"
    return f"{place}: {len(export.cells)} cells{', in place of an earlier export' if stale else ''}"


def _experiment(client: MlflowClient, name: str) -> str:
    """Return the id of the MLflow experiment, which is created if there is none."""
    found = client.get_experiment_by_name(name)
    if found is None:
        return str(client.create_experiment(name))
    if found.lifecycle_stage == "deleted":
        raise ExportError(
            f"--mlflow: the MLflow experiment {name!r} was deleted; restore it: "
            f"mlflow experiments restore --experiment-id {found.experiment_id}"
        )
    return str(found.experiment_id)


def _earlier(client: MlflowClient, experiment_id: str, identity: str) -> dict[str, Mapping[str, str]]:
    """Return the tags of the runs of earlier exports of the same run, complete or not, by run id."""
    search = partial(client.search_runs, [experiment_id], f"tags.`{IDENTITY}` = '{identity}'", max_results=MOST_RUNS)
    pages = [search()]
    while pages[-1].token:
        pages.append(search(page_token=pages[-1].token))
    return {str(run.info.run_id): run.data.tags for page in pages for run in page}


def _write_all(client: MlflowClient, experiment_id: str, export: MlflowExport) -> str:
    """Write the run for the whole, the cells and the files; return the id of the run for the whole."""
    tags = {IDENTITY: export.identity}
    whole = _write(client, experiment_id, export, export.whole, tags)
    for cell in export.cells:
        _write(client, experiment_id, export, cell, {**tags, PARENT: whole})
    for folder, paths in export.files.items():
        for path in paths:
            client.log_artifact(whole, str(path), folder or None)
    client.set_tag(whole, DIGEST, export.digest)
    return whole


def _write(
    client: MlflowClient, experiment_id: str, export: MlflowExport, run: MlflowRun, tags: Mapping[str, str]
) -> str:
    """Write one run as a finished one; return its id."""
    from mlflow.entities import Metric, Param

    made = client.create_run(experiment_id, start_time=export.start_ms, run_name=run.name, tags={**run.tags, **tags})
    run_id = str(made.info.run_id)
    params = [Param(name, value) for name, value in run.params.items()]
    for start in range(0, len(params), MOST_PARAMS):
        client.log_batch(run_id, params=params[start : start + MOST_PARAMS])
    metrics = [Metric(one.name, one.value, export.end_ms, one.step) for one in run.metrics]
    for start in range(0, len(metrics), MOST_METRICS):
        client.log_batch(run_id, metrics=metrics[start : start + MOST_METRICS])
    client.set_terminated(run_id, status="FINISHED", end_time=export.end_ms)
    return run_id
