"""An earlier run's folder, opened to go on: the same experiment, with blocks that are added to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.config.experiment import Experiment, parse
from harness.errors import ExperimentError, RunFolderError
from harness.record.folder import RunFolder
from harness.system import sanitize

LIMITS = {"limits"}
"""What may differ on resume: how long a run may take is no part of what it measures."""


def reopened(path: Path, file: Path, experiment: Experiment, add_blocks: int = 0) -> tuple[RunFolder, Experiment]:
    """The folder, and the experiment as it goes on there; raises RunFolderError where another one made the folder.

    Blocks that were added in an earlier sitting stay; ``add_blocks`` come on top of them.
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
    return parse(content, source="--add-blocks")


def _different(one: Experiment, other: Experiment) -> list[str]:
    then, now = _content(one), _content(other)
    return [key for key in now if then.get(key) != now[key]]


def _content(experiment: Experiment) -> dict[str, Any]:
    content: dict[str, Any] = sanitize.plain(experiment.model_dump(mode="json", exclude=LIMITS))  # as it was recorded
    return content
