"""The sentences on what to use: a setting with its batch, what it is compared with, and what it was faster than."""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.verdict.rules import ENOUGH
from harness.report.labels import on_devices, rate_unit, shown_strategy
from harness.report.row import Row, Scalar, is_missing, is_true, number, rows_of, texts
from harness.report.sentence import MOST, Context, Sentence
from harness.report.tables.text import decimal, percent, plural, speed, with_ends

times = decimal("{:.2f}")


def what_to_use(row: Row, context: Context) -> Sentence:
    """Return the sentence on the fastest setting, or on one device if that is clearly faster."""
    ratio, name = context.ratio(row["cell_id"]), context.name(row["cell_id"])
    if ratio and _difference(ratio) == "slower":
        rate = f"{speed(ratio['base_throughput_per_s'])} {rate_unit(context.table('leaders'))}"
        best = f"the fastest setting {on_devices(context.cells[str(row['cell_id'])])}, {name}"
        text = f"{rate}; {best}, has only {_gain(ratio)} times its throughput."
        return Sentence("fastest", context.name(ratio["base_id"]), text)
    return Sentence("fastest", _open(ratio, name), f"{_compared(row, ratio, context)}. {_rivals(row, context)}".strip())


def _open(ratio: Row | None, name: str) -> str:
    """Return the name of the fastest setting, with its base before it if neither is known to be faster."""
    if ratio is None or _difference(ratio) not in ("not clear", "unknown"):
        return name
    return f"Undecided: {plural(int(number(ratio['base_devices'])), 'device')}, or {name}"


def on_fewer_devices(row: Row, context: Context) -> Sentence:
    """Return the same of a smaller number of devices."""
    compared = _compared(row, context.ratio(row["cell_id"]), context)
    return Sentence("fewer", context.name(row["cell_id"]), f"{compared}. {_rivals(row, context)}".strip())


def _compared(row: Row, ratio: Row | None, context: Context) -> str:
    """Return a setting's speedup and what it is over, whether that is clear, and its throughput."""
    blocks = f" over {plural(int(number(row['n'])), 'block')}" if not is_missing(row["n"]) else ""
    rate = f"{with_ends(speed, row['value'], row['low'], row['high'])} {rate_unit(context.table('leaders'))}{blocks}"
    if ratio is None:
        alone = context.cells.get(str(row["cell_id"]), {}).get("devices") == 1
        return rate if alone else f"{rate}; not compared with one device, which has no result beside it"
    base, gain = base_words(ratio), _gain(ratio)
    found = _difference(ratio)
    if found == "not clear":
        return f"no clear gain over {base}: {gain} times its throughput; {rate}"
    if found == "unknown":
        return f"not known to be faster than {base}: {gain} times its throughput, without an interval; {rate}"
    return f"{gain} times the throughput of {base}{', slower' * (found == 'slower')}; {rate}"


def base_words(ratio: Row) -> str:
    """Return what a ratio is over: '1 device (strategy single, same batch per device)'."""
    batch = "same global batch" if ratio["scaling"] == "strong" else "same batch per device"
    devices = plural(int(number(ratio["base_devices"])), "device")
    return f"{devices} (strategy {ratio['base_strategy']}, {batch})"


def _gain(ratio: Row) -> str:
    return with_ends(times, ratio["speedup"], ratio["low"], ratio["high"])


def _difference(ratio: Row) -> str:
    """Return whether a cell is faster or slower than its base, by the interval; unknown without one."""
    if is_missing(ratio["low"]):
        return "unknown"
    if number(ratio["low"]) <= 1 <= number(ratio["high"]):
        return "not clear"
    return "faster" if number(ratio["speedup"]) > 1 else "slower"


def _rivals(row: Row, context: Context) -> str:
    """Return the sentences on the other settings on as many devices at the same batch, and on the choice of a batch."""
    beside = [
        one
        for one in rows_of(context.table("leaders"))
        if one["leader_id"] == row["cell_id"] and one["cell_id"] != row["cell_id"]
    ]
    tied, untested = texts(row["others"]), texts(row["reasons"])
    beaten = [str(one["cell_id"]) for one in beside if one["cell_id"] not in (*tied, *untested)]
    where = on_devices(context.cells[str(row["cell_id"])])
    ratios = {str(one["cell_id"]): one for one in beside}
    parts = [
        f"Faster {where} at this batch than {_with_ratios(beaten, ratios, context)}." if beaten else "",
        f"No clear difference from {_with_ratios(tied, ratios, context)}." if tied else "",
        f"For lack of blocks not compared with {context.names_of(untested)}." if untested else "",
    ]
    if row["code"] == "smallest batch":
        parts.append(f"The smallest batch that reaches {percent(ENOUGH)} of the highest throughput {where}.")
    return " ".join(part for part in parts if part)


def _with_ratios(ids: Sequence[str], ratios: dict[str, Row], context: Context) -> str:
    """Return settings with their ratio to the leader: 'fsdp (0.87 times its throughput, 0.80 to 0.94)'."""
    names = _short_names(ids, ratios, context)
    some = [f"{name}{_share(ratios.get(cell_id))}" for cell_id, name in zip(ids, names, strict=True)]
    more = f" and {len(ids) - MOST} more" if len(ids) > MOST else ""
    return "; ".join(some[:MOST]) + more


def _share(row: Row | None) -> str:
    if row is None or is_missing(row["ratio"]):
        return ""
    if is_missing(row["low"]):
        return f" ({times(row['ratio'])} times its throughput)"
    by_chance = is_true(row["tied"]) and not number(row["low"]) <= 1 <= number(row["high"])
    why = "; of so many comparisons one may differ as much by chance" if by_chance else ""
    return f" ({times(row['ratio'])} times its throughput, {times(row['low'])} to {times(row['high'])}{why})"


def _short_names(ids: Sequence[str], ratios: dict[str, Row], context: Context) -> list[str]:
    """Return the strategies of settings if these tell them apart, else the full names."""
    strategies: list[Scalar] = [shown_strategy(ratios[one]) if one in ratios else None for one in ids]
    known = {shown_strategy(row) for row in ratios.values()}
    leading = {shown_strategy(row) for one, row in context.cells.items() if one in _leaders_of(ratios)}
    if None not in strategies and len(known) == len(ratios) and not known & leading:
        return [str(one) for one in strategies]
    return [context.name(one) for one in ids]


def _leaders_of(ratios: dict[str, Row]) -> set[str]:
    return {str(row["leader_id"]) for row in ratios.values()}
