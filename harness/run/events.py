"""Progress as small frozen events through one callable; only sinks format and print them."""

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
    """The numbers of trials to measure and of those already done. Without a folder nothing is recorded."""

    folder: Path | None
    trials: int
    done: int


@dataclass(frozen=True)
class GroupStarting:
    """A worker group's processes are being started."""

    group: WorkerGroup


@dataclass(frozen=True)
class GroupReady:
    """The worker group is ready, ``start_s`` seconds after its launch."""

    group: WorkerGroup
    start_s: float


@dataclass(frozen=True)
class TrialStarting:
    trial: Trial


@dataclass(frozen=True)
class TrialEnded:
    """A trial has an outcome; ``line`` is its recorded row, ``again`` whether it is retried."""

    trial: Trial
    line: Mapping[str, Any]
    again: bool = False


@dataclass(frozen=True)
class Note:
    """A message to the user."""

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
    """Every examination is done: findings, and the figures of each examination as text."""

    findings: pd.DataFrame
    figures: Mapping[str, Mapping[str, str]]
    plan: Plan


Event = (
    DoctorFinished | Planned | RunStarted | GroupStarting | GroupReady | TrialStarting | TrialEnded | Note | Reported
)
Emit = Callable[[Event], None]
