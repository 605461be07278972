"""Run a worker group's trials one by one under torchrun, without Ray: the control that shows the cost of Ray."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from harness.config.experiment import Experiment
from harness.doctor.gate import SkipRule, skip_reason, skip_rules
from harness.launch.agent import NodeAgent
from harness.launch.failures import despite, explained, from_exit, from_hang, primary
from harness.launch.protocol import GroupStarted, Job, Message
from harness.launch.startup import Received, Registration, StartupTimer
from harness.launch.supervision import GroupEnd, supervise
from harness.launch.torchrun.processes import Processes, start_processes
from harness.launch.watchdog import Ending, Watchdog
from harness.plan.trial import TrialResult, WorkerGroup, skipped
from harness.system.code_version import CodeVersion

START_S = 120.0
"""Timeout until the first process registers: that of Ray's worker groups."""


@dataclass(frozen=True)
class TorchrunLauncher:
    """Runs each trial in processes of its own on this machine, with the same worker code as under Ray."""

    experiment: Experiment
    threads_per_device: int
    import_path: str | None = None
    versions: Mapping[str, CodeVersion] = field(default_factory=dict)
    """The versions of the user's code, by variant."""

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        """As Launcher describes; a GroupStarted for each trial, with the seconds of all starts until then."""
        parts: Mapping[str, float] = {}
        rules: list[SkipRule] = []
        for trial in group.trials:
            if deadline is not None and time.time() >= deadline:
                return
            if trial.trains and (reason := skip_reason(rules, trial.cell)):
                yield skipped(trial, reason)
                continue
            alone, version = replace(group, trials=(trial,)), self.versions.get(group.variant)
            job = Job(self.experiment, alone, self.threads_per_device, self.import_path, version)
            finished = False
            with closing(self._run(job, deadline, parts)) as messages:
                for message in messages:
                    finished = isinstance(message, TrialResult) and not message.ends_group
                    if isinstance(message, GroupStarted):
                        parts = message.parts
                    if isinstance(message, TrialResult):
                        rules += skip_rules(trial.cell, message.facts, self.experiment.allow)
                    yield message
            if not finished:
                return

    def _run(self, job: Job, deadline: float | None, parts: Mapping[str, float]) -> Generator[Message, None, None]:
        """Run one trial in processes of its own; the last message is its result, unless the deadline comes first."""
        (trial,) = job.group.trials
        timer = StartupTimer(time.time(), "torchrun", before=parts)
        with start_processes(job, deadline) as processes:
            watchdog = Watchdog(ask_here, self.experiment.limits.trial, start_s=START_S)
            end = yield from supervise(TorchrunGroup(processes, watchdog), watchdog, timer, trial.id)
            if not end.finished and not processes.mailbox.refused:
                if end.verdict.ending is Ending.BY_ITSELF:  # else the time of the end is not known
                    watchdog.record_failure()
                yield despite(explained(_failure(trial.id, end, watchdog, processes), watchdog), end.measured)


@dataclass(frozen=True)
class TorchrunGroup:
    """torchrun and its ranks, as ``supervise`` sees them."""

    processes: Processes
    watchdog: Watchdog

    @property
    def ended(self) -> bool:
        return self.processes.exit_code is not None

    def take(self, timeout_s: float) -> list[Received]:
        messages = self.processes.mailbox.take(timeout_s)
        self.processes.pids.update(message.pid for message in messages if isinstance(message, Registration))
        return messages

    def kill(self) -> None:
        self.watchdog.kill()

    def release(self) -> None:
        """Nothing: ``start_processes`` ends all of them."""


def _failure(trial_id: str, end: GroupEnd, watchdog: Watchdog, processes: Processes) -> TrialResult:
    output = processes.output()
    if end.verdict.ending is Ending.HUNG:
        row = next(from_hang([trial_id], end.verdict.stacks))
    elif end.failures:
        row = primary(end.failures, watchdog.dead_ranks or ())
    else:
        return from_exit(trial_id, processes.exit_code, output, came_up=bool(processes.pids))
    return replace(row, detail=f"{row.detail}\n\nlast output of the processes:\n{output}") if output else row


def ask_here(question: str, things: Sequence[tuple[str, object]]) -> list[Any]:
    """Return the answers of this machine, in place of the agents that Ray has on every node."""
    return list(getattr(NodeAgent(), question)([what for _, what in things]) or [None] * len(things))
