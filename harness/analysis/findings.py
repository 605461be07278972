"""Doctor trials -> their findings, one row each, and the cells that are measured despite an error."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import mean

import pandas as pd

from harness.analysis.common import AnyRow, Lines, Row, columns_of, grouped, rows_of, workload_options
from harness.analysis.stats import LEAST_BLOCKS, deviation
from harness.analysis.trials import label_columns
from harness.config.doctor_checks import allowed_findings
from harness.config.strategy_traits import BASE_STRATEGY
from harness.plan.checks import judge_links, judge_machine, judge_network, judge_versions, uneven_batch
from harness.plan.known_errors import advice_on
from harness.plan.labels import Labels
from harness.plan.rows import FindingRow, RecordedTrial
from harness.plan.run_environment import RunEnvironment
from harness.record.schema import DESCRIPTION, FINDINGS

FAILED = {
    "check": "execution",
    "means": "failure of the doctor's trial itself; the cells that it represents are likely to fail too",
}
HUNG = {
    "means": "a rank that waits for others, which never come: a collective that not every rank calls, or a step longer "
    "than limits.trial; every trial of these cells would hang",
    "advice": "let every rank call the same collectives in the same order, or raise limits.trial",
}


def findings(lines: Lines, trials: pd.DataFrame) -> pd.DataFrame:
    """Return the findings of the latest attempt of each doctor trial, and of each trial of a script that has some.

    A trial that failed has the finding FAILED, unless it reported an error before, or the failure of a check.
    """
    examined = (line for line in lines if line["purpose"] == "doctor" or line["facts"].get("findings"))
    latest = {line["trial_id"]: line for line in examined}
    cells = trials.drop_duplicates("trial_id", keep="last").set_index("trial_id")
    rows = []
    for trial_id, line in latest.items():
        of_trial = list(line["facts"].get("findings", []))
        named = any(found["severity"] == "error" or found["check"] == FAILED["check"] for found in of_trial)
        if line["outcome"] not in ("ok", "skipped") and not named:
            texts = HUNG if line["outcome"] == "timeout" else {**FAILED, "advice": advice_on(line["reason"] or "")}
            log = f"; log: {line['log']}" if line["log"] else ""
            name, means, advice = FAILED["check"], texts["means"], texts["advice"] + log
            seen = line["reason"]
            of_trial.append({"check": name, "severity": "error", "seen": seen, "means": means, "advice": advice})
        axes = {axis: cells.loc[trial_id, axis] for axis in ("cell_id", *DESCRIPTION)}
        of_trial += _fewer_samples(line, latest.values())
        rows += [{"trial_id": trial_id, **axes, **finding} for finding in of_trial]
    return FINDINGS.frame(rows)


def _fewer_samples(line: AnyRow, examined: Iterable[AnyRow]) -> list[FindingRow]:
    """Return a finding if an epoch of the line's cell has another number of distinct samples than one device's."""
    own = line["facts"].get("distinct_samples")
    others = (one for one in examined if one["strategy"] == BASE_STRATEGY and _data_of(one) == _data_of(line))
    alone = next((one["facts"]["distinct_samples"] for one in others if "distinct_samples" in one["facts"]), None)
    if own is None or alone is None or own == alone:
        return []
    return [
        {
            "check": "data sharding",
            "severity": "error",
            "seen": f"distinct samples in an epoch: {own:,}; of one device: {alone:,}",
            "means": "the strategies train on different amounts of data: their accuracy and their time to a target "
            "compare different trainings",
            "advice": "datasets() must return the same data whatever the rank and the number of ranks; the harness "
            "gives each rank its share of every global batch",
        }
    ]


def _data_of(line: AnyRow) -> tuple[object, ...]:
    """Return the key of examinations that must have the same data."""
    return (line["workload"], line["data"], line["model"], line.get("variant"), workload_options(line))


EQUAL_LOSSES = 0.01
"""The largest relative difference of the validation losses of trainings that are taken for equal."""
FAR = 10.0
"""A metric that is further apart than this many times the losses, relatively, is no matter of the loss."""
SPREADS = 3.0
"""Metrics that are further apart than this many standard deviations over seeds are so by more than chance."""


def unequal_metrics(trials: pd.DataFrame, convergence: pd.DataFrame, known: pd.DataFrame) -> pd.DataFrame:
    """Return a finding on each metric of a cell that is far from its base's, while their validation losses are equal.

    After the last epochs of trainings with the same seeds and global batch, at least LEAST_BLOCKS of them. ``known``:
    the doctor's findings, which may have the same metric of the same workload already. Scripts are left out: each
    reports what it computes itself. Values of metrics(), of derived() and of evaluate() are recorded alike.
    """
    scripts = set(trials.loc[trials["connected_ranks"].notna(), "cell_id"])
    bases = dict(zip(trials["cell_id"], trials["base_id"], strict=True))
    rows = [row for row in rows_of(convergence) if row.cell_id not in scripts]
    trained = {(row.cell_id, row.seed): row for row in rows}
    names = [name for name in map(str, convergence.columns) if name.startswith("val_") and name not in (LOSS, *DERIVED)]
    said = {
        (_data_of(row), name)
        for row in rows_of(known[known["check"] == METRICS])
        for name in re.split("[ ,:;]+", row.seen)
    }
    found = []
    for cell_id, of_cell in grouped(rows, lambda row: str(row.cell_id)).items():
        base_id = bases[cell_id]
        pairs = [(row, base) for row in of_cell if (base := trained.get((base_id, row.seed))) and base_id != cell_id]
        pairs = [(row, base) for row, base in pairs if row.global_batch_size == base.global_batch_size]
        losses = _both(pairs, LOSS)
        apart = max((_relative(*both) for both in losses), default=1.0)
        if len(losses) < LEAST_BLOCKS or apart > EQUAL_LOSSES:
            continue
        named = columns_of(pairs[-1][0], "trial_id", "cell_id", *DESCRIPTION)
        for name in names:
            values = _both(pairs, name)
            if _are_far(values, apart) and (_data_of(named), name) not in said:
                own, other = (mean(each) for each in zip(*values, strict=True))
                seen = f"{name} after the last epoch: {own:.4g}, and {other:.4g} of its base, over {len(values)} seeds"
                equal = f"; their losses differ by at most {100 * apart:.2g} %"
                found.append({**named, **UNEQUAL, "seen": f"{seen}{equal}"})
    return FINDINGS.frame(found)


LOSS = "val_loss"
DERIVED = ("val_perplexity", "val_psnr")
"""What the built-in workloads derive from means: it follows from the loss."""
METRICS = "metrics"
UNEQUAL = {
    "check": METRICS,
    "severity": "warning",
    "means": "if metrics() returns it, it may be no mean over samples, which depends on how the validation set is "
    "split, and so on the strategy, not on what was trained",
    "advice": "compute such a metric in evaluate(model, loader), which gets the whole validation set, in the same "
    "batches; nothing is to be done about a mean, or about what derived() or evaluate() returns",
}


def _both(pairs: Iterable[tuple[Row, Row]], name: str) -> list[tuple[float, float]]:
    """Return the finite values of a column in both trainings of each pair."""
    values = [(getattr(one, name), getattr(other, name)) for one, other in pairs]
    known = [(float(one), float(other)) for one, other in values if not (pd.isna(one) or pd.isna(other))]
    return [both for both in known if all(map(math.isfinite, both))]


def _relative(one: float, other: float) -> float:
    return abs(one - other) / (max(abs(one), abs(other)) or 1.0)


def _are_far(values: Sequence[tuple[float, float]], losses_apart: float) -> bool:
    """Return whether a metric differs by more than its spread over seeds, and than equal losses may explain."""
    if len(values) < LEAST_BLOCKS:
        return False
    apart = mean(one - other for one, other in values)
    spread = max(map(deviation, zip(*values, strict=True)))
    least = max(EQUAL_LOSSES, FAR * losses_apart)
    return abs(apart) > SPREADS * spread and min(_relative(*both) for both in values) > least


def figures(lines: Lines) -> dict[str, Mapping[str, str]]:
    """Return the values that the latest attempt of each doctor trial measured, as text, by trial."""
    return {
        line["trial_id"]: line["facts"]["figures"]
        for line in lines
        if line["purpose"] == "doctor" and line["facts"].get("figures")
    }


def static_findings(plan: AnyRow, environment: RunEnvironment, labels: Labels) -> pd.DataFrame:
    """Return rows of schema.FINDINGS: of cells, batches that do not divide; without a cell, findings about the nodes.

    ``plan`` and ``environment`` are the contents of plan.json and environment.jsonl, ``labels`` those of the run.
    """
    cannot_run = [*plan["skipped"], *plan["impossible"]]
    uneven = {row["cell_id"]: row for row in cannot_run if row["per_device_batch_size"] is None}
    rows = [
        {**{axis: row.get(axis) for axis in ("cell_id", *DESCRIPTION)}, **label_columns(row, labels), **finding.row()}
        for row in uneven.values()
        for finding in uneven_batch(row["strategy"], row["devices"], row["global_batch_size"])
    ]
    groups = [group["nodes"] for group in environment.get("groups", ())]
    of_nodes = [  # of the nodes of a worker group; each finding counts once
        finding for group in groups for finding in [*judge_versions(group), *judge_links(group)]
    ]
    of_nodes += judge_network(max(reversed(groups), key=len, default=[]))  # counters differ between groups
    of_nodes += judge_machine({node["node_id"]: node for group in groups for node in group}.values())
    return FINDINGS.frame([*rows, *(finding.row() for finding in dict.fromkeys(of_nodes))])


def with_faulty(lines: Sequence[RecordedTrial], allow: Collection[str]) -> list[RecordedTrial]:
    """Return the lines with the flag ``faulty``; without it if the file allows no check and there is no such error.

    An error of the doctor concerns every cell of the examined kind: see ``Cell.workload_key``. The latest examination
    of a kind counts.
    """
    names = allowed_findings(allow)
    latest = {line["trial_id"]: line for line in lines if line["purpose"] == "doctor" and "findings" in line["facts"]}
    errors = (
        (line, finding)
        for line in latest.values()
        for finding in line["facts"]["findings"]
        if finding["severity"] == "error"
    )
    kinds = {_kind(line) for line, error in errors if error["check"] in names or not error.get("stops", True)}
    if not (kinds or allow):
        return list(lines)
    return [{**line, "faulty": _kind(line) in kinds} for line in lines]


def _kind(line: Mapping[str, object]) -> tuple[str, ...]:
    """Return what cells of one kind share, as ``Cell.workload_key`` does."""
    axes = ("strategy", "data", "model", "device_ids", "variant")
    return (*(str(line.get(axis)) for axis in axes), workload_options(line))
