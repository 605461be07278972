"""What a sentence of the verdict is, and what a phrase makes it from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from harness.analysis.results import Results, attempt
from harness.config.values import PlainValue
from harness.record.schema import empty_table
from harness.report.row import Row, Scalar, rows_of

MOST = 4
"""The most sentences of one topic, and the most cells that a sentence names; the others are in tables/verdict.csv."""
TOPICS: Mapping[str, str] = {
    "fastest": "What to use",
    "fewer": "On fewer devices",
    "choice": "Options compared",
    "trust": "How sure",
    "scaling": "How far it scales",
    "loss": "Why not better",
    "data": "Waiting for data",
    "next": "What to try next",
    "training": "Convergence",
    "equivalence": "Same training",
    "failed": "Failed",
    "open": "Open",
}
"""The topics in the order of the page, each with its heading."""


@dataclass(frozen=True)
class Sentence:
    """One sentence of the verdict, in the order in which it is shown.

    ``lead``: what it is about; ``options``: lines of an experiment file to try; ``command``: what to type;
    ``evidence``: the anchor of its section in the report; ``code``: that of its statement.
    """

    topic: str
    lead: str
    text: str
    options: tuple[str, ...] = ()
    command: str = ""
    evidence: str = ""
    code: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether it stands in the colour of problems: low trust, no equivalence, failures."""
        return self.topic == "failed" or self.code in ("low", "not equivalent", "unknown")

    @property
    def proposal(self) -> str:
        """Its options as words: 'Try ddp.bucket_cap_mb: [1, 25, 100]'; empty if there are none."""
        lines = "; ".join(self.options)
        return f"Try {lines}." if lines and self.topic in ("loss", "data") else lines

    @property
    def heading(self) -> str:
        return TOPICS[self.topic]


@dataclass(frozen=True)
class Context:
    """What the sentences need besides the statements: the results, and the cells and their options by id."""

    results: Results
    cells: Mapping[str, Row]
    options: Mapping[str, Mapping[str, PlainValue]]

    def table(self, name: str) -> pd.DataFrame:
        """Return a table of the run; without rows if it failed by an error of the harness."""
        found = attempt(self.results, name)
        return empty_table(name) if found is None else found

    def label(self, cell_id: Scalar) -> str:
        """Return the label of a cell; its id if it has no trial, as one that no machine can run."""
        row = self.cells.get(str(cell_id))
        return str(row["label"] if row else cell_id)

    def labels_of(self, ids: Sequence[str]) -> str:
        """Return the labels of several cells, the first MOST by name."""
        more = f" and {len(ids) - MOST} more" if len(ids) > MOST else ""
        return ", ".join(map(self.label, ids[:MOST])) + more


def context_of(results: Results) -> Context:
    """Return what the sentences on a run need."""
    first = results.trials.drop_duplicates("cell_id")
    options = zip(first["cell_id"], first["options"], strict=True)
    cells = {str(row["cell_id"]): row for row in rows_of(first)}
    return Context(results, cells, {cell_id: values or {} for cell_id, values in options})
