"""The run folder: the only place that knows file names. What is in it is whole, however the run ended."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from harness.config.experiment import Experiment, parse_experiment
from harness.config.yaml_source import MAX_BYTES, read_mapping
from harness.errors import RunFolderError, WriteError, cause_of
from harness.plan.environment import GroupEnvironment, Invocation, RunEnvironment
from harness.plan.planner import Plan
from harness.plan.rows import Circumstances, RecordedTrial
from harness.plan.trial import Trial, TrialResult
from harness.record.frames import csv_bytes
from harness.record.jsonl import read_lines, upgrade_environment
from harness.record.parquet import gather, in_parquet, read_table, write_frame
from harness.record.reading import check_no_links, encode_json, naming_file, read_object, read_text
from harness.record.rows import SCHEMA_VERSION, Record, merged, plan_content
from harness.record.schema import CHECKS, EPOCHS, STEPS, Table
from harness.system import sanitize
from harness.system.files import (
    PARTIAL,
    append_lines,
    locked,
    remove_all,
    replace_all,
    replace_text,
    replacing,
    writing,
)

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

    def _raw(self, name: str) -> Path:
        return self.path / "raw" / f"{name}.parquet"

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
            replace_text(path / "experiment.yaml", sanitize.source(source, yaml.safe_load(source)))
            replace_text(path / "experiment.resolved.yaml", _resolved(experiment))
            replace_text(path / "plan.json", json.dumps(_planned(plan), indent=1))
        except (OSError, WriteError) as error:
            raise RunFolderError(
                f"{path}: the run folder cannot be made: {cause_of(error)}; give another folder with --output"
            ) from None
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing folder; raises RunFolderError where it is none."""
        if not (path / "plan.json").is_file() or not (path / "experiment.resolved.yaml").is_file():
            raise RunFolderError(
                f"{path}: not a run folder (no plan.json in it); give results/<experiment>/<time>-<id>"
            )
        check_no_links(path)
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
        return parse_experiment(read_mapping(source, times=RESOLVED), source=str(source))

    def given(self) -> Experiment:
        """The experiment as the file gave it: without blocks that were added since."""
        source = self.path / "experiment.yaml"
        return parse_experiment(read_mapping(source), source=str(source))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One run at a time writes into a folder; raises RunFolderError where another does."""
        with locked(self.path):
            remove_all(self.path.rglob(f"*{PARTIAL}"))  # by a run that was killed at it
            yield

    def extend(self, experiment: Experiment, plan: Plan) -> None:
        """Keeps the experiment and the plan as they are from now on: what was planned before stays in the plan."""
        if _resolved(experiment) != _resolved(self.experiment()):
            replace_text(self.path / "experiment.resolved.yaml", _resolved(experiment))
        before = self.plan()
        now = merged(before, _planned(plan))
        if now != before:
            replace_text(self.path / "plan.json", json.dumps(now, indent=1))

    # -- writing ----------------------------------------------------------------------------------------------

    def append(self, trial: Trial, result: TrialResult, circumstances: Circumstances) -> RecordedTrial:
        """Records what became of a trial: its steps or epochs first, then its line. Returns the line."""
        return self._write([Record(trial, result, circumstances)])[0]

    def append_all(self, records: Sequence[Record]) -> Iterator[RecordedTrial]:
        """The same of several, in order, which wait for the disk together. Gives each line when it is there.

        Raises WriteError at the first that cannot be written; those before it are recorded all the same.
        """
        if len(records) > 1:
            size = self._size()
            try:
                yield from self._write(records)
                return
            except Exception:  # then each alone: there may be room for the first, or one may be to blame
                if self._size() > size:  # unless lines are there that could not be taken back
                    raise
        for record in records:
            yield from self._write([record])

    def _write(self, records: Sequence[Record]) -> list[RecordedTrial]:
        """All steps or epochs and logs, and when these are on disk the lines."""
        lines = [record.line() for record in records]
        parts = [part for record in records for part in self._parts(record)]
        # a run that was killed before its line may have left steps under this name
        remove_all(self._raw(record.name) for record in records if not record.rows)
        replace_all(parts)
        size = self._size()
        try:
            append_lines(self._lines, [encode_json(line) for line in lines])
        except BaseException:
            if self._size() <= size:  # else they would be taken for those of the next attempt
                remove_all(path for path, _ in parts)
            raise
        return lines

    def _size(self) -> int:
        return self._lines.stat().st_size if self._lines.exists() else 0

    def _parts(self, record: Record) -> Iterator[tuple[Path, bytes | memoryview]]:
        """The files that a trial has for itself, and what is in them."""
        if rows := record.rows:
            yield self._raw(record.name), memoryview(in_parquet(*rows))
        if record.log:
            yield (
                self.path / record.log,
                sanitize.redact_text(record.result.detail).encode("utf-8", errors="backslashreplace"),
            )

    def add_environment(self, entry: GroupEnvironment) -> None:
        """Adds what one worker group saw to environment.json."""
        with writing(self._environment):
            content = self.environment()
            content.setdefault("groups", []).append(sanitize.plain(entry))
            replace_text(self._environment, json.dumps(content, indent=1))

    def set_invocation(self, invocation: int, facts: Invocation) -> None:
        """Adds facts of one invocation, the first being 0, to environment.json."""
        with writing(self._environment):
            content = self.environment()
            invocations = content.setdefault("invocations", [])
            invocations.extend({} for _ in range(invocation + 1 - len(invocations)))
            invocations[invocation].update(sanitize.plain(facts))
            replace_text(self._environment, json.dumps(content, indent=1))

    def write_table(self, name: str, frame: pd.DataFrame) -> Path:
        """A derived table as CSV, replaced whole."""
        path = self.tables / f"{name}.csv"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        replace_all([(path, memoryview(csv_bytes(frame)))])
        return path

    # -- reading ----------------------------------------------------------------------------------------------

    def lines(self) -> list[RecordedTrial]:
        """Every recorded trial, in the order of recording; a line cut short by a crash does not count."""
        return read_lines(self._lines) if self._lines.exists() else []

    def environment(self) -> RunEnvironment:
        """Return the content of environment.json so far, in the names of today's schema version."""
        if not self._environment.exists():
            return {}
        return upgrade_environment(read_object(self._environment, lists=("invocations", "sittings", "groups")))

    def plan(self) -> dict[str, Any]:
        """What is in plan.json."""
        return read_object(self.path / "plan.json")

    def source_text(self) -> str:
        """The experiment file as it was given."""
        return read_text(self.path / "experiment.yaml", MAX_BYTES)

    def steps(self, lines: Sequence[RecordedTrial]) -> pd.DataFrame:
        """Every step of the timed trials among these lines."""
        timed = [line for line in lines if line["kind"] != "convergence" and line["purpose"] != "equivalence"]
        return self._compacted(STEPS, timed)

    def epochs(self, lines: Sequence[RecordedTrial]) -> pd.DataFrame:
        """Every epoch of the convergence trials among these lines."""
        return self._compacted(EPOCHS, [line for line in lines if line["kind"] == "convergence"])

    def checks(self, lines: Sequence[RecordedTrial]) -> pd.DataFrame:
        """The update of every equivalence check among these lines."""
        return self._compacted(CHECKS, [line for line in lines if line["purpose"] == "equivalence"])

    def compact(self, frames: Mapping[str, pd.DataFrame]) -> None:
        """Writes what was read from raw/ as steps.parquet, epochs.parquet and checks.parquet."""
        for table in (STEPS, EPOCHS, CHECKS):
            frame = frames[table.name]
            with replacing(self.path / f"{table.name}.parquet") as partial:
                write_frame(partial, frame)

    def _compacted(self, table: Table, lines: Sequence[RecordedTrial]) -> pd.DataFrame:
        """From raw/ where it is there, else from the compacted file, as in a folder that was passed on."""
        compacted = self.path / f"{table.name}.parquet"
        if compacted.exists() and not any((self.path / "raw").glob("*.parquet")):
            with naming_file(compacted):
                return table.typed(read_table(compacted, table).to_pandas())
        return self._from_raw(table, lines)

    def _from_raw(self, table: Table, lines: Sequence[RecordedTrial]) -> pd.DataFrame:
        named = [
            (line["trial_id"], line["attempt"], self._raw(f"{line['trial_id']}-{line['attempt']}")) for line in lines
        ]
        with naming_file(self.path / "raw"):
            return gather(table, [part for part in named if part[2].exists()])


def _resolved(experiment: Experiment) -> str:
    content = sanitize.plain(experiment.model_dump(mode="json"))
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _planned(plan: Plan) -> dict[str, Any]:
    content = plan_content(plan)
    return {
        **content,
        "cells": sanitize.plain(content["cells"]),
        "skipped": [sanitize.redact_row(row) for row in content["skipped"]],
    }
