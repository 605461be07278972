"""The run folder: the only place that knows file names. What is in it is whole, however the run ended."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from filelock import FileLock, Timeout

from harness import redact
from harness.config import Experiment, parse
from harness.errors import RunFolderError, WriteError
from harness.files import PARTIAL, append_line, replace_bytes, replace_text, replacing, writing
from harness.frames import csv_text
from harness.messages import TrialResult
from harness.parquet import gather, in_parquet, write_frame
from harness.plan import Plan
from harness.plan_rows import SCHEMA_VERSION, merged, plan_content, trial_columns
from harness.reading import naming, read_lines, read_object, read_table, read_text, refuse_links
from harness.schema import CHECKS, EPOCHS, STEPS, Table
from harness.trial import Trial
from harness.yaml_source import MAX_BYTES, read_mapping

Lines = Sequence[Mapping[str, Any]]
RESOLVED = 20
"""How much larger than an experiment file the resolved one may be, which holds every default."""


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

    def checkpoints(self, folder: str | None) -> Path:
        """Where this run's checkpoints are: a folder of their own in the one that the experiment names, or here."""
        return Path(folder) / self.path.name if folder else self.path / "checkpoints"

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
        if (output / experiment.name).is_symlink():
            raise RunFolderError(f"{output / experiment.name}: is a link, which may lead anywhere; remove it")
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = output / experiment.name / f"{stamp}-{secrets.token_hex(2)}"
        try:
            for name in ("raw", "tables", "figures", "logs"):
                (path / name).mkdir(parents=True)
            replace_text(path / "experiment.yaml", redact.source(source, yaml.safe_load(source)))
            replace_text(path / "experiment.resolved.yaml", _resolved(experiment))
            replace_text(path / "plan.json", json.dumps(_planned(plan), indent=1))
        except (OSError, WriteError) as error:
            raise RunFolderError(
                f"{path}: the run folder cannot be made: {_cause(error)}; give another folder with --output"
            ) from None
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing folder; raises RunFolderError where it is none."""
        if not (path / "plan.json").is_file() or not (path / "experiment.resolved.yaml").is_file():
            raise RunFolderError(
                f"{path}: not a run folder (no plan.json in it); give results/<experiment>/<time>-<id>"
            )
        refuse_links(path)
        folder = cls(path)
        version = folder.plan().get("schema_version")
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise RunFolderError(
                f"{path / 'plan.json'}: the folder is of version {str(version)[:20]}; this harness reads versions 1 to "
                f"{SCHEMA_VERSION}. Update harness"
            )
        return folder

    def experiment(self) -> Experiment:
        """The experiment as it was resolved when the run began."""
        source = self.path / "experiment.resolved.yaml"
        return parse(read_mapping(source, times=RESOLVED), source=str(source))

    def given(self) -> Experiment:
        """The experiment as the file gave it: without blocks that were added since."""
        source = self.path / "experiment.yaml"
        return parse(read_mapping(source), source=str(source))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One run at a time writes into a folder; raises RunFolderError where another does.

        The system holds the lock for a process and gives it back when that dies, however it dies.
        """
        lock, holder = FileLock(self.path / ".lock"), self.path / ".lock-holder"
        try:
            lock.acquire(timeout=0)
            replace_text(holder, f"pid {os.getpid()} on {platform.node()}")
        except Timeout:
            raise RunFolderError(f"{self.path}: another run is writing into this folder{_named(holder)}") from None
        except (OSError, WriteError) as error:
            lock.release()
            raise RunFolderError(f"{self.path}: the folder cannot be written: {_cause(error)}") from None
        try:
            with contextlib.suppress(OSError):
                for left in self.path.rglob(f"*{PARTIAL}"):  # by a run that was killed at it
                    left.unlink(missing_ok=True)
            yield
        finally:
            with contextlib.suppress(OSError):
                holder.unlink(missing_ok=True)
            lock.release()

    def extend(self, experiment: Experiment, plan: Plan) -> None:
        """Keeps the experiment and the plan as they are from now on: what was planned before stays in the plan."""
        if _resolved(experiment) != _resolved(self.experiment()):
            replace_text(self.path / "experiment.resolved.yaml", _resolved(experiment))
        before = self.plan()
        now = merged(before, _planned(plan))
        if now != before:
            replace_text(self.path / "plan.json", json.dumps(now, indent=1))

    # -- writing ----------------------------------------------------------------------------------------------

    def append(self, trial: Trial, result: TrialResult, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Records what became of a trial: its steps or epochs first, then its line. Returns the line."""
        attempt = int(facts["attempt"])
        rows = ((STEPS, result.steps), (EPOCHS, result.epochs), (CHECKS, result.checks))
        for table, columns in [(table, columns) for table, columns in rows if columns][:1]:
            replace_bytes(self._raw(trial.id, attempt), memoryview(in_parquet(table, columns)))
        log = self._write_log(trial.id, attempt, result.detail)
        line = redact.row({**trial_columns(trial), **facts, **_result_columns(result), "log": log})
        append_line(self._lines, json.dumps(line, allow_nan=True))
        return line

    def add_environment(self, entry: Mapping[str, Any]) -> None:
        """Adds what one worker group saw to environment.json."""
        with writing(self._environment):
            content = self.environment()
            content.setdefault("groups", []).append(redact.plain(entry))
            replace_text(self._environment, json.dumps(content, indent=1))

    def set_sitting(self, sitting: int, facts: Mapping[str, Any]) -> None:
        """Adds facts of one sitting, the first being 0, to environment.json."""
        with writing(self._environment):
            content = self.environment()
            sittings = content.setdefault("sittings", [])
            sittings.extend({} for _ in range(sitting + 1 - len(sittings)))
            sittings[sitting].update(redact.plain(facts))
            replace_text(self._environment, json.dumps(content, indent=1))

    def write_table(self, name: str, frame: pd.DataFrame) -> Path:
        """A derived table as CSV, replaced whole."""
        path = self.tables / f"{name}.csv"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        replace_text(path, csv_text(frame))
        return path

    def _write_log(self, trial_id: str, attempt: int, detail: str) -> str | None:
        if not detail:
            return None
        relative = f"logs/{trial_id}-{attempt}.txt"
        replace_text(self.path / relative, redact.text(detail))
        return relative

    # -- reading ----------------------------------------------------------------------------------------------

    def lines(self) -> list[dict[str, Any]]:
        """Every recorded trial, in the order of recording; a line cut short by a crash does not count."""
        return read_lines(self._lines) if self._lines.exists() else []

    def environment(self) -> dict[str, Any]:
        """What is in environment.json so far."""
        return read_object(self._environment, lists=("sittings", "groups")) if self._environment.exists() else {}

    def plan(self) -> dict[str, Any]:
        """What is in plan.json."""
        return read_object(self.path / "plan.json")

    def source_text(self) -> str:
        """The experiment file as it was given."""
        return read_text(self.path / "experiment.yaml", MAX_BYTES)

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
            with replacing(self.path / f"{table.name}.parquet") as partial:
                write_frame(partial, frame)

    def _compacted(self, table: Table, lines: Lines) -> pd.DataFrame:
        """From raw/ where it is there, else from the compacted file, as in a folder that was passed on."""
        compacted = self.path / f"{table.name}.parquet"
        if compacted.exists() and not any((self.path / "raw").glob("*.parquet")):
            with naming(compacted):
                return table.typed(read_table(compacted, table).to_pandas())
        return self._from_raw(table, lines)

    def _from_raw(self, table: Table, lines: Lines) -> pd.DataFrame:
        named = [(line["trial_id"], line["attempt"], self._raw(line["trial_id"], line["attempt"])) for line in lines]
        with naming(self.path / "raw"):
            return gather(table, [part for part in named if part[2].exists()])


def _resolved(experiment: Experiment) -> str:
    content = redact.plain(experiment.model_dump(mode="json"))
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _planned(plan: Plan) -> dict[str, Any]:
    content = plan_content(plan)
    return {
        **content,
        "cells": redact.plain(content["cells"]),
        "skipped": [redact.row(row) for row in content["skipped"]],
    }


def _cause(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error, WriteError) else error
    return str(getattr(cause, "strerror", None) or cause)


def _named(holder: Path) -> str:
    """Who holds the lock, where that can be told: ' (pid 123 on some-host)'."""
    try:
        return f" ({holder.read_text(encoding='utf-8')[:200]})"
    except (OSError, UnicodeDecodeError):
        return ""


def _result_columns(result: TrialResult) -> dict[str, Any]:
    """The columns of the line; what is long has a file of its own."""
    elsewhere = ("trial_id", "detail", "steps", "epochs", "checks")
    return {field.name: getattr(result, field.name) for field in fields(result) if field.name not in elsewhere}
