"""Runs a worker group as one TorchTrainer.fit(): fresh processes, watched from outside."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from harness.config.experiment import Experiment
from harness.errors import ClusterLostError
from harness.launch.failures import (
    blamed,
    ended_by_themselves,
    explained,
    from_hang,
    from_launch,
    from_memory_monitor,
    primary,
)
from harness.launch.protocol import GroupStarted, Job, Message, TrialStarted, process_variables
from harness.launch.ray import private
from harness.launch.ray.agents import ask_agents, patience
from harness.launch.ray.cluster import Cluster
from harness.launch.ray.controller import RankConfig, startup_callbacks
from harness.launch.ray.trainer import UNUSED, Fit, free_devices
from harness.launch.ray.worker import train
from harness.launch.watchdog import Registration, ResourcesRequested, StartupTimer, Watchdog
from harness.plan.inventory import Machine, Node
from harness.plan.trial import TrialResult, WorkerGroup
from harness.system.scratch import Scratch

TAKE_S = 1.0
"""How long one look into the mailbox waits; a message ends the wait."""
ENDING_S = 0.05
"""The same once the last result is there, when only the end of the group is awaited."""
END_S = 60.0
"""How long Ray has to notice that the workers of a group were killed."""
GIVEN_UP_S = 5.0
"""The same where the whole run ends, and Ray with it."""
GRACE_S = 1.0
"""How long the other ranks have, after the first failure, to fail too; then they are ended, wherever they wait."""
CLOSED = -2
"""The number of no launch: the mailbox takes nothing."""


@dataclass
class RayLauncher:
    """Starts each worker group on the cluster, hears its messages, ends it where it hangs."""

    cluster: Cluster
    experiment: Experiment
    machine: Machine
    import_path: str | None = None
    _launches: Iterator[int] = field(default_factory=itertools.count)
    _storage: Scratch = field(default_factory=Scratch)

    def close(self) -> None:
        """Removes what Ray Train wrote for itself."""
        self._storage.close()

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        nodes = self._nodes_for(group)
        if len(nodes) < group.placement.nodes:  # Ray would wait for those that have gone
            reason = f"the cluster shrank: of {group.placement.nodes} nodes that the trial needs {len(nodes)} are left"
            yield from (TrialResult(trial.id, "lost", reason) for trial in group.trials)
            return
        number = next(self._launches)
        _answer(self.cluster.mailbox.open.remote(number, deadline))
        fit = Fit(self._trainer(group, nodes, number))
        watch = Watchdog(partial(ask_agents, self.cluster), self.experiment.limits.trial)
        failures: list[TrialResult] = []
        finished: list[str] = []
        current: str | None = None
        for message in self._hear(fit, watch, group.trials[-1].id):
            if isinstance(message, TrialResult) and message.ends_group:
                failures.append(message)  # told when the group has ended: the cause may be a peer's
                continue
            if isinstance(message, TrialStarted):
                current = message.trial_id
            elif isinstance(message, TrialResult):
                current = None
                finished.append(message.trial_id)
            yield message
        left = blamed([trial.id for trial in group.trials], finished, current, connected=watch.connected)
        yield from (explained(row, watch) for row in _rows(left, failures, fit, watch))

    def _hear(self, fit: Fit, watch: Watchdog, last: str) -> Iterator[Message]:
        """Messages until the group has ended and all are heard; ends a group that fails, hangs or is given up."""
        coming_up = StartupTimer(time.time(), "controller")
        wait_s = TAKE_S
        try:
            while True:
                ended = fit.ended  # before the last look, so that nothing sent until then is missed
                for message in self._take(0.0 if ended else wait_s):
                    watch.saw_progress()
                    if _is_of_coming_up(message, watch, coming_up):
                        continue
                    if isinstance(message, GroupStarted):
                        message = replace(message, parts=coming_up.parts(time.time()))
                    elif isinstance(message, TrialResult):
                        wait_s = ENDING_S if message.trial_id == last or message.ends_group else wait_s
                        watch.saw_end(message)
                    yield message
                if ended:
                    return
                if watch.failed_for(GRACE_S) or watch.hangs():
                    watch.cut_short()
                    fit.join(END_S)
                    return
        finally:
            if not fit.ended:  # given up: ranks that are still coming up hear it when they register
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get(self.cluster.mailbox.open.remote(CLOSED, None), timeout=patience())
                watch.end()
                fit.join(GIVEN_UP_S)
            elif fit.error:
                watch.saw_failure()
                watch.end()  # what the ranks started and left behind
                free_devices()
            watch.clear()

    def _take(self, wait_s: float) -> list[Any]:
        messages: list[Any] = _answer(self.cluster.mailbox.take.remote(wait_s))
        return messages

    def _trainer(self, group: WorkerGroup, nodes: Sequence[Node], number: int) -> TorchTrainer:
        job = Job(self.experiment, group, self.machine.threads_per_device, self.import_path)
        mailbox = self.cluster.mailbox
        trainer = TorchTrainer(
            train,
            train_loop_config={"job": job, "mailbox": mailbox, "launch": number},
            torch_config=RankConfig(
                backend=group.backend, timeout_s=self.experiment.limits.collective_s, mailbox=mailbox, launch=number
            ),
            scaling_config=self._scaling(group, nodes),
            run_config=RunConfig(
                name=f"{group.id}-{number}",
                storage_path=str(self._storage.path),
                callbacks=startup_callbacks(mailbox, number),
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
                logging_config=LoggingConfig(log_level="ERROR"),
                worker_runtime_env={"env_vars": process_variables(group, self.machine.threads_per_device)},
            ),
        )
        private.drop_callbacks(trainer, UNUSED)
        return trainer

    def _scaling(self, group: WorkerGroup, nodes: Sequence[Node]) -> ScalingConfig:
        placement = group.placement
        resources = _resources(group, self.machine, nodes)
        pinned: dict[str, Any] = {}
        if len(self.cluster.inventory.nodes) > 1:
            names = [node.node_id for node in nodes for _ in range(placement.workers_per_node)]
            pinned["label_selector"] = [{"ray.io/node-id": name} for name in names]
        return ScalingConfig(
            num_workers=placement.workers,
            use_gpu=group.device == "cuda",
            resources_per_worker=resources,
            **pinned,
        )

    def _nodes_for(self, group: WorkerGroup) -> list[Node]:
        """The first nodes that hold their part of the group: the same ones in every block, while they are there."""
        per_node = self.machine.devices_per_node
        placement = group.placement
        needed = 1 if group.oversubscribe else max([placement.devices_per_node, *(n + 1 for n in placement.device_ids)])
        fits = [node for node, devices in zip(self.cluster.inventory.nodes, per_node, strict=True) if devices >= needed]
        alive = self._alive()
        return [node for node in fits if node.node_id in alive][: placement.nodes]

    def _alive(self) -> set[str]:
        """The nodes whose agents answer; a cluster of one has no other to lose."""
        names = [node.node_id for node in self.cluster.inventory.nodes]
        if len(names) == 1:
            return set(names)
        answers = ask_agents(self.cluster, "alive", [(name, 1) for name in names])
        return {name for name, answer in zip(names, answers, strict=True) if answer is not None}


def _is_of_coming_up(message: Any, watch: Watchdog, coming_up: StartupTimer) -> bool:
    """Notes what tells of a group that comes up, which is not for the run; False of any other message."""
    if isinstance(message, Registration):
        watch.add(message)
    if isinstance(message, Registration | ResourcesRequested):
        coming_up.saw(message, time.time())
        return True
    return False


def _answer(reference: Any) -> Any:
    """What the mailbox answers; raises ClusterLostError where it is gone, without which no rank is heard."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        raise ClusterLostError(
            f"the run's mailbox on Ray is gone ({type(error).__name__}): it was killed, or Ray or its node ended"
        ) from error


def _rows(left: Sequence[str], failures: Sequence[TrialResult], fit: Fit, watch: Watchdog) -> Iterator[TrialResult]:
    """What is to be recorded of the trials that a group ended at."""
    if watch.timed_out:
        yield from from_hang(left, watch.stacks)
    elif failures:
        silent = watch.silent or ([] if watch.was_cut_short else ended_by_themselves(fit.error))
        yield from_memory_monitor(primary(failures, silent), fit.error)
    elif fit.error is not None:
        yield from from_launch(left, fit.error)


def _resources(group: WorkerGroup, machine: Machine, nodes: Sequence[Node]) -> dict[str, float]:
    """What Ray reserves for one worker. Where GPUs are named, all of the node: those that are not used stay idle."""
    placement = group.placement
    if placement.device_ids:
        return {
            "CPU": machine.cpus_per_device * placement.devices_per_worker,
            "GPU": float(nodes[0].gpus // placement.workers),
        }
    if not group.oversubscribe:
        cpus = machine.cpus_per_device * placement.devices_per_worker
        gpus = {"GPU": float(placement.devices_per_worker)} if group.device == "cuda" else {}
        return {"CPU": cpus, **gpus}
    cores = min(node.cores for node in nodes)
    cpu_share = int(100 * cores / placement.workers_per_node) / 100
    if group.device != "cuda":
        return {"CPU": cpu_share if cpu_share < 1 else int(cpu_share)}
    least = min(node.gpus for node in nodes)
    sharing = -(-placement.workers_per_node // least)  # ranks on the fullest GPU
    gpu_share = float(least) if placement.workers == 1 else 1.0 if sharing == 1 else int(10_000 / sharing) / 10_000
    return {"CPU": cpu_share if cpu_share < 1 else int(cpu_share), "GPU": gpu_share}
