"""A comparison of several runs as sentences, as a page, as Markdown for a pull request, and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from harness.analysis.common import is_no_claim
from harness.analysis.compare import FAILS, FASTER, PASSES, SLOWER, UNDECIDED, WITHIN_NOISE, Comparison, exit_code
from harness.errors import ComparisonError, WriteError, cause_of
from harness.report.page import render
from harness.report.row import plural, rows_of
from harness.report.sentence import with_holm_explained
from harness.report.tables import compare as tables
from harness.report.tables.compare import labels_of, ratio_text, run_state
from harness.report.tables.text import NO_BREAK, TextTable, words
from harness.report.verdict import plain
from harness.system.files import replace_all

NAMED = 6
"""The most cells, or facts, that a sentence names."""
KEEP_RUNS = "Two runs alone decide nothing: keep at least 3 earlier runs in the results folder, or state --run-noise."
JSON_VERSION = 1
"""Number of the layout of the JSON: raised if a key changes its meaning or goes."""


def sentences(comparison: Comparison) -> list[str]:
    """Return what the comparison found, most important first, a sentence each."""
    runs = rows_of(comparison.runs)
    found = [*_changes(comparison), *_noise(comparison), *_gate(comparison)]
    found += [f"{run.run} is {run_state(run)}: it is compared for what it has." for run in runs if not run.finished]
    facts = [fact for fact in comparison.environment if fact.differs]
    between = " -> " if len(runs) == 2 else " / "
    named = [f"{each.name} {between.join(value or 'not recorded' for value in each.values)}" for each in facts[:NAMED]]
    if facts:
        differ = f"{plural(len(facts), 'fact')} of code or environment: {_joined(named, len(facts))}"
        found.append(f"The runs differ in {differ}.")
    return with_holm_explained([*found, *_unmatched(comparison)])


def _changes(comparison: Comparison) -> Iterator[str]:
    labels = labels_of(comparison)
    for run in comparison.runs["run"].tolist()[1:]:
        rows = [row for row in rows_of(comparison.cells) if row.run == run and not is_no_claim(row)]
        for direction in (SLOWER, FASTER):
            some = [row for row in rows if row.change == direction]
            named = _joined([f"{labels.of(row)}: {ratio_text(row)}" for row in some[:NAMED]], len(some))
            if some:
                yield f"{run} is {direction} than A in {len(some)} of {plural(len(rows), 'cell')}: {named}."
        within = sum(row.change == WITHIN_NOISE for row in rows)
        if within == len(rows) and rows:
            yield f"{run} against A: no change is claimed. Every difference is within the noise between runs."
        elif within:
            yield f"{run} against A: {within} of {plural(len(rows), 'cell')} within the noise between runs."
        alone = sum(row.change == WITHIN_NOISE and not row.low <= 1 <= row.high for row in rows)
        if alone:
            tested = int(comparison.cells["p_adjusted"].notna().sum())
            yield (
                f"Intervals of {alone} of them exclude 1 taken alone, but not after Holm's adjustment over "
                f"{plural(tested, 'cell')}: of many cells some differ by chance. More earlier runs narrow them."
            )


def _noise(comparison: Comparison) -> Iterator[str]:
    cells, question = comparison.cells, comparison.question
    known = cells[cells["run_noise"].notna()]
    if question.run_noise is not None:
        stated = f"{100 * question.run_noise:g} %"
        yield f"Run noise: {stated}, as stated with --run-noise; intervals are normal, or t by the blocks if wider."
        more = cells[cells["change"].notna() & (cells["run_noise"] > question.run_noise)]
        if len(more):
            yield (
                f"In {len(more)} of {plural(len(cells), 'cell')} the blocks of a run themselves spread by "
                f"{_percents(more['run_noise'])}, which contradicts {stated}: that spread is used there."
            )
    elif len(known):
        few, many = int(known["earlier_runs"].min()), int(known["earlier_runs"].max())
        count = str(few) if few == many else f"{few} to {many}"
        assert comparison.history is not None
        yield (
            f"Run noise: {_percents(known['run_noise'])} between runs (standard deviation of a cell's "
            f"throughput over {count} earlier runs below {comparison.history.folder})."
        )
    without = [row for row in rows_of(cells[cells["change"].isna()]) if not is_no_claim(row)]
    if reasons := list(dict.fromkeys(words(row.reason) for row in without)):
        yield (
            f"Undecided, {len(without)} of {plural(len(cells), 'cell')}: {_joined(reasons[:2], len(reasons))}."
            + f" {KEEP_RUNS}" * any("earlier run" in reason for reason in reasons)
        )


def _percents(values: pd.Series[float]) -> str:
    """Return '1.2 %', or '1.2 % to 3 %'."""
    return " to ".join(dict.fromkeys(f"{100 * value:.2g} %" for value in (values.min(), values.max())))


def _gate(comparison: Comparison) -> Iterator[str]:
    labels = labels_of(comparison)
    for condition in map(str, comparison.conditions):
        mine = [row for row in rows_of(comparison.gate) if row.condition == condition]
        found = [row.verdict for row in mine]
        failing = [f"{row.run}, {labels.of(row)}" for row in mine if row.verdict == FAILS]
        named = f": {_joined(failing[:NAMED], len(failing))}" if failing else ""
        counted = ", ".join(f"{found.count(verdict)} {verdict}" for verdict in (FAILS, PASSES, UNDECIDED))
        yield f"--fail-if {condition}: {counted if mine else 'no cell'}{named}."


def _unmatched(comparison: Comparison) -> Iterator[str]:
    labels = labels_of(comparison)
    for (run, letter), group in comparison.unmatched.groupby(["run", "measured_in"], sort=False):
        named = [f"{labels.of(row)} ({row.reason})" for row in rows_of(group[:NAMED])]
        yield f"Measured in {letter}, not in {run if letter != run else 'A'}: {_joined(named, len(group))}."


def _joined(named: list[str], count: int) -> str:
    return "; ".join(named) + ("; ..." if count > len(named) else "")


@dataclass(frozen=True)
class Part:
    """A table of the page under its title, with a sentence above it."""

    title: str
    table: TextTable
    words: str = ""
    level: int = 2
    folded: str = ""
    failure: str = ""

    @property
    def anchor(self) -> str:
        """The part's id in the page."""
        return "-".join(re.findall(r"[a-z]+", self.title.lower()))


def default_page(comparison: Comparison) -> Path:
    """Return the path of the page beside the last run: compare-<first>-<last>.html."""
    first, *_, last = (Path(folder).resolve() for folder in comparison.runs["folder"])
    return last.parent / f"compare-{first.name}-{last.name}.html"


def write_page(comparison: Comparison, path: Path) -> None:
    """Write the page; raises ComparisonError if the file cannot be written."""
    write_output(path, as_html(comparison))


def write_output(path: Path, content: str | bytes) -> None:
    """Write a file that the user asked for; raises ComparisonError, since nothing was recorded that could be lost."""
    try:
        replace_all([(path, content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)])
    except WriteError as error:
        raise ComparisonError(f"--output: {path}: cannot be written: {cause_of(error)}; give another file") from None


def as_html(comparison: Comparison) -> str:
    """Return the page, one self-contained file."""
    names = list(dict.fromkeys(comparison.runs["experiment"].tolist()))
    found, parts = sentences(comparison), [part for part in _parts(comparison) if part.table.rows]
    said = with_holm_explained([*found, *(part.words for part in parts)])[len(found) :]
    return render(
        "compare.html",
        title=f"Comparison of {len(comparison.runs)} runs: {', '.join(names)}",
        sentences=found,
        parts=[
            replace(part, table=part.table.without_constants(), words=words)
            for part, words in zip(parts, said, strict=True)
        ],
    )


def _parts(comparison: Comparison) -> Iterator[Part]:
    yield Part("Runs", tables.runs_table(comparison), "A is the first run, with which the others are compared.")
    yield Part("Throughput, cell by cell", tables.cell_table(comparison), tables.METHOD)
    yield Part("Conditions of --fail-if", tables.gate_table(comparison), tables.GATE_METHOD)
    yield Part("Cells without a counterpart", tables.unmatched_table(comparison))
    yield Part("Convergence", tables.convergence_table(comparison), tables.CONVERGENCE_METHOD)
    differing = tables.environment_table(comparison, differing=True)
    yield Part("Environments: what differs", differing)
    yield Part("Environments side by side", tables.environment_table(comparison), level=3, folded="Every recorded fact")


def as_markdown(comparison: Comparison) -> str:
    """Return the sentences and the table of cells as Markdown, for a pull request."""
    lines = ["### Comparison of throughput", ""]
    lines += [f"- {plain(sentence)}" for sentence in sentences(comparison)]
    for part in (tables.cell_table(comparison), tables.gate_table(comparison), tables.runs_table(comparison)):
        if part.rows:
            lines += ["", *_markdown_table(part)]
    return "\n".join(lines)


def _markdown_table(table: TextTable) -> Iterator[str]:
    yield f"| {' | '.join(heading.title for heading in table.columns)} |"
    yield f"|{'|'.join('---:' if heading.number else '---' for heading in table.columns)}|"
    for line in table.rows:
        cells = [plain(cell) for cell in line.cells]
        first = f"**{cells[0]}**" if line.kind == "base" else cells[0]
        yield f"| {' | '.join([first, *cells[1:]])} |"


def as_json(comparison: Comparison) -> str:
    """Return every table as JSON, its keys the columns of results/README.md; a missing value is null."""
    question = comparison.question
    content: dict[str, object] = {
        "version": JSON_VERSION,
        "by": list(question.by),
        "only": dict(question.only),
        "run_noise": question.run_noise,
        "history": str(comparison.history.folder) if comparison.history else None,
        "fail_if": [str(condition) for condition in comparison.conditions],
        "exit_code": exit_code(comparison.gate) if comparison.conditions else 0,
        "summary": [sentence.replace(NO_BREAK, " ") for sentence in sentences(comparison)],
        **{name: rows_of(getattr(comparison, name)) for name in ("runs", "cells", "gate", "unmatched", "convergence")},
        "environment": [
            {
                "name": fact.name,
                "differs": fact.differs,
                "values": dict(zip(comparison.runs["run"], fact.values, strict=True)),
            }
            for fact in comparison.environment
        ],
    }
    return json.dumps(content, indent=1, allow_nan=False, default=str)  # doubts with their counts are texts
