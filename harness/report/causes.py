"""The sentence on why a setting is not faster: every cause with its share of the step, then what to try."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.analysis.stats import LEAST_BLOCKS
from harness.analysis.verdict.causes import CLEAR, DATA, NO_INTERVAL, UNCLEAR
from harness.report.advice import MACHINE, Option, options_to_try
from harness.report.row import Row, Scalar, is_missing, number, rows_of
from harness.report.sentence import Context, Sentence
from harness.report.tables.text import NO_BREAK, percent, plural, with_ends

NAMES: Mapping[str, str] = {
    "smaller batch": "the smaller batch of each device",
    "wrapper": "the strategy's own work on each device",
    "threads": "the threads of dp",
    "side by side": "devices that slow each other down",
    "slowest rank": "the wait for the slowest device",
    "rest": "not explained",
}
"""The parts of a waterfall in words that need no key; the others are called by terms of the field."""
NOTHING_TO_CHANGE = frozenset({*MACHINE, "rest"})
"""The causes that no option changes: the advice is against the largest of the others."""


def name_of(part: str) -> str:
    """Return a part of a step in words."""
    return NAMES.get(part, part)


def why_not_better(row: Row, context: Context) -> Sentence:
    """Return the sentence on all causes of a cell, of which ``row`` is one; the advice is against the largest alone."""
    causes = causes_of(row, context)
    listed = "; ".join(_listed(one, is_first=at == 0) for at, one in enumerate(causes))
    few = [one for one in causes if one["code"] == NO_INTERVAL]
    blocks = plural(int(number(few[0]["n"])), "block") if few else ""
    no_interval = f" No interval: measured in {blocks}, {LEAST_BLOCKS} are needed." if few else ""
    uncertain = " No cause is certain." if all(one["code"] == UNCLEAR for one in causes) else ""
    text = f"{listed}.{no_interval}{uncertain} {_new_advice(causes, context)}"
    return Sentence("loss", context.short(row["cell_id"]), text.strip())


def causes_of(row: Row, context: Context) -> list[Row]:
    """Return the causes of the cell of a row, the largest first."""
    verdict = context.results.verdict
    return rows_of(verdict[(verdict["topic"] == "loss") & (verdict["cell_id"] == row["cell_id"])])


def _listed(row: Row, *, is_first: bool) -> str:
    share = with_ends(percent, *(_rounded(row[name]) for name in ("value", "low", "high")))
    if row["code"] == UNCLEAR:
        share = f"{share.removesuffix(')')}:{NO_BREAK}may{NO_BREAK}be{NO_BREAK}0)"
    return f"{share}{' of the step:' if is_first else ''} {name_of(str(row['subject']))}"


def _rounded(value: Scalar) -> Scalar:
    """Return a share in whole per cent, without the sign of a zero."""
    return None if is_missing(value) else round(number(value), 2) + 0.0


def target(causes: Sequence[Row]) -> Row | None:
    """Return the cause that advice is against: the largest that is certain, and that an option may change.

    A wait for data is a measurement of its own, which counts without an interval too.
    """
    for row in causes:
        certain = row["code"] == CLEAR or (row["subject"] == DATA and row["code"] == NO_INTERVAL)
        if certain and row["subject"] not in NOTHING_TO_CHANGE:
            return row
    return None


def _new_advice(causes: Sequence[Row], context: Context) -> str:
    """Return what to try, unless the sentence on an earlier cell says the same."""
    advice, verdict = _advice(causes, context), context.results.verdict
    for row in rows_of(verdict[verdict["topic"] == "loss"].drop_duplicates("cell_id")):
        if row["cell_id"] == causes[0]["cell_id"]:
            return advice
        if _advice(causes_of(row, context), context) == advice:
            return ""
    return advice


def _advice(causes: Sequence[Row], context: Context) -> str:
    row = target(causes)
    if row is None:
        certain = [str(one["subject"]) for one in causes if one["code"] == CLEAR]
        return next((MACHINE[part] for part in certain if part in MACHINE), "")
    lines = "; ".join(map(str, options_of(row, context)))
    return f"Against {name_of(str(row['subject']))}, try {lines}." if lines else ""


def options_of(row: Row, context: Context) -> list[Option]:
    """Return the options that may reduce a cause, without those that the file varies already."""
    cell = context.cells.get(str(row["cell_id"]))
    return options_to_try(str(row["subject"]), cell, context.results.experiment) if cell else []


def smaller_causes(causes: Sequence[Row], context: Context) -> Iterator[str]:
    """Yield what may be tried against the certain causes that are smaller than the one that advice is against."""
    first = target(causes)
    for row in causes:
        lines = "; ".join(map(str, options_of(row, context)))
        if lines and row is not first and row["code"] == CLEAR:
            yield f"{context.name(row['cell_id'])}, against {name_of(str(row['subject']))}: {lines}."
