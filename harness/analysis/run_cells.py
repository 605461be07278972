"""The measured cells of one run as they enter comparisons between runs, and the environment they were measured in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from harness.analysis.common import Record, Records, Row, bases_of, by_cell, measured, rows_of
from harness.analysis.doubts import tally
from harness.analysis.equivalence import NOT_RUN, Verdict, Verdicts
from harness.analysis.evidence import PLACEMENT_VARIABLES, group_environments
from harness.analysis.ratios import paired
from harness.analysis.results import Results
from harness.analysis.trials import trial_row
from harness.config.values import GIB
from harness.plan.labels import TAGS
from harness.plan.run_environment import NodeEnvironment

MACHINE = ("cpu", "cores", "memory_gib", "threads", "niceness")
BLOCK_OPTIONS = frozenset({"blocks", "twin", "explain", "links_seconds", "keep_steps"})
"""Options of ``throughput`` that do not change how a trial is timed."""
COMMIT = 12
"""The number of digits that name a commit."""
SEVERAL = " + "
"""Joins the values of a fact that changed within a run."""


@dataclass(frozen=True)
class Conditions:
    """The circumstances in which a run measured a cell, as text for comparison.

    ``machine``: hardware, threads and niceness; ``rest``: versions, variables, and how trials are timed.
    """

    machine: str
    rest: str


def conditions_of(results: Results, group: Records) -> Conditions | None:
    """Return the conditions of a cell's trials, given their rows; None if they are unknown for one of them."""
    found = group_environments(results.environment)
    groups = [found.get((row.group_id, row.invocation)) for row in group]
    if not groups or any(each is None for each in groups):
        return None
    models = sorted({str(row.device_model) for row in group})
    machines = sorted({_text(node, MACHINE) for nodes in groups for node in nodes or ()})
    rest = sorted(
        {_text(node, [key for key in node if key not in MACHINE]) for nodes in groups for node in nodes or ()}
    )
    return Conditions(json.dumps([machines, models]), json.dumps([rest, _timing(results)]))


def _text(node: Mapping[str, object], keys: Iterable[str]) -> str:
    return json.dumps({key: node[key] for key in keys}, sort_keys=True)


def _timing(results: Results) -> dict[str, object]:
    timed = results.experiment.throughput
    return {} if timed is None else timed.model_dump(mode="json", exclude=set(BLOCK_OPTIONS))


@dataclass(frozen=True)
class Fact:
    """One fact of several runs, in their order; None if a run did not record it."""

    name: str
    values: tuple[str | None, ...]

    @property
    def differs(self) -> bool:
        """Whether two runs recorded different values."""
        return len({value for value in self.values if value is not None}) > 1


def side_by_side(runs: Sequence[Results]) -> list[Fact]:
    """Return every fact that a run recorded on its code, versions, hardware and settings, with that of each run."""
    found = [facts_of(results) for results in runs]
    names = dict.fromkeys(name for facts in found for name in facts)
    return [Fact(name, tuple(facts.get(name) for facts in found)) for name in names]


def facts_of(results: Results) -> dict[str, str]:
    """Return the recorded facts of a run by name; several values if they changed within it."""
    environment = results.environment
    values: dict[str, dict[str, None]] = {}
    named = {"git_commit": "git commit", "harness": "harness", "workload_code": "workload's code"}
    pairs = [
        (name, str(value)[:COMMIT] if key == "git_commit" else str(value))
        for invocation in environment.get("invocations", [])
        for key, name in named.items()
        if (value := invocation.get(key)) is not None
    ]
    nodes = [node for group in environment.get("groups", []) for node in group["nodes"]]
    pairs += [pair for node in nodes for pair in _of_node(node)]
    pairs.append(("measures", str(results.folder.plan()["measures"])))
    timing = _timing(results).items()
    pairs += [(f"throughput.{name}", "default" if value is None else str(value)) for name, value in timing]
    for name, value in pairs:
        values.setdefault(name, {})[value] = None
    return {name: SEVERAL.join(sorted(each)) for name, each in values.items()}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Return the facts that differ, such as 'torch 2.14.0 -> 2.15.0'; facts that one of both lacks are equal."""
    return tuple(
        f"{name} {before[name]} -> {now[name]}" for name in now if name in before and before[name] != now[name]
    )


def _of_node(node: NodeEnvironment) -> Iterator[tuple[str, str]]:
    yield "host", node["host"]
    yield "processor", f"{node['cpu']}, {node['cores']} cores"
    yield "memory", f"{node['memory_bytes'] / GIB:.0f} GiB"
    yield "GPUs", ", ".join(device["model"] for device in node["devices"] if device["kind"] == "cuda") or "none used"
    yield "system", node["system"]
    yield "Python", node["python"]
    yield from ((name, version) for name, version in node["packages"].items() if name != "harness")
    for key, name in (("cuda", "CUDA"), ("driver", "GPU driver"), ("nccl", "NCCL"), ("niceness", "niceness")):
        if (value := node.get(key)) is not None:
            yield name, str(value)
    yield "threads per device", str(node["threads"])
    yield from ((name, value) for name, value in node["variables"].items() if name not in PLACEMENT_VARIABLES)


@dataclass(frozen=True)
class RunCell:
    """A cell as one run measured it.

    ``first``: a row of its trials, for its axes. ``throughputs``: one a block, in order. ``speedups``: over the base,
    paired by block; empty for the base itself, and without ``base``. ``is_base``: whether it is the base, or stands
    in for one that failed. ``verdict``: whether it is equivalent to one device; None if that is not checked.
    """

    first: Row
    rows: Records = field(repr=False)
    throughputs: tuple[float, ...]
    base: Row | None
    is_base: bool
    speedups: tuple[float, ...]
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
        return next((tag for tag in TAGS if not pd.isna(self.first.get(tag)) and self.first[tag]), None)


def run_cells(results: Results) -> dict[str, RunCell]:
    """Return the measured cells of a run by id, in their order of appearance."""
    return _cells(results, by_cell(rows_of(measured(results.trials))), results.verdicts)


def quick_run_cells(results: Results) -> dict[str, RunCell]:
    """Return the same from trials.jsonl alone, in a tenth of the time: without doubts and exclusions."""
    last = {
        (line["cell_id"], line["block"], line["invocation"]): Record({"environment": None, **trial_row(line)})
        for line in results.lines
        if line["kind"] == "throughput" and line["outcome"] == "ok" and not line["facts"].get("inline")
    }
    return _cells(results, by_cell(last.values()), {})


def _cells(results: Results, cells: Mapping[str, Records], verdicts: Verdicts) -> dict[str, RunCell]:
    bases = bases_of(cells)
    return {
        cell_id: _cell(results, group, cells[bases[cell_id]], verdicts.get(str(group[0].check_id), NOT_RUN))
        for cell_id, group in cells.items()
    }


def _cell(results: Results, group: Records, base: Records, verdict: Verdict) -> RunCell:
    last = {row.block: float(row.throughput_per_s) for row in group}
    is_base = group[0].cell_id == base[0].cell_id
    ratios = [] if is_base else paired(group, base).ratios
    return RunCell(
        first=vars(group[0]),
        rows=group,
        throughputs=tuple(last.values()),
        base=vars(base[0]) if ratios else None,
        is_base=bool(is_base),
        speedups=tuple(ratios),
        conditions=conditions_of(results, group),
        verdict=verdict if group[0].check_id else None,
    )


def started_at(results: Results) -> float | None:
    """Return the start of a run as Unix time; None if it is not recorded."""
    invocations = results.environment.get("invocations", [])
    recorded = [invocation["started_at"] for invocation in invocations if "started_at" in invocation]
    return min([*recorded, *(line["started_at"] for line in results.lines if line["started_at"])], default=None)


def git_commit(results: Results) -> str | None:
    """Return the commit of the experiment file's folder at the first invocation that recorded one."""
    invocations = results.environment.get("invocations", [])
    return next((commit for invocation in invocations if (commit := invocation.get("git_commit"))), None)


def is_finished(results: Results) -> bool:
    """Return whether every planned trial has a result and the last invocation finished."""
    invocations = results.environment.get("invocations", [])
    ended = invocations[-1].get("ended", "finished") if invocations else "finished"
    return results.missing.empty and ended == "finished"
