"""Tables on how far the numbers can be believed, and where the time goes, as rows of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from harness.analysis.doubts import DOUBTS
from harness.record.frames import records
from harness.report.labels import rate_unit, shown_devices, shown_strategy, with_settings
from harness.report.tables.scaling import DOUBTFUL
from harness.report.tables.text import Heading, Line, TextTable, duration, speed, with_ends

NAMED = 6
"""Of the cells that a sentence is about, so many are named."""


def noise_table(noise: pd.DataFrame) -> TextTable:
    """Each base against its twin."""
    names = {"setting": [name for _, name in with_settings(noise)]}
    speeds = {"base": "throughput_per_s", "twin": "twin_throughput_per_s"}
    return _ratio_table(noise, names, speeds, "twin / base")


def parity_table(parity: pd.DataFrame, *, narrow: bool = False) -> TextTable:
    """Each cell under Ray against the same cell under torchrun."""
    rows = with_settings(parity)
    names = {"cell": [_placed(row) for row, _ in rows], "setting": [name for _, name in rows]}
    speeds = {"torchrun": "control_throughput_per_s", "Ray": "throughput_per_s"}
    return _ratio_table(parity, names, {} if narrow else speeds, "Ray / torchrun")


def versus_table(versus: pd.DataFrame, *, narrow: bool = False) -> TextTable:
    """Each strategy against another on the same devices; ``narrow``, for a terminal: without their throughputs."""
    rows = with_settings(versus)
    names = {"first / second": [_pair(row) for row, _ in rows], "setting": [name for _, name in rows]}
    speeds = {"second": "other_throughput_per_s", "first": "throughput_per_s"}
    return _ratio_table(versus, names, {} if narrow else speeds, "ratio")


def _placed(row: Any) -> str:
    return f"{shown_strategy(row)} x{shown_devices(row)}"


def _pair(row: Any) -> str:
    """'ddp / dp x2 (emulated)'."""
    apart = shown_strategy(row).removeprefix(str(row["strategy"]))
    return f"{row['strategy']} / {row['other_strategy']} x{shown_devices(row)}{apart}"


def _ratio_table(
    rows: pd.DataFrame, names: Mapping[str, Sequence[str]], speeds: Mapping[str, str], ratio: str
) -> TextTable:
    """Two throughputs, by heading, and their ratio with its interval; rows whose interval excludes 1 are set off."""
    unit = rate_unit(rows)
    titles = (*(f"{name} ({unit})" for name in speeds), f"{ratio} (95 % interval)", "n")
    columns = (*(Heading(name) for name in names), *(Heading(title, True) for title in titles))
    lines = []
    for row, *named in zip(records(rows), *names.values(), strict=True):
        numbers = (*(speed(row[column]) for column in speeds.values()), _ratio(row), str(row["blocks"]))
        apart = row["emulated"] or row["oversubscribed"]
        lines.append(Line((*named, *numbers), "apart" if apart else "base" if _is(row["excludes_one"]) else ""))
    return TextTable(columns, tuple(lines))


def _ratio(row: Any) -> str:
    if pd.isna(row["ratio"]):
        return "not equivalent"
    if pd.isna(row["low"]):
        return f"{row['ratio']:.3f} (one block)"
    return with_ends("{:.3f}".format, row["ratio"], row["low"], row["high"])


def equivalence_table(equivalence: pd.DataFrame) -> TextTable:
    """Whether each strategy is equivalent to one device."""
    columns = (
        Heading("strategy"),
        Heading("model"),
        Heading("global batch", True),
        Heading("update differs by", True),
        Heading("verdict"),
    )
    rows = [
        Line(
            (
                f"{shown_strategy(row)} x{shown_devices(row)}",
                "" if pd.isna(row["model"]) else str(row["model"]),
                str(row["global_batch_size"]),
                "-" if pd.isna(row["difference"]) else f"{100 * row['difference']:.2g} %",
                "equivalent" if _is(row["equivalent"]) else str(row["reason"]),
            )
        )
        for row in records(equivalence)
    ]
    return TextTable(columns, tuple(rows))


def doubt_table(trials: pd.DataFrame) -> TextTable:
    """Each doubt with how many timed trials have it, and what it means."""
    timed = trials[trials["throughput_per_s"].notna() & (trials["outcome"] == "ok")]
    names = [name for text in timed["doubts"].fillna("") for name in str(text).split("; ") if name]
    rows = []
    for name, count in Counter(names).most_common():
        known = next((doubt for doubt in sorted(DOUBTS, key=len, reverse=True) if name.startswith(doubt)), None)
        rows.append(Line((name, f"{count} of {len(timed)}", DOUBTS[known].meaning if known else "")))
    return TextTable((Heading("doubt"), Heading("timed trials", True), Heading("what it means")), tuple(rows))


def ledger_table(ledger: pd.DataFrame) -> TextTable:
    """Where the run's time went, the largest part first."""
    levels = {"trial": "in trials", "group": "worker groups beside their trials", "run": "beside worker groups"}
    total = float(ledger["seconds"].sum())
    sums = ledger.groupby(["level", "part"], sort=False)["seconds"].sum().sort_values(ascending=False)
    rows = [
        Line((levels[row["level"]], row["part"], duration(row["seconds"]), f"{100 * row['seconds'] / total:.1f} %"))
        for row in records(sums.reset_index())
        if row["seconds"] >= 0.0005 * total
    ]
    columns = (Heading("where"), Heading("part"), Heading("time", True), Heading("of all", True))
    return TextTable(columns, tuple(rows))


def memory_table(cells: pd.DataFrame, ranks: pd.DataFrame, trials: pd.DataFrame) -> TextTable:
    """Peak memory of the fullest rank of each cell, and what of it is known."""
    columns = (
        Heading("setting"),
        Heading("strategy"),
        Heading("devices", True),
        Heading("peak", True),
        *([Heading("reserved", True)] if (reserved := bool(ranks["peak_reserved_bytes"].notna().any())) else []),
        Heading("parameters", True),
        Heading("gradients", True),
        Heading("optimizer", True),
        Heading("rest", True),
    )
    parts = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    keys = trials[trials["kind"] == "throughput"][["trial_id", "attempt", "cell_id"]]
    merged = ranks.merge(keys, on=["trial_id", "attempt"], how="inner").dropna(subset=["peak_memory_bytes"])
    fullest = {
        row["cell_id"]: row
        for row in records(merged.sort_values("peak_memory_bytes").drop_duplicates("cell_id", keep="last"))
    }
    rows = []
    for cell, name in with_settings(cells):
        rank = fullest.get(cell["cell_id"])
        if rank is None or pd.isna(rank["parameter_bytes"]):
            continue
        known = [float(rank[part]) for part in parts]
        peaks = [rank["peak_memory_bytes"], *([rank["peak_reserved_bytes"]] if reserved else [])]
        sizes = (_size(size) for size in (*peaks, *known, max(0.0, rank["peak_memory_bytes"] - sum(known))))
        rows.append(Line((name, shown_strategy(cell), str(cell["devices"]), *sizes)))
    return TextTable(columns, tuple(rows))


def _size(count: float) -> str:
    """'1.5 GiB', '79 KiB'."""
    if pd.isna(count):
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def _is(value: Any) -> bool:
    return not pd.isna(value) and bool(value)


def imprecise(scaling: pd.DataFrame) -> str:
    """A sentence on the intervals that are wider than the rule for blocks asks; empty where there are none."""
    asked = scaling[scaling["precise"].notna()]
    wide = [f"{_placed(row)}, {name}" for row, name in with_settings(asked) if not row["precise"]]
    if not wide:
        return ""
    some = "; ".join(wide[:NAMED]) + ("; ..." if len(wide) > NAMED else "")
    return f"{len(wide)} of {len(asked)} intervals are wider than throughput.blocks asks: {some}."


def belief_lines(noise: pd.DataFrame, trials: pd.DataFrame, scaling: pd.DataFrame) -> list[str]:
    """The noise floor, the wide intervals and the doubts in a line each, for the end of a run."""
    lines = []
    known = noise[noise["low"].notna()]
    if not known.empty:
        floors = ", ".join(f"{row['low']:.3f} to {row['high']:.3f}" for row in records(known))
        wrong = int(known["excludes_one"].fillna(False).sum())
        told = f" {wrong} of {len(known)} leave out 1, as one in twenty does by chance." if wrong else ""
        lines.append(f"Noise floor (the base against its twin, 95 %): {floors}.{told}")
    elif len(noise):
        lines.append("Noise floor: unknown, as one block has no interval.")
    if wide := imprecise(scaling):
        lines.append(wide)
    doubts = doubt_table(trials).rows
    if doubts:
        told = "; ".join(f"{line.cells[0]} ({line.cells[1]})" for line in doubts)
        lines.append(f"Doubts ({DOUBTFUL}), by timed trials: {told}.")
    return lines
