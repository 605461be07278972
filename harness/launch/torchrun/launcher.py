"""Runs a worker group's trials one by one under torchrun, without Ray: the control that shows what Ray costs."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.config.experiment import Experiment
from harness.doctor.gate import SkipRule, skip_reason, skip_rules
from harness.launch.agent import NodeAgent
from harness.launch.failures import explained, from_exit, from_hang, primary
from harness.launch.protocol import GroupStarted, Job, Message
from harness.launch.torchrun.processes import Processes, start_processes
from harness.launch.watchdog import Registration, StartupTimer, Watchdog
from harness.plan.trial import TrialResult, WorkerGroup

TAKE_S = 1.0
"""How long one look into the mailbox waits; a message ends the wait."""
ENDING_S = 0.05
"""The same once the result is there, when only the end of the processes is awaited."""
START_S = 120.0
"""How long the processes may take until the first of them registers: as long as Ray gives its own."""


@dataclass(frozen=True)
class TorchrunLauncher:
    """Each trial in processes of its own on this machine, with the same worker code as under Ray."""

    experiment: Experiment
    threads_per_device: int
    import_path: str | None = None

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        """As Launcher says; a GroupStarted for each trial, with the seconds of coming up of all until then."""
        spent: dict[str, float] = {}
        refused: list[SkipRule] = []
        for trial in group.trials:
            if deadline is not None and time.time() >= deadline:
                return
            if trial.purpose != "doctor" and (reason := skip_reason(refused, trial.cell)):
                yield TrialResult(trial.id, "skipped", reason)
                continue
            own = replace(group, trials=(trial,))
            job = Job(self.experiment, own, self.threads_per_device, self.import_path)
            if not (yield from self._run(job, deadline, spent, refused)):
                return

    def _run(
        self, job: Job, deadline: float | None, spent: dict[str, float], refused: list[SkipRule]
    ) -> Generator[Message, None, bool]:
        """One trial; gives whether the group may go on. What an examination refuses is added to ``refused``."""
        coming_up = StartupTimer(time.time(), "torchrun")
        failures: list[TrialResult] = []
        finished = False
        with start_processes(job, deadline) as processes:
            watch = Watchdog(ask_here, self.experiment.limits.trial)
            for message in _hear(processes, watch, coming_up):
                if isinstance(message, TrialResult) and message.ends_group:
                    failures.append(message)  # told when the processes have ended: the cause may be a peer's
                    continue
                if isinstance(message, GroupStarted):
                    for part, seconds in coming_up.parts(time.time()).items():
                        spent[part] = spent.get(part, 0.0) + seconds
                    message = replace(message, parts=dict(spent))
                if isinstance(message, TrialResult):
                    finished = True
                    refused += skip_rules(job.group.trials[0].cell, message.facts)
                yield message
            if not finished and not processes.mailbox.refused:
                if processes.exit_code is not None:  # else they are ended later, and when is not seen
                    watch.saw_failure()
                yield explained(_failure(job.group.trials[0].id, failures, watch, processes), watch)
        return finished


def _hear(processes: Processes, watch: Watchdog, coming_up: StartupTimer) -> Iterator[Message]:
    """Messages until torchrun has ended and all are heard, or until the processes hang."""
    wait_s, began = TAKE_S, time.monotonic()
    while True:
        ended = processes.exit_code is not None  # before the last look, so that nothing sent until then is missed
        for message in processes.mailbox.take(0.0 if ended else wait_s):
            watch.saw_progress()
            if isinstance(message, Registration):
                watch.add(message)
                coming_up.saw(message, time.time())
                processes.pids.add(message.pid)
                continue
            if isinstance(message, TrialResult):
                wait_s = ENDING_S
                watch.saw_end(message)
            yield message
        if ended or (not processes.pids and time.monotonic() - began > START_S):
            return
        if watch.hangs():
            watch.end()
            return


def _failure(trial_id: str, failures: Sequence[TrialResult], watch: Watchdog, processes: Processes) -> TrialResult:
    output = processes.output()
    if watch.timed_out:
        row = next(from_hang([trial_id], watch.stacks))
    elif failures:
        row = primary(failures, watch.silent or ())
    else:
        return from_exit(trial_id, processes.exit_code, output, came_up=bool(processes.pids))
    return replace(row, detail=f"{row.detail}\n\nthe processes printed last:\n{output}") if output else row


def ask_here(question: str, things: Sequence[tuple[str, Any]]) -> list[Any]:
    """This machine's answers, in the place of the agents that Ray has on every node."""
    return list(getattr(NodeAgent(), question)([what for _, what in things]) or [None] * len(things))
