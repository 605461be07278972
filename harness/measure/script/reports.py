"""What a script reports of its training, and its learning curve.

``harness.probe.report``, Ray Train's ``report``, the logs of Hugging Face's Trainer and of Lightning's are read. The
functions of a library are replaced once the script has imported it; nothing is imported for that.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

from harness.config.script import column_of
from harness.plan.checks import SCRIPT, Finding, join_names

Values: TypeAlias = Mapping[str, object]
MOST_ROWS, MOST_NAMES = 2_000, 50
"""The most rows of a learning curve that are kept: of more every second, fourth ... is; and the most columns."""
LOSSES = ("train_loss", "val_loss", "reported_loss")
"""The columns whose values diverge."""
NOISE = ("_runtime", "_per_second", "_time", "total_flos", "grad_norm")
"""The ends of names that a Trainer logs beside its metrics."""
VALIDATION, EPOCH, ACCURACIES = "val_", "epoch", ("train_accuracy", "val_accuracy")


@dataclass(frozen=True)
class Report:
    """Metrics that a script reports, by column, after ``step`` steps; ``epoch``: None if it states none.

    ``train_s``: seconds since the end of the first step, without pauses; evaluation that is no pause is contained.
    ``samples``: those that a DataLoader delivered to this rank for these steps.
    """

    step: int
    train_s: float
    samples: float
    epoch: float | None
    values: Mapping[str, float]


@dataclass
class Reports:
    """The rows of one process' learning curve, made of what it reports; a bounded number is kept.

    Reports at one step are one, at the time and with the values of the first of validation. If some have a metric of
    validation, each of these is a row, with the latest other values since the row before; else every report is.
    ``names``: of their columns. ``left_out``: names of values that are not recorded. ``every``: the distance of the
    rows that are kept.
    """

    names: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    every: int = 1
    _rows: list[Report] = field(default_factory=list)
    _count: int = 0
    _of_step: Report | None = None
    """The reports at the last step, which may not be all of it."""
    _pending: Report | None = None
    """The reports since the last row of validation."""
    _last: Report | None = None

    def add(self, given: Values, step: int, clock: Callable[[], float], samples: float) -> None:
        """Add a report, at the time that the clock shows once its values are known."""
        values = dict(self._numbers(given))
        epoch = values.pop(EPOCH, None)
        if values:
            self.join(Report(step, clock(), samples, epoch, values))

    def join(self, report: Report) -> None:
        """Join a report to those at its step, or begin the next step's."""
        before = self._of_step
        if before and before.step != report.step:
            self._end_step(before)
            before = None
        # after an evaluation, a second one or a checkpoint's report changes no value and no time
        earlier, later = (report, before) if before and _validates(before) else (before, report)
        self._of_step = _joined(earlier, later)

    def _end_step(self, report: Report) -> None:
        """Make the rows of a step's reports: until one is of validation, each is a row."""
        validates, first = _validates(report), not (self._last and _validates(self._last))
        pending = _joined(self._pending, report)
        self._pending = None if validates else pending
        if not (validates or first):
            return
        if validates and first:
            self._rows, self._count, self.every = [], 0, 1
        self._last = pending if validates else report
        if self._count % self.every == 0:
            self._rows.append(self._last)
            if len(self._rows) > MOST_ROWS:
                self._rows, self.every = self._rows[::2], 2 * self.every
        self._count += 1

    def _numbers(self, given: Values) -> Iterator[tuple[str, float]]:
        """Yield the finite numbers among the values by column, and losses that are not finite."""
        for name, value in given.items():
            column, number = column_of(str(name)) if name != EPOCH else EPOCH, _number(value)
            full = column not in self.names and len(self.names) >= MOST_NAMES
            if number is None or full or not (math.isfinite(number) or column in LOSSES):
                if column not in self.left_out and len(self.left_out) < MOST_NAMES:
                    self.left_out.append(column)
                continue
            if column != EPOCH and column not in self.names:
                self.names.append(column)
            yield column, number

    def summary(self) -> Reports:
        """Return the same without the reports."""
        return Reports(self.names, self.left_out, self.every)

    def end(self) -> list[Report]:
        """Return the rows that are kept, and the last one."""
        if self._of_step:
            self._end_step(self._of_step)
            self._of_step = None
        of_end = [self._last] if self._last and self._rows[-1] is not self._last else []
        return [*self._rows, *of_end]


def _number(value: object) -> float | None:
    """Return a number, also of a tensor with one element; None if it is none."""
    if isinstance(value, str | bool):
        return None
    try:
        value = getattr(value, "detach", lambda: value)()  # torch warns of a tensor with a gradient
        return float(value)  # type: ignore[arg-type]  # any type may convert itself
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def curve_of(rows: Sequence[Report], samples_of: Callable[[Report], float | None]) -> list[dict[str, float | None]]:
    """Return the rows of a training in the table epochs, without trial and attempt.

    ``epoch`` is the stated one if all are whole and increase, plus 1 if the first is 0 and not before the first step;
    else the number of the row.
    """
    epochs = [row.epoch for row in rows if row.epoch is not None and row.epoch == round(row.epoch)]
    stated = len(epochs) == len(rows) and all(one < other for one, other in pairwise(epochs))
    first = int(stated and bool(rows) and epochs[0] == 0 and rows[0].step > 0)
    return [
        {
            "epoch": int(epochs[place]) + first if stated else place + 1,
            "samples": samples_of(row),
            "train_s": row.train_s,
            "evaluation_s": None,
            "learning_rate": None,
            **row.values,
        }
        for place, row in enumerate(rows)
    ]


def _validates(report: Report) -> bool:
    return any(name.startswith(VALIDATION) for name in report.values)


def _joined(before: Report | None, later: Report) -> Report:
    """Return the later report with the values that only the one before has."""
    if before is None:
        return later
    epoch = before.epoch if later.epoch is None else later.epoch
    return Report(later.step, later.train_s, later.samples, epoch, {**before.values, **later.values})


def first_not_finite(rows: Sequence[Mapping[str, float | None]]) -> str | None:
    """Return where a reported loss is not finite for the first time; None if all are."""
    for row in rows:
        for name, value in row.items():
            if value is not None and not math.isfinite(value):
                return f"{name} became {value:g} in epoch {row['epoch']}"
    return None


NOTHING = (
    "the script reported nothing in {steps} steps: call harness.probe.report(val_accuracy=..., epoch=...) after each "
    "evaluation, on rank 0 at least; ray.train.report, Hugging Face's Trainer and Lightning's self.log with a logger "
    "are read without a change"
)


def judge_reports(
    ranks: Sequence[Reports], chosen: int, rows: Sequence[Mapping[str, float | None]]
) -> Iterator[Finding]:
    """Yield findings on what the ranks reported; ``chosen``: the rank whose reports are recorded, as ``rows``."""
    own = ranks[chosen]
    others = sorted({name for each in ranks for name in each.names} - {*own.names})
    if others:
        seen = f"reported by other ranks than rank {chosen}, and not by it: {join_names(others)}"
        means = "these metrics are not recorded"
        advice = f"report the same names on rank {chosen}, of all ranks' data"
        yield Finding(SCRIPT, "warning", seen, means, advice)
    if own.left_out:
        seen = f"reported, and no finite number or beyond {MOST_NAMES} names: {join_names(own.left_out)}"
        means = "these values are not recorded"
        advice = "report numbers, such as 0.5 or a tensor with one element"
        yield Finding(SCRIPT, "note", seen, means, advice)
    largest = max(((row.get(name) or 0.0, name) for row in rows for name in ACCURACIES), default=(0.0, ""))
    if largest[0] > 1:
        seen = f"{largest[1]} is {largest[0]:.4g}"
        means = "an accuracy is a fraction: it is shown as a percentage, times 100"
        advice = "report correct / total, without a factor of 100"
        yield Finding(SCRIPT, "warning", seen, means, advice)
    if own.every > 1:
        seen = f"over {MOST_ROWS} rows of the learning curve: one in {own.every} is recorded, and the last"
        means = "the time to a target may be that of a later report"
        advice = "report once an evaluation"
        yield Finding(SCRIPT, "note", seen, means, advice)


# -- the functions of libraries that are read


def _of_trainer(_: object, logs: Values) -> Values:
    """Return the metrics in the logs of Hugging Face's Trainer.

    Its last log is a summary: the mean loss of all steps.
    """
    if {"train_loss", "train_runtime"} <= logs.keys():  # of the last one alone
        return {}
    kept = {name: value for name, value in logs.items() if not name.endswith(NOISE)}
    if "loss" in kept:
        kept["train_loss"] = kept.pop("loss")
    return kept


def _of_lightning(connector: Any, metrics: Values) -> Values:
    """Return the metrics that Lightning logs in a fit; its epochs count from 0."""
    trainer = connector.trainer
    stated = {EPOCH: trainer.current_epoch + 1}
    return {**metrics, **stated} if metrics and trainer.state.fn == "fit" and not trainer.sanity_checking else {}


def _of_ray(_: object, metrics: Values) -> Values:
    """Return the metrics of a call of ray.train.report, which may be the logs of a Trainer."""
    return {name: value for name, value in metrics.items() if not str(name).endswith(NOISE)}


Read: TypeAlias = Callable[[object, Values], Values]
LOGGER = "pytorch.trainer.connectors.logger_connector.logger_connector"
SOURCES: Sequence[tuple[str, str, str, str, int, Read]] = (
    ("ray.train", "", "report", "metrics", 0, _of_ray),
    ("transformers.trainer_callback", "CallbackHandler", "on_log", "logs", 4, _of_trainer),
    (f"lightning.{LOGGER}", "_LoggerConnector", "log_metrics", "metrics", 1, _of_lightning),
    (f"pytorch_lightning.{LOGGER.partition('.')[2]}", "_LoggerConnector", "log_metrics", "metrics", 1, _of_lightning),
)
"""What is read: module, class (empty: a function of the module), function, name and position of its argument with the
metrics, and what takes that one and the first argument."""
READ = "_read_by_harness"


def read_libraries(record: Callable[[Values], None]) -> None:
    """From now on, record what the libraries that are imported by now report."""
    for module, owner, name, argument, place, read in SOURCES:
        holder = sys.modules.get(module)
        holder = getattr(holder, owner, None) if owner else holder
        function = getattr(holder, name, None)
        if function is not None and not hasattr(function, READ):
            if holder is sys.modules.get("ray.train"):
                function = _without_checkpoint(function)
            setattr(holder, name, _recording(function, argument, place, read, record))


def _without_checkpoint(report: Callable[..., object]) -> Callable[..., object]:
    """Return ray.train.report without its checkpoint: a trial keeps none, and its nodes may share no folder for it."""

    @functools.wraps(report)
    def alone(metrics: Values, *_: object, **__: object) -> object:
        return report(metrics)

    return alone


def _recording(
    function: Callable[..., object], argument: str, place: int, read: Read, record: Callable[[Values], None]
) -> Callable[..., object]:
    """Return the function, which also records what its argument of this name, or at this position, reports."""

    @functools.wraps(function)
    def recording(*given: Any, **named: Any) -> object:
        values: Values = {}
        with suppress(LookupError, AttributeError, TypeError):  # arguments of another version
            values = read(given[0] if given else None, named[argument] if argument in named else given[place])
        record(values)
        return function(*given, **named)

    setattr(recording, READ, True)
    return recording
