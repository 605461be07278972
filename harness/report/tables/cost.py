"""Text tables on the time of a step: compute, efficiency loss, communication, GPUs."""

from __future__ import annotations

import pandas as pd

from harness.analysis.waterfall import ROW_OF
from harness.config.strategy_traits import ALL_REDUCE, COLLECTIVES, EXCHANGE_CPU, SPARSE
from harness.plan.labels import devices_text
from harness.report.row import Row, is_missing, rows_of
from harness.report.tables.text import CELL, TextTable, decimal, flush_right, make_table, percent, size, words

share = decimal("{:.1f}", 100)
milliseconds = decimal("{:.2f}", 1000)


def compute_table(cells: pd.DataFrame) -> TextTable:
    """Return model FLOP/s of one device of each cell, relative to the device's peak."""

    def mfu(row: Row) -> str:
        if is_missing(row.achieved_flops_per_s):
            return f"not counted: {row.flops_reason}"
        return "no published peak" if is_missing(row.mfu) else percent(row.mfu)

    columns = (
        *CELL,
        ("GFLOP/s per device", "achieved_flops_per_s", decimal("{:,.3g}", 1e-9)),
        ("% of matmul peak", "of_measured_peak", percent),
        ("MFU", mfu, flush_right, "mfu"),
        ("compiling (s)", "compile_s", decimal("{:,.1f}")),
    )
    counted = cells[cells["achieved_flops_per_s"].notna() | cells["flops_reason"].notna()]
    return make_table(columns, rows_of(counted))


def waterfall_table(waterfall: pd.DataFrame, most: int = 1000) -> TextTable:
    """Return the efficiency loss of each cell on several devices by part; the shares of a cell add up to 100 %.

    At most ``most`` rows: the whole table is on disk.
    """

    def interval(row: Row) -> str:
        """Return the interval or, below 3 blocks, the range, marked as such."""
        if not is_missing(row.low):
            return f"{share(row.low)} to {share(row.high)} %"
        return f"n = {row.blocks}: {share(row.least)} to {share(row.most)} %" if (row.blocks or 0) > 1 else "-"

    columns = (
        ("cell", lambda row: row.label if row.part == "ideal" else "", words),
        ("part", lambda row: "ideal (efficiency)" if row.part == "ideal" else ROW_OF[row.part], words),
        ("ms of a step", "part_s", milliseconds),
        ("share", "share", decimal("{:.1f} %", 100)),
        ("95 % interval", interval, flush_right),
        ("n", "blocks", flush_right),
    )

    def kind(row: Row) -> str:
        return "base" if row.part == "ideal" else ""

    return make_table(columns, rows_of(waterfall), kind, most=most, every="tables/waterfall.csv", ordered=True)


def unexplained_table(trials: pd.DataFrame, waterfall: pd.DataFrame) -> TextTable:
    """Return the cells whose efficiency loss could not be explained, or not by all parts, each with the reason."""
    bad = trials[trials["explain_error"].notna() & (trials["outcome"] == "ok")].drop_duplicates("cell_id")
    failed = bad[["label"]].assign(reason=bad["explain_error"])
    unknown = waterfall.loc[(waterfall["part"] == "rest") & waterfall["reason"].notna(), ["label", "reason"]]
    return make_table((("cell", "label", words), ("reason", "reason", words)), rows_of(pd.concat([failed, unknown])))


def communication_table(waterfall: pd.DataFrame, trials: pd.DataFrame) -> TextTable:
    """Return ddp's exposed communication by difference, beside DDP's own timers."""
    columns = (
        ("setting", "setting", words),
        ("devices", devices_text, flush_right, "devices"),
        ("exposed, by difference (ms)", "part_s", milliseconds),
        ("of this CPU time (ms)", "cpu_s", milliseconds),
        ("exposed, DDP's timer (ms)", "exposed_s", milliseconds),
        ("first to last bucket, DDP's timer (ms)", "exchange_s", milliseconds),
    )
    exposed = waterfall[waterfall["part"] == COLLECTIVES.name]
    others = {name: rows.set_index("cell_id")["part_s"].to_dict() for name, rows in waterfall.groupby("part")}
    cpu_s, sparse_s = (exposed["cell_id"].map(others.get(name, {})).astype(float) for name in (EXCHANGE_CPU, SPARSE))
    exposed = exposed.assign(part_s=exposed["part_s"] + cpu_s.fillna(0.0) + sparse_s.fillna(0.0), cpu_s=cpu_s)
    timed = [
        (row.cell_id, *((times or {}).get(ALL_REDUCE) for times in (row.exposed_s, row.exchange_s)))
        for row in rows_of(trials)
    ]
    own = pd.DataFrame(timed, columns=["cell_id", "exposed_s", "exchange_s"]).groupby("cell_id").mean()
    return make_table(columns, rows_of(exposed.join(own, on="cell_id")))


def gpu_table(gpus: pd.DataFrame) -> TextTable:
    """Return NVML's readings of the GPUs of each cell, and the share of its step in which they are busy."""
    columns = (
        *CELL,
        ("busy in a step", "busy", percent),
        ("utilisation", "gpu_utilisation", percent),
        ("power per GPU (W)", "power_w", decimal("{:,.0f}")),
        ("lowest SM clock (% of maximum)", "sm_clock_fraction", percent),
        ("highest temperature (\N{DEGREE SIGN}C)", "temperature_c", decimal("{:.0f}")),
        ("throttled", lambda row: "not known" if is_missing(row.throttled) else row.throttled or "no", words),
        ("samples per joule", "samples_per_joule", decimal("{:,.3g}")),
        ("n", "blocks", flush_right),
    )
    return make_table(columns, rows_of(gpus))


def device_memory_table(device_memory: pd.DataFrame) -> TextTable:
    """Return the memory of the first GPU of each cell on several against that of its others."""
    columns = (
        *CELL,
        ("GPU 0", "allocated_bytes", size),
        ("others, smallest", "least", size),
        ("others, largest", "most", size),
        ("GPU 0 / largest other", lambda row: row.allocated_bytes / row.most, decimal("{:.2f}")),
    )
    rows = []
    for _, gpus in device_memory.groupby("cell_id", sort=False):
        first, *others = rows_of(gpus)
        if peaks := [row.allocated_bytes for row in others]:
            rows.append(Row(first, least=min(peaks), most=max(peaks)))
    return make_table(columns, rows)
