"""The real pipeline over a launcher that measures nothing, in a child process: for kills, full disks, locks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from harness.cli.arguments import exit_code_of
from harness.launch.protocol import GroupStarted, Message, TrialStarted
from harness.plan.trial import Trial, TrialResult, WorkerGroup
from harness.run import pipeline
from harness.run.events import Event, Note, TrialEnded
from harness.run.request import Request, read_experiment
from tests.records import rank_row
from tests.run_folders import NODE, steps_of

TEXT = """
name: scripted
grid: {model: resnet8, strategy: [single, ddp], devices: [1, 2], per_device_batch_size: [8, 16]}
throughput: {blocks: %d, twin: false, explain: false}
equivalence: false
preflight: false
"""
"""Six cells a block, four of them against two bases."""
STEPS = 40


def command(
    request: Request, finished_log: Path, trial_s: float = 0.002, before: Callable[[int], None] | None = None
) -> None:
    """What ``harness run`` does with this request, but measuring nothing; ends the process with its exit code.

    ``finished_log`` gets the id of each trial that the run has reported as finished. ``before``: called with the number
    of trials so far, before each.
    """
    launcher = Scripted(trial_s, before or (lambda count: None))
    pipeline.start_ray = lambda *_: ExitStack()  # type: ignore[assignment,return-value]
    pipeline.launcher_for = lambda *_: launcher  # type: ignore[assignment]
    with finished_log.open("ab", buffering=0) as result:

        def emit(event: Event) -> None:
            if isinstance(event, Note):
                os.write(1, f"{event.text}\n".encode())
            if isinstance(event, TrialEnded):
                result.write(f"{event.line['trial_id']} {event.line['attempt']}\n".encode())

        os._exit(exit_code_of(lambda: pipeline.run(request, read_experiment(request), emit)))


@dataclass
class Scripted:
    """Every trial is ok, in one environment. A trial's speed is that of its devices."""

    trial_s: float
    before: Callable[[int], None]
    count: int = 0

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        yield GroupStarted((NODE,), ())
        for trial in group.trials:
            self.before(self.count)
            yield TrialStarted(trial.id)
            time.sleep(self.trial_s)
            yield self._measured(trial)
            self.count += 1

    def _measured(self, trial: Trial) -> TrialResult:
        devices, speed = trial.cell.devices, 100.0 * trial.cell.devices
        window = {"window": 1, "window_kind": "timed", "duration_s": 1.0, "steps": STEPS, "weight": speed / devices}
        return TrialResult(
            trial.id,
            "ok",
            windows=tuple({"rank": rank, **window} for rank in range(devices)),
            ranks=tuple(map(rank_row, range(devices))),
            steps=steps_of(devices, STEPS, 1.0 / STEPS),
            unit="samples",
            started_at=time.time(),
            trial_s=1.0,
            steps_s=1.0,
        )
