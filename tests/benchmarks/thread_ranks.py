"""Ranks of a worker group that are threads of the driver: they run trials as processes do, with made-up windows.

Their collectives are those of ranks on several nodes (``train/ranks.py``), through a store that the threads share in
place of a connection each to rank 0's: as fast per value, and no sockets.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from harness.launch import worker
from harness.launch.mailbox import Mailbox
from harness.launch.protocol import GroupStarted, Job, Message
from harness.launch.startup import Received
from harness.measure import environment, scenarios
from harness.measure.explain import Explanation
from harness.measure.scenarios import TrialContext
from harness.measure.throughput import ThroughputMeasurement
from harness.measure.window import Window
from harness.plan.planner import Plan
from harness.plan.trial import TrialResult, WorkerGroup
from harness.train.ranks import Ranks, StoreExchange
from tests.benchmarks.scale import PER_NODE

TAKE_S = 0.02
WARMUP_STEPS = 20
PHASES = ("wait", "copy", "forward", "backward", "optimizer", "rest")


class CountedStore:
    """A rank's end of its group's store; ``received``: the bytes that it has got from there.

    A HashStore wakes whoever waits at each value that is set, so values for rank 0 alone have a store of their own.
    """

    def __init__(self, for_all: Any, for_first: Any) -> None:
        self._for_all, self._for_first, self.received = for_all, for_first, 0

    def _of(self, key: str) -> Any:
        return self._for_first if key.count("/") > 1 else self._for_all  # as StoreExchange names them

    def set(self, key: str, value: bytes) -> None:
        self._of(key).set(key, value)

    def get(self, key: str) -> bytes:
        (value,) = self.multi_get([key])
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values: list[bytes] = self._of(keys[0]).multi_get(keys)
        self.received += sum(map(len, values))
        return values

    def delete_key(self, key: str) -> None:
        self._of(key).delete_key(key)


class ThreadLauncher:
    """Runs worker groups in threads, and counts their bytes; ``size``: ranks of the trials that count."""

    def __init__(self, plan: Plan, size: int) -> None:
        self._experiment, self._size = plan.experiment, size
        self.message_bytes: list[int] = []
        self.received: list[Sequence[int]] = []
        self.trials = 0

    def busy_cores(self) -> dict[str, float]:
        return {}

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        """As Launcher describes; messages are pickled, as Ray does, and a trial waits for the record of the last."""
        size, job = group.placement.workers, Job(self._experiment, group, 1)
        counts, mailbox = size == self._size, Mailbox()
        mailbox.open(0, deadline, holds=True)
        both = dist.HashStore(), dist.HashStore()  # type: ignore[attr-defined]
        stores = [CountedStore(*both) for _ in range(size)]

        def send(message: Received) -> bool:
            sent = pickle.dumps(message)
            if isinstance(message, GroupStarted):  # the other ranks wait for the first
                for each in stores:
                    each.received = 0  # what follows is trials'
            elif counts:
                self.message_bytes.append(len(sent))
            return mailbox.put(0, pickle.loads(sent))

        def run(rank: int) -> None:
            node, local = divmod(rank, PER_NODE)
            place = (rank, size, local, node, f"node {node}", f"10.0.0.{node}", (torch.device("cuda", local),))
            ranks = Ranks(*place, exchange=StoreExchange(stores[rank], rank, size))
            worker.run_group(job, ranks, send, lambda: None, Path("unused"))

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        run_on = True
        while run_on:
            run_on = any(thread.is_alive() for thread in threads)
            messages = mailbox.take(TAKE_S)
            yield from (message for message in messages if isinstance(message, Message))
        if counts:
            self.trials += len(group.trials)
            self.received.append([each.received for each in stores])


def make_up_ranks(steps: int, put: Callable[[object, str, object], None] = setattr) -> None:
    """Replace what a rank trains and what a process does once: windows of ``steps`` steps, GPUs that are not there.

    A window depends on its trial and rank alone. ``put``: replaces an attribute, for good or for a test.
    """
    links_of_node = [["X" if one == other else "NV18" for other in range(PER_NODE)] for one in range(PER_NODE)]
    here = environment.capture_environment("node", (torch.device("cpu"),))

    def described(device: torch.device) -> Any:
        return {"kind": "cuda", "model": "NVIDIA H100 80GB HBM3", "uuid": f"{device.index}", "memory_bytes": 80 * 10**9}

    def captured(node_id: str, devices: Sequence[torch.device]) -> Any:
        gpus = [f"GPU-{number}" for number in range(PER_NODE)]
        topology = {"gpus": gpus, "links": links_of_node, "apart": [], "numa": [0] * PER_NODE, "driver": "1"}
        return {**here, "node_id": node_id, "devices": [described(devices[0])], "topology": topology}

    def window(random: np.random.Generator, kind: Any, count: int) -> Window:
        step_s = 0.02 * random.lognormal(sigma=0.05, size=count)
        duration_s, wait_s = float(step_s.sum()), 0.01 * step_s
        phases = dict.fromkeys(PHASES, duration_s / len(PHASES))
        values = {"loss": 50 * step_s, "weight": np.full(count, 32.0)}
        return Window(kind, duration_s, step_s, wait_s, phases, dict(phases), 32.0 * count, values)  # type: ignore[arg-type]

    def measured(stepper: TrialContext, settings: object, **options: object) -> ThroughputMeasurement:
        random = np.random.default_rng([stepper.ranks.rank, *stepper.trial.id.encode()])
        kinds = {"warmup": WARMUP_STEPS, "timed": steps // 2}
        windows = tuple(window(random, kind, count) for kind, count in kinds.items() for _ in range(2))
        load: Any = {"watched_s": 6.0, "own_cpu_s": 6.0, "node_cpu_s": 60.0, "swapped_bytes": 0}
        return ThroughputMeasurement(windows, steps // 2, True, True, load)

    def explained(context: TrialContext, *arguments: object) -> Explanation:
        random = np.random.default_rng(context.ranks.rank)
        kinds: Any = ("alone", "together", "alone", "together")
        return [window(random, kind, steps // 8) for kind in kinds], {"flops_per_unit": 1e9}, ()

    held = ("peak_memory_bytes", "peak_reserved_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes")
    of_rank = {**dict.fromkeys((*held, "resident_bytes", "build_peak_bytes"), 2**30), "settings": "", "processors": ""}
    training = SimpleNamespace(parameters=25_000_000, facts={}, compile_s=None)

    def built(context: TrialContext) -> SimpleNamespace:
        blank = TrialResult(context.trial.id, "ok", unit="samples", parameters=training.parameters)
        return SimpleNamespace(data=context, training=training, of_rank=lambda context: of_rank, blank=blank)

    for module, replaced in {
        environment: {"capture_environment": captured, "describe_device": described},
        scenarios: {
            "_build": built,
            "Stepper": lambda training, data, advance: SimpleNamespace(ranks=data.ranks, trial=data.trial, spent_s=6.0),
            "measure_throughput": measured,
            "_explanation": explained,
            "measure_collectives": lambda stepper: {},
        },
        worker: dict.fromkeys(("_prepare_process", "_preload", "_release"), lambda *given, **named: None),
    }.items():
        for name, value in replaced.items():
            put(module, name, value)
