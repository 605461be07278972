"""A comparison of several runs as sentences, tables, a page, Markdown for a pull request, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from harness.analysis.common import grouped, is_no_claim
from harness.analysis.compare import FAILS, FASTER, PASSES, SLOWER, UNDECIDED, WITHIN_NOISE, Comparison
from harness.errors import ComparisonError, WriteError, cause_of
from harness.plan.labels import joined
from harness.report.page import Part, render
from harness.report.row import Row, is_missing, is_true, plural, rate_unit, rows_of
from harness.report.sentence import with_holm_explained
from harness.report.tables.ratios import ratio
from harness.report.tables.scaling import METRICS
from harness.report.tables.text import (
    NO_BREAK,
    TextTable,
    decimal,
    first_of,
    flush_right,
    make_table,
    or_dash,
    span,
    speed,
    start_text,
    with_ends,
    words,
)
from harness.report.verdict import plain
from harness.system.files import replace_all

NAMED = 6
"""The most cells, or facts, that a sentence names."""
KEEP_RUNS = "Two runs alone decide nothing: keep at least 3 earlier runs in the results folder, or state --run-noise."
JSON_VERSION = 1
"""Number of the layout of the JSON: raised if a key changes its meaning or goes."""
METHOD = (
    "Ratio of throughputs, later run over first. Blocks inside a run are no replicates of the run: on the logarithm, "
    "the half-width of the 95 % interval is t(k - 1) s sqrt(2), with s the standard deviation of the cell's log "
    "throughput between k earlier runs in the same environment. A stated s has the normal quantile; if s between the "
    "blocks inside both runs gives a wider interval, that is taken: what runs differ by beyond it, earlier runs alone "
    "show. A change is claimed if 1 is rejected at 5 % after Holm's adjustment over all rows. Speedups are paired by "
    "block inside each run."
)

GATE_METHOD = (
    "A cell fails, or passes, if its threshold is rejected at 5 % after Holm's adjustment over all rows; else it is "
    "undecided. Emulated, oversubscribed and faulty cells have no row: their speed is no claim."
)


def sentences(comparison: Comparison) -> list[str]:
    """Return what the comparison found, most important first, a sentence each."""
    runs = rows_of(comparison.runs)
    found = [*_changes(comparison), *_noise(comparison), *_gate(comparison)]
    found += [f"{run.run} is {run_state(run)}: it is compared for what it has." for run in runs if not run.finished]
    between = " -> " if len(runs) == 2 else " / "
    facts = [
        f"{fact['name']} {between.join(value or 'not recorded' for value in fact['values'].values())}"
        for fact in comparison.environment
        if fact["differs"]
    ]
    if facts:
        named = first_of(facts, NAMED)
        found.append(f"The runs differ in {plural(len(facts), 'fact')} of code or environment: {named}.")
    return with_holm_explained([*found, *_trainings(comparison), *_unmatched(comparison)])


def _changes(comparison: Comparison) -> Iterator[str]:
    labels = comparison.labels
    for run in comparison.runs["run"].tolist()[1:]:
        rows = [row for row in rows_of(comparison.cells) if row.run == run and not is_no_claim(row)]
        for direction in (SLOWER, FASTER):
            some = [row for row in rows if row.change == direction]
            named = first_of([f"{labels.of(row)}: {ratio_text(row)}" for row in some], NAMED)
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
    cells, question, noise = comparison.cells, comparison.question, decimal("{:.2g} %", 100)
    known = cells[cells["run_noise"].notna()]
    if question.run_noise is not None:
        stated = f"{100 * question.run_noise:g} %"
        yield f"Run noise: {stated}, as stated with --run-noise; intervals are normal, or t by the blocks if wider."
        more = cells[cells["change"].notna() & (cells["run_noise"] > question.run_noise)]
        if len(more):
            yield (
                f"In {len(more)} of {plural(len(cells), 'cell')} the blocks of a run themselves spread by "
                f"{span(noise, more['run_noise'])}, which contradicts {stated}: that spread is used there."
            )
    elif len(known):
        count = span(str, known["earlier_runs"])
        yield (
            f"Run noise: {span(noise, known['run_noise'])} between runs (standard deviation of a cell's "
            f"throughput over {count} earlier runs below {comparison.history})."
        )
    without = [row for row in rows_of(cells[cells["change"].isna()]) if not is_no_claim(row)]
    if reasons := list(dict.fromkeys(words(row.reason) for row in without)):
        yield (
            f"Undecided, {len(without)} of {plural(len(cells), 'cell')}: {first_of(reasons, 2)}."
            + f" {KEEP_RUNS}" * any("earlier run" in reason for reason in reasons)
        )


def _gate(comparison: Comparison) -> Iterator[str]:
    labels = comparison.labels
    for condition in map(str, comparison.conditions):
        mine = [row for row in rows_of(comparison.gate) if row.condition == condition]
        found = [row.verdict for row in mine]
        failing = [f"{row.run}, {labels.of(row)}" for row in mine if row.verdict == FAILS]
        named = f": {first_of(failing, NAMED)}" if failing else ""
        counted = ", ".join(f"{found.count(verdict)} {verdict}" for verdict in (FAILS, PASSES, UNDECIDED))
        yield f"--fail-if {condition}: {counted if mine else 'no cell'}{named}."


def _unmatched(comparison: Comparison) -> Iterator[str]:
    found = grouped(comparison.unmatched, lambda row: (row["run"], row["measured_in"]))
    for (run, letter), rows in found.items():
        cells = [f"{comparison.labels.of(row)} ({row['reason']})" for row in rows]
        yield f"Measured in {letter}, not in {run if letter != run else 'A'}: {first_of(cells, NAMED)}."


def _trainings(comparison: Comparison) -> Iterator[str]:
    """Yield a sentence a later run and metric: the mean differences over seeds with their intervals."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in map(Row, comparison.convergence):
        title, factor, _, unit = METRICS.get(row.metric, (row.metric, 1.0, "", ""))
        difference = with_ends(decimal("{:+.3g}", factor), row.difference, row.low, row.high)
        reason = f" ({row.reason})" if row.reason else ""
        named = f"{comparison.labels.of(row)} {difference}{unit} over {plural(row.seeds, 'seed')}{reason}"
        if row.metric != "train_loss":
            found.setdefault((row.run, title), []).append(named)
    for (run, title), cells in found.items():
        yield f"Convergence, {run} less A, {title}: {first_of(cells, NAMED)}."


def runs_table(comparison: Comparison) -> TextTable:
    """Return the compared runs: folder, start, commit, and whether they are finished."""
    columns = (
        ("run", "run", words),
        ("folder", "folder", words),
        ("started", lambda row: start_text(row.started_at), words),
        ("commit", lambda row: words(row.git_commit)[:12], words),
        ("state", run_state, words),
    )
    return make_table(columns, rows_of(comparison.runs))


def run_state(run: Row) -> str:
    """Return whether a run is finished, and how many of its trials failed."""
    parts = [
        "finished" if is_true(run.finished) else "unfinished",
        f"{plural(run.missing, 'trial')} without a result" * (run.missing > 0),
        f"{run.failed} failed" * (run.failed > 0),
    ]
    return ", ".join(filter(None, parts))


def run_lines(comparison: Comparison) -> list[str]:
    """Return the compared runs for a terminal, two lines each."""
    lines = []
    for run in rows_of(comparison.runs):
        commit = "" if is_missing(run.git_commit) else f", commit {run.git_commit[:12]}"
        lines += [f"{run.run}  {run.folder}", f"   {start_text(run.started_at)}{commit}, {run_state(run)}"]
    return lines


def cell_tables(comparison: Comparison) -> list[tuple[str, TextTable]]:
    """Return the cells of each later run, for a terminal, in parts of one setting, each with its title.

    Settings of one cell each are no parts: the label of the cell names the setting.
    """
    rows = [(row, *comparison.labels.parts(row)) for row in rows_of(comparison.cells)]
    are_parts = len({setting for _, _, setting, _ in rows}) * (len(comparison.runs) - 1) < len(rows)
    parts: dict[str, list[Row]] = {}
    for row, placed, setting, own in rows:
        above, beside = (setting, "") if are_parts else ("", setting)
        title = joined(f"{row.run} / A", above, words(row.by), f"A in {rate_unit(comparison.cells)}")
        parts.setdefault(title, []).append(Row(row, label=joined(placed, beside, own)))
    columns = (
        ("cell", "label", words),
        ("A", "first_throughput_per_s", speed),
        ("ratio (95 %)", ratio_text, flush_right),
        ("speedups", "speedup_ratio", ratio),
        ("change", change, words),
    )
    return [(title, make_table(columns, part, kind)) for title, part in parts.items()]


def cell_table(comparison: Comparison) -> TextTable:
    """Return the cells of every later run against the first, with both throughputs."""
    unit = rate_unit(comparison.cells)

    def speedups(row: Row) -> str:
        return with_ends(ratio, row.speedup_ratio, row.speedup_low, row.speedup_high)

    columns = (
        ("run", lambda row: row.run if len(comparison.runs) > 2 else "", words),
        ("cell", comparison.labels.of, words),
        ("compared by", "by", words),
        (f"A ({unit})", "first_throughput_per_s", speed),
        (f"later ({unit})", "throughput_per_s", speed),
        ("ratio (95 %)", ratio_text, flush_right, "ratio"),
        ("speedups", speedups, flush_right, "speedup_ratio"),
        ("change", change, words),
        ("reason", "reason", words),
    )
    return make_table(columns, rows_of(comparison.cells), kind)


def change(row: Row) -> str:
    """Return what is claimed of a cell: slower, faster, within noise, undecided, or no claim."""
    claimed = row.change or ("no claim" if is_no_claim(row) else UNDECIDED)
    return claimed.replace(" ", NO_BREAK)


def kind(row: Row) -> str:
    """Return the style of a cell's line: 'apart' for a rehearsal, 'base' for a claimed change."""
    return "apart" if is_no_claim(row) else "base" if row.change in (SLOWER, FASTER) else ""


def ratio_text(row: Row) -> str:
    """Return a cell's ratio with its interval, if there is one."""
    return with_ends(ratio, row.ratio, row.low, row.high)


def gate_table(comparison: Comparison) -> TextTable:
    """Return the verdict of each condition of --fail-if on each cell."""

    @or_dash
    def p_value(value: float) -> str:
        return "< 0.001" if value < 0.001 else f"{value:.3f}"

    columns = (
        ("run", lambda row: row.run if len(comparison.runs) > 2 else "", words),
        ("cell", comparison.labels.of, words),
        ("fails if", "condition", words),
        ("ratio", "ratio", ratio),
        ("p (Holm)", "p_adjusted", p_value),
        ("verdict", "verdict", words),
        ("reason", "reason", words),
    )
    return make_table(columns, rows_of(comparison.gate), lambda row: "base" if row.verdict == FAILS else "")


def environment_table(comparison: Comparison, *, differing: bool) -> TextTable:
    """Return the environments side by side; ``differing``: only the facts that differ."""
    columns = [("", "name", words), *((letter, letter, words) for letter in comparison.runs["run"])]
    rows = [{**fact, **fact["values"]} for fact in comparison.environment if fact["differs"] or not differing]
    return make_table(columns, rows, lambda row: "base" if row.differs else "")


def default_page(comparison: Comparison) -> Path:
    """Return the path of the page beside the last run: compare-<first>-<last>.html."""
    first, *_, last = (Path(folder).resolve() for folder in comparison.runs["folder"])
    return last.parent / f"compare-{first.name}-{last.name}.html"


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
    shown = [
        replace(part, table=part.table.without_constants(), words=text) for part, text in zip(parts, said, strict=True)
    ]
    title = f"Comparison of {len(comparison.runs)} runs: {', '.join(names)}"
    return render("compare.html", title=title, sentences=found, parts=shown)


def _parts(comparison: Comparison) -> Iterator[Part]:
    yield Part("Runs", "runs", runs_table(comparison), "A is the first run, with which the others are compared.")
    yield Part("Throughput, cell by cell", "throughput-cell-by-cell", cell_table(comparison), METHOD)
    yield Part("Conditions of --fail-if", "conditions-of-fail-if", gate_table(comparison), GATE_METHOD)
    differing, every = (environment_table(comparison, differing=only) for only in (True, False))
    yield Part("Environments: what differs", "environments-what-differs", differing)
    side, anchor = "Environments side by side", "environments-side-by-side"
    yield Part(side, anchor, every, level=3, folded="Every recorded fact")


def as_markdown(comparison: Comparison) -> str:
    """Return the sentences and the table of cells as Markdown, for a pull request."""
    lines = ["### Comparison of throughput", ""]
    lines += [f"- {plain(sentence)}" for sentence in sentences(comparison)]
    for part in (cell_table(comparison), gate_table(comparison), runs_table(comparison)):
        if part.rows:
            lines += ["", f"| {' | '.join(heading.title for heading in part.columns)} |"]
            lines += [f"|{'|'.join('---:' if heading.number else '---' for heading in part.columns)}|"]
        for line in part.rows:
            cells = [plain(cell) for cell in line.cells]
            first = f"**{cells[0]}**" if line.kind == "base" else cells[0]
            lines.append(f"| {' | '.join([first, *cells[1:]])} |")
    return "\n".join(lines)


def as_json(comparison: Comparison) -> str:
    """Return every table as JSON, its keys the columns of results/README.md; a missing value is null."""
    question = comparison.question
    content: dict[str, object] = {
        "version": JSON_VERSION,
        "by": list(question.by),
        "only": dict(question.only),
        "run_noise": question.run_noise,
        "history": str(comparison.history) if comparison.history else None,
        "fail_if": [str(condition) for condition in comparison.conditions],
        "exit_code": comparison.exit_code,
        "summary": [sentence.replace(NO_BREAK, " ") for sentence in sentences(comparison)],
        **{name: rows_of(getattr(comparison, name)) for name in ("runs", "cells", "gate")},
        **{name: getattr(comparison, name) for name in ("unmatched", "convergence", "environment")},
    }
    return json.dumps(content, indent=1, allow_nan=False, default=str)  # doubts with their counts are texts
