"""Resuming a run: the rest of its plan, given the recorded trials, and its experiment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from harness.config.experiment import Experiment
from harness.config.load import parse_experiment
from harness.doctor.gate import errors
from harness.errors import ExperimentError, RunFolderError
from harness.plan.cell import MEASURES
from harness.plan.planner import Plan, bases_first, codes_of
from harness.plan.rows import Json, RecordedTrial
from harness.plan.trial import WorkerGroup
from harness.record.folder import RunFolder
from harness.system import sanitize

Lines = Sequence[RecordedTrial]


def pending(plan: Plan, lines: Lines) -> tuple[WorkerGroup, ...]:
    """Return the worker groups with the trials that are not settled: neither ok, nor precise enough, nor out of memory.

    Nothing that is ok is measured again, except examinations that found an error. In a block that earlier invocations
    began its bases come first, so that as many pairs as possible are of one invocation; in a new block they keep their
    random place.
    """
    allow = plan.experiment.allow
    settled = {
        line["trial_id"]
        for line in lines
        if (line["outcome"] == "ok" and not errors(line.get("facts", {}), allow)) or line.get("skip_code") == "precise"
    }
    if plan.experiment.limits.prune_oom:
        last = {line["trial_id"]: line for line in lines}
        settled |= {
            name for name, line in last.items() if line["outcome"] == "oom" or line.get("skip_code") == "out_of_memory"
        }
    begun = {trial.block for trial in plan.trials if trial.id in settled}
    left = (group.keeping(lambda trial: trial.id not in settled) for group in plan.groups)
    return bases_first([group for group in left if group.trials], begun)


LIMITS = {"limits", "published", "cost", "cluster", "improve", "hardware"}
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
    """Return the sections that differ; 1 and 1.0 do, of which other cells follow."""
    then, now = (
        {key: json.dumps(value, sort_keys=True) for key, value in _content(each).items()} for each in (one, other)
    )
    return [key for key in now if then.get(key) != now[key]]


def _content(experiment: Experiment) -> Json:
    content: Json = sanitize.plain(experiment.model_dump(mode="json", exclude=LIMITS))  # as it was recorded
    return {**content, "variants": [*experiment.variants]}  # check_variants compares their code; folders may move
