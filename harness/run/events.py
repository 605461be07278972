"""Progress as small frozen events through one callable. Sinks format them; nobody else prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.plan.planner import Plan
from harness.plan.trial import Trial, WorkerGroup

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Planned:
    """The plan, before anything starts."""

    plan: Plan


@dataclass(frozen=True)
class RunStarted:
    """So many trials are to be measured, so many are already done. Without a folder nothing is kept."""

    folder: Path | None
    trials: int
    done: int


@dataclass(frozen=True)
class GroupStarting:
    """A worker group's processes are being started."""

    group: WorkerGroup


@dataclass(frozen=True)
class GroupReady:
    """They are up, after so many seconds."""

    group: WorkerGroup
    start_s: float


@dataclass(frozen=True)
class TrialStarting:
    trial: Trial


@dataclass(frozen=True)
class TrialEnded:
    """A trial came to an outcome; ``line`` is what was recorded of it."""

    trial: Trial
    line: Mapping[str, Any]
    again: bool = False


@dataclass(frozen=True)
class Note:
    """Something a person should know."""

    text: str


@dataclass(frozen=True)
class Reported:
    """Tables, figures and report are written."""

    folder: Path
    report: Path
    tables: Mapping[str, pd.DataFrame]
    seconds: float


@dataclass(frozen=True)
class DoctorFinished:
    """The doctor has looked at everything: findings, and figures by examination, in words."""

    findings: pd.DataFrame
    figures: Mapping[str, Mapping[str, str]]
    plan: Plan


Event = (
    DoctorFinished | Planned | RunStarted | GroupStarting | GroupReady | TrialStarting | TrialEnded | Note | Reported
)
Emit = Callable[[Event], None]
