"""Facts by rank, a trial's ranks and windows: a file for each trial in raw/, all of them in by_rank.jsonl.

Their size grows with the ranks, so a line of trials.jsonl has only how many there are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict

from harness.plan.rows import Json, RankRow, RecordedTrial, TrialLine, WindowRow
from harness.record.reading import check_integers, encode_json, naming_file, object_of, validated
from harness.system.files import replacing

GATHERED = "by_rank.jsonl"
T = TypeVar("T")


class ByRank(TypedDict):
    """The facts by rank of one attempt at a trial."""

    ranks: Sequence[RankRow]
    windows: Sequence[WindowRow]


MANY = 500
"""From this number of rows on they are kept by column."""
_ABSENT: object = ...  # one object in copies and other processes too


class Rows(Sequence[Json]):
    """The rows of a trial of many ranks, kept by column and made anew each time that they are read.

    As mappings the ranks and 8 windows of 512 ranks take 3.9 MiB, so 0.7.
    """

    def __init__(self, rows: Sequence[Json]) -> None:
        names = dict.fromkeys(name for row in rows for name in row)
        self._columns = {name: _packed([row.get(name, _ABSENT) for row in rows]) for name in names}
        self._count = len(rows)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        return list(self)[place]

    def __iter__(self) -> Iterator[Json]:
        return map(self._row, zip(*self._columns.values(), strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def _row(self, values: Iterable[object]) -> Json:
        return {name: value for name, value in zip(self._columns, values, strict=True) if value is not _ABSENT}


def _kept(rows: Sequence[T]) -> Sequence[T]:
    """Return the rows as they are kept."""
    return cast("Sequence[T]", Rows(cast("Sequence[Json]", rows))) if len(rows) >= MANY else rows


def _packed(values: list[Any]) -> Sequence[Any]:
    """Return the values, as an array if all are of one type of number."""
    kinds = {type(value) for value in values}
    return array("d", values) if kinds == {float} else array("q", values) if kinds == {int} else values


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
            for fact in (*facts["ranks"], *facts["windows"]):
                check_integers(fact)
        return cast("RecordedTrial", {**line, "ranks": _kept(facts["ranks"]), "windows": _kept(facts["windows"])})


def gather_by_rank(folder: Path, lines: Iterable[RecordedTrial]) -> None:
    """Write by_rank.jsonl, which a folder that is passed on without raw/ is read from; raises WriteError."""
    with replacing(folder / GATHERED) as partial, partial.open("w", encoding="utf-8") as file:
        for line in lines:
            if facts := by_rank_of(line):
                file.write(encode_json({"trial": f"{line['trial_id']}-{line['attempt']}", "facts": facts}) + "\n")
