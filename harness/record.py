"""The run folder: the only place that knows file names. What is in it is whole, however the run ended."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from filelock import FileLock, Timeout

from harness.config import Experiment, parse
from harness.errors import RunFolderError
from harness.files import append_line, replace_bytes, replace_text
from harness.frames import csv_text
from harness.messages import TrialResult
from harness.parquet import gather, in_parquet, write_frame
from harness.plan import Plan
from harness.plan_rows import plan_content, trial_columns
from harness.schema import CHECKS, EPOCHS, STEPS, Table
from harness.trial import Trial
from harness.yaml_source import read_mapping

Lines = Sequence[Mapping[str, Any]]


class RunFolder:
    """results/<experiment>/<time>-<id>/. A trial is finished when its line is on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # -- names ------------------------------------------------------------------------------------------------

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def tables(self) -> Path:
        return self.path / "tables"

    @property
    def figures(self) -> Path:
        return self.path / "figures"

    @property
    def _lines(self) -> Path:
        return self.path / "trials.jsonl"

    @property
    def _environment(self) -> Path:
        return self.path / "environment.json"

    def _raw(self, trial_id: str, attempt: int) -> Path:
        return self.path / "raw" / f"{trial_id}-{attempt}.parquet"

    # -- making and opening -----------------------------------------------------------------------------------

    @classmethod
    def create(cls, output: Path, experiment: Experiment, plan: Plan, source: str) -> RunFolder:
        """A new folder with the experiment and the plan in it; raises RunFolderError where none can be made."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = output / experiment.name / f"{stamp}-{secrets.token_hex(2)}"
        try:
            for name in ("raw", "tables", "figures", "logs"):
                (path / name).mkdir(parents=True)
        except OSError as error:
            raise RunFolderError(
                f"{path}: the run folder cannot be made: {error.strerror}; give another folder with --output"
            ) from None
        folder = cls(path)
        resolved = yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        replace_text(path / "experiment.yaml", source)
        replace_text(path / "experiment.resolved.yaml", resolved)
        replace_text(path / "plan.json", json.dumps(plan_content(plan), indent=1))
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing folder; raises RunFolderError where it is none."""
        if not (path / "plan.json").is_file() or not (path / "experiment.resolved.yaml").is_file():
            raise RunFolderError(
                f"{path}: not a run folder (no plan.json in it); give results/<experiment>/<time>-<id>"
            )
        return cls(path)

    def experiment(self) -> Experiment:
        """The experiment as it was resolved when the run began."""
        source = self.path / "experiment.resolved.yaml"
        return parse(read_mapping(source), source=str(source))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One run at a time writes into a folder; raises RunFolderError where another does."""
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise RunFolderError(f"{self.path}: another run is writing into this folder") from None
        try:
            yield
        finally:
            lock.release()

    # -- writing ----------------------------------------------------------------------------------------------

    def append(self, trial: Trial, result: TrialResult, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Records what became of a trial: its steps or epochs first, then its line. Returns the line."""
        attempt = int(facts["attempt"])
        rows = ((STEPS, result.steps), (EPOCHS, result.epochs), (CHECKS, result.checks))
        for table, columns in [(table, columns) for table, columns in rows if columns][:1]:
            replace_bytes(self._raw(trial.id, attempt), in_parquet(table, columns))
        log = self._write_log(trial.id, attempt, result.detail)
        line = {**trial_columns(trial), **facts, **_result_columns(result), "log": log}
        append_line(self._lines, json.dumps(line, allow_nan=True))
        return line

    def add_environment(self, entry: Mapping[str, Any]) -> None:
        """Adds what one worker group saw to environment.json."""
        content = self.environment()
        content.setdefault("groups", []).append(dict(entry))
        replace_text(self._environment, json.dumps(content, indent=1))

    def set_sitting(self, sitting: int, facts: Mapping[str, Any]) -> None:
        """Adds facts of one sitting, the first being 0, to environment.json."""
        content = self.environment()
        sittings = content.setdefault("sittings", [])
        sittings.extend({} for _ in range(sitting + 1 - len(sittings)))
        sittings[sitting].update(facts)
        replace_text(self._environment, json.dumps(content, indent=1))

    def write_table(self, name: str, frame: pd.DataFrame) -> Path:
        """A derived table as CSV, replaced whole."""
        path = self.tables / f"{name}.csv"
        path.parent.mkdir(exist_ok=True)
        replace_text(path, csv_text(frame))
        return path

    def _write_log(self, trial_id: str, attempt: int, detail: str) -> str | None:
        if not detail:
            return None
        relative = f"logs/{trial_id}-{attempt}.txt"
        replace_text(self.path / relative, detail)
        return relative

    # -- reading ----------------------------------------------------------------------------------------------

    def lines(self) -> list[dict[str, Any]]:
        """Every recorded trial, in the order of recording; a last line cut short by a crash does not count."""
        if not self._lines.exists():
            return []
        rows = []
        text = self._lines.read_text(encoding="utf-8")
        for line in text.split("\n")[:-1]:  # what follows the last newline was never finished
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(_upgraded(json.loads(line)))
        return rows

    def environment(self) -> dict[str, Any]:
        """What is in environment.json so far."""
        if not self._environment.exists():
            return {}
        content: dict[str, Any] = json.loads(self._environment.read_text(encoding="utf-8"))
        return content

    def plan(self) -> dict[str, Any]:
        """What is in plan.json."""
        content: dict[str, Any] = json.loads((self.path / "plan.json").read_text(encoding="utf-8"))
        return content

    def source_text(self) -> str:
        """The experiment file as it was given."""
        return (self.path / "experiment.yaml").read_text(encoding="utf-8")

    def steps(self, lines: Lines) -> pd.DataFrame:
        """Every step of the timed trials among these lines."""
        timed = [line for line in lines if line["kind"] != "convergence" and line["purpose"] != "equivalence"]
        return self._compacted(STEPS, timed)

    def epochs(self, lines: Lines) -> pd.DataFrame:
        """Every epoch of the convergence trials among these lines."""
        return self._compacted(EPOCHS, [line for line in lines if line["kind"] == "convergence"])

    def checks(self, lines: Lines) -> pd.DataFrame:
        """The update of every equivalence check among these lines."""
        return self._compacted(CHECKS, [line for line in lines if line["purpose"] == "equivalence"])

    def compact(self, frames: Mapping[str, pd.DataFrame]) -> None:
        """Writes what was read from raw/ as steps.parquet, epochs.parquet and checks.parquet."""
        for table in (STEPS, EPOCHS, CHECKS):
            frame = frames[table.name]
            partial = self.path / f"{table.name}.partial"
            write_frame(partial, frame)
            os.replace(partial, self.path / f"{table.name}.parquet")

    def _compacted(self, table: Table, lines: Lines) -> pd.DataFrame:
        """From raw/ where it is there, else from the compacted file, as in a folder that was passed on."""
        compacted = self.path / f"{table.name}.parquet"
        if compacted.exists() and not any((self.path / "raw").glob("*.parquet")):
            return table.typed(pd.read_parquet(compacted))
        return self._from_raw(table, lines)

    def _from_raw(self, table: Table, lines: Lines) -> pd.DataFrame:
        named = [(line["trial_id"], line["attempt"], self._raw(line["trial_id"], line["attempt"])) for line in lines]
        return gather(table, [part for part in named if part[2].exists()])


def _upgraded(line: dict[str, Any]) -> dict[str, Any]:
    """A line of an older version with what it lacks, so that old run folders can be read."""
    if "purpose" not in line:
        later = {"purpose": "", "check_id": None, "alone_id": None, "wrapped_id": None, "launcher": "ray"}
        line = {**later, "facts": {}, "parts": {}, **line}
        for window in line["windows"]:
            window["window_kind"] = "warmup" if window.pop("warmup") else "timed"
    return line


def _result_columns(result: TrialResult) -> dict[str, Any]:
    """The columns of the line; what is long has a file of its own."""
    elsewhere = ("trial_id", "detail", "steps", "epochs", "checks")
    return {field.name: getattr(result, field.name) for field in fields(result) if field.name not in elsewhere}
