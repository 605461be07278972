"""The measured cells of one run as they enter comparisons between runs, and the environment they were measured in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from harness.analysis.common import AnyRow, Row, Rows, bases_of, by_cell, claim_tags, measured, rows_of
from harness.analysis.doubts import tally
from harness.analysis.equivalence import NOT_RUN, Verdict
from harness.analysis.evidence import PLACEMENT_VARIABLES, group_environments
from harness.analysis.ratios import paired
from harness.analysis.results import Results
from harness.analysis.trials import trial_row
from harness.config.values import GIB

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
        return self.verdict.reason if self.verdict and self.verdict.equivalence == "not equivalent" else None

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
    if quick:
        last = {
            (line["cell_id"], line["block"], line["invocation"]): Row({"environment": None, **trial_row(line)})
            for line in results.lines
            if line["kind"] == "throughput" and line["outcome"] == "ok" and not line["facts"].get("inline")
        }
    cells = by_cell(last.values() if quick else rows_of(measured(results.trials)))
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
    values: dict[str, set[str]] = {}
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
    for name, value in pairs:
        values.setdefault(name, set()).add(value)
    return {name: " + ".join(sorted(each)) for name, each in values.items()}


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
