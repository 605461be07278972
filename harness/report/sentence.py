"""A sentence of the verdict, and what the phrases of ``sentences.py`` and ``causes.py`` make it from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import pandas as pd

from harness.analysis.common import grouped
from harness.analysis.results import Results, attempt
from harness.analysis.verdict import Statement
from harness.config.script import ScriptExperiment
from harness.plan.labels import SEPARATOR
from harness.record.schema import empty_table
from harness.report.row import Row, Scalar, is_missing, plain_label, rows_of, texts

MOST = 4
"""The most sentences of one topic, and the most cells that a sentence names; the others are in tables/verdict.csv."""
MOST_PARTS = 3
"""The most settings, options or causes of one line of the decision."""
HOLM = "Holm's adjustment"
HOLM_MEANING = ", which keeps the chance of any false claim at 5 %,"

Said: TypeAlias = tuple[str, str]
"""The lead and the text of a sentence."""


@dataclass(frozen=True)
class Sentence:
    """One sentence of the verdict.

    ``lead``: what it is about; ``command``: what to type; ``evidence``: the anchor of its section in the report;
    ``code``: that of its statement.
    """

    topic: str
    lead: str
    text: str
    command: str = ""
    evidence: str = ""
    code: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether it stands in the colour of problems: no result, low trust, no equivalence, failures."""
        return self.topic in ("incomplete", "failed") or self.code in ("low", "not equivalent", "unknown")


@dataclass(frozen=True)
class Context:
    """What the sentences on a run need besides their statement."""

    results: Results

    @cached_property
    def cells(self) -> Mapping[str, Row]:
        """A trial of each cell, by the cell's id."""
        return {row.cell_id: row for row in rows_of(self.results.trials.drop_duplicates("cell_id"))}

    @cached_property
    def causes(self) -> Mapping[str, Sequence[Statement]]:
        """The causes of each leading cell's loss, the largest first."""
        losses = (one for one in self.results.statements if one.topic == "loss")
        return grouped(losses, lambda one: str(one.cell_id))

    def stated(self, topic: str) -> list[Statement]:
        """Return the statements of a topic; of the causes the first of each cell."""
        if topic == "loss":
            return [causes[0] for causes in self.causes.values()]
        return [one for one in self.results.statements if one.topic == topic]

    def table(self, name: str) -> pd.DataFrame:
        """Return a table of the run; without rows if it failed by an error of the harness."""
        found = attempt(self.results, name)
        return empty_table(name) if found is None else found

    @property
    def of_program(self) -> bool:
        """Whether the run measures a script or loop, which has no options of harness."""
        return isinstance(self.results.experiment, ScriptExperiment)

    @property
    def has_measured(self) -> bool:
        """Whether a trial succeeded; diagnostic ones count only if there are no others, as in a run of the links."""
        trials = self.table("trials")
        asked = trials[trials["kind"] != "diagnostic"]
        return bool(((asked if len(asked) else trials)["outcome"] == "ok").any())

    def has_doubt(self, words: str, cell_id: Scalar = None) -> bool:
        """Return whether a trial has a doubt with these words: a trial of the cell, or any."""
        rows = (row for row in rows_of(self.table("trials")) if cell_id in (None, row.cell_id))
        return any(words in name for row in rows for name in texts(row.doubts))

    def label(self, cell_id: Scalar) -> str:
        """Return the label of a cell; its id if it has no trial, as one that no machine can run."""
        row = self.cells.get(str(cell_id))
        return str(row.label if row else cell_id)

    def name(self, cell_id: Scalar) -> str:
        """Return a cell in plain words, with its batch: see plain_label; its id if it has no trial."""
        row = self.cells.get(str(cell_id))
        return plain_label(row) if row else str(cell_id)

    def short(self, cell_id: Scalar) -> str:
        """Return what tells a leading cell from the others, such as 'resnet14'; nothing if it is the only one.

        Of a cell that does not lead the whole name.
        """
        leading = [one.cell_id for one in self.stated("fastest")]
        if cell_id not in leading:
            return self.name(cell_id)
        parts = {one: self.name(one).split(SEPARATOR) for one in leading}
        own = [part for part in parts[cell_id] if not all(part in others for others in parts.values())]
        return SEPARATOR.join(own)

    def names_of(self, ids: Sequence[str]) -> str:
        """Return the names of several cells, the first MOST by name."""
        more = f" and {len(ids) - MOST} more" if len(ids) > MOST else ""
        return ", ".join(map(self.name, ids[:MOST])) + more

    def ratio(self, cell_id: Scalar) -> Row | None:
        """Return a cell's row of scaling if it has a speedup over another cell."""
        for row in rows_of(self.table("scaling")):
            if row.cell_id == cell_id != row.base_id and not is_missing(row.speedup):
                return row
        return None

    def rivals(self, cell_id: Scalar) -> dict[str, Row]:
        """Return the rows of leaders of the settings that a leading cell is compared with, by cell."""
        rows = rows_of(self.table("leaders"))
        return {row.cell_id: row for row in rows if row.leader_id == cell_id != row.cell_id}


def with_holm_explained(texts: Sequence[str]) -> list[str]:
    """Return the texts of a comparison with Holm's adjustment explained where it is named first."""
    found = [*texts]
    first = next((at for at, text in enumerate(found) if HOLM in text), None)
    if first is not None and not any(HOLM_MEANING in text for text in found):
        found[first] = found[first].replace(HOLM, f"{HOLM}{HOLM_MEANING}", 1)
    return found
