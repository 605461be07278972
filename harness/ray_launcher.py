"""Runs a worker group as one TorchTrainer.fit(): fresh processes, watched from outside."""

from __future__ import annotations

import faulthandler
import itertools
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from ray.runtime_context import get_runtime_context
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer, get_devices
from ray.train.torch.config import _TorchBackend

from harness.cluster import Cluster
from harness.config import Experiment
from harness.failures import from_launch, primary
from harness.inventory import Machine, Node
from harness.measure.progress import StepCounter, shared_folder
from harness.messages import Message, TrialResult, TrialStarted
from harness.node import interface_of
from harness.plan import WorkerGroup
from harness.ranks import Ranks
from harness.worker import Job, run_group

TAKE_S = 1.0
"""How long one look into the mailbox waits; a message ends the wait."""
END_S = 60.0
"""How long Ray has to notice that the workers of a group were killed."""


@dataclass(frozen=True)
class Registration:
    """A rank's process, before it joins anything: so that it can be watched and ended."""

    rank: int
    node_id: str
    pid: int
    counter: str
    stack: str


@dataclass
class RayLauncher:
    """Starts each worker group on the cluster, hears its messages, ends it where it hangs."""

    cluster: Cluster
    experiment: Experiment
    machine: Machine
    import_path: str | None = None
    _launches: Iterator[int] = field(default_factory=itertools.count)
    _storage: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="harness-"))

    def close(self) -> None:
        """Removes what Ray Train wrote for itself."""
        shutil.rmtree(self._storage, ignore_errors=True)

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Iterator[Message]:
        number = next(self._launches)
        ray.get(self.cluster.mailbox.open.remote(number, deadline))
        fit = _Fit(self._trainer(group, number))
        watch = _Watch(self.cluster, self.experiment.limits.trial)
        failures: list[TrialResult] = []
        current: str | None = None
        for message in self._hear(fit, watch):
            if isinstance(message, TrialResult) and message.error_rank is not None:
                failures.append(message)  # told when the group has ended: the cause may be a peer's
                continue
            if isinstance(message, TrialStarted | TrialResult):
                current = message.trial_id if isinstance(message, TrialStarted) else None
            yield message
        if failures and not watch.timed_out:
            yield primary(failures)
        elif watch.timed_out or fit.error is not None:
            yield from from_launch(group, current, fit.error, watch.timed_out, watch.stacks)

    def _hear(self, fit: _Fit, watch: _Watch) -> Iterator[Message]:
        """Messages until the group has ended and all are heard; ends a group that hangs or is given up."""
        try:
            while True:
                ended = fit.ended  # before the last look, so that nothing sent until then is missed
                for message in self._take(0.0 if ended else TAKE_S):
                    watch.saw_progress()
                    if isinstance(message, Registration):
                        watch.add(message)
                    else:
                        yield message
                if ended:
                    return
                if watch.hangs():
                    watch.end()
                    fit.join(END_S)
                    return
        finally:
            if not fit.ended:
                watch.end()
                fit.join(END_S)

    def _take(self, wait_s: float) -> list[Any]:
        messages: list[Any] = ray.get(self.cluster.mailbox.take.remote(wait_s))
        return messages

    def _trainer(self, group: WorkerGroup, number: int) -> TorchTrainer:
        job = Job(self.experiment, group, self.machine.threads_per_device, self.import_path)
        threads = str(self.machine.threads_per_device)
        variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if group.device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""  # a CPU trial on a GPU machine must not see its GPUs
        return TorchTrainer(
            _train,
            train_loop_config={"job": job, "mailbox": self.cluster.mailbox, "launch": number},
            torch_config=_InterfaceTorchConfig(
                backend=_backend(group), timeout_s=int(2 * self.experiment.limits.trial + 60)
            ),
            scaling_config=self._scaling(group),
            run_config=RunConfig(
                name=f"{group.id}-{number}",
                storage_path=self._storage,
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
                logging_config=LoggingConfig(log_level="ERROR"),
                worker_runtime_env={"env_vars": variables},
            ),
        )

    def _scaling(self, group: WorkerGroup) -> ScalingConfig:
        placement = group.placement
        nodes = self._nodes_for(group)
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
        """The first nodes that hold their part of the group: the same ones in every block."""
        per_node = self.machine.devices_per_node
        needed = 1 if group.oversubscribe else group.placement.devices_per_node
        fits = [node for node, devices in zip(self.cluster.inventory.nodes, per_node, strict=True) if devices >= needed]
        return fits[: group.placement.nodes]


class _Fit:
    """One fit() in a thread of its own, so that the main thread keeps Ctrl-C and its ears."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self.error: BaseException | None = None
        self._trainer = trainer
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:  # SystemExit too: Ray raises it when it is told to stop
            self.error = error


class _Watch:
    """Sees from outside whether the processes of a group still take steps."""

    def __init__(self, cluster: Cluster, limit_s: float) -> None:
        self._cluster, self._limit_s = cluster, limit_s
        self._processes: list[Registration] = []
        self._counts: list[int | None] = []
        self._changed = self._looked = time.monotonic()
        self.timed_out = False
        self.stacks: str = ""

    def add(self, process: Registration) -> None:
        self._processes.append(process)

    def saw_progress(self) -> None:
        self._changed = time.monotonic()

    def hangs(self) -> bool:
        """Whether no step was taken for the limit; looks at most four times in that span."""
        now = time.monotonic()
        if not self._processes or now - self._looked < min(5.0, self._limit_s / 4):
            return False
        self._looked = now
        counts = self._ask("progress", lambda p: p.counter)
        if counts != self._counts:
            self._counts, self._changed = counts, now
        self.timed_out = now - self._changed > self._limit_s
        return self.timed_out

    def end(self) -> None:
        """Notes where the processes stand, if they hang, and ends them."""
        if self.timed_out:
            texts = self._ask("stacks", lambda p: (p.pid, p.stack))
            named = zip(self._processes, texts, strict=False)
            self.stacks = "\n\n".join(f"rank {p.rank} (pid {p.pid}):\n{text}" for p, text in named)
        self._ask("kill", lambda p: p.pid)

    def _ask(self, question: str, about: Any) -> list[Any]:
        """One answer a process, in order; what a lost node does not answer is None."""
        answers: list[Any] = []
        for process in self._processes:
            agent = self._cluster.agents.get(process.node_id)
            try:
                answer = ray.get(getattr(agent, question).remote([about(process)]), timeout=15) if agent else None
            except ray.exceptions.RayError:
                answer = None
            answers.append(answer[0] if answer else None)
        return answers


class _InterfaceBackend(_TorchBackend):
    """Points gloo and NCCL to the interface that holds each node's own address, before they connect."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(_use_own_interface)
        super().on_start(worker_group, backend_config)


@dataclass
class _InterfaceTorchConfig(TorchConfig):
    @property
    def backend_cls(self) -> type[_InterfaceBackend]:
        return _InterfaceBackend


def _use_own_interface() -> None:
    interface = interface_of(ray.util.get_node_ip_address())
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if interface != "lo":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _backend(group: WorkerGroup) -> str:
    """gloo for CPU slots and where ranks share a GPU, which NCCL refuses; else NCCL beside gloo for the control."""
    return "cpu:gloo,cuda:nccl" if group.device == "cuda" and not group.oversubscribe else "gloo"


def _resources(group: WorkerGroup, machine: Machine, nodes: Sequence[Node]) -> dict[str, float]:
    """What Ray reserves for one worker."""
    placement = group.placement
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


def _devices(group: WorkerGroup) -> tuple[torch.device, ...]:
    """This worker's devices; one that is shared stands several times."""
    count = group.placement.devices_per_worker
    if group.device == "cpu":
        return tuple(torch.device("cpu") for _ in range(count))
    mine = get_devices()
    return tuple(mine[i % len(mine)] for i in range(count))


def _train(config: dict[str, Any]) -> None:
    """What Ray Train calls on every rank."""
    job: Job = config["job"]
    mailbox, launch = config["mailbox"], config["launch"]
    context = get_context()
    rank = context.get_world_rank()
    node_id = get_runtime_context().get_node_id()
    name = f"harness-{psutil.Process().pid}-{launch}"
    stack = Path(tempfile.gettempdir()) / f"{name}.stack"

    def send(message: Any) -> bool:
        heard: bool = ray.get(mailbox.put.remote(launch, message))
        return heard

    with stack.open("w") as file, StepCounter(shared_folder() / name) as counter:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        send(Registration(rank, node_id, os.getpid(), str(counter.path), str(stack)))
        ranks = Ranks(
            rank=rank,
            world_size=context.get_world_size(),
            local_rank=context.get_local_rank(),
            node_rank=context.get_node_rank(),
            node_id=node_id,
            devices=_devices(job.group),
        )
        try:
            run_group(job, ranks, send, counter.advance)
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    stack.unlink(missing_ok=True)
