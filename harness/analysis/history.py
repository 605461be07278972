"""Cells of several runs: what a run has of each, their noise between runs, and one table over all runs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import pandas as pd

from harness.analysis.common import AnyRow, Rows, bases_of, by_cell, claim_tags, ends, grouped, rows_of
from harness.analysis.doubts import tally
from harness.analysis.equivalence import NOT_RUN, Verdict
from harness.analysis.evidence import PLACEMENT_VARIABLES, group_environments
from harness.analysis.ratios import paired, with_twins
from harness.analysis.results import Results, load
from harness.analysis.stats import geometric_mean, half_width, p_value, pooled_deviation
from harness.analysis.trials import trial_row
from harness.config.axes import AXES
from harness.config.values import GIB
from harness.errors import HarnessError, RunFolderError
from harness.plan.labels import Labels
from harness.record.frames import records
from harness.record.reading import find_run_folders
from harness.record.schema import HISTORY, TRIALS

UNREAD = "unread"
"""The attribute of the table with the folders that could not be read: a mapping of paths to reasons."""


def load_history(folder: str | Path) -> pd.DataFrame:
    """Return one row a run and measured cell, for all runs below a folder, by start; results/README.md has the columns.

    Run folders that cannot be read are left out: ``frame.attrs["unread"]`` maps their paths to the reasons. Raises
    RunFolderError if there is no run.
    """
    in_order: list[tuple[AnyRow, dict[str, str]]] = []
    unread: dict[str, str] = {}
    if not (paths := find_run_folders(Path(folder))):
        raise RunFolderError(f"{folder}: no run folder is below it; give a folder such as results/")
    for path in paths:
        try:
            results = load(path)
            rows, facts = [*_rows(results)], facts_of(results)
            in_order += [(row, facts) for row in rows]
        except HarnessError as error:
            unread[str(path)] = str(error)
    in_order.sort(key=lambda one: math.inf if one[0]["started_at"] is None else one[0]["started_at"])
    labels = Labels(row for row, _ in in_order)
    last: dict[str, dict[str, str]] = {}  # facts by cell
    found = []
    for row, facts in in_order:
        before = last.get(row["cell_id"], facts)
        last[row["cell_id"]] = facts
        changed = [(name, now) for name, now in facts.items() if before.get(name, now) != now]
        changes = tuple(f"{name} {before[name]} -> {now}" for name, now in changed)
        found.append({**row, "label": labels.of(row), "changes": changes})
    frame = HISTORY.frame(found)
    frame.attrs[UNREAD] = unread
    return frame


def _rows(results: Results) -> Iterator[AnyRow]:
    scaling = {row["cell_id"]: row for row in records(results.scaling)}
    of_run = run_columns(results)
    for cell_id, cell in run_cells(results).items():
        scaled, speed = scaling.get(cell_id, {}), geometric_mean(cell.by_block["throughput"])
        conditions = json.dumps(cell.conditions) if cell.conditions else None
        yield {
            **of_run,
            **{name: cell.first.get(name) for name in ("cell_id", "unit", *AXES)},
            "environment": conditions and hashlib.sha256(conditions.encode()).hexdigest()[:8],
            "throughput_per_s": speed.value,
            **ends(speed),
            **{name: scaled.get(name) for name in ("base_id", "speedup", "efficiency")},
            "doubts": (*tally(cell.rows), *filter(None, [cell.excluded])),
        }


LEAST_RUNS = 3
"""The fewest earlier runs that the noise is estimated from."""
EarlierRuns = Mapping[float, Mapping[str, "RunCell"]]
"""The cells of runs by id, by the run's start as Unix time: a copy of a run is not another one."""
STATED_FOR_THROUGHPUT = "--run-noise is of throughput; the noise of speedups needs earlier runs"
Deviation = tuple[float, int | None]
"""A standard deviation of a logarithm, with its degrees of freedom; None if it was stated."""


@dataclass(frozen=True)
class RunRatio:
    """The geometric means over blocks of a cell in the first and in a later run, with the noise between runs.

    ``deviations``: those of the logarithm between runs; of several, a claim needs to hold by each. Without any, the
    noise is unknown for ``reason``. ``runs``: the number of earlier runs that they are estimated from.
    """

    first: float
    later: float
    deviations: Sequence[Deviation] = ()
    runs: int | None = None
    reason: str = ""

    @property
    def ratio(self) -> float:
        return self.later / self.first

    @property
    def interval(self) -> tuple[float, float] | tuple[None, None]:
        """The 95 % confidence interval of the ratio: t(k - 1) s sqrt(2) on the logarithm; None if s is unknown."""
        if not self.deviations:
            return None, None
        half = max(half_width(sd * math.sqrt(2), freedom) for sd, freedom in self.deviations)
        return self.ratio * math.exp(-half), self.ratio * math.exp(half)

    def p_value(self, threshold: float = 1.0) -> float | None:
        """Return the two-sided p-value of the ratio being ``threshold``; None if the noise is unknown."""
        difference = math.log(self.ratio / threshold)
        found = (p_value(difference, sd * math.sqrt(2), freedom) for sd, freedom in self.deviations)
        return max(found, default=None)


def read_history(folder: Path, cells: Iterable[str]) -> EarlierRuns:
    """Return the runs below a folder that measured one of these cells; a run that cannot be read is left out."""
    wanted = {*cells}
    runs = {}
    for path in find_run_folders(folder):
        try:
            results = load(path)
            start = started_at(results)
            if start is not None and any(line["cell_id"] in wanted for line in results.lines):
                runs[start] = run_cells(results, quick=True)
        except HarnessError:
            continue
    return runs


def run_ratio(
    first: RunCell, later: RunCell, metric: Metric, earlier: EarlierRuns, stated: float | None = None
) -> RunRatio:
    """Return the ratio of a cell in two runs, with the noise from earlier runs or a stated one of throughput.

    s is the standard deviation of the logarithm over k >= 3 runs of the cell before both, in the same environment, each
    over as many blocks as the shorter of both compared runs has. If both runs differ in versions or, compared ``by`` an
    axis, in the cell, s is pooled over the earlier runs of each: it is taken to be the same for both. Cells of the same
    earlier runs share the state of those: together they have no more degrees of freedom than the runs. Beside a stated
    s stands that between the blocks of both runs.
    """
    one, other = first.by_block[metric], later.by_block[metric]
    ratio = RunRatio(geometric_mean(one).value, geometric_mean(other).value)
    if stated is not None and metric == "throughput":
        return replace(ratio, deviations=[(stated, None), *noise_within(one, other)])
    if stated is not None:
        return replace(ratio, reason=STATED_FOR_THROUGHPUT)
    if first.conditions is None or later.conditions is None:
        return replace(ratio, reason="the environment of a run was not recorded")
    if first.conditions.machine != later.conditions.machine:
        return replace(ratio, reason="the runs are of different machines or threads, whose run noise may differ")
    blocks = min(len(one), len(other))
    samples: list[dict[float, float]] = []
    for kind in dict.fromkeys(_kind(cell, metric) for cell in (first, later)):
        cells = [(start, of_run[kind[0]]) for start, of_run in earlier.items() if kind[0] in of_run]
        values = {start: cell.by_block[metric][:blocks] for start, cell in cells if _kind(cell, metric) == kind}
        samples.append({start: math.log(geometric_mean(each).value) for start, each in values.items() if each})
    enough = [sample for sample in samples if len(sample) >= LEAST_RUNS]
    if not enough:
        most = max(map(len, samples))
        runs = f"{most or 'no'} earlier run{'s' * (most != 1)}"
        return replace(ratio, reason=f"{runs} of this cell in this environment; {LEAST_RUNS} are needed")
    sd, freedom = pooled_deviation([[*sample.values()] for sample in enough])
    count = len(set().union(*enough))
    return replace(ratio, deviations=[(sd, min(freedom, count - 1))], runs=count)


def _kind(cell: RunCell, metric: Metric) -> tuple[str, Conditions | None, str | None]:
    """Return what runs must share to be replicates: the cell, its conditions and, for speedups, its base."""
    base = str(cell.base["cell_id"]) if cell.base and metric == "speedup" else None
    return str(cell.first["cell_id"]), cell.conditions, base


def noise_within(*runs: Sequence[float]) -> list[Deviation]:
    """Return the noise between the blocks of a run, pooled over the given values of runs; none without two blocks."""
    if max(map(len, runs)) < 2:
        return []
    return [pooled_deviation([[math.log(value) for value in values] for values in runs])]


MACHINE = ("cpu", "cores", "memory_gib", "threads", "niceness")
BLOCK_OPTIONS = frozenset({"blocks", "twin", "explain", "links_seconds", "keep_steps"})
"""Options of ``throughput`` that do not change how a trial is timed."""
COMMIT = 12
"""The number of digits that name a commit."""
Metric = Literal["throughput", "speedup"]


class Conditions(NamedTuple):
    """The circumstances in which a run measured a cell, as text for comparison.

    ``machine``: hardware, threads and niceness; ``rest``: versions, variables, and how trials are timed.
    """

    machine: str
    rest: str


@dataclass(frozen=True)
class RunCell:
    """A cell as one run measured it.

    ``first``: a row of its trials, for its axes. ``by_block``: the values of each metric in the order of blocks;
    speedups are over the base, paired by block, without any for the base itself and without ``base``. ``is_base``:
    whether it is the base, or stands in for one that failed. ``conditions``: None if they are unknown for a trial.
    ``verdict``: whether it is equivalent to one device; None if that is not checked.
    """

    first: AnyRow
    rows: Rows = field(repr=False)
    by_block: Mapping[Metric, tuple[float, ...]]
    base: AnyRow | None
    is_base: bool
    conditions: Conditions | None
    verdict: Verdict | None

    @property
    def excluded(self) -> str | None:
        """The reason if it is not equivalent to one device."""
        return self.verdict.excluded if self.verdict else None

    def doubts(self, letter: str) -> tuple[object, ...]:
        """Return the doubts of its trials and of its equivalence, with the letter of the run."""
        unknown = self.verdict.reason if self.verdict and self.verdict.equivalence == "unknown" else None
        return (*tally(self.rows, letter), *((f"{letter}: equivalence {unknown}",) if unknown else ()))

    @property
    def rehearsal(self) -> str | None:
        """The reason if its speed is no claim: emulated, oversubscribed or faulty."""
        return next(iter(claim_tags(self.first)), None)


def run_cells(results: Results, *, quick: bool = False) -> dict[str, RunCell]:
    """Return the measured cells of a run by id, in their order of appearance.

    ``quick``: from trials.jsonl alone, in a tenth of the time, without doubts and exclusions.
    """
    trials = TRIALS.frame(map(trial_row, results.lines)) if quick else results.trials
    cells = by_cell(rows_of(with_twins(trials)))
    verdicts = {} if quick else results.verdicts
    bases, found = bases_of(cells), {}
    for cell_id, group in cells.items():
        last_of_block = {row.block: float(row.throughput_per_s) for row in group}
        base, is_base = cells[bases[cell_id]], cell_id == bases[cell_id]
        speedups = () if is_base else tuple(paired(group, base).ratios)
        found[cell_id] = RunCell(
            first=group[0],
            rows=group,
            by_block={"throughput": tuple(last_of_block.values()), "speedup": speedups},
            base=base[0] if speedups else None,
            is_base=is_base,
            conditions=_conditions(results, group),
            verdict=verdicts.get(str(group[0].check_id), NOT_RUN) if group[0].check_id else None,
        )
    return found


def _conditions(results: Results, group: Rows) -> Conditions | None:
    known = group_environments(results.environment)
    groups = [known.get((row.group_id, row.invocation)) for row in group]
    if None in groups:
        return None

    def texts(*, of_machine: bool) -> list[str]:
        nodes = (node for each in groups for node in each or ())
        chosen = ({key: node[key] for key in node if (key in MACHINE) == of_machine} for node in nodes)
        return sorted({json.dumps(each, sort_keys=True) for each in chosen})

    models = sorted({str(row.device_model) for row in group})
    machine = json.dumps([texts(of_machine=True), models])
    return Conditions(machine, json.dumps([texts(of_machine=False), _timing(results)]))


def _timing(results: Results) -> dict[str, object]:
    timed = results.experiment.throughput
    return {} if timed is None else timed.model_dump(mode="json", exclude=set(BLOCK_OPTIONS))


def side_by_side(runs: Mapping[str, Results]) -> list[AnyRow]:
    """Return every fact that a run recorded on its code, versions, hardware and settings, with the value of each run.

    ``values``: by letter of the run, None if it did not record the fact. ``differs``: whether two runs recorded
    different values.
    """
    facts = {letter: facts_of(results) for letter, results in runs.items()}
    names = dict.fromkeys(name for each in facts.values() for name in each)
    known = {name: {letter: each.get(name) for letter, each in facts.items()} for name in names}
    return [
        {"name": name, "differs": len({*values.values()} - {None}) > 1, "values": values}
        for name, values in known.items()
    ]


def facts_of(results: Results) -> dict[str, str]:
    """Return the recorded facts of a run by name; several values if they changed within it."""
    environment = results.environment
    named = {"git_commit": "git commit", "harness": "harness", "workload_code": "workload's code"}
    pairs = [
        (name, str(value)[:COMMIT] if key == "git_commit" else str(value))
        for invocation in environment.get("invocations", [])
        for key, name in named.items()
        if (value := invocation.get(key)) is not None
    ]
    for node in (node for group in environment.get("groups", []) for node in group["nodes"]):
        gpus = ", ".join(device["model"] for device in node["devices"] if device["kind"] == "cuda")
        pairs += [("host", node["host"]), ("processor", f"{node['cpu']}, {node['cores']} cores")]
        pairs += [("memory", f"{node['memory_bytes'] / GIB:.0f} GiB"), ("GPUs", gpus or "none used")]
        pairs += [("system", node["system"]), ("Python", node["python"])]
        pairs += [(name, version) for name, version in node["packages"].items() if name != "harness"]
        of_gpus = (("cuda", "CUDA"), ("driver", "GPU driver"), ("nccl", "NCCL"), ("niceness", "niceness"))
        pairs += [(name, str(value)) for key, name in of_gpus if (value := node.get(key)) is not None]
        pairs.append(("threads per device", str(node["threads"])))
        pairs += [(name, value) for name, value in node["variables"].items() if name not in PLACEMENT_VARIABLES]
    pairs.append(("measures", str(results.folder.plan()["measures"])))
    timing = _timing(results).items()
    pairs += [(f"throughput.{name}", "default" if value is None else str(value)) for name, value in timing]
    if trained := results.experiment.convergence:
        lengths = trained.model_dump(mode="json", include={"epochs", "steps", "seconds", "target"}, exclude_none=True)
        pairs += [(f"convergence.{name}", json.dumps(value)) for name, value in lengths.items()]
    values = grouped(dict.fromkeys(pairs), lambda pair: pair[0])
    return {name: " + ".join(sorted(value for _, value in each)) for name, each in values.items()}


def started_at(results: Results) -> float | None:
    """Return the start of a run as Unix time; None if it is not recorded."""
    invocations = results.environment.get("invocations", [])
    recorded = [invocation["started_at"] for invocation in invocations if "started_at" in invocation]
    return min([*recorded, *(line["started_at"] for line in results.lines if line["started_at"])], default=None)


def run_columns(results: Results) -> AnyRow:
    """Return the columns that name a run: folder, experiment, start, commit, and whether it is finished.

    The commit is that of the first invocation that recorded one. A run is finished if every planned trial has a result
    and the last invocation ended so.
    """
    invocations = results.environment.get("invocations", [])
    ended = invocations[-1].get("ended", "finished") if invocations else "finished"
    return {
        "folder": str(results.folder.path),
        "experiment": results.experiment.name,
        "started_at": started_at(results),
        "git_commit": next((commit for invocation in invocations if (commit := invocation.get("git_commit"))), None),
        "finished": results.missing.empty and ended == "finished",
    }
