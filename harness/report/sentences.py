"""The sentences of the verdict: a phrase for each topic of its statements."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from harness.analysis.common import is_no_claim
from harness.analysis.results import attempt
from harness.analysis.verdict.choices import FASTER, SLOWER
from harness.analysis.verdict.rules import EFFICIENT
from harness.plan.labels import joined, strategy_text
from harness.report.causes import why_not_better
from harness.report.decision import base_words, on_fewer_devices, times, what_to_use
from harness.report.labels import setting_without_batch
from harness.report.row import Row, is_missing, number, rows_of, texts
from harness.report.sentence import Context, Sentence
from harness.report.tables.evidence import INTERVALS, imprecise
from harness.report.tables.ratios import pair_label, pair_setting
from harness.report.tables.text import decimal, percent, plural, with_ends
from harness.report.trust_words import how_sure

seconds = decimal("{:.3g} s")
ENDED: Mapping[str | None, str] = {
    "interrupted": "the run was interrupted",
    "finished": "the last call left them out (--only, or another machine)",
    "error": "the run ended with an error of its own",
    None: "the run was killed, or is still going on",
}
"""Why trials have no result, by the end of the last invocation."""
LEAST_PERCENT = 1e-4
"""The smallest difference of updates that is written, in percent."""
FAILURES: Mapping[str, str] = {
    "error": "failed with an error",
    "oom": "ran out of memory",
    "diverged": "had a loss or parameter that is no number",
    "timeout": "made no progress within the limit",
    "lost": "lost their process or node",
}
"""The outcomes of trials in plain words."""


def _incomplete(row: Row, context: Context) -> Sentence:
    count, cells = int(number(row["n"])), plural(int(number(row["n"])), "cell")
    has = "has" if count == 1 else "have"
    if row["code"] == "missing":
        invocations = context.results.environment.get("invocations", [])
        planned = context.table("trials")["trial_id"].nunique() + count
        why = ENDED.get(invocations[-1].get("ended") if invocations else None, ENDED[None])
        lead = f"{count} of {planned} planned trials {has} no result"
        return Sentence("incomplete", lead, f"{why}. What follows rests on the others.")
    why = "; ".join(texts(row["reasons"]))
    if row["code"] == "failed":
        why = f"no trial succeeded ({context.names_of((str(row['cell_id']), *texts(row['others'])))})"
        return Sentence("incomplete", f"{cells} {has} no result", f"{why}.")
    return Sentence("incomplete", f"{cells} {'lacks' if count == 1 else 'lack'} trials", f"{why}.")


def _choice(row: Row, context: Context) -> Sentence:
    versus = context.table("versus")
    pairs = versus[(versus["cell_id"] == row["cell_id"]) & versus["other_id"].isin(texts(row["others"]))]
    lead = next((joined(pair_label(pair), pair_setting(pair)) for pair in rows_of(pairs)), str(row["subject"]))
    ratio = with_ends(times, row["value"], row["low"], row["high"])
    blocks = plural(int(number(row["n"])), "block")
    found = f"the first is {row['code']}" if row["code"] in (FASTER, SLOWER) else row["code"]
    return Sentence("choice", lead, f"{ratio} times the throughput over {blocks}: {found}.")


def _scaling(row: Row, context: Context) -> Sentence:
    bound, code, ratio = percent(EFFICIENT), str(row["code"]), context.ratio(row["cell_id"])
    efficiency = with_ends(percent, row["value"], row["low"], row["high"])
    base = base_words(ratio) if ratio else "1 device"
    found = f"efficiency {efficiency} on {row['devices']} devices, compared with {base}"
    until = "" if is_missing(row["subject"]) else f"above the threshold of {bound} up to {row['subject']} devices; "
    words = {
        "above": f"{found}: above the threshold of {bound}, as on every number of devices measured",
        "below": f"{until}{found}: below the threshold of {bound}",
        "not clear": f"{until}{found}: whether above the threshold of {bound} is not "
        f"{'known without an interval' if is_missing(row['low']) else 'clear'}",
    }
    return Sentence("scaling", context.short(row["cell_id"]), f"{words[code]}.")


def _training(row: Row, context: Context) -> Sentence:
    label, seeds, target = context.name(row["cell_id"]), int(number(row["n"])), str(row["subject"])
    if row["code"] == "missed":
        cell = context.cells[str(row["cell_id"])]
        batch = joined(f"Global batch {cell['global_batch_size']}", setting_without_batch(cell))
        return Sentence("training", batch, f"no training reached {target} with every seed.")
    span = f" ({seconds(row['low'])} to {seconds(row['high'])} over {seeds} seeds)" if seeds > 1 else ""
    text = f"shortest median time to {target}: {seconds(row['value'])}{span}."
    if overlapping := texts(row["others"]):
        text += f" Not clearly before {context.names_of(overlapping)}, whose times overlap with its own."
    return Sentence("training", label, text)


def _equivalence(row: Row, context: Context) -> Sentence:
    code = str(row["code"])
    if code == "equivalent":
        checks = plural(int(number(row["n"])), "check")
        share = 100 * number(row["value"])
        text = f"{checks}, updates differ by at most {max(share, LEAST_PERCENT) if share else 0:.2g} %."
        return Sentence("equivalence", "Every strategy trains as one device does", text)
    label = context.name(row["cell_id"])
    if code == "unknown":
        return Sentence("equivalence", label, f"whether it trains as one device does is {row['subject']}.", code=code)
    return Sentence("equivalence", label, f"{row['subject']}; its ratios are no claims.", code=code)


def _failed(row: Row, context: Context) -> Sentence:
    why = "; ".join(texts(row["reasons"])[:1])
    if row["code"] == "tables":
        tables = f"{'Table' if row['n'] == 1 else 'Tables'} {', '.join(texts(row['reasons']))}"
        return Sentence("failed", tables, "failed by an error of the harness; the sentences that need it are left out.")
    if row["code"] == "preflight":
        where = f" ({context.name(row['cell_id'])})" if row["cell_id"] in context.cells else ""
        return Sentence("failed", f"Check before the measurement ({row['subject']})", f"{why}{where}.")
    names = context.names_of((str(row["cell_id"]), *texts(row["others"])))
    lead = f"{plural(int(number(row['n'])), 'trial')} {FAILURES.get(str(row['subject']), str(row['subject']))}"
    return Sentence("failed", lead, f"{why} ({names}).")


def _open(row: Row, context: Context) -> Sentence:
    cells = plural(int(number(row["n"])), "cell")
    if row["code"] == "too_few_devices":
        text = "this machine has too few; the same file runs on a larger one."
        return Sentence("open", f"{cells} on {row['subject']} devices", text)
    return Sentence("open", cells, f"{'; '.join(texts(row['reasons']))}.")


def further(context: Context) -> list[Sentence]:
    """Return the sentences that follow from no statement: nothing measured, no claim about speed, wide intervals."""
    found = []
    leaders = attempt(context.results, "leaders")
    if not context.has_measured:
        found.append(
            Sentence("failed", "Nothing was measured", "every trial failed or was skipped.", evidence="outcomes")
        )
    elif len(context.table("cells")) and leaders is not None and leaders.empty:
        text = "every measured cell is emulated, oversubscribed, faulty or not equivalent to one device."
        found.append(Sentence("fastest", "No claim about speed", text, evidence="scaling"))
    elif left_out := _left_out(context):
        text = f"{', '.join(left_out)}; what was measured of it is in tables and figures."
        found.append(Sentence("open", "Left out of these claims", text, evidence="scaling"))
    if wide := imprecise({name: context.table(name) for name in INTERVALS}):
        found.append(Sentence("open", "Wide intervals", wide, evidence="scaling"))
    return found


def _left_out(context: Context) -> list[str]:
    """Return the measured strategies whose speed is no claim, as 'dp (emulated)'."""
    cells = context.table("cells")
    return list(dict.fromkeys(strategy_text(row) for row in rows_of(cells) if is_no_claim(row)))


PHRASES: Mapping[str, Callable[[Row, Context], Sentence]] = {
    "incomplete": _incomplete,
    "fastest": what_to_use,
    "fewer": on_fewer_devices,
    "choice": _choice,
    "training": _training,
    "scaling": _scaling,
    "loss": why_not_better,
    "trust": how_sure,
    "equivalence": _equivalence,
    "failed": _failed,
    "open": _open,
}
