"""Execution of a plan: launches worker groups, records their trials' results, retries lost trials."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace

from harness.analysis.evidence import environment_id
from harness.doctor.gate import memory_estimates
from harness.launch.protocol import ChoosesNodes, GroupStarted, Launcher, TrialStarted
from harness.plan.planner import Plan
from harness.plan.rows import Circumstances, RecordedTrial
from harness.plan.trial import SkipReason, Trial, TrialResult, WorkerGroup, skipped
from harness.record.folder import RunFolder
from harness.run.attempts import Attempts
from harness.run.events import Emit, GroupReady, GroupStarting, Repeating, TrialEnded, TrialStarting
from harness.run.resume import attempts, on_other_hardware, out_of_memory, pending, spent_by
from harness.run.skip_policy import SkipPolicy
from harness.system.signals import deferred_interrupts


class Execution:
    """One invocation of a run, which ``began`` at this Unix time, by default now. ``code``: the version of the code."""

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        launcher: Launcher,
        emit: Emit,
        began: float | None = None,
        code: str = "",
    ) -> None:
        self._plan, self._folder, self._launcher, self._emit = plan, folder, launcher, emit
        self._code = code
        self._environment: str | None = None  # of the worker group that runs
        lines = folder.lines()
        self._attempts = Attempts(attempts(lines), plan.experiment.limits.attempts)
        devices = plan.machine.devices
        spent = spent_by(folder, lines, devices)
        spent += (time.time() - began) * devices if began else 0.0
        self._policy = SkipPolicy(plan, out_of_memory(plan, lines), folder.lines, spent, lines)
        recorded = 1 + max((int(line["invocation"]) for line in lines), default=-1)
        self.invocation = max(recorded, len(folder.environment().get("invocations", [])))
        self.groups = pending(plan, lines)
        """The worker groups that this invocation is to run."""
        self.running: str | None = None
        """The trial that is being measured."""
        self._skipped_before = {(line["trial_id"], line["skip_code"]) for line in lines if line["outcome"] == "skipped"}

    @property
    def limit_s(self) -> float | None:
        """The seconds until a limit ends the run; None without a limit."""
        return self._policy.end.seconds if self._policy.end else None

    @property
    def done(self) -> int:
        """The number of planned trials that need not be measured again."""
        return len(self._plan.trials) - sum(len(group.trials) for group in self.groups)

    def run(self) -> None:
        """Run every pending worker group, in the order of the plan; a failed group continues in fresh processes.

        Each result is on disk before the next message is handled. Raises WriteError if a result cannot be written.
        """
        for skip in self._plan.skips:
            if (skip.trial.id, skip.skip_code) not in self._skipped_before:
                reason = SkipReason(skip.skip_code, skip.reason)
                self._record(skip.trial, skipped(skip.trial, reason), None, position=None)
        for group in self.groups:
            self._run(group)
        self._repeat_on_one_type()

    def _repeat_on_one_type(self) -> None:
        """Repeat, block by block, what ran on other hardware than its base, if one type of nodes now holds both."""
        apart: dict[int, list[WorkerGroup]] = {}
        for group in on_other_hardware(self._plan, self._lines()):
            apart.setdefault(group.block, []).append(group)
        for groups in apart.values():
            if any(self._policy.skipped(trial) for group in groups for trial in group.trials):
                return
            if isinstance(self._launcher, ChoosesNodes) and self._launcher.keep_together(groups):
                self._emit(Repeating(tuple(groups)))
                for group in groups:
                    self._launch(group)

    def _lines(self) -> list[RecordedTrial]:
        """Return the recorded trials of this invocation."""
        return [line for line in self._folder.lines() if line["invocation"] == self.invocation]

    def _run(self, group: WorkerGroup) -> None:
        left = self._startable(group)
        while left.trials:
            before = self._attempts.total
            self._launch(left)
            first, left = left.trials[0], self._startable(group)
            if left.trials and self._attempts.total == before:
                self._record(first, _without_result(first), group, position=0)
                left = self._startable(group)

    def _startable(self, group: WorkerGroup) -> WorkerGroup:
        """Return the group with the trials that have no final outcome yet, after recording those that are skipped."""
        for trial in self._unsettled(group):
            if result := self._policy.skipped(trial):
                self._record(trial, result, group, position=None)
        return replace(group, trials=self._unsettled(group))

    def _unsettled(self, group: WorkerGroup) -> tuple[Trial, ...]:
        return tuple(trial for trial in group.trials if not self._attempts.is_settled(trial.id))

    def _launch(self, group: WorkerGroup) -> None:
        """Launch a group once; return when it ends, by itself or by its first failure."""
        self._emit(GroupStarting(group))
        started = last_message = time.time()
        trials = {trial.id: (position, trial) for position, trial in enumerate(group.trials)}
        ready: GroupStarted | None = None
        start_s = self._environment = None
        try:
            with closing(self._launcher.launch(group, deadline=self._policy.deadline)) as messages:
                for message in messages:
                    if isinstance(message, GroupStarted):
                        ready = message  # under torchrun each trial has its own: the last stays, the first start counts
                        start_s = start_s or time.time() - started
                        self._environment = environment_id(ready.environments, self._code)
                        self._emit(GroupReady(group, start_s))
                    elif isinstance(message, TrialStarted):
                        self.running = message.trial_id
                        self._emit(TrialStarting(trials[message.trial_id][1]))
                    else:
                        position, trial = trials[message.trial_id]
                        self._record(trial, message, group, position)
                    last_message = time.time()  # waiting for the disk is no part of the group's teardown
        finally:  # after an interruption too: what it finished ran in this environment
            with deferred_interrupts():
                self._remember_group(group, ready, started, start_s, last_message)

    def _remember_group(
        self, group: WorkerGroup, ready: GroupStarted | None, started: float, start_s: float | None, last_message: float
    ) -> None:
        self._folder.add_environment(
            {
                "group_id": group.id,
                "invocation": self.invocation,
                "placement": str(group),
                "started_at": started,
                "start_s": start_s,
                "whole_s": time.time() - started,
                "parts": {**ready.parts, **self._teardown(last_message)} if ready else {},
                "nodes": list(ready.environments) if ready else [],
                "ranks": list(ready.ranks) if ready else [],
            }
        )

    def _teardown(self, last_message: float) -> dict[str, float]:
        """Return the time since the group's last message; nothing if a trial was cut short, whose part is unknown."""
        return {} if self.running else {"teardown": time.time() - last_message}

    def _record(self, trial: Trial, result: TrialResult, group: WorkerGroup | None, position: int | None) -> None:
        """Record a trial's result, and emit TrialEnded if a worker group was to run it."""
        circumstances: Circumstances = {
            "attempt": self._attempts.next_number(trial.id),
            "invocation": self.invocation,
            "group_id": group.id if group else None,
            "environment": None if position is None else self._environment,
            "position": position,
        }
        if estimates := memory_estimates(trial.cell, result.facts, (planned.cell for planned in self._plan.trials)):
            result = replace(result, facts={**result.facts, "estimates": estimates})
        with deferred_interrupts():  # an interruption inside would leave a recorded trial without its event
            line = self._folder.append(trial, result, circumstances)
            self._attempts.add(trial.id, result.outcome)
            self.running = None if self.running == trial.id else self.running
            if group:
                again = not self._attempts.is_settled(trial.id)
                self._emit(TrialEnded(trial, line, again, result.epochs))
        self._policy.learn(trial, result)


def _without_result(trial: Trial) -> TrialResult:
    return TrialResult(trial.id, "error", "the worker group ended without a result and without an error")
