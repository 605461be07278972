"""The sentences of the verdict: of each statement one with all numbers, and a short one for the decision.

The decision says what to use, what not, why not better, how sure and what to do next, in at most eight short lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from harness.analysis.doubts import doubt_of, plain_doubt
from harness.analysis.improvements import CONFIRMING_BLOCKS
from harness.analysis.ratios import ALL_THREADS
from harness.analysis.stats import CLEAR, LEANING, LEAST_BLOCKS, OPEN, word
from harness.analysis.trials import NOT_STARTED
from harness.analysis.verdict import Statement
from harness.analysis.verdict.rules import ENOUGH, FASTER, GOOD_BLOCKS, RANKED_SEEDS, SLOWER, TOO_FEW
from harness.config.axes import BATCHES
from harness.config.strategy_traits import BASE_STRATEGY
from harness.plan.labels import joined
from harness.report.causes import short_causes, why_not_better
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
)
from harness.report.sentence import MOST, MOST_PARTS, Context, Said, Sentence
from harness.report.tables.ratios import pair_label, pair_setting
from harness.report.tables.text import decimal, duration, percent, speed, with_ends

times = decimal("{:.2f}")
seconds = decimal("{:.3g} s")
REASONS: Mapping[str, str] = {
    "differs": "one setting measured twice differs from itself (A/A test; by chance 1 run in 20 does)",
    "no A/A test": "nothing was measured twice (no A/A test), so that the noise is not known",
    "blocks": f"few blocks, {GOOD_BLOCKS} are better",
    "equivalence": "it is not known whether it trains as one device does",
    "script": "of a script it is not checked that its ranks train what one device does",
}
ONE_PROCESS = "one process with all CPU threads"
CHANGES_TRAINING = ("training.accumulation", "precision", "ddp.comm_hook", "per_device_batch_size", "global_batch_size")
"""The axes of which a faster setting may need more samples to the same target; batch norm sees micro-batches."""
UNCONFIRMED = f"no confirmation of {CONFIRMING_BLOCKS} blocks was measured"
NO_ERROR = "no sign of a repeated error"
SMALLEST = f"The smallest batch that reaches {percent(ENOUGH)} of the highest throughput"
INGESTS: Mapping[str, str] = {
    "bottleneck": "the ingest is the bottleneck",
    "no bottleneck": "the ingest is not the bottleneck",
    OPEN: "whether the ingest is the bottleneck is open",
}
ENDED = {**NOT_STARTED, "finished": "the last call left them out (--only, or another machine)"}
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


# -- the settings to use ----------------------------------------------------------------------------------------------


def _fastest(row: Statement, context: Context) -> Said:
    """Return the gain of a setting over its base, its throughput, and the settings that it is compared with."""
    ratio, ratios = context.ratio(row.cell_id), context.rivals(row.cell_id)
    cell = context.cells[str(row.cell_id)]
    rate = f"{_rate(row, context)} over {plural(row.n, 'block')}"
    if ratio is not None:
        rate = f"{_gain(ratio)} times the throughput of {_base(ratio)}, {_sure_words(ratio, context)}; {rate}"
    elif cell.devices != 1:
        rate = f"{rate}; not compared with one device, which has no result beside it"
    parts = [f"{rate}."]
    if ratio is not None and not is_missing(ratio.p_value) and _word(ratio, context) != CLEAR:
        parts.append(_why_wide(row, context))
    where, beaten = on_devices(cell), _beaten(row, context)
    parts += [
        f"Faster {where} at this batch than {_with_ratios(beaten, ratios, context)}." if beaten else "",
        f"Not clearly faster than {_with_ratios(row.others, ratios, context)}." if row.others else "",
        f"For lack of blocks not compared with {context.names_of(row.reasons)}." if row.reasons else "",
    ]
    if row.code == "smallest batch":
        parts.append(f"{SMALLEST} {where}.")
    return context.name(row.cell_id), " ".join(filter(None, parts))


def _use(row: Statement, context: Context) -> Iterator[Said]:
    """Yield the fastest setting if its gain is clear, or nothing is beside it; the base if no gain is shown."""
    ratio, name = context.ratio(row.cell_id), context.name(row.cell_id)
    batch = f". {SMALLEST}" if row.code == "smallest batch" else ""
    if ratio is None:
        if not (row.others or row.reasons):  # else nothing shows that it is the fastest
            yield name, f"{_rate(row, context)}{batch}."
    elif _word(ratio, context) != CLEAR:
        if not is_missing(ratio.p_value) and number(ratio.speedup) <= 1:
            yield _other(row, ratio), f"no gain shown by {name}: {_gain(ratio)} times{_larger_batch(ratio, context)}."
    elif number(ratio.speedup) <= 1:
        less = f"{name} has only {_gain(ratio)} of its throughput"
        yield context.name(ratio.base_id), f"{less}{_larger_batch(ratio, context)}."
    elif (with_all := _with_all_threads(ratio, context)) is not None and number(with_all.ratio) <= 1:
        less = f"{with_ends(times, with_all.ratio, with_all.low, with_all.high)} times"
        yield ONE_PROCESS, f"no gain shown by {name}: {less}, although {_gain(ratio)} times {_other(row, ratio)}."
    else:
        time = row.facts.devices / ratio.base_devices / number(ratio.speedup)
        is_wider = row.facts.devices != ratio.base_devices
        cost = f", for {times(time)} times the device time a sample" if is_wider else ""
        yield name, f"{_gain(ratio)} times {_other(row, ratio)}{cost}{_over_one_process(with_all, context)}{batch}."


def _with_all_threads(ratio: Row, context: Context) -> Row | None:
    """Return the comparison of a cell with its base with the threads of all CPU slots; None if not measured."""
    rows = (one for one in rows_of(context.table("versus")) if one.axis == ALL_THREADS and one.cell_id == ratio.cell_id)
    return next((row for row in rows if not is_missing(row.ratio)), None)


def _over_one_process(row: Row | None, context: Context) -> str:
    """Return by how much a cell is faster than one process with all threads; empty if not measured."""
    if row is None:
        return ""
    if _word(row, context) == CLEAR:
        return f"; {with_ends(times, row.ratio, row.low, row.high)} times {ONE_PROCESS}"
    ratio = with_ends(times, row.ratio, row.low, row.high)
    return f"; not clearly faster than {ONE_PROCESS}: {ratio} times, {_sure_words(row, context)}"


def _larger_batch(ratio: Row, context: Context) -> str:
    """Return how much faster the base of a ratio is at its best larger batch; empty if that is not clear."""
    pairs = [one for one in rows_of(context.table("versus")) if one.axis in BATCHES and one.other_id == ratio.base_id]
    clear = [one for one in pairs if _word(one, context) == CLEAR and number(one.ratio) > 1]
    best = max(clear, key=lambda one: number(one.ratio), default=None)
    if best is None:
        return ""
    where = plural(ratio.base_devices, "device")
    ratio_text = with_ends(times, best.ratio, best.low, best.high)
    return f"; on {where} batch {best.value} is {ratio_text} times as fast"


def _not(row: Statement, context: Context) -> Iterator[Said]:
    """Yield the settings on as many devices at the same batch that are clearly slower than the fastest."""
    if beaten := _beaten(row, context):
        yield context.short(row.cell_id), f"{_with_ratios(beaten, context.rivals(row.cell_id), context)}."


def _open_settings(row: Statement, context: Context) -> Iterator[Said]:
    """Yield what is not decided: a gain over the base, and settings that cannot be told apart."""
    ratio, ratios = context.ratio(row.cell_id), context.rivals(row.cell_id)
    if ratio and _word(ratio, context) != CLEAR and (is_missing(ratio.p_value) or number(ratio.speedup) > 1):
        either = f"{_other(row, ratio)}, or {context.name(row.cell_id)}"
        yield either, f"{_gain(ratio)} times, {_sure_words(ratio, context)}."
    is_used = ratio is None or is_missing(ratio.p_value) or number(ratio.speedup) > 1
    if undecided := [one for one in ratios if one in (*row.others, *row.reasons) and is_used]:
        lead = f"{context.short(row.cell_id) or context.name(row.cell_id)}, or another setting"
        yield lead, f"{_with_ratios(undecided, ratios, context)}."


def _beaten(row: Statement, context: Context) -> list[str]:
    return [one for one in context.rivals(row.cell_id) if one not in (*row.others, *row.reasons)]


def _rate(row: Statement, context: Context) -> str:
    facts, unit = row.facts, rate_unit(context.table("leaders"))
    return f"{with_ends(speed, facts.throughput_per_s, facts.throughput_low, facts.throughput_high)} {unit}"


def _why_wide(row: Statement, context: Context) -> str:
    """Return a sentence on what makes the interval of a cell wider; empty if nothing was seen that does."""
    doubts = (doubt for one in rows_of(context.table("cells")) if one.cell_id == row.cell_id for doubt in one.doubts)
    wide = (doubt for doubt in doubts if doubt_of(doubt.name).widens)
    seen = [f"{plain_doubt(doubt.name)} ({doubt.count} of {doubt.trials} trials)" for doubt in wide]
    return f"Its interval is wide: {', '.join(seen)}." if seen else ""


def _base(ratio: Row) -> str:
    """Return what a ratio is over: '1 device', or '2 devices (ddp) at the same global batch' under strong scaling."""
    own = f" ({ratio.base_strategy})" if ratio.base_strategy != BASE_STRATEGY else ""
    batch = " at the same global batch" if ratio.scaling == "strong" else ""
    return f"{plural(ratio.base_devices, 'device')}{own}{batch}"


def _other(row: Statement, ratio: Row) -> str:
    """Return what a setting is compared with, by what differs: '1 device', or the strategy on as many devices."""
    more = row.facts.devices != ratio.base_devices
    return plural(ratio.base_devices, "device") if more else f"strategy {ratio.base_strategy}"


def _gain(ratio: Row) -> str:
    return with_ends(times, ratio.speedup, ratio.low, ratio.high)


def _word(row: Row, context: Context) -> str:
    """Return how sure the difference of a row's two settings is: clear, leaning or open."""
    return word(None if is_missing(row.p_value) else number(row.p_value), context.results.significance)


def _sure_words(row: Row, context: Context) -> str:
    """Return how sure a difference is, with its p-value unless it is clear: 'leaning (p = 0.12)'."""
    if is_missing(row.p_value):
        return f"{OPEN}, as fewer than {LEAST_BLOCKS} blocks have no interval"
    sure = _word(row, context)
    return CLEAR if sure == CLEAR else f"{sure} (p = {number(row.p_value):.2g})"


def _with_ratios(ids: Sequence[str], ratios: Mapping[str, Row], context: Context) -> str:
    """Return settings with their ratio to the leader: 'fsdp (0.87 times the throughput of ddp, 0.80 to 0.94)'.

    By their strategies if these tell all settings apart, else by their full names.
    """
    leaders = {row.leader_id for row in ratios.values()}
    known = {shown_strategy(row) for row in ratios.values()}
    leading = {shown_strategy(row) for one, row in context.cells.items() if one in leaders}
    if all(one in ratios for one in ids) and len(known) == len(ratios) and not known & leading:
        names, leader = [shown_strategy(ratios[one]) for one in ids], "".join(leading) or "the fastest at its batch"
    else:
        names, leader = [context.name(one) for one in ids], "the fastest at its batch"
    some = [f"{name}{_share(ratios.get(cell_id), leader, context)}" for cell_id, name in zip(ids, names, strict=True)]
    return "; ".join(some[:MOST]) + _and_more(ids)


def _share(row: Row | None, leader: str, context: Context) -> str:
    if row is None or is_missing(row.ratio):
        return ""
    if is_missing(row.low):
        return f" ({times(row.ratio)} times the throughput of {leader})"
    by_chance = is_true(row.tied) and not number(row.low) <= 1 <= number(row.high)
    why = f"; {_sure_words(row, context)}" if is_true(row.tied) else ""
    why += "; of so many comparisons one may differ as much by chance" if by_chance else ""
    return f" ({times(row.ratio)} times the throughput of {leader}, {times(row.low)} to {times(row.high)}{why})"


def _and_more(names: Sequence[str]) -> str:
    return f" and {len(names) - MOST} more" if len(names) > MOST else ""


# -- options, scaling, trainings --------------------------------------------------------------------------------------


def _pair(row: Statement) -> tuple[str, str]:
    """Return the label of two settings that differ in a choice, and their ratio."""
    pair = row.facts
    label = joined(pair_label(pair), pair_setting(pair))
    return label, f"{with_ends(times, pair.ratio, pair.low, pair.high)} times the throughput"


def _choice(row: Statement, context: Context) -> Said:
    label, ratio = _pair(row)
    found = row.code
    if row.code in (FASTER, SLOWER):
        found = f"the first is {row.code}, {CLEAR}"
    elif row.code != TOO_FEW:
        to = f" to the {'first' if row.facts.ratio > 1 else 'second'}" if row.code == LEANING else ""
        found = f"{row.code}{to} (p = {row.facts.p_adjusted:.2g})"
    return label, f"{ratio} over {plural(row.n, 'block')}: {found}."


def _options(row: Statement, context: Context) -> Iterator[Said]:
    """Yield which value of a choice is faster, or that it is open."""
    if row.code != TOO_FEW:
        label, ratio = _pair(row)
        sure = "" if row.code in (FASTER, SLOWER) else f", {row.code} (p = {row.facts.p_adjusted:.2g})"
        yield label, f"{ratio}{sure}."


def _ingest(row: Statement, context: Context) -> Said:
    facts, unit = row.facts, rate_unit(context.table("trials"))
    part = with_ends(percent, facts.ratio, facts.low, facts.high)
    alone = f"the ingest alone reaches {speed(facts.other_throughput_per_s)} {unit}"
    found = INGESTS.get(row.code, f"no interval below {LEAST_BLOCKS} blocks")
    return context.name(row.cell_id), f"{alone}, training uses {speed(facts.throughput_per_s)}, {part}: {found}."


def _scaling(row: Statement, context: Context) -> Said:
    efficiency = with_ends(percent, row.facts.efficiency, row.facts.efficiency_low, row.facts.efficiency_high)
    return context.name(row.cell_id), f"efficiency {efficiency}, compared with {_base(row.facts)}."


def _training(row: Statement, context: Context) -> Said:
    cell, target = context.cells[str(row.cell_id)], row.subject
    setting, batch = setting_without_batch(cell), f"global batch {cell.global_batch_size}"
    if row.code == "missed":
        return joined(batch.capitalize(), setting), f"no training reached {target} with every seed."
    if row.code == "few seeds":
        compared = [str(row.cell_id), *row.others]
        rows = rows_of(context.table("convergence"))
        trainings = [[one for one in rows if one.cell_id == cell_id] for cell_id in compared]
        each = [_reached(of_cell) for of_cell in trainings[:MOST]]
        least = "at least " if len({*map(len, trainings)}) > 1 else ""
        order = f" each; no order below {RANKED_SEEDS} seeds" if row.others else ""
        how = f"{joined(setting, batch)}; {least}{plural(row.n, 'seed')}{order}"
        return str(target), f"reached by {', '.join(each)}{_and_more(compared)} ({how})."
    ends = f"{seconds(row.facts.least_s)} to {seconds(row.facts.most_s)} over {row.n} seeds"
    span = f" ({ends})" if row.n != 1 else ""
    text = f"shortest median time to {target}: {seconds(row.facts.time_to_target_s)}{span}."
    if row.others:
        text += f" Not clearly before {context.names_of(row.others)}, whose times overlap with its own."
    return context.name(row.cell_id), text


def _reached(trainings: Sequence[Row]) -> str:
    """Return the least and the largest time of a cell's trainings to the target: 'ddp x2 in 0.8 to 1.2 s'."""
    times = [training.time_to_target_s for training in trainings]
    low, high = (f"{each:.2g}" for each in (min(times), max(times)))
    return f"{cell_label(trainings[0])} in {low if low == high else f'{low} to {high}'} s"


def _improved(row: Statement, context: Context) -> Said:
    """Return what --improve tried on a cell, and what came of it."""
    tried = f"{plural(row.n, 'option')} tried in {duration(row.facts.wall_s)}"
    if row.code == "no option helped":
        return context.name(row.cell_id), f"{tried}: none helped."
    if row.subject is None:
        return context.name(row.cell_id), f"{tried}; {UNCONFIRMED}."
    ratio = with_ends(times, row.facts.ratio, row.facts.low, row.facts.high) if row.facts.ratio else ""
    blocks = f" in {plural(row.facts.blocks, 'block')} of fresh processes"
    if row.code == "confirmed":
        found = f"is confirmed, {CLEAR}: {ratio} times its throughput{blocks}"
        if any(f"{axis}: " in row.subject for axis in CHANGES_TRAINING):
            found += "; it may change what is trained, and no convergence was compared"
    elif row.code == "not confirmed":
        found = f"is not confirmed: {'; '.join(row.reasons) or f'{ratio} times its throughput{blocks}'}"
    else:
        found = f"helped; {'; '.join(row.reasons) or UNCONFIRMED}"
    return context.name(row.cell_id), f"{tried}; {row.subject} {found}."


# -- losses, trust, failures, open questions --------------------------------------------------------------------------


def _trust(row: Statement, context: Context) -> Said:
    """Return the level of trust in one or several settings, with its reasons."""
    lead = row.code.capitalize()
    if len(context.stated("trust")) > 1:
        lead = f"{lead} for {', '.join(map(context.short, (row.cell_id, *row.others[: MOST - 1])))}"
    kinds = [reason.partition(": ") for reason in row.reasons]
    words = [REASONS[kind] for kind, _, _ in kinds if kind in REASONS]
    words += dict.fromkeys(plain_doubt(name) for kind, _, name in kinds if kind == "doubt")
    words += [
        f"the ratio to the base is another in the blocks of later calls ({ratios})"
        for kind, _, ratios in kinds
        if kind == "invocations"
    ]
    return lead, f"{'; '.join(words) or f'{_aa_test(row, context)}; {NO_ERROR}'}."


def _aa_test(row: Statement, context: Context) -> str:
    """Return that the bases of some settings do not differ from their twins, with the interval of each."""
    leading = (row.cell_id, *row.others)  # of which one may be a base itself
    bases = {ratio.base_id if (ratio := context.ratio(one)) else one for one in leading}
    rows = [one for one in rows_of(context.table("noise")) if not is_missing(one.low)]
    known = [one for one in rows if one.cell_id in bases]
    ends = [f"{times(one.low)} to {times(one.high)}" for one in known]
    if any(is_true(one.excludes_one) for one in known):
        ends[-1] += f"; of {plural(len(rows), 'test')} one may exclude 1 by chance"
    what = "one setting" if len(bases) == 1 else f"each of {len(bases)} settings"
    return f"{what} measured twice agrees with itself (A/A test{': ' * bool(ends)}{', '.join(ends)})"


def _equivalence(row: Statement, context: Context) -> Said:
    if row.code == "equivalent":
        share = 100 * row.facts.difference
        text = f"updates differ by at most {max(share, LEAST_PERCENT) if share else 0:.2g} %."
        return "Every strategy trains as one device does", f"{plural(row.n, 'check')}, {text}"
    if row.code == "unknown":
        return context.name(row.cell_id), f"whether it trains as one device does is {row.subject}."
    return context.name(row.cell_id), f"{row.subject}; its ratios are no claims."


def _not_equivalent(row: Statement, context: Context) -> Iterator[Said]:
    """Yield what does not train as one device does; nothing without numbers."""
    if row.code != "equivalent" and context.has_measured:
        yield _equivalence(row, context)


def _incomplete(row: Statement, context: Context) -> Said:
    cells, is_one = plural(row.n, "cell"), row.n == 1
    has = "has" if is_one else "have"
    if row.code == "missing":
        invocations = context.results.environment.get("invocations", [])
        planned = context.table("trials")["trial_id"].nunique() + row.n
        why = ENDED.get(invocations[-1].get("ended") if invocations else None, ENDED[None])
        return f"{row.n} of {planned} planned trials {has} no result", f"{why}. What follows rests on the others."
    if row.code == "failed":
        return f"{cells} {has} no result", f"no trial succeeded ({_cells_of(row, context)})."
    return f"{cells} {'lacks' if is_one else 'lack'} trials", f"{'; '.join(row.reasons)}."


def _failed(row: Statement, context: Context) -> Said:
    if row.code == "tables":
        tables = f"{'Table' if row.n == 1 else 'Tables'} {', '.join(row.reasons)}"
        return tables, "failed by an error of the harness; the sentences that need it are left out."
    why = next(iter(row.reasons), "")
    if row.code == "preflight":
        where = f" ({_cells_of(row, context)})" if row.cell_id in context.cells else ""
        more = f"; {len(row.reasons) - 1} more in the table of the preflight" if len(row.reasons) > 1 else ""
        return f"Check before the measurement ({row.subject})", f"{why}{where}{more}."
    outcome = FAILURES.get(str(row.subject), row.subject)
    return f"{plural(row.n, 'trial')} {outcome}", f"{why} ({_cells_of(row, context)})."


def _cells_of(row: Statement, context: Context) -> str:
    return context.names_of((str(row.cell_id), *row.others))


def _open(row: Statement, context: Context) -> Said:
    cells = plural(row.n, "cell")
    if row.code == "too_few_devices":
        return f"{cells} on {row.subject} devices", "this machine has too few; the same file runs on a larger one."
    return cells, f"{'; '.join(row.reasons)}."


TOPICS: Mapping[str, tuple[str, Callable[[Statement, Context], Said]]] = {
    "incomplete": ("INCOMPLETE", _incomplete),
    "fastest": ("Fastest", _fastest),
    "fewer": ("On fewer devices", _fastest),
    "choice": ("Options compared", _choice),
    "trust": ("How sure", _trust),
    "scaling": ("How far it scales", _scaling),
    "loss": ("Why not better", why_not_better),
    "ingest": ("Ingest", _ingest),
    "improved": ("Options tried", _improved),
    "training": ("Convergence", _training),
    "equivalence": ("Same training", _equivalence),
    "failed": ("Failed", _failed),
    "open": ("Open", _open),
}
"""The topics in the order of the page, each with its heading and the sentence on a statement."""
Short = Callable[[Statement, Context], Iterator[Said]]


def _whole(row: Statement, context: Context) -> Iterator[Said]:
    yield TOPICS[row.topic][1](row, context)


LINES: Mapping[str, Mapping[str, Short]] = {
    "INCOMPLETE": {"incomplete": _whole, "failed": _whole},
    "USE": {"fastest": _use},
    "NOT": {"fastest": _not},
    "OPTIONS": {"choice": _options},
    "TARGET": {"training": _whole},
    "WHY": {"loss": short_causes, "ingest": _whole},
    "TRIED": {"improved": _whole},
    "SURE": {"trust": _whole, "equivalence": _not_equivalent},
    "OPEN": {"fastest": _open_settings, "open": _whole},
}
"""The lines of the decision by label, each with its topics and the parts that a statement of each gives."""


CAN_WAIT = ("TARGET", "OPTIONS")
"""The lines that give way to others."""


def sentences(context: Context) -> list[Sentence]:
    """Return a sentence on each statement, at most MOST of a topic."""
    found = []
    for topic, (_, phrase) in TOPICS.items():
        rows = context.stated(topic)
        found += [_sentence(row, phrase(row, context)) for row in rows[:MOST]]
        if len(rows) > MOST:
            more = f"And {len(rows) - MOST} more, in tables/verdict.csv."
            found.append(Sentence(topic, "", more, evidence=rows[0].evidence))
    return found


def decision(context: Context) -> dict[str, list[Sentence]]:
    """Return the lines by their labels, in order, each with its parts; without the next step."""
    lines: dict[str, list[Sentence]] = {}
    for label, topics in LINES.items():
        found = [
            _sentence(row, said)
            for topic, short in topics.items()
            for row in context.stated(topic)
            for said in short(row, context)
        ]
        if found:
            more = f"And {len(found) - MOST_PARTS} more, below."
            lines[label] = found[:MOST_PARTS] + [Sentence(found[0].topic, "", more)] * (len(found) > MOST_PARTS)
    unusual = sum(label in lines for label in ("INCOMPLETE", "TRIED"))  # which most runs lack: eight lines are read
    for waiting in CAN_WAIT[:unusual]:
        lines.pop(waiting, None)
    return lines


def _sentence(row: Statement, said: Said) -> Sentence:
    return Sentence(row.topic, *said, evidence=row.evidence, code=row.code)
