"""The rules of the verdict: which statements the tables of a run support, each with its number and interval.

A rule is a function of the tables and of the leading cells. It returns nothing if its evidence is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from statistics import median

import pandas as pd

from harness.analysis.common import Record, columns_of, grouped, is_no_claim, rows_of, work_of
from harness.analysis.stats import CLEAR, holm_of_known, word
from harness.analysis.verdict import Statement, TableFailed, Tables
from harness.analysis.verdict.trust import NO_CHOICES, trust
from harness.plan.checks import SCRIPT
from harness.plan.feasibility import IMPOSSIBLE
from harness.record.schema import VERDICT

ENOUGH = 0.95
"""The share of the best throughput that a smaller batch must reach to be preferred."""
ANSWERED = {*IMPOSSIBLE, "precise", "not_measured"}
"""The reasons to skip that leave no question open: no machine can run it, it is precise, or its trial has failed."""
CUT_SHORT = {"time_up"}
"""The reasons to skip that the same command can take up again on the same machine."""
RANK = r" on rank \d+: "
"""What stands in a reason between the type of an error and its message."""
RANKED_SEEDS = 5
"""Trainings are ranked by their time to a target from this number of seeds on, as MLPerf Training asks for."""
PLACES = ("nodes", "device_ids")


def fastest(tables: Tables) -> list[Statement]:
    """State the setting to use for each model, data set and precision, on the most devices that were measured."""
    return [_fastest("fastest", most) for *_, most in _by_devices(tables)]


def fewer_devices(tables: Tables) -> list[Statement]:
    """State the fastest setting on each smaller number of devices, above one, that has several settings."""
    smaller = [cells for *fewer, _ in _by_devices(tables) for cells in fewer if cells[0].devices > 1]
    return [_fastest("fewer", cells) for cells in smaller if len(cells) > 1]


def _by_devices(tables: Tables) -> list[list[list[Record]]]:
    """Return the rows of each model, data set and precision by their number of devices, the most last."""
    compared = grouped(rows_of(tables["leaders"]), work_of)
    by_number = (grouped(rows, lambda row: int(row.devices)) for rows in compared.values())
    return [[rows for _, rows in sorted(of.items())] for of in by_number]


def _fastest(topic: str, cells: Sequence[Record]) -> Statement:
    """Return the fastest setting on a number of devices.

    Among the fastest settings of all batches: the smallest per-device batch within ENOUGH of the highest throughput.
    ``others``: the settings of that batch that cannot be told apart from it; ``reasons``: those that were not tested,
    since they have fewer than three blocks in common with it; ``subject``: set if there is no other of that batch.
    """
    leading = [row for row in cells if row.cell_id == row.leader_id]
    best = max(leading, key=lambda row: row.throughput_per_s)
    enough = [row for row in leading if row.throughput_per_s >= ENOUGH * best.throughput_per_s]
    chosen = min(enough, key=lambda row: (row.per_device_batch_size, -row.throughput_per_s))
    beside = [row for row in cells if row.leader_id == chosen.cell_id and row.cell_id != chosen.cell_id]
    return Statement(
        topic,
        "smallest batch" if chosen is not best else "fastest",
        "leaders",
        chosen.cell_id,
        others=tuple(str(row.cell_id) for row in beside if row.tied),
        devices=int(chosen.devices),
        value=chosen.throughput_per_s,
        low=chosen.throughput_low,
        high=chosen.throughput_high,
        n=chosen.blocks,
        subject=None if beside else "alone",
        reasons=tuple(str(row.cell_id) for row in beside if row.tied is None),
    )


def efficiencies(tables: Tables, leading: Sequence[Record]) -> list[Statement]:
    """State the efficiency of each leading strategy on every number of devices above its base's, the most last."""
    families = dict(zip(tables["trials"]["cell_id"], tables["trials"]["family_id"], strict=True))
    by_family: dict[object, list[Record]] = {}
    for row in sorted(rows_of(tables["scaling"]), key=lambda row: int(row.devices)):
        if row.devices > row.base_devices and not pd.isna(row.efficiency) and pd.isna(row.excluded):
            by_family.setdefault(families.get(row.cell_id), []).append(row)
    return [
        Statement(
            "scaling",
            "efficiency",
            "scaling",
            row.cell_id,
            devices=row.devices,
            value=row.efficiency,
            low=row.efficiency_low,
            high=row.efficiency_high,
            n=row.blocks,
        )
        for leader in leading
        for row in _one_each(by_family.get(families.get(leader.cell_id), []), leader)
    ]


def _one_each(rows: Sequence[Record], leader: Record) -> list[Record]:
    """Return one row for each number of devices: on the leader's nodes and GPUs if there is one, or on fewest nodes."""
    found: dict[int, Record] = {}
    own = columns_of(leader, *PLACES)
    for row in sorted(rows, key=lambda row: (*(getattr(row, name) != own[name] for name in PLACES), int(row.nodes))):
        found.setdefault(int(row.devices), row)
    return [found[devices] for devices in sorted(found)]


def training(tables: Tables) -> list[Statement]:
    """State which training of each model reached the target first, by the median over its seeds.

    ``others``: cells whose range over seeds overlaps; those of all cells if one has fewer than RANKED_SEEDS, with which
    nothing is ranked. Without a target nothing is compared. Trainings of rehearsals and of cells that are not
    equivalent are left out.
    """
    rows = [row for row in rows_of(tables["convergence"]) if pd.isna(row.excluded) and not is_no_claim(vars(row))]
    found = []
    for of_work in grouped(rows, lambda row: work_of(row, "global_batch_size")).values():
        seeds = grouped(of_work, lambda row: str(row.cell_id))
        # the time of a seed that missed the target is not known
        reached = {cell_id: group for cell_id, group in seeds.items() if all(row.reached for row in group)}
        times = {cell_id: [float(row.time_to_target_s) for row in group] for cell_id, group in reached.items()}
        if times:
            first = min(times, key=lambda cell_id: median(times[cell_id]))
            own, row = times[first], seeds[first][0]
            few = any(len(values) < RANKED_SEEDS for values in times.values())
            rest = [cell_id for cell_id, values in times.items() if cell_id != first]
            overlap = [cell_id for cell_id in rest if few or min(times[cell_id]) <= max(own)]
            found.append(
                Statement(
                    "training",
                    "few seeds" if few else "reached",
                    "convergence",
                    first,
                    others=tuple(overlap),
                    devices=row.devices,
                    value=median(own),
                    low=min(own),
                    high=max(own),
                    n=min(map(len, times.values())) if few else len(own),
                    subject=row.target,
                )
            )
        elif any(row.reached is False for row in of_work):
            (cell_id, group), *_ = seeds.items()
            missed = Statement("training", "missed", "convergence", cell_id, subject=group[0].target, n=len(group))
            found.append(missed)
    return found


def equivalence(tables: Tables) -> Iterator[Statement]:
    """State which strategies do not train as one device does, and for which it is not known; else that all do."""
    checks = rows_of(tables["equivalence"])
    for row in checks:
        if row.equivalent is not True:
            code = "unknown" if row.equivalent is None else "not equivalent"
            yield Statement(
                "equivalence",
                code,
                "equivalence",
                row.cell_id,
                devices=row.devices,
                value=row.difference,
                subject=row.reason,
            )
    if checks and all(row.equivalent for row in checks):
        known = ("gradient_difference", "first_difference", "difference")
        largest = max(float(value) for row in checks for name in known if (value := getattr(row, name)) is not None)
        yield Statement("equivalence", "equivalent", "equivalence", value=largest, n=len(checks))


def failures(tables: Tables) -> Iterator[Statement]:
    """State the trials that failed, by outcome and reason, and the doctor's errors."""
    last = tables["trials"].drop_duplicates("trial_id", keep="last")
    bad = last[~last["outcome"].isin(["ok", "skipped"])]
    cause = bad["reason"].str.replace(RANK, ": ", n=1, regex=True)  # one error that several ranks report
    for (outcome, _), rows in bad.groupby(["outcome", cause], sort=False, dropna=False):
        cells = tuple(dict.fromkeys(rows["cell_id"].astype(str)))
        subject, reasons = str(outcome), tuple(map(str, rows["reason"].dropna().unique()))
        yield Statement(
            "failed", "trials", "failed", cells[0], cells[1:], n=len(rows), subject=subject, reasons=reasons
        )
    found = tables["findings"]
    errors = found[(found["severity"] == "error") & (found["check"] != SCRIPT)]  # that of a script is in equivalence()
    for check, rows in errors.groupby("check", sort=False):
        seen = tuple(dict.fromkeys(rows["seen"].astype(str)))
        known = rows["cell_id"].dropna().astype(str).tolist()
        cell_id = known[0] if known else None
        yield Statement("failed", "preflight", "preflight", cell_id, subject=str(check), reasons=seen, n=len(rows))


def incomplete(tables: Tables) -> Iterator[Statement]:
    """State what was to be measured and has no result: trials that never ended, cells left out, cells that failed."""
    if len(tables["missing"]):
        yield Statement("incomplete", "missing", "missing", n=len(tables["missing"]))
    last = tables["trials"].drop_duplicates("trial_id", keep="last")
    late = last[(last["outcome"] == "skipped") & last["skip_code"].isin(CUT_SHORT)]
    for code, rows in late.groupby("skip_code", sort=False):
        reasons = (str(rows["reason"].iloc[0]),)
        yield Statement("incomplete", str(code), "outcomes", n=rows["cell_id"].nunique(), reasons=reasons)
    tried = (last["outcome"] != "skipped") | (last["skip_code"] == "doctor")
    asked = last[(last["kind"] != "diagnostic") & tried]
    measured = asked["cell_id"][asked["outcome"] == "ok"]
    failed = asked["cell_id"][~asked["cell_id"].isin(measured)].drop_duplicates().tolist()
    if failed:
        yield Statement("incomplete", "failed", "failed", failed[0], tuple(failed[1:]), n=len(failed))


def open_questions(tables: Tables) -> Iterator[Statement]:
    """State the cells that were asked for and could not be run here."""
    last = tables["trials"].drop_duplicates("trial_id", keep="last")
    skipped = last[(last["outcome"] == "skipped") & ~last["skip_code"].isin(ANSWERED | CUT_SHORT)]
    for code, rows in skipped.groupby("skip_code", sort=False):
        counts = sorted({int(value) for value in rows["devices"]})
        yield Statement(
            "open",
            str(code),
            "outcomes",
            n=rows["cell_id"].nunique(),
            subject=", ".join(map(str, counts)),
            reasons=(str(rows["reason"].iloc[0]),),
        )


DATA = "waiting for data"
"""The part of the step that has two measurements: against one device in the waterfall, as a whole in the phases."""
WAITS = 0.10
"""The share of a step spent waiting for data from which all of it is a cause, whatever the number of devices."""
WORTH_NAMING = 0.01
"""The least share of a step that is named, lost or saved."""
UNCLEAR, NO_INTERVAL, SAVED = "unclear", "no interval", "saved"
WHOLE_WAIT = "figure-phases"
"""The evidence of a wait for data that includes what one device waits."""


def causes(tables: Tables, leading: Sequence[Record]) -> list[Statement]:
    """State the parts that take time of each leading cell's step, the largest first, and those that save some last.

    The parts of its waterfall, what is not explained among them. The wait for data is that of the phases from WAITS,
    since the waterfall has only what it takes more than on one device. ``code``: SAVED for a part that is shorter than
    on one device, which the others add up with to what is lost; else whether the interval excludes 0.
    """
    shares = (row for row in rows_of(tables["waterfall"]) if row.part != "ideal" and abs(row.share) >= WORTH_NAMING)
    parts = grouped(shares, lambda row: str(row.cell_id))
    phases = {row.cell_id: row for row in rows_of(tables["phases"]) if not pd.isna(row.waits) and row.waits >= WAITS}
    found: list[Statement] = []
    for leader in leading:
        cell_id, waits = leader.cell_id, phases.get(leader.cell_id)
        of_cell = [
            _cause(cell_id, row.part, "figure-waterfall", row)
            for row in parts.get(cell_id, [])
            if not (waits and row.part == DATA)
        ]
        if waits:
            whole = {"share": waits.waits, "low": waits.waits_low, "high": waits.waits_high}
            of_cell.insert(0, _cause(cell_id, DATA, WHOLE_WAIT, Record({**vars(waits), **whole})))
        if any((one.value or 0.0) > 0 for one in of_cell):
            found += sorted(of_cell, key=lambda one: -(one.value or 0.0))
    return found


def _cause(cell_id: str, part: str, evidence: str, row: Record) -> Statement:
    code: str = UNCLEAR
    if pd.isna(row.low):
        code = NO_INTERVAL if row.share > 0 else SAVED
    elif row.low > 0 or row.high < 0:
        code = CLEAR if row.low > 0 else SAVED
    return Statement(
        "loss",
        code,
        evidence,
        cell_id,
        devices=row.devices,
        value=row.share,
        low=row.low,
        high=row.high,
        n=row.blocks,
        subject=part,
        reasons=(row.reason,) if part == "rest" and row.reason else (),
    )


FASTER, SLOWER, TOO_FEW = "faster", "slower", "too few blocks to say"


def choices(tables: Tables, leading: Sequence[Record]) -> list[Statement]:
    """State of each choice that the file varies whether one value is faster than another, all else equal.

    In the cells of the leading settings; if none of them has the choice, in the fastest pair on the most devices.
    A difference is claimed if the p-value of the paired ratio, adjusted by Holm over these statements, makes it clear.
    """
    rows = [row for row in rows_of(tables["versus"]) if row.axis not in NO_CHOICES and not pd.isna(row.ratio)]
    rows = [row for row in rows if pd.isna(row.excluded) and not is_no_claim(vars(row))]

    def size(row: Record) -> tuple[int, float]:
        return row.devices, max(row.throughput_per_s, row.other_throughput_per_s)

    chosen = {leader.cell_id for leader in leading}
    stated: list[Record] = []
    for axis in dict.fromkeys(str(row.axis) for row in rows):
        mine = [row for row in rows if row.axis == axis]
        stated += [row for row in mine if chosen & {row.cell_id, row.other_id}] or [max(mine, key=size)]
    p_values = holm_of_known([None if pd.isna(row.p_value) else float(row.p_value) for row in stated])
    return [
        Statement(
            "choice",
            _code(row, p_value, tables.significance),
            "versus",
            row.cell_id,
            others=(row.other_id,),
            devices=row.devices,
            value=row.ratio,
            low=row.low,
            high=row.high,
            p_value=p_value,
            n=row.blocks,
            subject=f"{row.axis} {row.value} / {row.other_value}",
        )
        for row, p_value in zip(stated, p_values, strict=True)
    ]


def _code(row: Record, p_value: float | None, significance: float) -> str:
    if p_value is None:
        return TOO_FEW
    if (sure := word(p_value, significance)) != CLEAR:
        return sure
    return FASTER if row.ratio > 1 else SLOWER


def statements(tables: Tables) -> list[Statement]:
    """Return the statements of the verdict, in the order in which they are read.

    A table that failed costs the statements that need it; the last statement names such tables.
    """
    failed: dict[str, None] = {}

    def follow(rule: Callable[..., Iterable[Statement]], *leading: Sequence[Record]) -> list[Statement]:
        try:
            return [*rule(tables, *leading)]
        except TableFailed as error:
            failed[error.name] = None
            return []

    to_use = follow(fastest)
    chosen = {statement.cell_id for statement in to_use}
    leading = [row for row in rows_of(tables["leaders"]) if row.cell_id in chosen] if chosen else []
    found = [*follow(incomplete), *to_use, *follow(fewer_devices), *follow(choices, leading), *follow(training)]
    for of_leading in (efficiencies, causes, trust):
        found += follow(of_leading, leading)
    for of_run in (equivalence, failures, open_questions):
        found += follow(of_run)
    return [*found, *([Statement("failed", "tables", "", n=len(failed), reasons=tuple(failed))] if failed else [])]


def verdict(tables: Tables) -> pd.DataFrame:
    """Return the statements of the verdict as a table."""
    return VERDICT.frame(asdict(statement) for statement in statements(tables))
