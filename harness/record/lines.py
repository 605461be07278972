"""A trial and a plan as plain values: lines of trials.jsonl, plan.json; and a trial's facts by rank, beside its line.

Facts by rank, its ranks and windows, are a file for each trial in raw/, all of them in by_rank.jsonl. Their size grows
with the ranks, so a line of trials.jsonl has only how many there are.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict

from harness.plan.cell import MEASURES
from harness.plan.comparison import axes_of, partner_ids, set_ids
from harness.plan.planner import Plan, codes_of
from harness.plan.rows import Circumstances, Json, RankRow, RecordedTrial, TrialColumns, TrialLine, WindowRow
from harness.plan.trial import Columns, Trial, TrialResult
from harness.record.reading import check_integers, encode_json, naming_file, object_of, validated
from harness.record.schema import CHECKS, EPOCHS, RAW, STEPS, TRAINING_STEPS, Table
from harness.system import sanitize
from harness.system.files import replacing

UNCHANGED = (
    *("outcome", "reason", "skip_code", "error_type", "error_rank", "started_at", "trial_s", "steps_s", "unit"),
    *("parameters", "facts"),
)
"""The attributes of a result that are in its line as they are."""


def rows_of(result: TrialResult, name: str) -> dict[str, tuple[Table, Columns]]:
    """Return the rows that a trial has, with their table, by the stem of their file in raw/.

    The steps of timed windows (one row a step, of its slowest rank, unless ``throughput.keep_steps`` is all), a check's
    update, or the epochs of a training and, in a file of their own, its steps.
    """
    tables: Iterable[tuple[Table, Columns]] = ((table, getattr(result, table.name)) for table in RAW)
    return {raw_name(table, name): (table, rows) for table, rows in tables if any(map(len, rows.values()))}


def tables_of(line: RecordedTrial) -> tuple[Table, ...]:
    """Return the tables in which a trial can have such rows."""
    if line["kind"] == "convergence":
        return EPOCHS, TRAINING_STEPS
    return (CHECKS,) if line["purpose"] == "equivalence" else (STEPS,)


def line_of(trial: Trial, result: TrialResult, circumstances: Circumstances, log: str | None) -> RecordedTrial:
    """Return an attempt at a trial as it is recorded, without secrets."""
    line = {
        **trial_columns(trial),
        **circumstances,
        **{name: getattr(result, name) for name in UNCHANGED},
        "parts": dict(result.parts),
        "ranks": list(result.ranks),
        "windows": list(result.windows),
        "links": list(result.links) or None,
        "exchanges": list(result.exchanges) or None,
        "log": log,
    }
    return cast("RecordedTrial", sanitize.redact_row(line))


SCHEMA = 6
"""The version of the files of a run folder; folders of another one are not read."""


def raw_name(table: Table, name: str) -> str:
    """Return the stem of the file in raw/ with a trial's rows of a table; ``name``: '<trial>-<attempt>'."""
    return f"{name}-steps" if table is TRAINING_STEPS else name


def trial_columns(trial: Trial) -> TrialColumns:
    """Return a trial's identity and axes as columns of the table of trials."""
    cell = trial.cell
    axes = axes_of(cell)
    return {
        "trial_id": trial.id,
        "cell_id": cell.id,
        # a check's global batch need not be divisible by the devices: its shares may be uneven
        **partner_ids(cell, equivalence=trial.purpose == "equivalence"),
        "check_id": trial.check_id,
        **set_ids(axes),
        "kind": trial.kind,
        "purpose": trial.purpose,
        "block": trial.block,
        "seed": trial.seed,
        "added": trial.added,
        **axes,
        "code": cell.code,
    }


def plan_content(plan: Plan) -> Json:
    """Return the plan as plain values, for plan.json."""
    return {
        "schema": SCHEMA,
        "measures": MEASURES,
        "inventory": asdict(plan.inventory),
        "machine": asdict(plan.machine),
        "order_seed": plan.experiment.seed,
        "groups": [
            {"id": g.id, "block": g.block, "placement": str(g), "trials": [t.id for t in g.trials]} for g in plan.groups
        ],
        "cells": {cell.id: plan.labels.of_cell(cell) for cell in dict.fromkeys(trial.cell for trial in plan.trials)},
        "impossible": [
            {"cell_id": cell.id, **axes_of(cell), "reason": reason.text, "skip_code": reason.code}
            for cell, reason in plan.impossible.items()
        ],
        "variants": codes_of(plan),
        "skipped": [
            {**trial_columns(trial), "reason": reason.text, "skip_code": reason.code}
            for trial, reason in plan.skips.items()
        ],
    }


def merged(before: Json, now: Json) -> Json:
    """Return a plan.json extended by the new parts of a later plan, such as added blocks; no entry is lost."""
    known = {trial_id for group in before["groups"] for trial_id in group["trials"]}
    skipped = {row["trial_id"] for row in before["skipped"]}
    impossible = {row["cell_id"]: row for row in [*before.get("impossible", []), *now["impossible"]]}
    more = [{**group, "trials": [t for t in group["trials"] if t not in known]} for group in now["groups"]]
    return {
        **before,
        "groups": [*before["groups"], *(group for group in more if group["trials"])],
        "cells": {**before.get("cells", {}), **now["cells"]},
        "impossible": list(impossible.values()),
        "skipped": [*before["skipped"], *(row for row in now["skipped"] if row["trial_id"] not in skipped)],
    }


GATHERED = "by_rank.jsonl"


class ByRank(TypedDict):
    """The facts by rank of one attempt at a trial."""

    ranks: Sequence[RankRow]
    windows: Sequence[WindowRow]


class Rows(Sequence[Any]):
    """The rows of a trial by rank, kept as compressed bytes and made anew each time that they are read.

    As mappings the ranks and 8 windows of 512 ranks take 3.3 MiB, so 0.2.
    """

    def __init__(self, rows: Sequence[Any]) -> None:
        self._packed, self._count = zlib.compress(pickle.dumps(rows), level=1), len(rows)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        return pickle.loads(zlib.decompress(self._packed))[place]

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == list(other)


_BY_RANK = TypeAdapter(list[ByRank], config=ConfigDict(strict=True, extra="allow"))


def by_rank_name(name: str) -> str:
    """Return the path of a trial's facts by rank in the run folder; ``name``: '<trial>-<attempt>'."""
    return f"raw/{name}-ranks.json"


def by_rank_of(line: RecordedTrial) -> ByRank | None:
    """Return a trial's facts by rank; None if it has none, as a trial that never started."""
    facts: ByRank = {"ranks": list(line["ranks"]), "windows": list(line["windows"])}
    return facts if any(facts.values()) else None


def with_counts(line: RecordedTrial) -> Json:
    """Return a line as in trials.jsonl: with the numbers of its ranks and windows."""
    return {**line, "ranks": len(line["ranks"]), "windows": len(line["windows"])}


class FactsByRank:
    """The facts by rank of a run folder's trials, from raw/, or from by_rank.jsonl if raw/ lacks a trial's file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _gathered(self) -> Mapping[str, object]:
        path = self._folder / GATHERED
        if not path.exists():
            return {}
        with naming_file(path):
            rows = [object_of(line) for line in path.read_bytes().splitlines()]
            return {str(row["trial"]): row["facts"] for row in rows}

    def with_rows(self, line: TrialLine) -> RecordedTrial:
        """Return a line of trials.jsonl with the rows of its ranks and windows in place of their numbers.

        Raises RunFolderError if they are missing, of other types, or of another number than the line says.
        """
        counts = {key: line.get(key) for key in ByRank.__annotations__}
        if not any(counts.values()):
            return cast("RecordedTrial", {**line, "ranks": [], "windows": []})
        name = f"{line['trial_id']}-{line['attempt']}"
        path = self._folder / by_rank_name(name)
        with naming_file(path):
            gathered = not path.exists() and name in self._gathered
            content = self._gathered[name] if gathered else object_of(path.read_bytes())
            (facts,) = validated(_BY_RANK, [content])
            found = {"ranks": len(facts["ranks"]), "windows": len(facts["windows"])}
            if found != counts:
                raise ValueError(f"it has {found}; trials.jsonl says {counts}")
            check_integers((*facts["ranks"], *facts["windows"]))
        return cast("RecordedTrial", {**line, "ranks": Rows(facts["ranks"]), "windows": Rows(facts["windows"])})


def gather_by_rank(folder: Path, lines: Iterable[RecordedTrial]) -> None:
    """Write by_rank.jsonl, which a folder that is passed on without raw/ is read from; raises WriteError."""
    with replacing(folder / GATHERED) as partial, partial.open("w", encoding="utf-8") as file:
        for line in lines:
            if facts := by_rank_of(line):
                file.write(encode_json({"trial": f"{line['trial_id']}-{line['attempt']}", "facts": facts}) + "\n")
