"""The sentences of the verdict: a phrase for each topic of its statements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from harness.analysis.common import is_no_claim
from harness.analysis.doubts import plain_doubt, widens
from harness.analysis.results import attempt
from harness.analysis.stats import CLEAR, LEANING, LEAST_BLOCKS, OPEN, word
from harness.analysis.verdict.rules import ENOUGH, FASTER, RANKED_SEEDS, SLOWER, TOO_FEW
from harness.analysis.verdict.trust import GOOD_BLOCKS
from harness.config.strategy_traits import BASE_STRATEGY
from harness.plan.labels import joined, strategy_text
from harness.report.causes import why_not_better
from harness.report.row import (
    Row,
    cell_label,
    is_missing,
    is_true,
    number,
    on_devices,
    plural,
    rate_unit,
    rows_of,
    setting_without_batch,
    shown_strategy,
    texts,
)
from harness.report.sentence import MOST, Context, Sentence
from harness.report.tables.ratios import pair_label, pair_setting
from harness.report.tables.text import decimal, duration, percent, speed, with_ends
from harness.report.tables.trust import INTERVALS, imprecise

times = decimal("{:.2f}")
MOST_BLOCKS = 100
"""The most further blocks that are proposed."""
REASONS: Mapping[str, str] = {
    "differs": "one setting measured twice differs from itself (A/A test; by chance 1 run in 20 does)",
    "no A/A test": "nothing was measured twice (no A/A test), so that the noise is not known",
    "blocks": f"few blocks, {GOOD_BLOCKS} are better",
    "equivalence": "it is not known whether it trains as one device does",
    "script": "what the ranks of a script train is not compared with one device",
}
QUIET = "one setting measured twice does not differ from itself (A/A test), no doubts"
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


def fastest(row: Row, context: Context) -> Sentence:
    """Return the sentence on the fastest setting on a number of devices: its gain over the base, and its rivals."""
    ratio = context.ratio(row.cell_id)
    undecided = ratio is not None and not is_missing(ratio.p_value) and word_of(ratio, context) != CLEAR
    wide = _why_wide(row, context) if undecided else ""
    parts = (f"{_compared(row, ratio, context)}.", wide, _rivals(row, context))
    return Sentence(row.topic, context.name(row.cell_id), " ".join(filter(None, parts)))


def _why_wide(row: Row, context: Context) -> str:
    """Return a sentence on what makes the interval of a cell wider; empty if nothing was seen that does."""
    doubts = (doubt for one in rows_of(context.table("cells")) if one.cell_id == row.cell_id for doubt in one.doubts)
    seen = [f"{plain_doubt(one.name)} ({one.count} of {one.trials} trials)" for one in doubts if widens(one.name)]
    return f"Its interval is wide: {', '.join(seen)}." if seen else ""


def _compared(row: Row, ratio: Row | None, context: Context) -> str:
    """Return a setting's speedup and what it is over, whether that is clear, and its throughput."""
    blocks = f" over {plural(row.n, 'block')}" if not is_missing(row.n) else ""
    rate = f"{with_ends(speed, row.value, row.low, row.high)} {rate_unit(context.table('leaders'))}{blocks}"
    if ratio is None:
        cell = context.cells.get(row.cell_id)
        alone = cell is not None and cell.devices == 1
        return rate if alone else f"{rate}; not compared with one device, which has no result beside it"
    return f"{gain(ratio)} times the throughput of {base_words(ratio)}, {sure_words(ratio, context)}; {rate}"


def base_words(ratio: Row) -> str:
    """Return what a ratio is over: '1 device', or '2 devices (ddp) at the same global batch' under strong scaling."""
    own = f" ({ratio.base_strategy})" if ratio.base_strategy != BASE_STRATEGY else ""
    batch = " at the same global batch" if ratio.scaling == "strong" else ""
    return f"{plural(ratio.base_devices, 'device')}{own}{batch}"


def gain(ratio: Row) -> str:
    return with_ends(times, ratio.speedup, ratio.low, ratio.high)


def word_of(row: Row, context: Context) -> str:
    """Return how sure the difference of a row's two settings is: clear, leaning or open."""
    return word(None if is_missing(row.p_value) else number(row.p_value), context.results.significance)


def sure_words(row: Row, context: Context) -> str:
    """Return how sure a difference is, with its p-value unless it is clear: 'leaning (p = 0.12)'."""
    if is_missing(row.p_value):
        return f"{OPEN}, as fewer than {LEAST_BLOCKS} blocks have no interval"
    sure = word_of(row, context)
    return CLEAR if sure == CLEAR else f"{sure} (p = {number(row.p_value):.2g})"


def _rivals(row: Row, context: Context) -> str:
    """Return the sentences on the other settings on as many devices at the same batch, and on the choice of a batch."""
    leaders = rows_of(context.table("leaders"))
    ratios = {one.cell_id: one for one in leaders if one.leader_id == row.cell_id != one.cell_id}
    tied, untested = texts(row.others), texts(row.reasons)
    beaten = [one for one in ratios if one not in (*tied, *untested)]
    where = on_devices(context.cells[row.cell_id])
    parts = [
        f"Faster {where} at this batch than {with_ratios(beaten, ratios, context)}." if beaten else "",
        f"Not clearly faster than {with_ratios(tied, ratios, context)}." if tied else "",
        f"For lack of blocks not compared with {context.names_of(untested)}." if untested else "",
    ]
    if row.code == "smallest batch":
        parts.append(f"The smallest batch that reaches {percent(ENOUGH)} of the highest throughput {where}.")
    return " ".join(filter(None, parts))


def with_ratios(ids: Sequence[str], ratios: dict[str, Row], context: Context) -> str:
    """Return settings with their ratio to the leader: 'fsdp (0.87 times its throughput, 0.80 to 0.94)'."""
    names = _short_names(ids, ratios, context)
    some = [f"{name}{_share(ratios.get(cell_id), context)}" for cell_id, name in zip(ids, names, strict=True)]
    more = f" and {len(ids) - MOST} more" if len(ids) > MOST else ""
    return "; ".join(some[:MOST]) + more


def _share(row: Row | None, context: Context) -> str:
    if row is None or is_missing(row.ratio):
        return ""
    if is_missing(row.low):
        return f" ({times(row.ratio)} times its throughput)"
    by_chance = is_true(row.tied) and not number(row.low) <= 1 <= number(row.high)
    why = f"; {sure_words(row, context)}" if is_true(row.tied) else ""
    why += "; of so many comparisons one may differ as much by chance" if by_chance else ""
    return f" ({times(row.ratio)} times its throughput, {times(row.low)} to {times(row.high)}{why})"


def _short_names(ids: Sequence[str], ratios: dict[str, Row], context: Context) -> list[str]:
    """Return the strategies of settings if these tell them apart, else the full names."""
    leaders = {row.leader_id for row in ratios.values()}
    known = {shown_strategy(row) for row in ratios.values()}
    leading = {shown_strategy(row) for one, row in context.cells.items() if one in leaders}
    if all(one in ratios for one in ids) and len(known) == len(ratios) and not known & leading:
        return [shown_strategy(ratios[one]) for one in ids]
    return [context.name(one) for one in ids]


def how_sure(row: Row, context: Context) -> Sentence:
    """Return the level of trust in one or several settings, with its reasons."""
    level, reasons, others = row.code, texts(row.reasons), texts(row.others)
    lead = level.capitalize()
    if (context.results.verdict["topic"] == "trust").sum() > 1:
        lead = f"{lead} for {', '.join(map(context.short, (row.cell_id, *others[: MOST - 1])))}"
    doubts = dict.fromkeys(plain_doubt(one.removeprefix("doubt: ")) for one in reasons if one.startswith("doubt: "))
    changed = (one.partition(": ")[2] for one in reasons if one.startswith("invocations: "))
    words = [*(REASONS[reason] for reason in reasons if reason in REASONS), *doubts]
    words += [f"the ratio to the base is another in the blocks of later calls ({ratios})" for ratios in changed]
    return Sentence("trust", lead, f"{'; '.join(words) or QUIET}.", code=level)


def cost(blocks: int, context: Context) -> str:
    """Return ' (about 25 min)': the wall time of so many blocks, by that of the run's own."""
    ledger, trials = context.table("ledger"), context.table("trials")
    groups = trials[trials["kind"] == "throughput"][["group_id", "block"]].drop_duplicates()
    spent = float(ledger["seconds"][ledger["group_id"].isin(groups["group_id"])].sum())
    if spent <= 0 or groups.empty:
        return ""
    total_s = spent / groups["block"].nunique() * blocks
    whole_minutes = 60 <= total_s < 3570
    return f" (about {f'{total_s / 60:.0f} min' if whole_minutes else duration(total_s)})"


def _incomplete(row: Row, context: Context) -> Sentence:
    count, cells = row.n, plural(row.n, "cell")
    has = "has" if count == 1 else "have"
    if row.code == "missing":
        invocations = context.results.environment.get("invocations", [])
        planned = context.table("trials")["trial_id"].nunique() + count
        why = ENDED.get(invocations[-1].get("ended") if invocations else None, ENDED[None])
        lead = f"{count} of {planned} planned trials {has} no result"
        return Sentence("incomplete", lead, f"{why}. What follows rests on the others.")
    why = "; ".join(texts(row.reasons))
    if row.code == "failed":
        why = f"no trial succeeded ({context.names_of((row.cell_id, *texts(row.others)))})"
        return Sentence("incomplete", f"{cells} {has} no result", f"{why}.")
    return Sentence("incomplete", f"{cells} {'lacks' if count == 1 else 'lack'} trials", f"{why}.")


def _choice(row: Row, context: Context) -> Sentence:
    versus = context.table("versus")
    pairs = versus[(versus["cell_id"] == row.cell_id) & versus["other_id"].isin(texts(row.others))]
    lead = next((joined(pair_label(pair), pair_setting(pair)) for pair in rows_of(pairs)), row.subject)
    ratio = with_ends(times, row.value, row.low, row.high)
    blocks = plural(row.n, "block")
    found = row.code
    if row.code in (FASTER, SLOWER):
        found = f"the first is {row.code}, {CLEAR}"
    elif row.code != TOO_FEW:
        to = f" to the {'first' if number(row.value) > 1 else 'second'}" if row.code == LEANING else ""
        found = f"{row.code}{to} (p = {number(row.p_value):.2g})"
    return Sentence("choice", lead, f"{ratio} times the throughput over {blocks}: {found}.")


def _scaling(row: Row, context: Context) -> Sentence:
    ratio, lead = context.ratio(row.cell_id), context.name(row.cell_id)
    efficiency = with_ends(percent, row.value, row.low, row.high)
    return Sentence(
        "scaling", lead, f"efficiency {efficiency}, compared with {base_words(ratio) if ratio else '1 device'}."
    )


def _reached(cell_id: str, context: Context) -> str:
    """Return the least and the largest time of a cell's trainings to the target: 'ddp x2 in 0.8 to 1.2 s'."""
    rows = [row for row in rows_of(context.table("convergence")) if row.cell_id == cell_id]
    times = [row.time_to_target_s for row in rows]
    low, high = (decimal("{:.2g}")(each) for each in (min(times), max(times)))
    return f"{cell_label(rows[0])} in {low if low == high else f'{low} to {high}'} s"


def _training(row: Row, context: Context) -> Sentence:
    label, seeds, target = context.name(row.cell_id), row.n, row.subject
    if row.code == "missed":
        cell = context.cells[row.cell_id]
        batch = joined(f"Global batch {cell.global_batch_size}", setting_without_batch(cell))
        return Sentence("training", batch, f"no training reached {target} with every seed.")
    if row.code == "few seeds":
        convergence = context.table("convergence")
        counts = [int((convergence["cell_id"] == one).sum()) for one in (row.cell_id, *texts(row.others))]
        each = [_reached(one, context) for one in (row.cell_id, *texts(row.others))]
        named = ("at least " if len({*counts}) > 1 else "") + plural(seeds, "seed")
        order = f" each; no order below {RANKED_SEEDS} seeds" if len(each) > 1 else ""
        more = f" and {len(each) - MOST} more" if len(each) > MOST else ""
        setting = joined(
            setting_without_batch(cell := context.cells[row.cell_id]), f"global batch {cell.global_batch_size}"
        )
        said = f"reached by {', '.join(each[:MOST])}{more} ({setting}; {named}{order})."
        return Sentence("training", target, said)
    span = f" ({seconds(row.low)} to {seconds(row.high)} over {seeds} seeds)" if seeds > 1 else ""
    text = f"shortest median time to {target}: {seconds(row.value)}{span}."
    if overlapping := texts(row.others):
        text += f" Not clearly before {context.names_of(overlapping)}, whose times overlap with its own."
    return Sentence("training", label, text)


def _equivalence(row: Row, context: Context) -> Sentence:
    code = row.code
    if code == "equivalent":
        checks = plural(row.n, "check")
        share = 100 * number(row.value)
        text = f"{checks}, updates differ by at most {max(share, LEAST_PERCENT) if share else 0:.2g} %."
        return Sentence("equivalence", "Every strategy trains as one device does", text)
    label = context.name(row.cell_id)
    if code == "unknown":
        return Sentence("equivalence", label, f"whether it trains as one device does is {row.subject}.", code=code)
    return Sentence("equivalence", label, f"{row.subject}; its ratios are no claims.", code=code)


def _failed(row: Row, context: Context) -> Sentence:
    why = "; ".join(texts(row.reasons)[:1])
    if row.code == "tables":
        tables = f"{'Table' if row.n == 1 else 'Tables'} {', '.join(texts(row.reasons))}"
        return Sentence("failed", tables, "failed by an error of the harness; the sentences that need it are left out.")
    if row.code == "preflight":
        where = f" ({context.name(row.cell_id)})" if row.cell_id in context.cells else ""
        return Sentence("failed", f"Check before the measurement ({row.subject})", f"{why}{where}.")
    names = context.names_of((row.cell_id, *texts(row.others)))
    lead = f"{plural(row.n, 'trial')} {FAILURES.get(row.subject, row.subject)}"
    return Sentence("failed", lead, f"{why} ({names}).")


def _open(row: Row, context: Context) -> Sentence:
    cells = plural(row.n, "cell")
    if row.code == "too_few_devices":
        text = "this machine has too few; the same file runs on a larger one."
        return Sentence("open", f"{cells} on {row.subject} devices", text)
    return Sentence("open", cells, f"{'; '.join(texts(row.reasons))}.")


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
    elif left_out := dict.fromkeys(strategy_text(row) for row in rows_of(context.table("cells")) if is_no_claim(row)):
        text = f"{', '.join(left_out)}; what was measured of it is in tables and figures."
        found.append(Sentence("open", "Left out of these claims", text, evidence="scaling"))
    if wide := imprecise({name: context.table(name) for name in INTERVALS}):
        found.append(Sentence("open", "Wide intervals", wide, evidence="scaling"))
    return found


PHRASES: Mapping[str, Callable[[Row, Context], Sentence]] = {
    "incomplete": _incomplete,
    "fastest": fastest,
    "fewer": fastest,
    "choice": _choice,
    "training": _training,
    "scaling": _scaling,
    "loss": why_not_better,
    "trust": how_sure,
    "equivalence": _equivalence,
    "failed": _failed,
    "open": _open,
}
