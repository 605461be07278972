"""The sentences of the verdict: a phrase for each topic of its statements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from harness.analysis.results import attempt
from harness.analysis.verdict.choices import FASTER, SLOWER
from harness.analysis.verdict.rules import EFFICIENT, ENOUGH
from harness.analysis.verdict.trust import HALFWIDTH
from harness.plan.labels import joined
from harness.report.advice import MACHINE, options_to_try
from harness.report.labels import rate_unit
from harness.report.row import Row, is_missing, number, rows_of, texts
from harness.report.sentence import Context, Sentence
from harness.report.tables.evidence import INTERVALS, imprecise
from harness.report.tables.ratios import pair_label, pair_setting
from harness.report.tables.text import decimal, duration, percent, plural, speed, with_ends

MOST_BLOCKS = 100
"""The most further blocks that are proposed."""
seconds = decimal("{:.3g} s")
times = decimal("{:.2f}")


def _fastest(row: Row, context: Context) -> Sentence:
    rate = with_ends(speed, row["value"], row["low"], row["high"])
    blocks = plural(int(number(row["n"])), "block")
    text = f"{rate} {rate_unit(context.table('leaders'))} over {blocks}{_speedup(row, context)}."
    tied, untested = texts(row["others"]), texts(row["reasons"])
    where = f"on {plural(int(number(row['devices'])), 'device')}"
    if row["code"] == "smallest batch":
        text += f" The smallest batch with {percent(ENOUGH)} of the highest throughput {where}."
    if tied:
        text += f" Cannot be told apart from it: {context.labels_of(tied)}."
    elif is_missing(row["subject"]) and not untested:
        text += f" Faster than the other settings {where} at that batch."
    if untested:
        text += f" Too few blocks to compare it with {context.labels_of(untested)}."
    return Sentence("fastest", context.label(row["cell_id"]), text)


def _speedup(row: Row, context: Context) -> str:
    """Return ', 1.23 times single x1', whether that is a clear gain, or nothing for a base."""
    found = context.table("scaling")
    for ratio in rows_of(found[found["cell_id"] == row["cell_id"]]):
        if ratio["cell_id"] != ratio["base_id"] and not is_missing(ratio["speedup"]):
            gain = with_ends(times, ratio["speedup"], ratio["low"], ratio["high"])
            clear = not is_missing(ratio["low"]) and not number(ratio["low"]) <= 1 <= number(ratio["high"])
            slower = "slower: " if clear and number(ratio["speedup"]) < 1 else ""
            doubt = "" if clear else " (no clear difference)"
            return f", {slower}{gain} times {ratio['base_strategy']} x{ratio['base_devices']}{doubt}"
    return ""


def _fewer(row: Row, context: Context) -> Sentence:
    rate = with_ends(speed, row["value"], row["low"], row["high"])
    text = f"{rate} {rate_unit(context.table('leaders'))}{_speedup(row, context)}."
    if tied := texts(row["others"]):
        text += f" Cannot be told apart from it: {context.labels_of(tied)}."
    return Sentence("fewer", context.label(row["cell_id"]), text)


def _choice(row: Row, context: Context) -> Sentence:
    versus = context.table("versus")
    pairs = versus[(versus["cell_id"] == row["cell_id"]) & versus["other_id"].isin(texts(row["others"]))]
    lead = next((joined(pair_label(pair), pair_setting(pair)) for pair in rows_of(pairs)), str(row["subject"]))
    ratio = with_ends(times, row["value"], row["low"], row["high"])
    blocks = plural(int(number(row["n"])), "block")
    found = f"the first is {row['code']}" if row["code"] in (FASTER, SLOWER) else row["code"]
    return Sentence("choice", lead, f"{ratio} times the throughput over {blocks}: {found}.")


def _scaling(row: Row, context: Context) -> Sentence:
    bound, code = percent(EFFICIENT), str(row["code"])
    efficiency = with_ends(percent, row["value"], row["low"], row["high"])
    until = "" if is_missing(row["subject"]) else f"above {bound} efficiency up to {row['subject']} devices; "
    words = {
        "above": f"efficiency {efficiency}, above {bound} on every number of devices measured",
        "below": f"{until}efficiency {efficiency} on {row['devices']} devices, below {bound}",
        "not clear": f"{until}efficiency {efficiency} on {row['devices']} devices: whether above {bound} is not clear",
    }
    return Sentence("scaling", context.label(row["cell_id"]), f"{words[code]}.")


def _loss(row: Row, context: Context) -> Sentence:
    share = with_ends(percent, row["value"], row["low"], row["high"])
    part, label = str(row["subject"]), context.label(row["cell_id"])
    if row["code"] == "none is certain":
        return Sentence(
            "loss",
            label,
            f"no part of the loss has an interval that excludes 0; the largest is {part}, {share} of the step.",
        )
    text = f"{part} takes {share} of the step, the largest loss whose interval excludes 0."
    if part in MACHINE:
        text += f" {MACHINE[part]}"
    return Sentence("loss", label, text, _advice(part, row, context))


def _data(row: Row, context: Context) -> Sentence:
    text = f"waits for data {percent(row['value'])} of its step."
    return Sentence("data", context.label(row["cell_id"]), text, _advice("waiting for data", row, context))


def _advice(part: str, row: Row, context: Context) -> tuple[str, ...]:
    """Return the lines of an experiment file that may reduce a part of a cell's step."""
    cell = context.cells[str(row["cell_id"])]
    return tuple(map(str, options_to_try(part, cell, context.results.experiment)))


def _training(row: Row, context: Context) -> Sentence:
    label, seeds, target = context.label(row["cell_id"]), int(number(row["n"])), str(row["subject"])
    if row["code"] == "missed":
        return Sentence("training", label, f"no training reached {target} with every seed.")
    span = f" ({seconds(row['low'])} to {seconds(row['high'])} over {seeds} seeds)" if seeds > 1 else ""
    text = f"shortest median time to {target}: {seconds(row['value'])}{span}."
    if overlapping := texts(row["others"]):
        text += f" Not clearly before {context.labels_of(overlapping)}, whose times overlap with its own."
    return Sentence("training", label, text)


REASONS = {
    "differs": "the A/A test excludes 1 (by chance 1 in 20 does)",
    "noise": "the A/A test differs by up to {reach}",
    "no A/A test": "no A/A test, so the noise floor is unknown",
    "blocks": "few blocks",
    "equivalence": "no verdict on whether it trains as one device does",
}


def _trust(row: Row, context: Context) -> Sentence:
    level, reasons, others = str(row["code"]), texts(row["reasons"]), texts(row["others"])
    lead, settings = level.capitalize(), "the settings named above or their base"
    if (context.results.verdict["topic"] == "trust").sum() > 1:
        lead = f"{lead} for {context.labels_of((str(row['cell_id']), *others))}"
        settings = "them or their bases" if others else "it or its base"
    doubts = [reason.removeprefix("doubt: ") for reason in reasons if reason.startswith("doubt: ")]
    words = [REASONS[reason].format(reach=percent(row["value"])) for reason in reasons if reason in REASONS]
    words += [f"doubts about {settings}: {', '.join(doubts)}"] if doubts else []
    floor = "" if is_missing(row["value"]) else f"A/A test within {percent(row['value'])}, no doubts"
    sentence = Sentence("trust", lead, f"{'; '.join(words) or floor}.", code=level)
    return _with_further_blocks(sentence, row, context)


def _with_further_blocks(sentence: Sentence, row: Row, context: Context) -> Sentence:
    """Return the sentence with the blocks that would narrow the intervals, and how this run gets them."""
    blocks, settings = int(number(row["n"])), context.results.experiment.throughput
    if not blocks or settings is None:
        return sentence
    if blocks > MOST_BLOCKS:
        text = f"{sentence.text} More blocks alone will not help ({blocks} for intervals within {percent(HALFWIDTH)}):"
        return replace(sentence, text=f"{text} close other load, or measure longer: throughput.window_seconds.")
    more = f"{plural(blocks, 'more block')}{_cost(blocks, context)}"
    text = f"{sentence.text} Intervals within {percent(HALFWIDTH)} need about {more}:"
    if row["subject"] == "fixed":
        command = f"python -m harness.run --resume {context.results.folder.path} --add-blocks {blocks}"
        return replace(sentence, text=text, command=command)
    rule = f"throughput.blocks.at_most: {settings.most_blocks + blocks}"
    return replace(sentence, text=f"{text} in a new run with", options=(rule,))


def _cost(blocks: int, context: Context) -> str:
    """Return ' (about 25 min)': the wall time of so many blocks, by that of the run's own."""
    ledger, trials = context.table("ledger"), context.table("trials")
    groups = trials[trials["kind"] == "throughput"][["group_id", "block"]].drop_duplicates()
    spent = float(ledger["seconds"][ledger["group_id"].isin(groups["group_id"])].sum())
    return f" (about {duration(spent / groups['block'].nunique() * blocks)})" if spent > 0 and len(groups) else ""


def _equivalence(row: Row, context: Context) -> Sentence:
    code = str(row["code"])
    if code == "equivalent":
        largest = (
            f"{plural(int(number(row['n'])), 'check')}, updates differ by at most {100 * number(row['value']):.2g} %"
        )
        return Sentence("equivalence", "Every strategy", f"trains as one device does ({largest}).")
    label = context.label(row["cell_id"])
    if code == "unknown":
        return Sentence("equivalence", label, f"whether it trains as one device does is {row['subject']}.", code=code)
    return Sentence("equivalence", label, f"{row['subject']}; its cells have no ratios.", code=code)


def _failed(row: Row, context: Context) -> Sentence:
    why = "; ".join(texts(row["reasons"])[:1])
    if row["code"] == "tables":
        tables = f"{'Table' if row['n'] == 1 else 'Tables'} {', '.join(texts(row['reasons']))}"
        return Sentence("failed", tables, "failed by an error of the harness; the sentences that need it are left out.")
    if row["code"] == "preflight":
        where = f" ({context.label(row['cell_id'])})" if row["cell_id"] in context.cells else ""
        return Sentence("failed", f"Preflight, {row['subject']}", f"{why}{where}.")
    labels = context.labels_of((str(row["cell_id"]), *texts(row["others"])))
    return Sentence("failed", str(row["subject"]), f"{plural(int(number(row['n'])), 'trial')} of {labels}: {why}.")


def _open(row: Row, context: Context) -> Sentence:
    count = int(number(row["n"]))
    if row["code"] == "missing":
        command = f"python -m harness.run --resume {context.results.folder.path}"
        return Sentence("open", plural(count, "planned trial"), "without a result. To measure them:", command=command)
    if row["code"] == "too_few_devices":
        cells = f"{plural(count, 'cell')} on {row['subject']} devices"
        return Sentence("open", cells, "this machine has too few; the same file runs on a larger one.")
    why = "; ".join(texts(row["reasons"]))
    if row["code"] == "time_up":
        command = f"python -m harness.run --resume {context.results.folder.path}"
        return Sentence("open", plural(count, "cell"), f"{why}. To measure the rest:", command=command)
    return Sentence("open", plural(count, "cell"), f"{why}.")


def further(context: Context) -> list[Sentence]:
    """Return the sentences that follow from no statement: nothing measured, no claim about speed, wide intervals."""
    found = []
    leaders = attempt(context.results, "leaders")
    if not (context.table("trials")["outcome"] == "ok").any():
        found.append(
            Sentence("failed", "Nothing was measured", "every trial failed or was skipped.", evidence="outcomes")
        )
    elif len(context.table("cells")) and leaders is not None and leaders.empty:
        text = "every measured cell is emulated, oversubscribed or not equivalent to one device."
        found.append(Sentence("fastest", "No claim about speed", text, evidence="scaling"))
    if wide := imprecise({name: context.table(name) for name in INTERVALS}):
        found.append(Sentence("open", "Wide intervals", wide, evidence="scaling"))
    return found


PHRASES: Mapping[str, Callable[[Row, Context], Sentence]] = {
    "fastest": _fastest,
    "fewer": _fewer,
    "choice": _choice,
    "training": _training,
    "scaling": _scaling,
    "loss": _loss,
    "data": _data,
    "trust": _trust,
    "equivalence": _equivalence,
    "failed": _failed,
    "open": _open,
}
