"""Ranks of a worker group that are threads of the driver: they run trials as processes do, with made-up windows."""

from __future__ import annotations

import dataclasses
import pickle
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch

from harness.launch import worker
from harness.launch.protocol import GroupStarted, Job, Measured, Message
from harness.measure import environment, scenarios
from harness.measure.explain import Explanation
from harness.measure.scenarios import TrialContext
from harness.measure.throughput import ThroughputMeasurement
from harness.measure.window import Window
from harness.plan.planner import Plan
from harness.plan.trial import TrialResult, WorkerGroup
from harness.train.ranks import Ranks
from tests.benchmarks.scale import PER_NODE

T = TypeVar("T")
WARMUP_STEPS = 20
PHASES = ("wait", "copy", "forward", "backward", "optimizer", "rest")


class Meeting:
    """The collectives of the threads of a worker group; ``received``: the bytes that each has received from others."""

    def __init__(self, size: int) -> None:
        self.size, self.received = size, [0] * size
        self._barrier, self._given = threading.Barrier(size), [b""] * size

    def gather(self, rank: int, value: Any, receives: bool) -> list[Any]:
        """Return all values, in order of the ranks; torch pads each to the size of the largest."""
        self._given[rank] = pickle.dumps(value)
        self._barrier.wait()
        given = list(self._given) if receives else []
        self.received[rank] += (self.size - 1) * max(map(len, given), default=0)
        self._barrier.wait()  # all have read
        return list(map(pickle.loads, given))


@dataclasses.dataclass(frozen=True)
class ThreadRanks(Ranks):
    """A rank that is a thread."""

    meeting: Meeting = dataclasses.field(kw_only=True)

    def broadcast(self, value: T) -> T:
        return self.meeting.gather(self.rank, value if self.first else None, True)[0]  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        return self.meeting.gather(self.rank, value, True)

    def gather_to_first(self, value: T) -> list[T]:
        return self.meeting.gather(self.rank, value, self.first) or [value]

    def sum(self, values: Sequence[float]) -> list[float]:
        return [sum(column) for column in zip(*self.gather(values), strict=True)]


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
        """As Launcher describes; messages are pickled, as Ray does."""
        size, messages = group.placement.workers, queue.Queue[bytes]()
        meeting, job = Meeting(size), Job(self._experiment, group, 1)

        def send(message: object) -> bool:
            messages.put(pickle.dumps(message))
            return True

        def run(rank: int) -> None:
            node, local = divmod(rank, PER_NODE)
            place = (rank, size, local, node, f"node {node}", f"10.0.0.{node}", (torch.device("cuda", local),))
            worker.run_group(job, ThreadRanks(*place, meeting=meeting), send, lambda: None, Path("unused"))

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) or not messages.empty():
            try:
                sent = messages.get(timeout=1.0)
            except queue.Empty:
                continue
            message = pickle.loads(sent)
            if isinstance(message, GroupStarted):
                meeting.received[:] = [0] * size  # what follows is trials'
            if size == self._size and not isinstance(message, GroupStarted):
                self.message_bytes.append(len(sent))
            if not isinstance(message, Measured):
                yield message
        if size == self._size:
            self.trials += len(group.trials)
            self.received.append(meeting.received)


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
        phases = {phase: step_s.sum() / len(PHASES) for phase in PHASES}
        values = {"loss": random.lognormal(size=count), "weight": np.full(count, 32.0)}
        wait_s: Any = 0.01 * step_s
        return Window(kind, float(step_s.sum()), step_s, wait_s, phases, dict(phases), 32.0 * count, values)  # type: ignore[arg-type]

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
