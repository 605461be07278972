"""The rules of the verdict: which statements the tables of a run support, each with its number and interval.

A rule is a function of the tables and of the leading cells. It returns nothing if its evidence is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

import pandas as pd

from harness.analysis.common import Row, by_cell, columns_of, grouped, is_no_claim, rows_of, work_of
from harness.analysis.doubts import doubt_of
from harness.analysis.improvements import CONFIRMATION, CONFIRMING_BLOCKS, SCREENING
from harness.analysis.ratios import ALL_THREADS, Paired, paired, with_twins, within
from harness.analysis.stats import CLEAR, EQUAL_WITHIN, LEAST_BLOCKS, OPEN, SIGNIFICANCE, deciding_blocks, holm, word
from harness.analysis.verdict import Statement, TableFailed, Tables
from harness.analysis.waterfall import WORTH_NAMING
from harness.config.axes import BATCHES, SIZES
from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.plan.checks import SCRIPT
from harness.plan.comparison import backend_of
from harness.plan.feasibility import IMPOSSIBLE

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
NO_CHOICES = frozenset({*SIZES, "strategy", ALL_THREADS})
"""The axes that the other statements are about; every other axis, and every option, is a choice. So is the batch, after
all others, for which no blocks are asked: about equal batches would ask for them without end."""
GOOD_BLOCKS = 5
HALFWIDTH = EQUAL_WITHIN
"""The half-width of an interval within which two settings are about equal: no further blocks are asked for."""


def settings(tables: Tables) -> list[Statement]:
    """State the setting to use for each model, data set and precision, on the most devices that were measured.

    Then, of topic ``fewer``, the fastest on each smaller number of devices, above one, that has several settings.
    """
    compared = grouped(rows_of(tables["leaders"]), work_of).values()
    by_devices = [sorted(grouped(rows, lambda row: int(row.devices)).items()) for rows in compared]
    smaller = [cells for *fewer, _ in by_devices for devices, cells in fewer if devices > 1 and len(cells) > 1]
    most = [_fastest("fastest", cells) for *_, (_, cells) in by_devices]
    return [*most, *(_fastest("fewer", cells) for cells in smaller)]


def _fastest(topic: str, cells: Sequence[Row]) -> Statement:
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
    code, subject = "smallest batch" if chosen is not best else "fastest", None if beside else "alone"
    tied = tuple(str(row.cell_id) for row in beside if row.tied)
    untested = tuple(str(row.cell_id) for row in beside if row.tied is None)
    return Statement(topic, code, "leaders", chosen.cell_id, tied, chosen, chosen.blocks, subject, untested)


def efficiencies(tables: Tables, leading: Sequence[Row]) -> list[Statement]:
    """State the efficiency of each leading strategy on every number of devices above its base's, the most last.

    Of several cells on as many devices that of the leader's nodes and GPUs, or else on the fewest nodes.
    """
    families = dict(zip(tables["trials"]["cell_id"], tables["trials"]["family_id"], strict=True))
    larger = (row for row in rows_of(tables["scaling"]) if row.devices > row.base_devices)
    claims = [row for row in larger if not pd.isna(row.efficiency) and pd.isna(row.excluded)]
    found = []
    for leader in leading:
        own = columns_of(leader, "nodes", "device_ids")
        rows = [row for row in claims if families.get(row.cell_id) == families.get(leader.cell_id)]
        rows.sort(key=lambda row: (row.devices, *(getattr(row, name) != own[name] for name in own), row.nodes))
        for row, *_ in grouped(rows, lambda row: int(row.devices)).values():
            found.append(Statement("scaling", "efficiency", "scaling", row.cell_id, facts=row, n=row.blocks))
    return found


def training(tables: Tables) -> list[Statement]:
    """State which training of each model reached the target first, by the median over its seeds.

    ``others``: cells whose range over seeds overlaps; those of all cells if one has fewer than RANKED_SEEDS, with which
    nothing is ranked. Without a target nothing is compared. Trainings of rehearsals and of cells that are not
    equivalent are left out.
    """
    rows = [row for row in rows_of(tables["convergence"]) if pd.isna(row.excluded) and not is_no_claim(row)]
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
            span = {"time_to_target_s": median(own), "least_s": min(own), "most_s": max(own)}
            code, n = ("few seeds", min(map(len, times.values()))) if few else ("reached", len(own))
            facts = Row({"devices": row.devices, **span})
            found.append(Statement("training", code, "convergence", first, tuple(overlap), facts, n, row.target))
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
            yield Statement("equivalence", code, "equivalence", row.cell_id, facts=row, subject=row.reason)
    if checks and all(row.equivalent for row in checks):
        known = ("gradient_difference", "first_difference", "difference")
        largest = max(float(value) for row in checks for name in known if (value := getattr(row, name)) is not None)
        facts = Row({"difference": largest})
        yield Statement("equivalence", "equivalent", "equivalence", facts=facts, n=len(checks))


def _last_attempts(tables: Tables) -> pd.DataFrame:
    return tables["trials"].drop_duplicates("trial_id", keep="last")


def failures(tables: Tables) -> Iterator[Statement]:
    """State the trials that failed, by outcome and reason, and the doctor's errors."""
    last = _last_attempts(tables)
    found = tables["findings"]
    errors = found[(found["severity"] == "error") & (found["check"] != SCRIPT)]  # a script's is in equivalence()
    bad = last[~last["outcome"].isin(["ok", "skipped"])]
    cause = bad["reason"].str.replace(RANK, ": ", n=1, regex=True)  # one error that several ranks report
    seen_in = {cell_id: " ".join(rows["seen"].astype(str)) for cell_id, rows in errors.groupby("cell_id")}
    examined = (bad["purpose"] == "doctor").fillna(False)  # whose error is told by its finding, with the place
    pairs = zip(bad["cell_id"], cause, examined, strict=True)
    told = [bool(doctor) and not pd.isna(why) and why in seen_in.get(cell_id, "") for cell_id, why, doctor in pairs]
    untold = pd.Series([not each for each in told], bad.index, dtype=bool)
    bad, cause = bad[untold], cause[untold]
    for (outcome, _), rows in bad.groupby(["outcome", cause], sort=False, dropna=False):
        first, *others = dict.fromkeys(rows["cell_id"].astype(str))
        reasons = tuple(map(str, rows["reason"].dropna().unique()))
        yield Statement(
            "failed", "trials", "failed", first, (*others,), n=len(rows), subject=str(outcome), reasons=reasons
        )
    for check, rows in errors.groupby("check", sort=False):
        seen = tuple(dict.fromkeys(rows["seen"].astype(str)))
        alike = rows[rows["seen"].astype(str) == seen[0]]
        cells = [*dict.fromkeys(alike["cell_id"].dropna().astype(str))]
        cell_id = next(iter(cells), None)
        yield Statement(
            "failed", "preflight", "preflight", cell_id, (*cells[1:],), n=len(rows), subject=str(check), reasons=seen
        )


def incomplete(tables: Tables) -> Iterator[Statement]:
    """State what was to be measured and has no result: trials that never ended, cells left out, cells that failed."""
    if len(tables["missing"]):
        yield Statement("incomplete", "missing", "missing", n=len(tables["missing"]))
    last = _last_attempts(tables)
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
    last = _last_attempts(tables)
    skipped = last[(last["outcome"] == "skipped") & ~last["skip_code"].isin(ANSWERED | CUT_SHORT)]
    measured = last["cell_id"][(last["outcome"] == "ok") & (last["kind"] != "diagnostic")]
    skipped = skipped[(skipped["skip_code"] != "doctor") | skipped["cell_id"].isin(measured)]  # others are incomplete
    for code, rows in skipped.groupby("skip_code", sort=False):
        devices = ", ".join(map(str, sorted({int(value) for value in rows["devices"]})))
        n, reasons = rows["cell_id"].nunique(), (str(rows["reason"].iloc[0]),)
        yield Statement("open", str(code), "outcomes", n=n, subject=devices, reasons=reasons)


def improved(tables: Tables) -> Iterator[Statement]:
    """State of each cell that ``--improve`` was to improve what was tried, and whether the best of it is confirmed.

    ``subject``: the changes; ``n``: the number of changes that were tried alone; ``facts``: the row of the last step.
    """
    for cell_id, rows in grouped(rows_of(tables["improvements"]), lambda row: str(row.improved_id)).items():
        tried = [row for row in rows if row.step == SCREENING]  # those that were measured, or failed
        last = next((row for row in rows if row.step == CONFIRMATION), None)
        wall_s = sum({row.step: row.wall_s for row in rows}.values())
        if last is None:
            code = "unfinished" if any(row.kept for row in rows) else "no option helped"
            yield Statement("improved", code, "improvements", cell_id, facts=Row({"wall_s": wall_s}), n=len(tried))
            continue
        few = pd.isna(last.ratio) or last.blocks < CONFIRMING_BLOCKS
        open_yet = few and pd.isna(last.excluded) and pd.isna(last.reason)
        code = "confirmed" if last.kept else "unfinished" if open_yet else "not confirmed"
        facts = Row({**last, "wall_s": wall_s})
        reasons = tuple(str(why) for why in (last.excluded, last.reason) if not pd.isna(why))
        others = (str(last.cell_id),)
        yield Statement("improved", code, "improvements", cell_id, others, facts, len(tried), last.changes, reasons)


DATA = "waiting for data"
"""The part of the step that has two measurements: against one device in the waterfall, as a whole in the phases."""
WAITS = 0.10
"""The share of a step spent waiting for data from which all of it is a cause, whatever the number of devices."""
HOST = "an idle GPU (bound by the host)"
"""The part of a step in which a GPU runs nothing although it waits for no data: the host launches too slowly."""
HOST_BOUND = 0.20
"""The share of a step from which this is a cause: profile and timed steps are not the same steps."""
ESTIMATED = "estimated from one profile; other parts may be some of it"
UNCLEAR, NO_INTERVAL, SAVED = "unclear", "no interval", "saved"
WHOLE_WAIT = "figure-phases"
"""The evidence of a wait for data that includes what one device waits."""


def causes(tables: Tables, leading: Sequence[Row]) -> list[Statement]:
    """State the parts that take time of each leading cell's step, the largest first, and those that save some last.

    The parts of its waterfall, what is not explained among them. The wait for data is that of the phases from WAITS,
    since the waterfall has only what it takes more than on one device; the waterfall's if it is longer, as that of one
    rank for which the others wait is: the phases are means over ranks. A GPU that is idle without waiting for data is
    bound by the host: from HOST_BOUND, and after the parts that are measured, since some of these may leave it idle.
    ``code``: SAVED for a part that is shorter than on one device, which the others add up with to what is lost; else
    whether the interval excludes 0.
    """
    shares = (row for row in rows_of(tables["waterfall"]) if row.part != "ideal" and abs(row.share) >= WORTH_NAMING)
    parts = grouped(shares, lambda row: str(row.cell_id))
    known = {row.cell_id: row for row in rows_of(tables["phases"]) if not pd.isna(row.waits)}
    phases = {cell_id: row for cell_id, row in known.items() if row.waits >= WAITS}
    busy = _busy(tables)
    found: list[Statement] = []
    for leader in leading:
        cell_id, waits = leader.cell_id, phases.get(leader.cell_id)
        if waits and any(row.part == DATA and row.share >= waits.waits for row in parts.get(cell_id, [])):
            waits = None
        known_parts = (row for row in parts.get(cell_id, []) if not (waits and row.part == DATA))
        of_cell = [_cause(cell_id, row.part, "figure-waterfall", row) for row in known_parts]
        if waits:
            whole = {"share": waits.waits, "low": waits.waits_low, "high": waits.waits_high}
            of_cell.insert(0, _cause(cell_id, DATA, WHOLE_WAIT, Row({**waits, **whole})))
        of_cell.sort(key=lambda one: -one.facts.share)
        idle = 1 - busy[cell_id] - known[cell_id].waits if cell_id in busy and cell_id in known else 0.0
        if idle >= HOST_BOUND:
            facts, why = Row({"share": idle, "low": None, "high": None}), (ESTIMATED,)
            host = Statement("loss", NO_INTERVAL, "gpus", cell_id, facts=facts, n=1, subject=HOST, reasons=why)
            of_cell.insert(sum(one.facts.share > 0 for one in of_cell), host)
        if any(one.facts.share > 0 for one in of_cell):
            found += of_cell
    return found


def _busy(tables: Tables) -> dict[str, float]:
    """Return the share of a step in which the least busy GPU of a cell runs something, if the host could be to blame.

    Not of dp, whose replicas wait for each other, nor of exchanges by gloo, which the host makes; of strategies of the
    user's own nothing is known.
    """
    busy = {str(row.cell_id): float(row.busy) for row in rows_of(tables["gpus"]) if not pd.isna(row.busy)}
    trials = rows_of(tables["trials"]) if busy else []
    cells = {str(row.cell_id): row for row in trials}

    def launches(row: Row) -> bool:
        traits = BUILTIN_TRAITS.get(row.strategy)
        return bool(traits and not traits.replicates) and (row.devices == 1 or backend_of(row) == "nccl")

    return {cell_id: share for cell_id, share in busy.items() if cell_id in cells and launches(cells[cell_id])}


def _cause(cell_id: str, part: str, evidence: str, row: Row) -> Statement:
    code: str = UNCLEAR
    if pd.isna(row.low):
        code = NO_INTERVAL if row.share > 0 else SAVED
    elif row.low > 0 or row.high < 0:
        code = CLEAR if row.low > 0 else SAVED
    reasons = () if pd.isna(getattr(row, "reason", None)) else (row.reason,)  # the phases have none
    return Statement("loss", code, evidence, cell_id, facts=row, n=row.blocks, subject=part, reasons=reasons)


AT_INGEST = 0.9
"""From this part of the ingest alone on, a training is as fast as its batches arrive."""


def ingests(tables: Tables) -> list[Statement]:
    """State of each training by a loop whether the ingest alone is faster, and its ratio to the ingest alone."""
    units = dict(zip(tables["trials"]["cell_id"], tables["trials"]["unit"], strict=True))
    versus = rows_of(tables["versus"])
    rows = (row for row in versus if not pd.isna(row.ingest) and row.ingest and row.value == "train")
    found = []
    for row in rows:
        if pd.isna(row.ratio) or units.get(row.cell_id) != units.get(row.other_id):
            continue
        code = NO_INTERVAL if pd.isna(row.low) else "bottleneck" if row.low >= AT_INGEST else OPEN
        if code == OPEN and row.high < AT_INGEST:
            code = "no bottleneck"
        found.append(Statement("ingest", code, "versus", row.cell_id, (row.other_id,), row, row.blocks))
    return found


FASTER, SLOWER, TOO_FEW = "faster", "slower", "too few blocks to say"


def choices(tables: Tables, leading: Sequence[Row]) -> list[Statement]:
    """State of each choice that the file varies whether one value is faster than another, all else equal.

    In the cells of the leading settings; if none of them has the choice, in the fastest pair on the most devices.
    A difference is claimed if the p-value of the paired ratio, adjusted by Holm over these statements, makes it clear;
    what is claimed comes first.
    """
    others = NO_CHOICES - {*BATCHES}
    rows = [row for row in rows_of(tables["versus"]) if row.axis not in others and not pd.isna(row.ratio)]
    rows = [row for row in rows if pd.isna(row.excluded) and not is_no_claim(row)]

    def size(row: Row) -> tuple[int, float]:
        return row.devices, max(row.throughput_per_s, row.other_throughput_per_s)

    chosen = {leader.cell_id for leader in leading}
    stated: list[Row] = []
    for axis in sorted(dict.fromkeys(str(row.axis) for row in rows), key=lambda axis: axis in BATCHES):
        mine = [row for row in rows if row.axis == axis]
        stated += [row for row in mine if chosen & {row.cell_id, row.other_id}] or [max(mine, key=size)]
    p_values = holm([None if pd.isna(row.p_value) else float(row.p_value) for row in stated])
    found = []
    for row, p_value in zip(stated, p_values, strict=True):
        code = TOO_FEW if p_value is None else word(p_value, tables.significance)
        if code == CLEAR:
            code = FASTER if row.ratio > 1 else SLOWER
        facts, subject = Row(row, p_adjusted=p_value), f"{row.axis} {row.value} / {row.other_value}"
        found.append(Statement("choice", code, "versus", row.cell_id, (row.other_id,), facts, row.blocks, subject))
    return sorted(found, key=lambda one: one.code not in (FASTER, SLOWER))


def trust(tables: Tables, leading: Sequence[Row]) -> list[Statement]:
    """State the trust in the leading cells and their bases: low, medium or high, with the reasons and further blocks.

    One statement for the leading cells with the same level for the same reasons; ``others``: all of them but the first.
    ``n``: blocks to add to decide what is open: the ratios to the base, to settings that cannot be told apart and to
    the other value of a choice, by their spread and mean so far; at least up to GOOD_BLOCKS. Blocks are added to the
    whole run, so that only the statement that needs most has them.
    """
    bases = {row.cell_id: row.base_id for row in rows_of(tables["scaling"])}
    pairs = [(row.cell_id, row.other_id) for row in rows_of(tables["versus"]) if row.axis not in NO_CHOICES]
    pairs += [(row.cell_id, row.leader_id) for row in rows_of(tables["leaders"]) if row.tied is not False]
    cells = by_cell(rows_of(with_twins(tables["trials"])))
    alike: dict[tuple[str, tuple[str, ...]], dict[str, int]] = {}
    for leader in leading:
        own, base_id = leader.cell_id, bases.get(leader.cell_id)
        compared = [(own, base_id), *(pair for pair in pairs if own in pair)]
        rows = [(cells.get(one), cells.get(other or "")) for one, other in compared if one != other]
        found = [pair for first, second in rows if first and second and (pair := paired(first, second)).ratios]
        further = _further_blocks(tables, found, int(leader.blocks))
        alike.setdefault(_level(tables, leader, base_id, found), {})[own] = further
    needed = {level: max(further.values()) for level, further in alike.items()}
    most = max(needed, key=lambda level: needed[level], default=None)
    statements, subject = list[Statement](), "fixed" if tables.look else "rule"
    for (level, reasons), (first, *others) in alike.items():
        n = needed[level, reasons] if (level, reasons) == most else 0
        statements.append(Statement("trust", level, "noise", first, (*others,), n=n, subject=subject, reasons=reasons))
    return statements


def _level(tables: Tables, leader: Row, base_id: str | None, pairs: Sequence[Paired]) -> tuple[str, tuple[str, ...]]:
    """Return the level of trust in a leading cell, and the reasons why it is no higher."""
    noise = rows_of(tables["noise"])
    twins = zip(noise, holm([None if pd.isna(row.p_value) else row.p_value for row in noise]), strict=True)
    tests = [p_value for row, p_value in twins if row.cell_id == base_id and p_value is not None]
    doubted = [row for row in rows_of(tables["cells"]) if row.cell_id in (leader.cell_id, base_id)]
    counted = [doubt for row in doubted for doubt in row.doubts]
    low = [f"doubt: {doubt.name}" for doubt in counted if doubt.repeats and not doubt_of(doubt.name).widens]
    own = [row for row in rows_of(tables["scaling"]) if row.cell_id == leader.cell_id]
    if leader.cell_id != base_id and any(row.equivalence in (None, "unknown") for row in own):
        low.append("equivalence")
    low += ["differs"] if any(p_value <= SIGNIFICANCE for p_value in tests) else []
    if pairs and (found := pairs[0].disagreement):  # of the ratio to the base
        low.append(f"invocations: {found[0]:.2f}, then {found[1]:.2f}")
    low += ["blocks"] if leader.blocks < LEAST_BLOCKS else []
    not_high = ["script"] if any(row.equivalence == "connected" for row in own) else []
    not_high += ([] if tests else ["no A/A test"]) + (["blocks"] if tables.look and leader.blocks < GOOD_BLOCKS else [])
    return "low" if low else "medium" if not_high else "high", tuple(dict.fromkeys(low or not_high))


def _further_blocks(tables: Tables, pairs: Sequence[Paired], blocks: int) -> int:
    """Return how many more blocks decide those of the comparisons that are open; 0 if none is."""
    needed = [
        deciding_blocks(pair.ratios, HALFWIDTH, tables.next_significance)
        for pair in pairs
        if len(pair.ratios) > 1
        and word(pair.p_value, tables.significance) != CLEAR
        and not within(pair.ratio, HALFWIDTH)
    ]
    return max(0, max([GOOD_BLOCKS, *needed]) - blocks) if needed or blocks < LEAST_BLOCKS else 0


def statements(tables: Tables) -> list[Statement]:
    """Return the statements of the verdict, in the order in which they are read.

    A table that failed costs the statements that need it; the last statement names such tables.
    """
    failed: dict[str, None] = {}

    def follow(rule: Callable[..., Iterable[Statement]], *leading: Sequence[Row]) -> list[Statement]:
        try:
            return [*rule(tables, *leading)]
        except TableFailed as error:
            failed[error.name] = None
            return []

    to_use = follow(settings)
    chosen = {statement.cell_id for statement in to_use if statement.topic == "fastest"}
    leading = [row for row in rows_of(tables["leaders"]) if row.cell_id in chosen] if chosen else []
    found = [*follow(incomplete), *to_use, *follow(choices, leading), *follow(training)]
    for of_leading in (efficiencies, causes, trust):
        found += follow(of_leading, leading)
    for of_run in (ingests, improved, equivalence, failures, open_questions):
        found += follow(of_run)
    return [*found, *([Statement("failed", "tables", "", n=len(failed), reasons=tuple(failed))] if failed else [])]
