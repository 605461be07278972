"""Run a worker group as one TorchTrainer.fit(): fresh processes, observed from outside."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer, get_devices
from ray.util import placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from harness.config.experiment import Experiment
from harness.config.script import ScriptExperiment
from harness.config.sections import Limits
from harness.errors import ClusterLostError, WorkloadError
from harness.launch.failures import (
    blamed,
    blamed_on,
    found_dead,
    from_exit,
    from_hang,
    from_launch,
    from_memory_monitor,
    judged,
    primary,
)
from harness.launch.mailbox import CLOSED
from harness.launch.protocol import Job, Message, process_variables
from harness.launch.ray import private
from harness.launch.ray.cluster import Cluster
from harness.launch.ray.controller import RankConfig, register, startup_callbacks
from harness.launch.ray.nodes import NodeChoice, ask_agents, dead_node, patience
from harness.launch.startup import Received, Registration, StartupTimer, start_limit_s
from harness.launch.supervision import Ending, GroupEnd, Watchdog, supervise
from harness.launch.worker import devices_of, run_rank
from harness.plan.cell import Placement
from harness.plan.inventory import Machine, Node
from harness.plan.rows import Json
from harness.plan.trial import TrialResult, WorkerGroup
from harness.system.process import in_thread, variables
from harness.system.scratch import Scratch
from harness.system.user_code import CodeVersion, load_from
from harness.train.ranks import Ranks, StoreExchange

CLEANER, MANAGER = "PlacementGroupCleanerCallback", "DatasetsCallback"
"""Ray's callbacks that a run does without: one that frees the resources of a controller that died, which Ray does
itself when the driver is gone, and ``free_devices`` while it runs; and, unless a loop has some, that of datasets."""
DATA_CORES = 1
"""Cores of a node that Ray does not reserve for workers if a loop has datasets, whose tasks need them."""
START_LIMIT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
END_S = 60.0
"""Timeout of Ray to notice that the workers of a group were killed."""
GIVEN_UP_S = 5.0
"""Timeout of a fit() to return once its controller is killed."""
KILL_EVERY_S = 0.2
"""A fit() may be about to start its controller."""
GRACE_S = 1.0
"""Time of the other ranks to fail too, after the first failure; then they are killed."""


def give_up(fit: Future[object]) -> None:
    """End trainer.fit() wherever it is, since its thread must not outlive Ray."""
    until = time.monotonic() + GIVEN_UP_S
    while not fit.done() and time.monotonic() < until:
        private.kill_controllers()
        wait([fit], KILL_EVERY_S)


def free_devices() -> None:
    """Free the resources that a failed fit() still holds: Ray keeps them if its own shutdown failed too.

    Called while no fit() runs: every placement group of this driver's job is a leftover.
    """
    job = ray.get_runtime_context().get_job_id()
    for name, group in placement_group_table().items():
        if name.endswith(job) and group["state"] != "REMOVED":  # an id ends with its job's
            remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(name)))


def train(config: Json) -> None:
    """Run the group's trials on this rank: the training function of Ray Train."""
    job, mailbox, launch = config["job"], config["mailbox"], config["launch"]
    process = register(connected=True)

    def send(message: Received) -> bool:
        received: bool = ray.get(mailbox.put.remote(launch, message))
        return received

    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # by it, a loader ends its processes
    run_rank(job, process, send, lambda: _ranks(job, process))


def _ranks(job: Job, process: Registration) -> Ranks:
    """Return this rank's place; Ray Train has connected the ranks before."""
    context = get_context()
    on_gpus = job.group.device == "cuda"
    devices = devices_of(job.group, context.get_local_rank(), get_devices() if on_gpus else ())
    if on_gpus and not job.experiment.programs:  # whose own processes use the GPU
        torch.cuda.set_device(devices[0])
    rank, size = process.rank, context.get_world_size()
    return Ranks(
        rank=rank,
        world_size=size,
        local_rank=context.get_local_rank(),
        node_rank=context.get_node_rank(),
        node_id=process.node_id,
        address=ray.util.get_node_ip_address(),
        devices=devices,
        exchange=_store_exchange(rank, size, job.experiment.limits) if job.group.placement.nodes > 1 else None,
    )


def _store_exchange(rank: int, size: int, limits: Limits) -> StoreExchange:
    """Return the collectives of ranks on several nodes, through a connection of their own to the store of rank 0."""
    place, timeout = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timedelta(seconds=limits.collective_s)
    return StoreExchange(dist.TCPStore(*place, is_master=False, timeout=timeout), rank, size)  # type: ignore[attr-defined]


@dataclass
class RayLauncher:
    """Starts each worker group on the cluster, receives its messages, ends it if it hangs."""

    cluster: Cluster
    experiment: Experiment
    machine: Machine
    import_path: str | None = None
    versions: Mapping[str, CodeVersion] = field(default_factory=dict)
    """The versions of the user's code, by variant."""
    placements: Sequence[Placement] = ()
    """The placements of the whole plan."""
    holds: bool = False
    """Whether each trial starts only once the driver has handled what came before it."""
    say: Callable[[str], None] = lambda text: None
    """Shows a line to the user."""
    _launches: Iterator[int] = field(default_factory=itertools.count)
    _storage: Scratch = field(default_factory=Scratch)

    @cached_property
    def choice(self) -> NodeChoice:
        """The choice of nodes."""
        settings = self.experiment.cluster
        wait_s = settings.wait_for if settings else 0.0
        return NodeChoice(self.cluster, self.machine, self.placements, wait_s, self.say)

    def busy_cores(self) -> dict[str, float]:
        nodes = [node for node in self.cluster.inventory.nodes if node.node_id in self.cluster.agents]
        answers = ask_agents(self.cluster, "busy", [(node.node_id, None) for node in nodes])
        names = (node.place if len(nodes) > 1 else node.host for node in nodes)
        return {name: cores for name, cores in zip(names, answers, strict=True) if cores is not None}

    def close(self) -> None:
        """Remove the files of Ray Train."""
        self._storage.close()

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        nodes = self.choice.nodes_for(group, deadline)
        if len(nodes) < group.placement.nodes:  # Ray would wait for those that have gone
            reason = (
                f"the cluster shrank: {len(nodes)} of the {group.placement.nodes} nodes that the trial needs are left"
            )
            yield from (TrialResult(trial.id, "lost", reason) for trial in group.trials)
            return
        number = next(self._launches)
        _answer(self.cluster.mailbox.open.remote(number, deadline, self.holds))
        start_s = start_limit_s(len(nodes))
        # first Ray waits for resources, then for processes that import; the datasets of a loop may take any time
        whole_s = None if datasets_of(self.experiment, None) else start_s + _limit_of_user(start_s)
        ask, limit_s = partial(ask_agents, self.cluster), self.experiment.limits.trial
        find_dead_node = partial(dead_node, nodes)
        watchdog = Watchdog(ask, limit_s, grace_s=GRACE_S, start_s=whole_s, find_dead_node=find_dead_node)
        with variables({START_LIMIT: f"{start_s:.0f}"}):  # which fit() hands to its controller
            # in a thread, so that the main thread can handle signals and messages
            running = RayGroup(self.cluster, in_thread(self._trainer(group, nodes, number).fit), watchdog)
            timer = StartupTimer(time.time(), "controller")
            end = yield from supervise(running, watchdog, timer, group.trials[-1].id)
        yield from judged(_failed_trials(group, end, running.error, watchdog), group, end, watchdog)

    def _trainer(self, group: WorkerGroup, nodes: Sequence[Node], number: int) -> TorchTrainer:
        versions = {name: self.versions[name] for name in group.variants}
        job = Job(self.experiment, group, self.machine.threads_per_device, self.import_path, versions)
        mailbox = self.cluster.mailbox
        datasets = datasets_of(self.experiment, self.import_path)
        trainer = TorchTrainer(
            train,
            train_loop_config={"job": job, "mailbox": mailbox, "launch": number},
            torch_config=RankConfig(
                backend=group.backend, timeout_s=self.experiment.limits.collective_s, mailbox=mailbox, launch=number
            ),
            scaling_config=self._scaling(group, nodes),
            datasets=datasets,
            run_config=RunConfig(
                name=f"{group.id}-{number}",
                storage_path=str(self._storage.path),
                callbacks=startup_callbacks(mailbox, number),
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
                logging_config=LoggingConfig(log_level="ERROR"),
                worker_runtime_env={"env_vars": process_variables(group, self.machine.threads_per_device)},
            ),
        )
        private.drop_callbacks(trainer, (CLEANER,) if datasets else (CLEANER, MANAGER))
        if self.cluster.request or self.cluster.embedded:  # whose one node is all that there is
            private.leave_out_requests(trainer)
        return trainer

    def _scaling(self, group: WorkerGroup, nodes: Sequence[Node]) -> ScalingConfig:
        pinned: dict[str, list[dict[str, str]]] = {}
        if not self.cluster.embedded:  # another node may join
            names = [node.node_id for node in nodes for _ in range(group.workers // group.placement.nodes)]
            pinned["label_selector"] = [{"ray.io/node-id": name} for name in names]
        resources = worker_resources(group, self.machine, nodes)
        if datasets_of(self.experiment, None):
            cores = min(node.cores for node in nodes)
            resources["CPU"] = int(100 * resources["CPU"] * max(0, cores - DATA_CORES) / cores) / 100
        return ScalingConfig(
            num_workers=group.workers,
            use_gpu=group.device == "cuda",
            resources_per_worker=resources,
            **pinned,
        )


def _limit_of_user(start_s: float) -> float:
    """Return the seconds that Ray waits for resources: the user's own, if they are a number, else as long."""
    with suppress(ValueError):
        return float(os.environ.get(START_LIMIT, start_s))
    return start_s


def datasets_of(experiment: Experiment, import_path: str | None) -> dict[str, Callable[[], Any]]:
    """Return the functions that make a loop's datasets, which Ray Train's controller calls."""
    named = experiment.datasets if isinstance(experiment, ScriptExperiment) else {}
    return {name: partial(_dataset, name, function, import_path) for name, function in named.items()}


def _dataset(name: str, function: str, import_path: str | None) -> object:
    if import_path and import_path not in sys.path:
        sys.path.insert(0, import_path)
    what = f"datasets.{name} {function!r}"
    make = load_from(function, "function", what=what)
    try:
        return make()
    except Exception as error:
        raise WorkloadError(f"{what}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class RayGroup:
    """A running fit() and its ranks, as ``supervise`` sees them."""

    cluster: Cluster
    fit: Future[object]
    watchdog: Watchdog

    @property
    def ended(self) -> bool:
        return self.fit.done()

    @property
    def error(self) -> BaseException | None:
        """What fit() raised, SystemExit too, which Ray raises when it is stopped; None while it runs."""
        return self.fit.exception() if self.ended else None

    def take(self, timeout_s: float) -> list[Received]:
        messages: list[Received] = _answer(self.cluster.mailbox.take.remote(timeout_s))
        return messages

    def kill(self) -> None:
        self.watchdog.kill()
        wait([self.fit], END_S)

    def release(self) -> None:
        if not self.ended:  # given up: ranks that have not registered yet are refused when they do
            self.watchdog.kill()
            try:
                ray.get(self.cluster.mailbox.open.remote(CLOSED, None), timeout=patience())
            except ray.exceptions.GetTimeoutError:  # Ray may be gone, and answers nobody
                wait([self.fit], GIVEN_UP_S)
            except ray.exceptions.RayError:  # the mailbox alone is gone, or Ray, which frees its devices then
                with suppress(Exception):  # the loss itself is what is reported
                    self._give_up()
            else:
                self._give_up()
        elif self.error:
            self.watchdog.record_failure()
            self.watchdog.kill()  # what the ranks started and left behind
            free_devices()
        self.watchdog.clear()

    def _give_up(self) -> None:
        give_up(self.fit)
        if self.ended:
            free_devices()


def _answer(reference: ray.ObjectRef) -> Any:
    """Return the answer of the mailbox; raise ClusterLostError if it is gone: no rank can report without it."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        raise ClusterLostError(
            f"the run's mailbox on Ray is gone ({type(error).__name__}): it was killed, or Ray or its node ended"
        ) from error


def _failed_trials(
    group: WorkerGroup, end: GroupEnd, error: BaseException | None, watchdog: Watchdog
) -> Iterator[TrialResult]:
    """Yield a row for each trial that the end of the group cost; ``error``: what fit() raised."""
    finished = [result.trial_id for result in end.finished]
    left = blamed([trial.id for trial in group.trials], finished, end.current, connected=watchdog.connected)
    if end.ending is Ending.HUNG:
        yield from from_hang(left, end.stacks)
    elif end.failures:
        dead_ranks = watchdog.dead_ranks or ([] if end.ending.was_cut_short else sorted(found_dead(error)))
        yield from (
            from_memory_monitor(row, error) for row in blamed_on(left, primary(end.failures, dead_ranks), finished)
        )
    elif end.ending is Ending.NEVER_STARTED:
        yield from (from_exit(trial_id, None, "", came_up=False) for trial_id in left)
    elif end.ending is Ending.NODE_LOST:
        reason = f"node {watchdog.dead_node} was lost while the worker group started"
        yield from (TrialResult(trial_id, "lost", reason) for trial_id in left)
    elif error is not None:
        yield from from_launch(left, error)


def worker_resources(group: WorkerGroup, machine: Machine, nodes: Sequence[Node]) -> dict[str, float]:
    """Return what Ray reserves for one worker of a group on these nodes.

    One that drives two GPUs, at 4 cores a device: {"CPU": 8, "GPU": 2}. If the GPUs are named, its part of all GPUs of
    its node, used or not; two workers on GPUs 1 and 2 of a node of 8: {"CPU": 4, "GPU": 4}. One of two variants on the
    same cores, which compute in turn, at 1 core a device: {"CPU": 0.5}. One that shares the devices of its node, of
    four workers on 2 cores: {"CPU": 0.5}; on 8 cores and 2 GPUs: {"CPU": 2, "GPU": 0.5}.
    """
    placement, on_gpus = group.placement, group.device == "cuda"
    cpus = machine.cpus_per_device * placement.devices_per_worker
    if placement.device_ids:
        return {"CPU": cpus, "GPU": float(nodes[0].gpus // placement.workers)}
    if not group.oversubscribe:
        cpus = _cpus(cpus / max(1, len(group.variants)))
        return {"CPU": cpus, "GPU": float(placement.devices_per_worker)} if on_gpus else {"CPU": cpus}
    cpus = _cpus(min(node.cores for node in nodes) / placement.workers_per_node)
    gpus = min(node.gpus for node in nodes) if on_gpus else 0
    if not gpus:
        return {"CPU": cpus}
    if placement.workers == 1:
        return {"CPU": cpus, "GPU": float(gpus)}
    ranks = -(-placement.workers_per_node // gpus)  # on the GPU with the most
    return {"CPU": cpus, "GPU": 1.0 if ranks == 1 else int(10_000 / ranks) / 10_000}


def _cpus(share: float) -> float:
    """Return a share of cores as Ray takes it: of more than one no fractions."""
    return int(100 * share) / 100 if share < 1 else int(share)
