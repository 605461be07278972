"""Resuming a run: the rest of its plan, given the recorded trials, and its experiment."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness.config.experiment import Experiment
from harness.config.load import parse_experiment
from harness.doctor.gate import errors
from harness.errors import ExperimentError, RunFolderError
from harness.plan.cell import MEASURES, Cell
from harness.plan.comparison import (
    axes_of,
    base_cell,
    comparable,
    other_launcher_cells,
    other_variant_cells,
    set_ids,
    single_device_cell,
    wrapped_single_device_cell,
)
from harness.plan.planner import Plan, bases_first, codes_of
from harness.plan.rows import Json, RecordedTrial, SkipCode
from harness.plan.trial import Trial, WorkerGroup
from harness.record.folder import RunFolder
from harness.system import sanitize

Lines = Sequence[RecordedTrial]


def pending(plan: Plan, lines: Lines) -> tuple[WorkerGroup, ...]:
    """Return the worker groups with the trials that are not settled: neither ok, nor precise enough, nor out of memory.

    Nothing that is ok is measured again. In a block that earlier invocations began its bases come first, so that as
    many pairs as possible are of one invocation; in a new block they keep their random place.
    """
    recorded = _Recorded(lines, prune_oom=plan.experiment.limits.prune_oom, allow=plan.experiment.allow)
    settled = recorded.done | recorded.pruned
    begun = {trial.block for trial in plan.trials if trial.id in settled}
    left = (group.keeping(lambda trial: trial.id not in settled) for group in plan.groups)
    return bases_first([group for group in left if group.trials], begun)


def on_other_hardware(plan: Plan, lines: Lines) -> tuple[WorkerGroup, ...]:
    """Return the worker groups with the trials of ``lines``, an invocation's, whose base ran on other devices.

    Nodes came or went between them, or the type of nodes that holds the most of the plan does not hold the trial. Each
    trial that is compared with such a trial is included: as the last attempt at a base counts, one that is not measured
    again would be left without a base on its own devices.
    """
    measured = (line for line in lines if line["outcome"] == "ok")
    models = {line["trial_id"]: {rank.get("device_model") for rank in line["ranks"]} for line in measured}
    partners = _Partners(plan, _Recorded(lines, prune_oom=False, allow=plan.experiment.allow))
    compared = {trial.id: partners.compared_with(trial) & models.keys() for trial in plan.trials if trial.id in models}
    apart = {
        trial_id
        for trial_id, others in compared.items()
        if len(own := models[trial_id]) == 1 and any(models[other] != own for other in others)
    }
    wanted = _connected(apart, compared)
    wanted = wanted.union(*(partners.twin_of_base(trial) for trial in plan.trials if trial.id in wanted))
    groups = (replace(g, trials=tuple(t for t in g.trials if t.id in wanted & models.keys())) for g in plan.groups)
    return tuple(group for group in groups if group.trials)


def _connected(some: Collection[str], compared: Mapping[str, set[str]]) -> set[str]:
    """Return some trials, with all that they are compared with, directly or through others."""
    reached, more = set[str](), set(some)
    while not more <= reached:
        reached |= more
        more = {trial_id for trial_id, others in compared.items() if trial_id in reached or others & reached}
        more = more.union(*(compared[trial_id] for trial_id in more))
    return reached


def out_of_memory(plan: Plan, lines: Lines) -> list[Cell]:
    """Return the cells that ran out of memory and are not to be tried again."""
    if not plan.experiment.limits.prune_oom:
        return []
    ids = {line["trial_id"] for line in lines if line["outcome"] == "oom"}
    return list(dict.fromkeys(t.cell for t in plan.trials if t.id in ids and t.trains and t.purpose != "profile"))


def attempts(lines: Lines) -> dict[str, int]:
    """Return the number of recorded attempts at each trial."""
    counts: dict[str, int] = {}
    for line in lines:
        counts[line["trial_id"]] = max(counts.get(line["trial_id"], 0), int(line["attempt"]))
    return counts


class _Recorded:
    """The recorded state of each trial, as sets of trial ids.

    ``ok``: measured; without examinations that found an error, so that their cells are examined again. ``done``: ok,
    or precise enough. ``failed``: would likely fail again. ``pruned``: ran out of memory, or a smaller batch did, and
    is not tried again.
    """

    def __init__(self, lines: Lines, *, prune_oom: bool, allow: Collection[str]) -> None:
        measured = (line for line in lines if line["outcome"] == "ok")
        self.ok = {line["trial_id"] for line in measured if not errors(line.get("facts", {}), allow)}
        self.done = self.ok | {line["trial_id"] for line in lines if _is_skipped(line, "precise")}
        # one that was lost, or had no time left, may yet be ok
        wrong = [line for line in lines if line["outcome"] not in ("ok", "lost") and not _is_skipped(line, "time_up")]
        self.failed = {line["trial_id"] for line in wrong} - self.done
        last = {line["trial_id"]: line for line in lines if prune_oom}
        self.pruned = {
            trial_id
            for trial_id, line in last.items()
            if line["outcome"] == "oom" or _is_skipped(line, "out_of_memory")
        }


class _Partners:
    """The trials of its block that each trial is compared with; plan/comparison.py defines which cells these are."""

    def __init__(self, plan: Plan, recorded: _Recorded) -> None:
        self._explains, self._failed = plan.experiment.explains, recorded.failed
        self._codes = codes_of(plan)
        self._twins = {(t.block, t.cell): t.id for t in plan.trials if t.purpose == "twin"}
        self._by_cell = {(t.block, t.cell): t.id for t in plan.trials if t.timed and t.purpose != "twin"}
        measured = [t for t in plan.trials if t.kind == "throughput" and t.id in recorded.ok]
        fewest_last = sorted(measured, key=lambda trial: trial.cell.devices, reverse=True)
        self._stand_ins = {(t.block, _family_id(t.cell)): t.id for t in fewest_last}

    def compared_with(self, trial: Trial) -> set[str]:
        """Return the ids of the base, of what explains this trial, of the same cell by other launchers and variants.

        If the base failed, its stand-in: the smallest device count of the same strategy that was measured.
        """
        if not trial.timed or not comparable(trial.cell):
            return set()
        base = self._by_cell.get((trial.block, base_cell(trial.cell)))
        if base in self._failed:
            base = self._stand_ins.get((trial.block, _family_id(trial.cell)))
        cells = other_launcher_cells(trial.cell) + other_variant_cells(trial.cell, self._codes)
        if self._explains:
            cells += [single_device_cell(trial.cell), wrapped_single_device_cell(trial.cell)]
        ids = {base, *(self._by_cell.get((trial.block, cell)) for cell in cells)}
        return {trial_id for trial_id in ids if trial_id and trial_id != trial.id}

    def twin_of_base(self, trial: Trial) -> set[str]:
        """Return the id of the twin of the trial's base, which is measured beside the base; empty if it has none."""
        if not trial.timed or not comparable(trial.cell):
            return set()
        twin = self._twins.get((trial.block, base_cell(trial.cell)))
        return {twin} if twin else set()


def _is_skipped(line: RecordedTrial, code: SkipCode) -> bool:
    return line["outcome"] == "skipped" and line.get("skip_code") == code


def _family_id(cell: Cell) -> str | None:
    return set_ids(axes_of(cell))["family_id"]


LIMITS = {"limits", "published", "cost", "cluster"}
"""The sections that may differ on resume: they are no part of what is measured."""


def reopen(path: Path, file: Path, experiment: Experiment, add_blocks: int = 0) -> tuple[RunFolder, Experiment]:
    """Return the folder and the experiment to resume in it; raises RunFolderError if another experiment made it.

    Blocks that an earlier invocation added stay; ``add_blocks`` are added to them.
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


def same_experiment(folder: RunFolder, experiment: Experiment) -> bool:
    """Return whether the experiment made the run in the folder, limits and added blocks aside."""
    kept = folder.experiment()
    return not _different(kept, _with_blocks_of(kept, experiment, folder))


class OtherMeasuresError(RunFolderError):
    """The cells of a run measure something else than those of this harness or code: it cannot be resumed."""


def check_measures(folder: RunFolder) -> None:
    """Raise OtherMeasuresError if a cell of the same content measured something else when the folder was made."""
    if (known := folder.plan().get("measures")) != MEASURES:
        raise OtherMeasuresError(
            f"{folder.path}: was made by a harness whose cells measure something else (measures {known}; here "
            f"{MEASURES}), so that its trials and new ones cannot be compared. Resume it with that harness, or start a "
            "new run"
        )


def check_variants(folder: RunFolder, plan: Plan) -> None:
    """Raise OtherMeasuresError if the code of a variant is not that of the run in the folder."""
    before = folder.plan().get("variants", {})
    now = codes_of(plan).items()
    changed = [f"{name} ({before[name]} -> {code})" for name, code in now if before.get(name, code) != code]
    if changed:
        raise OtherMeasuresError(
            f"{folder.path}: was made with other code of the variants {', '.join(changed)}, the hash of their Python "
            "files: a third version would stand under their names. Restore it, or start a new run"
        )


def more_blocks(experiment: Experiment, added: int) -> Experiment:
    """Return the experiment with ``added`` more blocks; raises ExperimentError if a rule decides their number."""
    settings = experiment.throughput
    if settings is None:
        problem = "the experiment measures no throughput, so it has no blocks; convergence repeats by its seeds"
        raise ExperimentError("--add-blocks", [problem])
    if settings.rule:
        problem = (
            f"throughput.blocks is a rule (at most {settings.most_blocks}): more of them after its looks at the result "
            "would make its intervals too narrow. Start a new run with a number of blocks, or a wider rule"
        )
        raise ExperimentError("--add-blocks", [problem])
    try:
        return _of_blocks(experiment, settings.most_blocks + added)
    except ExperimentError as error:
        raise ExperimentError("--add-blocks", error.problems) from None


def _with_blocks_of(kept: Experiment, experiment: Experiment, folder: RunFolder) -> Experiment:
    """Return the experiment with the folder's blocks, if the file still gives the number that it gave at first."""
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


def _content(experiment: Experiment) -> Json:
    content: Json = sanitize.plain(experiment.model_dump(mode="json", exclude=LIMITS))  # as it was recorded
    return {**content, "variants": [*experiment.variants]}  # check_variants compares their code; folders may move
