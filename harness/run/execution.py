"""Execution of a plan: launches worker groups, records their trials' results, retries lost trials."""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path

from harness.analysis.doubts import FOREIGN_CORES
from harness.analysis.evidence import environment_id
from harness.doctor.gate import memory_estimates
from harness.launch.protocol import ByLauncher, GroupStarted, Launcher, TrialStarted
from harness.launch.ray import cluster
from harness.launch.ray.cluster import Cluster
from harness.launch.torchrun import TorchrunLauncher
from harness.plan.planner import Plan, by_placement, by_variant
from harness.plan.rows import Circumstances
from harness.plan.run_environment import spent_device_seconds
from harness.plan.trial import Trial, TrialResult, WorkerGroup, skipped
from harness.record.folder import RunFolder
from harness.report.tables.text import duration
from harness.run.events import Emit, GroupReady, GroupStarting, Note, TrialEnded, TrialStarting
from harness.run.resume import pending
from harness.run.skip_policy import SkipPolicy
from harness.run.variants import on_nodes, own_folder_on_nodes
from harness.system.process import deferred_interrupts


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
        self._quiet: set[int] = set()  # the blocks that were waited for
        self._environment: str | None = None  # of the worker group that runs
        lines = folder.lines()
        self._attempts = Counter({line["trial_id"]: int(line["attempt"]) for line in lines})
        """The attempts at each trial, of earlier invocations too: they are numbered on."""
        self._lost = Counter[str]()
        """The lost attempts of this invocation: only a lost trial is tried again, at most limits.attempts times."""
        self._settled: set[str] = set()
        devices = plan.machine.devices
        spent = spent_device_seconds(folder.environment(), lines, devices)
        spent += (time.time() - began) * devices if began else 0.0
        self._policy = SkipPolicy(plan, folder.lines, spent, lines, began)
        recorded = 1 + max((int(line["invocation"]) for line in lines), default=-1)
        self.invocation = max(recorded, len(folder.environment().get("invocations", [])))
        self.groups = pending(plan, lines)
        """The worker groups that this invocation is to run."""
        self.done = len(plan.trials) - sum(len(group.trials) for group in self.groups)
        """The number of planned trials that need not be measured again."""
        self.limit_s = self._policy.end.seconds if self._policy.end else None
        """The seconds until a limit ends the run."""
        self.deadline = self._policy.deadline
        """The time at which it does, in seconds since the epoch; None without one."""
        self.running: str | None = None
        """The trial that is being measured."""
        self._skipped_before = {(line["trial_id"], line["skip_code"]) for line in lines if line["outcome"] == "skipped"}
        self._ran_before = {line["trial_id"]: line["outcome"] for line in lines if line["outcome"] != "skipped"}
        """The last outcome of trials, which a reason not to start them again does not replace."""

    def run(self) -> None:
        """Run every pending worker group, in the order of the plan; a failed group continues in fresh processes.

        Each result is on disk before the next message is handled. Raises WriteError if a result cannot be written.
        """
        for trial, reason in self._plan.skips.items():
            if trial.id not in self._ran_before and (trial.id, reason.code) not in self._skipped_before:
                self._record(trial, skipped(trial, reason), None, position=None)
        for group in self.groups:
            parts = [group]
            while parts:
                left = self._startable(parts[0])
                if not left.trials:
                    parts.pop(0)
                    continue
                if self._wait_for_quiet(group.block):
                    continue  # no time may be left
                before, lost = self._attempts.total(), self._lost.total()
                started = self._launch(left)
                if self._attempts.total() == before and self._startable(left).trials:
                    ended = "the worker group ended without a result and without an error"
                    self._record(left.trials[0], TrialResult(left.trials[0].id, "error", ended), left, position=0)
                if not started:  # those that need fewer ranks may start
                    parts[:1] = by_placement(left)
                elif len(left.variants) > 1 and self._lost.total() > lost:  # perhaps memory: each alone
                    parts[:1] = by_variant(left)

    def _wait_for_quiet(self, block: int) -> bool:
        """Wait before a block until the processors of all nodes are idle, at most throughput.wait_for_quiet.

        By the same limit as the doubt "foreign load": no rank runs now, so any load is another program's. Return
        whether it waited.
        """
        settings = self._plan.experiment.throughput
        most = settings.wait_for_quiet if settings else None
        if most is None or block in self._quiet:
            return False
        self._quiet.add(block)
        began, deadline, waited = time.time(), self._policy.deadline or math.inf, False
        while busy := {host: cores for host, cores in self._launcher.busy_cores().items() if cores > FOREIGN_CORES}:
            text = "; ".join(f"{cores:.1f} cores on {host}" for host, cores in list(busy.items())[:3])
            now = time.time()
            if now >= deadline:  # every trial of the block is skipped
                break
            if now >= began + most:
                self._emit(Note(f"{text} busy after {duration(most)}: block {block} is measured beside that."))
                break
            if not waited:
                self._emit(Note(f"{text} busy before block {block}: waiting until idle, at most {duration(most)}."))
            waited = True
        return waited

    def _startable(self, group: WorkerGroup) -> WorkerGroup:
        """Return the group with the trials that have no final outcome yet, after recording those that are skipped."""
        for trial in group.trials:
            if trial.id not in self._settled and (result := self._policy.skipped(trial)):
                if self._ran_before.get(trial.id, "lost") == "lost":  # a lost one is left out, and goes on in a resume
                    self._record(trial, result, group, position=None)
                else:
                    self._settled.add(trial.id)
                    self._policy.learn(trial, result)
        return group.keeping(lambda trial: trial.id not in self._settled)

    def _launch(self, group: WorkerGroup) -> bool:
        """Launch a group once, until it ends by itself or by its first failure; return whether its ranks connected."""
        self._emit(GroupStarting(group))
        started = last_message = time.time()
        trials = {trial.id: (position, trial) for position, trial in enumerate(group.trials)}
        ready: GroupStarted | None = None
        start_s = self._environment = None
        try:
            informed = self._policy.informed(group)
            with closing(self._launcher.launch(informed, deadline=self._policy.deadline)) as messages:
                for message in messages:
                    if isinstance(message, GroupStarted):
                        ready = message
                        start_s = time.time() - started
                        self._environment = environment_id(ready.environments, self._code, dict(group.variables))
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
                # the teardown is unknown if a trial was cut short
                teardown = {} if self.running else {"teardown": time.time() - last_message}
                self._folder.add_environment(
                    {
                        "group_id": group.id,
                        "invocation": self.invocation,
                        "placement": str(group),
                        "started_at": started,
                        "start_s": start_s,
                        "whole_s": time.time() - started,
                        "parts": {**ready.parts, **teardown} if ready else {},
                        "nodes": list(ready.environments) if ready else [],
                        "ranks": list(ready.ranks) if ready else [],
                    }
                )
        return ready is not None

    def _record(self, trial: Trial, result: TrialResult, group: WorkerGroup | None, position: int | None) -> None:
        """Record a trial's result, and emit TrialEnded if a worker group was to run it."""
        circumstances: Circumstances = {
            "attempt": self._attempts[trial.id] + 1,
            "invocation": self.invocation,
            "group_id": group.id if group else None,
            "environment": None if position is None else self._environment,
            "position": position,
        }
        if estimates := memory_estimates(trial.cell, result.facts, (planned.cell for planned in self._plan.trials)):
            result = replace(result, facts={**result.facts, "estimates": estimates})
        with deferred_interrupts():  # an interruption inside would leave a recorded trial without its event
            line = self._folder.append(trial, result, circumstances)
            self._attempts[trial.id] += 1
            self._lost[trial.id] += result.outcome == "lost"
            if result.outcome != "lost" or self._lost[trial.id] >= self._plan.experiment.limits.attempts:
                self._settled.add(trial.id)
            self.running = None if self.running == trial.id else self.running
            if group:
                again = trial.id not in self._settled
                self._emit(TrialEnded(trial, line, again, result.epochs))
        self._policy.learn(trial, result)


def start_ray(ray_cluster: Cluster | None, plan: Plan) -> AbstractContextManager[Cluster | None]:
    """Return the connected cluster, or start an embedded one; None if no worker group of the plan needs Ray."""
    if ray_cluster or all(group.launcher != "ray" for group in plan.groups):
        return nullcontext(ray_cluster)
    return cluster.start_embedded(plan.inventory)


def launcher_for(
    plan: Plan, ray_cluster: Cluster | None, home: Path, stack: ExitStack, emit: Emit, holds: bool = False
) -> Launcher:
    """Return the launcher of the plan's worker groups. Idle, Ray takes no part in groups that torchrun starts.

    ``holds``: the next trial starts once the driver has handled the result of the last one; torchrun always does so.
    """
    own = str(home) if plan.experiment.own_modules and not plan.variants else None
    versions = {name: own.version for name, own in plan.variants.items()}
    torchrun = TorchrunLauncher(plan.experiment, plan.machine.threads_per_device, own, versions)
    if ray_cluster is None:
        return torchrun
    from harness.launch.ray.launcher import RayLauncher  # and with it ray.train, which takes seconds

    if not ray_cluster.embedded:
        own, versions = own_folder_on_nodes(plan.experiment, home), on_nodes(plan.variants)
    launcher = RayLauncher(
        ray_cluster,
        plan.experiment,
        plan.machine,
        own,
        versions,
        placements=[group.placement for group in plan.groups],
        holds=holds,
        say=lambda text: emit(Note(text)),
    )
    ray = stack.enter_context(closing(launcher))
    return ByLauncher({"ray": ray, "torchrun": torchrun})
