"""The verdict on a run: what to use, how far it scales, why not better, how sure, and what is left open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.analysis.results import Results
from harness.report.advice import next_experiment, options_to_try
from harness.report.glossary import explained
from harness.report.row import Row, number, rows_of
from harness.report.sentence import MOST, TOPICS, Context, Sentence, context_of
from harness.report.sentences import PHRASES, further

NEXT_FILE = "next.yaml"
NOTHING_NEXT = "# The verdict proposes no option to compare.\n"


@dataclass(frozen=True)
class Verdict:
    """The sentences, and an experiment file that tries what they propose."""

    sentences: tuple[Sentence, ...]
    next_file: str = NOTHING_NEXT

    @property
    def proposes(self) -> bool:
        """Whether there is something to try."""
        return self.next_file != NOTHING_NEXT

    @property
    def commands(self) -> list[str]:
        """The commands of the sentences, in their order."""
        return [one.command for sentences in self.by_heading.values() for one in sentences if one.command]

    @property
    def by_heading(self) -> dict[str, list[Sentence]]:
        """The sentences by heading, in the order of the page, with words explained where they are used first."""
        order = [*TOPICS]
        found: dict[str, list[Sentence]] = {}
        for sentence in explained(sorted(self.sentences, key=lambda one: order.index(one.topic))):
            found.setdefault(sentence.heading, []).append(sentence)
        return found


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
        rows = [row for row in statements if row["topic"] == topic]
        for row in rows[:MOST]:
            sentences.append(replace(phrase(row, context), evidence=str(row["evidence"])))
        if len(rows) > MOST:
            more = f"And {len(rows) - MOST} more, in tables/verdict.csv."
            sentences.append(Sentence(topic, "", more, evidence=str(rows[0]["evidence"])))
    proposal = _proposal(statements, context)
    if proposal:
        sentences.append(_next_sentence(proposal, results))
    return Verdict((*_said_once(sentences), *further(context)), proposal.file if proposal else NOTHING_NEXT)


def _said_once(sentences: Iterable[Sentence]) -> Iterator[Sentence]:
    """Yield the sentences; options that an earlier one proposes are not proposed again."""
    seen: set[tuple[str, ...]] = set()
    for sentence in sentences:
        yield replace(sentence, options=()) if sentence.options in seen else sentence
        seen.add(sentence.options)


@dataclass(frozen=True)
class Proposal:
    """An option to compare in one cell, and the experiment file that does."""

    option: str
    label: str
    file: str


def _proposal(statements: Sequence[Row], context: Context) -> Proposal | None:
    """Return the first option to try against the largest loss; None if there is none."""
    losses = [row for row in statements if row["topic"] == "data" or row["code"] == "largest"]
    for row in sorted(losses, key=lambda row: -number(row["value"])):
        part = "waiting for data" if row["topic"] == "data" else str(row["subject"])
        cell = context.cells[str(row["cell_id"])]
        if options := options_to_try(part, cell, context.results.experiment):
            chosen = context.options[str(row["cell_id"])]
            text = next_experiment(context.results.experiment, cell, chosen, options[0])
            label = context.label(row["cell_id"])
            return Proposal(str(options[0]), label, f"# Compares {options[0].axis} in {label}.\n{text}")
    return None


def _next_sentence(proposal: Proposal, results: Results) -> Sentence:
    """Return how to run the experiment file that the verdict proposes."""
    path = results.folder.path / NEXT_FILE
    if results.experiment.own_code:
        text = f"for {proposal.label}: copy {path} beside your experiment file, and run it."
        return Sentence("next", proposal.option, text)
    text = f"for {proposal.label}, all else as here:"
    return Sentence("next", proposal.option, text, command=f"python -m harness.run {path}")
