"""The run folder: names, writers and readers of its files. Every file is complete, however the run ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd
import yaml

from harness.config.experiment import Experiment
from harness.config.load import load_resolved, parse_experiment
from harness.config.yaml_source import MAX_BYTES, dump, parse_mapping, read_text
from harness.errors import RunFolderError, WriteError, cause_of
from harness.plan.planner import Plan
from harness.plan.rows import Circumstances, Json, RecordedTrial, TrialLine
from harness.plan.run_environment import GroupEnvironment, Invocation, RunEnvironment
from harness.plan.trial import Trial, TrialResult
from harness.record import reading
from harness.record.frames import csv_bytes, gather, in_parquet, read_frame, write_frame
from harness.record.lines import (
    SCHEMA,
    FactsByRank,
    by_rank_name,
    by_rank_of,
    gather_by_rank,
    line_of,
    merged,
    plan_content,
    raw_name,
    rows_of,
    tables_of,
    with_counts,
)
from harness.record.schema import RAW, table_of
from harness.system import files, sanitize

FOLDERS = ("raw", "tables", "figures", "logs")
"""The folders inside a run folder."""
TRACES = "traces"
"""The folder of the traces of two cells, if a run keeps them."""
NO_TRACE = "-too-large"
"""The end of the name of an empty file there: every trace of the cell exceeds its share."""
CANNOT_RUN = ("skipped", "impossible")
"""The lists of plan.json whose rows hold the axes of cells."""
RESOLVED = 20
"""Maximum size of experiment.resolved.yaml, which holds every default, as a multiple of an experiment file's."""


class RunFolder:
    """The folder results/<experiment>/<time>-<id>/. A trial is finished once its line is on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.report, self.tables, self.figures = path / "report.html", path / "tables", path / "figures"
        self._lines, self._environment = path / "trials.jsonl", path / "environment.jsonl"
        self._plan = path / "plan.json"

    def checkpoints(self, folder: str | None) -> Path:
        """Return the folder of this run's checkpoints: below ``folder`` if the experiment names one, else here."""
        return Path(folder) / self.path.name if folder else self.path / "checkpoints"

    def _raw(self, name: str) -> Path:
        return self.path / "raw" / f"{name}.parquet"

    # -- making and opening -----------------------------------------------------------------------------------

    @classmethod
    def create(cls, output: Path, experiment: Experiment, plan: Plan, source: str) -> RunFolder:
        """Create a run folder with the experiment and the plan; raises RunFolderError if that is impossible."""
        if os.path.islink(output / experiment.name):
            raise RunFolderError(
                f"{output / experiment.name}: is a link, which may lead outside the output folder; remove it"
            )
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = output / experiment.name / f"{stamp}-{secrets.token_hex(2)}"
        try:
            for name in FOLDERS:
                (path / name).mkdir(parents=True)
            files.replace_text(path / "experiment.yaml", sanitize.source(source, yaml.safe_load(source)))
            files.replace_text(path / "experiment.resolved.yaml", _resolved(experiment))
            files.replace_text(path / "plan.json", json.dumps(_planned(plan), indent=1))
        except (OSError, ValueError, WriteError) as error:  # a ValueError: a name with a null character
            raise RunFolderError(
                f"{path}: the run folder cannot be created: {cause_of(error)}; give another folder with --output"
            ) from None
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open an existing run folder; raises RunFolderError if the path is none, or of another schema."""
        if not all(os.path.isfile(path / name) for name in ("plan.json", "experiment.resolved.yaml")):
            raise RunFolderError(
                f"{path}: not a run folder (plan.json or experiment.resolved.yaml is missing); "
                "give results/<experiment>/<time>-<id>"
            )
        folder = cls(path)
        plan = folder.plan()
        if (schema := plan.get("schema", plan.get("schema_version"))) != SCHEMA:
            others = "0.1" if schema in (1, 2, 3) else "another version"
            raise RunFolderError(
                f"{path / 'plan.json'}: got schema {str(schema)[:20]}; this harness reads and resumes schema "
                f"{SCHEMA}. Read the folder with harness {others}, which made it, or measure again"
            )
        return folder

    def experiment(self) -> Experiment:
        """Return the experiment with every default, as resolved at the start of the run."""
        source = self.path / "experiment.resolved.yaml"
        return load_resolved(source, times=RESOLVED)

    def given(self, home: Path | None = None) -> Experiment:
        """Return the experiment of the user's file, without the blocks that a resume has added.

        Relative paths are resolved against ``home``, the folder of that file; without it they stay relative.
        """
        source = self.path / "experiment.yaml"
        content = parse_mapping(read_text(source, MAX_BYTES), source=str(source))
        return parse_experiment(content, source=str(source), home=home)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for one writing run; raises RunFolderError if another run holds the lock."""
        with files.locked(self.path):
            files.remove_all(self.path.rglob(f"*{files.PARTIAL}"))  # left by a run that was killed while writing
            yield

    def extend(self, experiment: Experiment, plan: Plan) -> None:
        """Write the extended experiment and plan; everything planned before stays in the plan."""
        if _resolved(experiment) != _resolved(self.experiment()):
            files.replace_text(self.path / "experiment.resolved.yaml", _resolved(experiment))
        before = reading.read_object(self._plan)
        now = merged(before, _planned(plan))
        if now != before:
            files.replace_text(self._plan, json.dumps(now, indent=1))

    # -- writing ----------------------------------------------------------------------------------------------

    def append(self, trial: Trial, result: TrialResult, circumstances: Circumstances) -> RecordedTrial:
        """Record the result of a trial: its steps, epochs and log first, then its line. Return the line once on disk.

        Raises WriteError; the trial is then not recorded, and no file of it is left.
        """
        name = f"{trial.id}-{circumstances['attempt']}"
        line = line_of(trial, result, circumstances, f"logs/{name}.txt" if result.detail else None)
        rows = rows_of(result, name)
        parts: list[tuple[Path, bytes | memoryview]] = []
        parts += [(self._raw(stem), memoryview(in_parquet(*of_table))) for stem, of_table in rows.items()]
        if facts := by_rank_of(line):
            parts.append((self.path / by_rank_name(name), reading.encode_json(facts).encode()))
        if line["log"]:
            text = sanitize.redact_text(result.detail).encode("utf-8", errors="backslashreplace")
            parts.append((self.path / line["log"], text))
        # an attempt that was killed before its line was written may have left steps
        files.remove_all(self._raw(stem) for stem in {raw_name(table, name) for table in RAW} - rows.keys())
        files.remove_all([self.path / by_rank_name(name)])
        files.replace_all(parts)
        size = self._size()
        try:
            files.append_lines(self._lines, [reading.encode_json(reading.for_file(with_counts(line)))])
        except BaseException:
            if self._size() <= size:  # else they would pass for the next attempt's
                files.remove_all(path for path, _ in parts)
            raise
        return line

    def _size(self) -> int:
        return self._lines.stat().st_size if self._lines.exists() else 0

    def add_environment(self, entry: GroupEnvironment) -> None:
        """Append the environment of one worker group to environment.jsonl."""
        self._append_environment({"group": entry})

    def set_invocation(self, invocation: int, facts: Invocation) -> None:
        """Append facts of one invocation, numbered from 0, to environment.jsonl; they are added to its earlier ones."""
        self._append_environment({"invocation": invocation, "facts": facts})

    def _append_environment(self, entry: Mapping[str, object]) -> None:
        with files.writing(self._environment):
            files.append_lines(self._environment, [reading.encode_json(sanitize.plain(entry))])

    def write_table(self, name: str, frame: pd.DataFrame) -> Path:
        """Write a table of the schema as CSV, replacing the file atomically. Return its path."""
        path = self.tables / f"{name}.csv"
        text = table_of(name).as_text(frame)
        with files.writing(path):
            path.parent.mkdir(exist_ok=True)
        files.replace_all([(path, memoryview(csv_bytes(text)))])
        return path

    def keep_traces(self, cells: Mapping[str, Sequence[bytes]], *, instead: bool) -> None:
        """Write the traces of these cells, by rank; raises WriteError.

        A cell without any leaves a mark, by which ``traces`` has it too. ``instead``: in place of all that were kept.
        """
        folder = self.path / TRACES
        with files.writing(folder):
            folder.mkdir(exist_ok=True)
        paths = {
            folder / f"{cell_id}-rank{rank}.json.gz": content
            for cell_id, traces in cells.items()
            for rank, content in enumerate(traces)
            if content
        }
        paths |= {folder / f"{cell_id}{NO_TRACE}": b"" for cell_id, traces in cells.items() if not any(traces)}
        if instead:
            files.remove_all(set(folder.iterdir()) - paths.keys())
        files.replace_all(paths.items())

    # -- reading ----------------------------------------------------------------------------------------------

    def traces(self) -> dict[str, dict[int, str]]:
        """Return the paths of the traces that are kept, relative to the run folder, by cell and rank, in order."""
        folder = self.path / TRACES
        found = {path.name.removesuffix(NO_TRACE): dict[int, str]() for path in folder.glob(f"*{NO_TRACE}")}
        for path in sorted(folder.glob("*-rank*.json.gz"), key=lambda path: (len(path.name), path.name)):
            cell_id, _, rank = path.name.removesuffix(".json.gz").rpartition("-rank")
            found.setdefault(cell_id, {})[int(rank)] = f"{TRACES}/{path.name}"
        return found

    def lines(self) -> list[RecordedTrial]:
        """Return all recorded trials in the order of recording, without lines that a crash cut short."""
        facts = FactsByRank(self.path)
        return [facts.with_rows(line) for line in self.trial_lines()]

    def trial_lines(self) -> list[TrialLine]:
        """Return all recorded trials as ``lines`` does, but without the rows of their ranks and windows: faster."""
        return reading.read_lines(self._lines) if self._lines.exists() else []

    def environment(self) -> RunEnvironment:
        """Return the content of environment.jsonl: invocations and worker groups."""
        return reading.read_environment(self._environment) if self._environment.exists() else {}

    @property
    def why_unfinished(self) -> str:
        """Why the run is not finished; '' if it is. A failed trial alone does not make it unfinished."""
        invocations = self.environment().get("invocations", [])
        if not invocations:
            return "it recorded no trial"
        lines = {line["trial_id"]: line for line in self.trial_lines()}
        if any(line["facts"].get("inline") or line["skip_code"] == "inline" for line in lines.values()):
            return ""  # a run for a debugger is never resumed
        if (ended := invocations[-1].get("ended")) == "interrupted":
            return "it was interrupted"
        if ended != "finished":
            return "its last invocation failed, was killed or still runs"
        late = [line["reason"] for line in lines.values() if line["skip_code"] == "time_up"]
        limits = dict.fromkeys(limit for reason in late for limit in re.findall(r"limits\.\w+", reason))
        if late:
            return f"{' and '.join(limits)} left out {len(late)} trials"
        left = sum(trial_id not in lines for group in self.plan()["groups"] for trial_id in group["trials"])
        return f"{left} planned trials were no part of its last invocation" if left else ""

    def plan(self) -> Json:
        """Return the content of plan.json; its skipped trials and impossible cells are rows as of trials.jsonl."""
        path = self.path / "plan.json"
        content = reading.read_object(path)
        with reading.naming_file(path):
            return {**content, **{name: list(map(reading.with_options, content.get(name, []))) for name in CANNOT_RUN}}

    def check(self) -> None:
        """Raise RunFolderError if environment.jsonl or plan.json lack what the tables are made from."""
        with reading.naming_file(self._environment):
            reading.validated(reading.ENVIRONMENT, self.environment())
        with reading.naming_file(self._plan):
            reading.validated(reading.PLAN, self.plan())

    def write_log(self, name: str, text: str) -> Path:
        """Write the log of a failure of the harness itself; return its path. Raises WriteError."""
        path = self.path / "logs" / f"{name}.txt"
        with files.writing(path):
            path.parent.mkdir(exist_ok=True)
        files.replace_text(path, sanitize.redact_text(text))
        return path

    def source_text(self) -> str:
        """Return the text of the user's experiment file."""
        path = self.path / "experiment.yaml"
        with reading.naming_file(path):
            if (size := path.stat().st_size) > MAX_BYTES:
                raise ValueError(f"{size} bytes; at most {MAX_BYTES} are allowed")
            return path.read_text(encoding="utf-8")

    def compact(self, frames: Mapping[str, pd.DataFrame], lines: Sequence[RecordedTrial]) -> None:
        """Write what was gathered from raw/: the rows as steps.parquet and the like, the lines' facts by rank."""
        gather_by_rank(self.path, lines)
        for table in RAW:
            frame = frames[table.name]
            with files.replacing(self.path / f"{table.name}.parquet") as partial:
                write_frame(partial, frame)

    def rows(self, name: str, lines: Sequence[RecordedTrial]) -> pd.DataFrame:
        """Return the rows of a table of RAW, given by its name, that the trials of these lines have.

        They are read from raw/, or from the compacted file if raw/ is empty, as in a folder that was passed on.
        """
        table, compacted = table_of(name), self.path / f"{name}.parquet"
        if compacted.exists() and not any((self.path / "raw").glob("*.parquet")):
            with reading.naming_file(compacted):
                return read_frame(compacted, table)
        attempts = [(line["trial_id"], line["attempt"]) for line in lines if table in tables_of(line)]
        named = [(trial, number, self._raw(raw_name(table, f"{trial}-{number}"))) for trial, number in attempts]
        with reading.naming_file(self.path / "raw"):
            return gather(table, [part for part in named if part[2].exists()])


def _resolved(experiment: Experiment) -> str:
    content = sanitize.plain(experiment.model_dump(mode="json"))
    return dump(content, allow_unicode=True)


def _planned(plan: Plan) -> Json:
    content = plan_content(plan)
    return {
        **content,
        "cells": sanitize.plain(content["cells"]),
        **{name: [reading.for_file(sanitize.redact_row(row)) for row in content[name]] for name in CANNOT_RUN},
    }
