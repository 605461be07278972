"""Results -> an MLflow tracking server or folder: one run for the whole, and one below it for each cell.

MLflow is the extra ``mlflow``. An export is made from the tables of a run folder, at any time after the run. The new
one is complete before an earlier one of the same run is deleted, so that a failure at any instant loses nothing.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from harness.analysis.results import Results
from harness.errors import ExportError
from harness.report.mlflow_runs import MlflowExport, MlflowRun, mlflow_export
from harness.system.sanitize import redact_text

if TYPE_CHECKING:
    from mlflow import MlflowClient

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


def export_to_mlflow(results: Results, target: str) -> str:
    """Export a run to a tracking URI or a folder; return a sentence on what was done. Raises ExportError."""
    uri = tracking_uri(target)
    with _settings():
        client = _client(uri)
        export = mlflow_export(results)
        if not export.cells:
            raise ExportError(f"{results.folder.path}: no cell was measured, so there is nothing to export")
        try:
            return _export(client, export)
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


def _client(uri: str) -> MlflowClient:
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise ExportError(
            f"--mlflow: MLflow cannot be imported ({error}); install it: pip install 'mlflow-skinny>=3.17'"
        ) from None
    try:
        return MlflowClient(tracking_uri=uri)
    except Exception as error:
        raise _failed(uri, error) from error


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
    found: dict[str, Mapping[str, str]] = {}
    token: str | None = None
    while True:
        wanted = f"tags.`{IDENTITY}` = '{identity}'"
        page = client.search_runs([experiment_id], wanted, max_results=MOST_RUNS, page_token=token)
        found |= {str(run.info.run_id): run.data.tags for run in page}
        token = page.token
        if not token:
            return found


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
