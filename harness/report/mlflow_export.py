"""Results -> an MLflow tracking server or folder: one run for the whole, and one below it for each cell.

MLflow is the extra ``mlflow``. An export is made from the tables of a run folder, at any time after the run. The new
one is complete before an earlier one of the same run is deleted, so that a failure at any instant loses nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from harness.analysis.common import KEYS
from harness.analysis.results import Results
from harness.config.axes import CELL_AXES
from harness.config.script import CURVE_METRICS
from harness.errors import ExportError
from harness.report.row import Row, is_missing, number, rows_of, texts
from harness.report.sentence import Context
from harness.report.verdict import make_verdict, verdict_lines
from harness.system.process import variables
from harness.system.sanitize import redact_text

if TYPE_CHECKING:
    from mlflow import MlflowClient

SPEED = {
    "low": "throughput_low",
    "high": "throughput_high",
    "per_device_per_s": "throughput_per_device_per_s",
    **{name: name for name in ("throughput_per_s", "step_s", "peak_memory_bytes", "mfu", "blocks")},
}
"""Columns of the table cells that become metrics, each with its name there."""
RATIOS = {
    "low": "speedup_low",
    "high": "speedup_high",
    **{name: name for name in ("speedup", "efficiency", "efficiency_low", "efficiency_high")},
}
"""Columns of the table scaling that become metrics, each with its name there."""
TARGET = {name: name for name in ("time_to_target_s", "samples_to_target", "epochs_to_target")}
"""Columns of the table convergence that become metrics for each seed, each with its name there."""
CURVES = ("train_loss", "train_accuracy", "learning_rate", *CURVE_METRICS)
"""How the names of the columns of a learning curve begin."""
LONGEST_PARAM, LONGEST_TAG = 500, 5000
"""The most characters that every version of MLflow accepts."""
NOT_IN_NAMES = re.compile(r"[^\w.\- :/]")
"""The characters that MLflow rejects in the name of a parameter or metric."""
IDENTITY, PARENT = "harness.run", "mlflow.parentRunId"
"""The tags by which the runs of an earlier export are found, and the one for the whole of a cell's run."""
SETTINGS = {
    "MLFLOW_ALLOW_FILE_STORE": "true",  # a folder is a target like any other; MLflow asks for a database
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # by default a server that is down is reported after minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""Variables that MLflow reads; those that the user has set stay."""
Metric = tuple[str, float, int]
"""Name, value, and the epoch in a learning curve, else 0."""


class MlflowRun(NamedTuple):
    """One run of MLflow."""

    name: str
    params: Mapping[str, str]
    metrics: Sequence[Metric]
    tags: Mapping[str, str]


def export_to_mlflow(results: Results, target: str) -> str:
    """Export a run to a tracking URI or a folder; return a sentence on what was done. Raises ExportError."""
    uri = tracking_uri(target)
    with variables(SETTINGS), warnings.catch_warnings(action="ignore"):
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise ExportError(
                f"--mlflow: MLflow cannot be imported ({error}); install it: pip install 'mlflow-skinny>=3.17'"
            ) from None
        whole, cells = mlflow_runs(results)
        if not cells:
            raise ExportError(f"{results.folder.path}: no cell was measured, so there is nothing to export")
        try:
            had_earlier = _export(MlflowClient(tracking_uri=uri), results, whole, cells)
        except ExportError:
            raise
        except Exception as error:  # of MLflow, or of its libraries for networks, databases and files
            causes = [error]
            while cause := causes[-1].__cause__ or causes[-1].__context__:
                causes.append(cause)  # type: ignore[arg-type]
            said = redact_text(" ".join(f"{type(causes[-1]).__name__}: {causes[-1]}".split()))[:300]
            lost = "Nothing that was exported before is lost; export again to repeat"
            raise ExportError(f"--mlflow: {uri}: {said}. {lost}") from error
    place = f"MLflow experiment {results.experiment.name!r}, run {whole.name!r}"
    return f"{place}: {len(cells)} cells{', in place of an earlier export' if had_earlier else ''}"


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


def _export(client: MlflowClient, results: Results, whole: MlflowRun, cells: Sequence[MlflowRun]) -> bool:
    """Write the runs and the files, then delete the runs of earlier exports; return whether there were any.

    The identity is the same for every export of one run, wherever its folder lies.
    """
    from mlflow import entities

    folder, name = results.folder, results.experiment.name
    invocations = [one for one in results.environment.get("invocations", []) if "started_at" in one]
    start_s = min((one["started_at"] for one in invocations), default=0.0)
    end_ms = round(1000 * max((one["started_at"] + one.get("wall_s", 0.0) for one in invocations), default=0.0))
    identity = hashlib.sha256(json.dumps([name, start_s or folder.path.name]).encode()).hexdigest()[:16]
    experiment_id = _experiment_id(client, name)
    search = partial(client.search_runs, [experiment_id], f"tags.`{IDENTITY}` = '{identity}'")
    page = search()
    earlier = [*page]  # complete or not
    while page.token:
        page = search(page_token=page.token)
        earlier += page

    def write(run: MlflowRun, below: Mapping[str, str]) -> str:
        tags = {**run.tags, IDENTITY: identity, **below}
        made = client.create_run(experiment_id, start_time=round(1000 * start_s), run_name=run.name, tags=tags)
        run_id = str(made.info.run_id)
        params = [entities.Param(*one) for one in run.params.items()]
        metrics = [entities.Metric(metric, value, end_ms, step) for metric, value, step in run.metrics]
        client.log_batch(run_id, metrics, params)  # in requests of a size that MLflow accepts
        return run_id

    parent = write(whole, {})
    written = [write(cell, {PARENT: parent}) for cell in cells]
    for path in filter(Path.is_file, (folder.report, folder.path / "experiment.yaml")):
        client.log_artifact(parent, str(path))
    for path in sorted(folder.tables.glob("*.csv")):
        client.log_artifact(parent, str(path), "tables")
    for run_id in (*written, parent):  # until then the export is still running, as MLflow shows it
        client.set_terminated(run_id, status="FINISHED", end_time=end_ms)
    for run in earlier:
        client.delete_run(str(run.info.run_id))
    return bool(earlier)


def _experiment_id(client: MlflowClient, name: str) -> str:
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


def mlflow_runs(results: Results) -> tuple[MlflowRun, list[MlflowRun]]:
    """Return the run for the whole, whose description is the verdict, and one for each cell.

    Cells with a throughput, a ratio or a learning curve.
    """
    context = Context(results)
    outcomes = Counter(str(outcome) for outcome in results.trials.drop_duplicates("trial_id", keep="last")["outcome"])
    statements = rows_of(results.verdict)
    levels = {str(row.code) for row in statements if row.topic == "trust"}
    invocations = results.environment.get("invocations", [])
    facts = invocations[-1] if invocations else {}
    tags = {
        "verdict": "; ".join(context.label(row.cell_id) for row in statements if row.topic == "fastest"),
        "trust": next((level for level in ("low", "medium", "high") if level in levels), ""),
        "version": facts.get("harness", ""),
        "git_commit": facts.get("git_commit") or "",
        "device": facts.get("device", ""),
    }
    note = "\n".join(verdict_lines(results.experiment.name, make_verdict(results)))
    metrics = [(f"trials_{name}", float(count), 0) for name, count in outcomes.items()]
    own = {**_tags(tags), "mlflow.note.content": note[:LONGEST_TAG]}
    whole = MlflowRun(results.folder.path.name, {"workload": results.experiment.workload}, metrics, own)
    return whole, [*_cells(results, context)]


def _cells(results: Results, context: Context) -> Iterator[MlflowRun]:
    speeds = {row.cell_id: row for row in rows_of(results.cells)}
    ratios = {row.cell_id: row for row in rows_of(results.scaling)}
    curves, named = _curves(results), dict[str, str]()
    for row in rows_of(results.verdict[results.verdict["topic"] == "fastest"]):
        named |= dict.fromkeys(texts(row.others), "cannot be told apart from what to use")
        named[row.cell_id] = "what to use"
    for cell_id, row in context.cells.items():
        speed, ratio = speeds.get(cell_id), ratios.get(cell_id)
        metrics = [*_metrics(speed, SPEED), *_metrics(ratio, RATIOS), *curves.get(cell_id, ())]
        tags = {"label": row.label, "cell": cell_id, "verdict": named.get(cell_id, "")}
        if speed:
            tags["unit"] = str(speed.unit)
        if ratio:
            equivalence = "" if is_missing(ratio.equivalence) else ratio.equivalence
            doubts = "; ".join(texts(ratio.doubts))
            tags |= {"base": context.label(ratio.base_id), "doubts": doubts, "equivalence": equivalence}
        if metrics:
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


def _metrics(row: Row | None, names: Mapping[str, str], suffix: str = "", step: int = 0) -> Iterator[Metric]:
    """Yield the numbers of a row that are known."""
    for column, name in names.items():
        if row is not None and math.isfinite(value := number(row[column])):
            yield NOT_IN_NAMES.sub("_", f"{name}{suffix}"), value, step


def _curves(results: Results) -> Mapping[str, Sequence[Metric]]:
    """Return the learning curves of each cell, ``val_accuracy/seed_0`` by epoch, and the time to the target."""
    trained, found = results.convergence, defaultdict[str, list[Metric]](list)
    names = {str(name): str(name) for name in results.epochs.columns if str(name).startswith(CURVES)}
    epochs = results.epochs.merge(trained[[*KEYS, "cell_id", "seed"]], on=KEYS, validate="m:1")
    for row in rows_of(epochs.sort_values("epoch")):
        found[row.cell_id] += _metrics(row, names, f"/seed_{row.seed}", row.epoch)
    for row in rows_of(trained):
        found[row.cell_id] += _metrics(row, TARGET, f"/seed_{row.seed}")
    return found
