"""What is left to do of a plan, given what was recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.config.experiment import Experiment, parse_experiment
from harness.doctor.gate import errors
from harness.errors import ExperimentError, RunFolderError
from harness.plan.cell import Cell
from harness.plan.comparison import (
    base_cell,
    comparable,
    other_launcher_cells,
    set_ids,
    single_device_cell,
    wrapped_single_device_cell,
)
from harness.plan.planner import Plan
from harness.plan.trial import PRECISE, PRUNED, TIME_IS_UP, Trial, WorkerGroup
from harness.record.folder import RunFolder
from harness.record.rows import axes_of
from harness.system import sanitize

Lines = Sequence[Mapping[str, Any]]


def pending(plan: Plan, lines: Lines) -> tuple[WorkerGroup, ...]:
    """The worker groups with the trials that are not ok yet, and with those that these are compared with.

    Pairs form only between trials of the same invocation. So a block that is measured in two parts measures its bases
    again in the second; and what is done, but without the base that the first part did not come to, is done again.
    What is known to lack memory is left out.
    """
    pairs, pruned = _Pairs(plan, lines), _pruned(plan, lines)
    missing = {trial.id for trial in plan.trials} - pairs.done - pruned
    again = [trial for trial in plan.trials if trial.id in missing or pairs.lacks_one(trial)]
    wanted = {trial.id for trial in again} | {partner for trial in again for partner in pairs.beside(trial)}
    wanted -= pruned
    groups = (replace(g, trials=tuple(t for t in g.trials if t.id in wanted)) for g in plan.groups)
    return tuple(group for group in groups if group.trials)


def out_of_memory(plan: Plan, lines: Lines) -> list[Cell]:
    """The cells that ran out of memory and are not to be tried again."""
    if not plan.experiment.limits.prune_oom:
        return []
    found = {line["trial_id"] for line in lines if line["outcome"] == "oom"}
    return list(dict.fromkeys(t.cell for t in plan.trials if t.id in found and t.purpose != "doctor"))


def attempts(lines: Lines) -> dict[str, int]:
    """How often each trial was recorded so far."""
    counts: dict[str, int] = {}
    for line in lines:
        counts[line["trial_id"]] = max(counts.get(line["trial_id"], 0), int(line["attempt"]))
    return counts


class _Pairs:
    """Which trials of a block are compared with each other, and in which invocations they were measured."""

    def __init__(self, plan: Plan, lines: Lines) -> None:
        self._plan = plan
        self._invocations: dict[str, set[int]] = {}
        for line in lines:
            # what the doctor refused may have been mended since: it looks again
            if line["outcome"] == "ok" and not errors(line.get("facts", {})):
                self._invocations.setdefault(line["trial_id"], set()).add(int(line.get("invocation", 0)))
        self.done = {*self._invocations, *(line["trial_id"] for line in lines if _is_skipped(line, PRECISE))}
        self._failed = {line["trial_id"] for line in lines if _failed(line)} - self.done
        self._twins = {(trial.block, trial.cell): trial.id for trial in plan.trials if trial.purpose == "twin"}
        self._by_cell = {(t.block, t.cell): t.id for t in plan.trials if t.timed and t.purpose != "twin"}
        self._stand_ins: dict[tuple[int, str | None], str] = {}
        for trial in sorted(plan.trials, key=lambda t: t.cell.devices, reverse=True):
            if trial.kind == "throughput" and trial.id in self._invocations:
                self._stand_ins[trial.block, _family(trial.cell)] = trial.id

    def of(self, trial: Trial) -> set[str]:
        """The other trials of its block that a trial is compared with.

        Where a base failed, its stand-in: the smallest device count of the same strategy that was measured.
        """
        if not trial.timed or not comparable(trial.cell):
            return set()
        base = self._by_cell.get((trial.block, base_cell(trial.cell)))
        if base in self._failed:
            base = self._stand_ins.get((trial.block, _family(trial.cell)))
        partners = other_launcher_cells(trial.cell)
        if self._plan.experiment.explains:
            partners += [single_device_cell(trial.cell), wrapped_single_device_cell(trial.cell)]
        found = {base, *(self._by_cell.get((trial.block, cell)) for cell in partners)}
        return {trial_id for trial_id in found if trial_id and trial_id != trial.id}

    def beside(self, trial: Trial) -> set[str]:
        """What is measured again where this trial is: what it is compared with, and the twin of its base."""
        has_twin = trial.timed and comparable(trial.cell)
        twin = self._twins.get((trial.block, base_cell(trial.cell))) if has_twin else None
        return self.of(trial) | ({twin} if twin else set())

    def lacks_one(self, trial: Trial) -> bool:
        """Whether no invocation holds both this trial, which was measured, and another that it needs."""
        mine = self._invocations.get(trial.id)
        if not mine:
            return False
        needed = (partner for partner in self.of(trial) if partner not in self._failed)
        return any(not mine & self._invocations.get(partner, set()) for partner in needed if not self._spared(partner))

    def _spared(self, trial_id: str) -> bool:
        return trial_id in self.done and trial_id not in self._invocations


def _is_skipped(line: Mapping[str, Any], reason: str) -> bool:
    return line["outcome"] == "skipped" and str(line.get("reason", "")).startswith(reason)


def _pruned(plan: Plan, lines: Lines) -> set[str]:
    """The trials of which it was seen last that they lack memory; none where they are to be tried again."""
    last = {line["trial_id"]: line for line in lines if plan.experiment.limits.prune_oom}
    return {trial_id for trial_id, line in last.items() if line["outcome"] == "oom" or _is_pruned(line)}


def _is_pruned(line: Mapping[str, Any]) -> bool:
    return line["outcome"] == "skipped" and str(line.get("reason", "")).endswith(PRUNED)


def _failed(line: Mapping[str, Any]) -> bool:
    """Whether a trial is likely to fail again; one that was lost, or had no time left, may yet go well."""
    return line["outcome"] not in ("ok", "lost") and not _is_skipped(line, TIME_IS_UP)


def _family(cell: Cell) -> str | None:
    return set_ids(axes_of(cell))["family_id"]


LIMITS = {"limits"}
"""What may differ on resume: how long a run may take is no part of what it measures."""


def reopen(path: Path, file: Path, experiment: Experiment, add_blocks: int = 0) -> tuple[RunFolder, Experiment]:
    """The folder, and the experiment as it goes on there; raises RunFolderError where another one made the folder.

    Blocks that were added in an earlier invocation stay; ``add_blocks`` come on top of them.
    """
    if sanitize.MARK in str(experiment.model_dump()):
        problem = f"holds {sanitize.MARK}, which stands for a secret: resume with the file that made the run, no copy"
        raise ExperimentError(str(file), [problem])
    folder = RunFolder.open(path)
    kept = folder.experiment()
    going_on = _with_blocks_of(kept, experiment, folder)
    different = _different(kept, going_on)
    if different:
        raise RunFolderError(
            f"{path}: was made by another experiment: {', '.join(different)} differ from {file}. "
            f"Resume with the file that made it ({path / 'experiment.yaml'} is a copy), or start a new run"
        )
    return folder, more_blocks(going_on, add_blocks) if add_blocks else going_on


def more_blocks(experiment: Experiment, added: int) -> Experiment:
    """The experiment with so many blocks more; raises ExperimentError where their number is not a plain one."""
    settings = experiment.throughput
    if settings is None:
        problem = "the experiment measures no throughput, so it has no blocks; convergence repeats by its seeds"
        raise ExperimentError("--add-blocks", [problem])
    if settings.rule:
        problem = (
            f"throughput.blocks is a rule (at most {settings.rule.at_most}), which decides once, from the first "
            "blocks: more of them after a look at the result would make its intervals too narrow. "
            "Start a new run with a smaller halfwidth or a larger at_most"
        )
        raise ExperimentError("--add-blocks", [problem])
    try:
        return _of_blocks(experiment, settings.most_blocks + added)
    except ExperimentError as error:
        raise ExperimentError("--add-blocks", error.problems) from None


def _with_blocks_of(kept: Experiment, experiment: Experiment, folder: RunFolder) -> Experiment:
    """The experiment with the blocks that the folder's has, where the file gives as many as it did at first."""
    if _different(kept, experiment) != ["throughput"] or kept.throughput is None:
        return experiment
    if not isinstance(kept.throughput.blocks, int) or folder.given().throughput != experiment.throughput:
        return experiment
    return _of_blocks(experiment, kept.throughput.blocks)


def _of_blocks(experiment: Experiment, blocks: int) -> Experiment:
    content = experiment.model_dump(mode="json")
    content["throughput"]["blocks"] = blocks
    return parse_experiment(content, source="--add-blocks")


def _different(one: Experiment, other: Experiment) -> list[str]:
    then, now = _content(one), _content(other)
    return [key for key in now if then.get(key) != now[key]]


def _content(experiment: Experiment) -> dict[str, Any]:
    content: dict[str, Any] = sanitize.plain(experiment.model_dump(mode="json", exclude=LIMITS))  # as it was recorded
    return content
