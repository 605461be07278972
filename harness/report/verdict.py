"""The verdict on a run: what to use, how far it scales, why not better, how sure, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.analysis.results import Results
from harness.report.glossary import explained
from harness.report.next_step import NOTHING_NEXT, next_step
from harness.report.row import Row, rows_of
from harness.report.sentence import MOST, TOPICS, Sentence, context_of
from harness.report.sentences import PHRASES, further


@dataclass(frozen=True)
class Verdict:
    """The sentences, an experiment file that the last one may need, and what else may be tried."""

    sentences: tuple[Sentence, ...]
    next_file: str = NOTHING_NEXT
    others: tuple[str, ...] = ()

    @property
    def proposes(self) -> bool:
        """Whether there is a file to run."""
        return self.next_file != NOTHING_NEXT

    @property
    def command(self) -> str:
        """The one command that is proposed; empty if there is none."""
        return next((one.command for one in self.sentences if one.command), "")

    @property
    def brackets(self) -> str:
        """What the numbers in brackets are; empty if the next step is all there is to say."""
        return BRACKETS if any(one.topic != "next" for one in self.sentences) else ""

    @property
    def by_heading(self) -> dict[str, list[Sentence]]:
        """The sentences by heading, in the order of the page, with words explained where they are used first."""
        order = [*TOPICS]
        found: dict[str, list[Sentence]] = {}
        for sentence in explained(sorted(self.sentences, key=lambda one: order.index(one.topic))):
            found.setdefault(sentence.heading, []).append(sentence)
        return found


BRACKETS = (
    "Numbers in brackets: 95 % intervals over blocks; of times to a target the range over seeds. In tables and figures "
    "x2 means: on 2 devices."
)
"""What the numbers in brackets are, and what the labels of tables mean, for below the sentences."""
NO_VERDICT = Verdict(())


def verdict_if_possible(results: Results) -> Verdict:
    """Return the verdict; without sentences if it fails by an error of the harness, which the report names."""
    try:
        return make_verdict(results)
    except Exception:
        return NO_VERDICT


def make_verdict(results: Results) -> Verdict:
    """Return the verdict on a run, in sentences."""
    context, statements = context_of(results), rows_of(results.verdict)
    sentences: list[Sentence] = []
    for topic, phrase in PHRASES.items():
        rows = _rows(topic, statements)
        for row in rows[:MOST]:
            sentences.append(replace(phrase(row, context), evidence=str(row["evidence"])))
        if len(rows) > MOST:
            more = f"And {len(rows) - MOST} more, in tables/verdict.csv."
            sentences.append(Sentence(topic, "", more, evidence=str(rows[0]["evidence"])))
    step = next_step(statements, context)
    return Verdict((*sentences, *further(context), step.sentence), step.file, step.others)


def _rows(topic: str, statements: Sequence[Row]) -> list[Row]:
    """Return the statements of a topic that have a sentence each; of the causes of one cell the first."""
    rows = [row for row in statements if row["topic"] == topic]
    if topic != "loss":
        return rows
    return [row for at, row in enumerate(rows) if row["cell_id"] not in [one["cell_id"] for one in rows[:at]]]
