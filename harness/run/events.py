"""Progress as small frozen events through one callable; only sinks format and print them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from harness.plan.cell import Cell
from harness.plan.labels import Labels
from harness.plan.memory_forecast import Forecast
from harness.plan.planner import Plan
from harness.plan.rows import RecordedTrial
from harness.plan.trial import Columns, Trial, WorkerGroup

if TYPE_CHECKING:
    import pandas as pd

    from harness.report.tables.text import TextTable
    from harness.report.verdict import Verdict


class Planned(NamedTuple):
    """The plan, before anything starts."""

    plan: Plan


class MemoryForecast(NamedTuple):
    """Whether the cells of a plan will fit into memory, before anything starts."""

    forecasts: Mapping[Cell, Forecast]
    labels: Labels


class Previewed(NamedTuple):
    """The estimated time of what is to be measured, in sentences and, for a dry run, as a table by part."""

    lines: tuple[str, ...]
    table: TextTable | None = None


class RunStarted(NamedTuple):
    """The worker groups to run, of a plan, and the number of trials already done; without a folder, unrecorded.

    ``limit_s``: the seconds until a limit ends the run.
    """

    folder: Path | None
    plan: Plan
    groups: tuple[WorkerGroup, ...]
    done: int
    limit_s: float | None = None


class GroupStarting(NamedTuple):
    """A worker group's processes are being started."""

    group: WorkerGroup


class GroupReady(NamedTuple):
    """The worker group is ready, ``start_s`` seconds after its launch."""

    group: WorkerGroup
    start_s: float


class TrialStarting(NamedTuple):
    """A trial is being started."""

    trial: Trial


class TrialEnded(NamedTuple):
    """A trial has an outcome; ``line`` is its recorded row, ``again`` whether it is retried, ``epochs`` its epochs."""

    trial: Trial
    line: RecordedTrial
    again: bool = False
    epochs: Columns = MappingProxyType({})


class Unsent(NamedTuple):
    """The number of recorded trials that are in the local run folder and not in the store of ``--output URI``."""

    trials: int


class Note(NamedTuple):
    """A message to the user."""

    text: str


class Reporting(NamedTuple):
    """Tables, figures and report are being written, which takes seconds."""


class Reported(NamedTuple):
    """Tables, figures and report are written."""

    folder: Path
    report: Path
    tables: Mapping[str, pd.DataFrame]
    verdict: Verdict
    seconds: float


class DoctorFinished(NamedTuple):
    """Every examination is done: findings, and the figures of each examination as text."""

    findings: pd.DataFrame
    figures: Mapping[str, Mapping[str, str]]
    plan: Plan


Event = (
    DoctorFinished
    | Planned
    | MemoryForecast
    | Previewed
    | RunStarted
    | GroupStarting
    | GroupReady
    | TrialStarting
    | TrialEnded
    | Unsent
    | Note
    | Reporting
    | Reported
)
Emit = Callable[[Event], None]
