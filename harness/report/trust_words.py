"""The sentence on how sure the verdict is: the level, the reasons in plain words, and the blocks that would help."""

from __future__ import annotations

from collections.abc import Mapping

from harness.analysis.verdict.trust import GOOD_BLOCKS, HALFWIDTH
from harness.report.doubt_words import plain_doubt
from harness.report.row import Row, is_missing, number, texts
from harness.report.sentence import MOST, Context, Sentence
from harness.report.tables.text import duration, percent, plural

MOST_BLOCKS = 100
"""The most further blocks that are proposed."""
REASONS: Mapping[str, str] = {
    "differs": "one setting measured twice differs from itself by more than chance (A/A test; 1 in 20 does by chance)",
    "noise": "one setting measured twice may differ from itself by up to {reach} (A/A test)",
    "no A/A test": "nothing was measured twice (no A/A test), so that the noise is not known",
    "blocks": f"few blocks, {GOOD_BLOCKS} are better",
    "equivalence": "it is not known whether it trains as one device does",
}


def how_sure(row: Row, context: Context) -> Sentence:
    """Return the level of trust in one or several settings, with its reasons."""
    level, reasons, others = str(row["code"]), texts(row["reasons"]), texts(row["others"])
    lead = level.capitalize()
    if (context.results.verdict["topic"] == "trust").sum() > 1:
        lead = f"{lead} for {', '.join(map(context.short, (row['cell_id'], *others[: MOST - 1])))}"
    doubts = dict.fromkeys(plain_doubt(one.removeprefix("doubt: ")) for one in reasons if one.startswith("doubt: "))
    words = [REASONS[reason].format(reach=percent(row["value"])) for reason in reasons if reason in REASONS]
    words += doubts
    quiet = "" if is_missing(row["value"]) else f"one setting measured twice differs by at most {percent(row['value'])}"
    text = f"{'; '.join(words) or f'{quiet} (A/A test), no doubts'}. {_further_blocks(row, context)}"
    return Sentence("trust", lead, text.strip(), code=level)


def _further_blocks(row: Row, context: Context) -> str:
    """Return a sentence on the blocks that would narrow the intervals; empty if none are needed."""
    blocks = int(number(row["n"]))
    if not blocks or context.results.experiment.throughput is None:
        return ""
    if blocks > MOST_BLOCKS:
        why = f"More blocks alone will not help ({blocks:,} for intervals within {percent(HALFWIDTH)})"
        closing = "close other programs, or " if context.has_doubt("foreign load") else ""
        return f"{why}: {closing}measure longer: throughput.window_seconds."
    trials = context.table("trials")
    timed = trials[
        (trials["cell_id"] == row["cell_id"]) & (trials["kind"] == "throughput") & (trials["outcome"] == "ok")
    ]
    if timed["block"].nunique() == 1:
        return f"One block does not show the spread: {plural(blocks, 'more block')} do{cost(blocks, context)}."
    return f"Intervals within {percent(HALFWIDTH)} need about {plural(blocks, 'more block')}{cost(blocks, context)}."


def cost(blocks: int, context: Context) -> str:
    """Return ' (about 25 min)': the wall time of so many blocks, by that of the run's own."""
    ledger, trials = context.table("ledger"), context.table("trials")
    groups = trials[trials["kind"] == "throughput"][["group_id", "block"]].drop_duplicates()
    spent = float(ledger["seconds"][ledger["group_id"].isin(groups["group_id"])].sum())
    return f" ({_about(spent / groups['block'].nunique() * blocks)})" if spent > 0 and len(groups) else ""


def _about(seconds: float) -> str:
    """Return 'about 54 min': whole minutes from one minute, no seconds."""
    return f"about {duration(seconds) if seconds < 60 or seconds >= 3570 else f'{seconds / 60:.0f} min'}"
