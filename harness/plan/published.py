"""The cells that an experiment file's published figures are of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.config.experiment import Experiment
from harness.config.published import Level, Published
from harness.errors import ExperimentError
from harness.plan.cell import Cell

NAMED = 3
"""The most cells that an error names."""


def check_published(experiment: Experiment, asked: Sequence[Cell]) -> None:
    """Raise ExperimentError unless each published figure is of exactly one cell of the file that is to be measured."""
    problems = [
        problem for entry in enumerate(experiment.published) for problem in _problems(*entry, experiment, asked)
    ]
    if problems:
        raise ExperimentError("published", problems)


def _problems(number: int, entry: Published, experiment: Experiment, asked: Sequence[Cell]) -> Iterator[str]:
    place = f"published[{number}]"
    section = _section(entry.level)
    if getattr(experiment, section) is None:
        yield f"{place}.metric: {entry.metric} needs the section {section}, which is off"
        return
    cells = list(dict.fromkeys(_trained(experiment, asked) if section == "convergence" else asked))
    found = [cell for cell in cells if cell.matches(entry.cell)]
    if len(found) != 1:
        named = "; ".join(f"{cell.strategy} x{cell.devices}, batch {cell.global_batch_size}" for cell in found[:NAMED])
        some = f" ({named}{'; ...' if len(found) > NAMED else ''})" if found else ""
        yield (
            f"{place}.cell: got {entry.cell}, which {len(found)} of the {len(cells)} cells match{some}; allowed: axes "
            "of the grid, with values that exactly one cell has"
        )


def _section(level: Level) -> str:
    return "convergence" if level == "epochs" else "throughput"


def _trained(experiment: Experiment, asked: Sequence[Cell]) -> Iterator[Cell]:
    """Yield the cells from which trainings are chosen, at their batch; which of them train depends on the machine."""
    settings = experiment.convergence
    assert settings is not None
    for cell in asked:
        if cell.matches(settings.only):
            batch = settings.global_batch_size
            yield cell.at_global_batch_size(batch) if batch else cell
