"""The cells that an experiment file's published figures are of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.config.experiment import Experiment
from harness.config.published import Level, Published
from harness.config.values import PlainValue
from harness.errors import ExperimentError
from harness.plan.axis_pairs import axis_value
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


def row_matches(row: Mapping[str, object], wanted: Mapping[str, PlainValue]) -> bool:
    """Return whether a recorded trial's row has the wanted value on every named axis, as ``Cell.matches`` does."""
    return all(_text(axis_value(name, row)) in _texts(name, values) for name, values in wanted.items())


def _texts(name: str, values: PlainValue) -> set[str]:
    """Return the wanted value, which may be a list, and each one of a list, as text; of GPUs a value is a list."""
    several = values if isinstance(values, list | tuple) else ()
    return {_text(value) for value in (values, *several) if name != "device_ids" or isinstance(value, list | tuple)}


def _text(value: object) -> str:
    """Return a value as text; of numbers of GPUs as recorded, '6,7'."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
