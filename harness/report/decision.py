"""The decision: what to use, what not, why not better, how sure and what to do next, in at most eight short lines.

From the same statements as the sentences of the verdict, which have the reasons and the further numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from harness.analysis.stats import CLEAR
from harness.analysis.verdict.rules import FASTER, SAVED, SLOWER, UNCLEAR
from harness.report.causes import causes_of, name_of
from harness.report.row import Row, is_missing, number, plural, rate_unit, rows_of, texts
from harness.report.sentence import Context, Sentence
from harness.report.sentences import PHRASES, gain, sure_words, times, with_ratios, word_of
from harness.report.tables.text import percent, speed, with_ends

MOST_SETTINGS = 3
"""The most settings, options or causes of one line."""


def decision(statements: Sequence[Row], context: Context, next_step: Sentence) -> dict[str, list[Sentence]]:
    """Return the lines by their labels, in order, each with its parts; the last is the next step."""
    by_topic: dict[str, list[Row]] = {}
    for row in statements:
        by_topic.setdefault(row.topic, []).append(row)
    lines: dict[str, list[Sentence]] = {}
    for label, (topics, phrase) in LINES.items():
        found = [
            replace(part, evidence=part.evidence or row.evidence)
            for topic in topics
            for row in by_topic.get(topic, [])
            for part in phrase(row, context)
        ]
        if found:
            more = f"And {len(found) - MOST_SETTINGS} more, below."
            lines[label] = found[:MOST_SETTINGS] + [Sentence(found[0].topic, "", more)] * (len(found) > MOST_SETTINGS)
    if "INCOMPLETE" in lines:  # the one line that can wait: at most eight are read
        lines.pop("TARGET", None)
    return {**lines, "NEXT": [next_step]}


def _statement(row: Row, context: Context) -> Iterator[Sentence]:
    yield PHRASES[row.topic](row, context)


def _use(row: Row, context: Context) -> Iterator[Sentence]:
    """Yield the fastest setting if its gain is clear, or nothing is beside it; the base if no gain is shown."""
    ratio, name = context.ratio(row.cell_id), context.name(row.cell_id)
    if ratio is None:
        rate = f"{with_ends(speed, row.value, row.low, row.high)} {rate_unit(context.table('leaders'))}"
        yield Sentence("fastest", name, f"{rate}.")
    elif word_of(ratio, context) != CLEAR:
        if not is_missing(ratio.p_value) and number(ratio.speedup) <= 1:
            yield Sentence("fastest", base_of(row, ratio), f"no gain shown by {name}: {gain(ratio)} times.")
    elif number(ratio.speedup) > 1:
        time = row.devices / ratio.base_devices / number(ratio.speedup)
        cost = f", for {times(time)} times its device time a sample" if row.devices != ratio.base_devices else ""
        yield Sentence("fastest", name, f"{gain(ratio)} times {base_of(row, ratio)}{cost}.")
    else:
        yield Sentence("fastest", context.name(ratio.base_id), f"{name} has only {gain(ratio)} of its throughput.")


def base_of(row: Row, ratio: Row) -> str:
    """Return what a setting is compared with, by what differs: '1 device', or the strategy on as many devices."""
    more = row.devices != ratio.base_devices
    return plural(ratio.base_devices, "device") if more else f"strategy {ratio.base_strategy}"


def _not(row: Row, context: Context) -> Iterator[Sentence]:
    """Yield the settings on as many devices at the same batch that are clearly slower than the fastest."""
    ratios = _rivals(row, context)
    if slower := [one for one in ratios if one not in (*texts(row.others), *texts(row.reasons))]:
        yield Sentence("fastest", context.short(row.cell_id), f"{with_ratios(slower, ratios, context)}.")


def _rivals(row: Row, context: Context) -> dict[str, Row]:
    leaders = rows_of(context.table("leaders"))
    return {one.cell_id: one for one in leaders if one.leader_id == row.cell_id != one.cell_id}


def _options(row: Row, context: Context) -> Iterator[Sentence]:
    """Yield a choice of which one value is clearly faster."""
    if row.code in (FASTER, SLOWER):
        lead = PHRASES["choice"](row, context).lead
        yield Sentence("choice", lead, f"{with_ends(times, row.value, row.low, row.high)} times the throughput.")


def _why(row: Row, context: Context) -> Iterator[Sentence]:
    """Yield the largest parts of the loss of a cell, once a cell."""
    causes = causes_of(row, context)
    if row.subject != causes[0].subject:
        return
    certain = [one for one in causes if one.code not in (UNCLEAR, SAVED)][:MOST_SETTINGS]
    named = ", ".join(f"{percent(one.value)} {name_of(one.subject)}" for one in certain)
    yield Sentence("loss", context.short(row.cell_id), f"{named or 'no bottleneck is significant'}.")


def _sure(row: Row, context: Context) -> Iterator[Sentence]:
    """Yield how far the numbers can be trusted, and what does not train as one device does; nothing without numbers."""
    if row.topic == "trust" or (row.code != "equivalent" and context.has_measured):
        yield PHRASES[row.topic](row, context)


def _open(row: Row, context: Context) -> Iterator[Sentence]:
    """Yield what is not decided: a gain over the base, settings that cannot be told apart, cells that did not run."""
    if row.topic == "open":
        yield PHRASES["open"](row, context)
        return
    ratio, ratios = context.ratio(row.cell_id), _rivals(row, context)
    if ratio and word_of(ratio, context) != CLEAR and (is_missing(ratio.p_value) or number(ratio.speedup) > 1):
        either = f"{base_of(row, ratio)}, or {context.name(row.cell_id)}"
        yield Sentence("open", either, f"{gain(ratio)} times, {sure_words(ratio, context)}.")
    if undecided := [one for one in ratios if one in (*texts(row.others), *texts(row.reasons))]:
        lead = f"{context.short(row.cell_id) or context.name(row.cell_id)}, or another setting"
        yield Sentence("open", lead, f"{with_ratios(undecided, ratios, context)}.")


LINES: Mapping[str, tuple[tuple[str, ...], Callable[[Row, Context], Iterator[Sentence]]]] = {
    "INCOMPLETE": (("incomplete", "failed"), _statement),
    "USE": (("fastest",), _use),
    "NOT": (("fastest",), _not),
    "OPTIONS": (("choice",), _options),
    "TARGET": (("training",), _statement),
    "WHY": (("loss",), _why),
    "SURE": (("trust", "equivalence"), _sure),
    "OPEN": (("fastest", "open"), _open),
}
"""The lines by label: the topics of the statements that it is made from, and the parts that each gives."""
