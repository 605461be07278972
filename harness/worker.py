"""What every rank of a worker group runs: its trials, one after the other, each told to the driver."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from harness import environment, workloads
from harness.config import Experiment
from harness.errors import SkipTrial
from harness.measure import memory
from harness.measure.convergence import Epochs
from harness.measure.rows import columns_of, joined, step_columns, window_rows
from harness.measure.throughput import measure_throughput
from harness.messages import GroupStarted, Message, Outcome, TrialResult, TrialStarted
from harness.ranks import Ranks
from harness.training import Training
from harness.trial import Trial, WorkerGroup

Send = Callable[[Message], bool]
"""Tells the driver and waits until it has it; False asks the group to stop before its next trial."""


@dataclass(frozen=True)
class Job:
    """What a worker group needs to know."""

    experiment: Experiment
    group: WorkerGroup
    threads_per_device: int
    import_path: str | None = None


class TrialFailed(Exception):
    """A trial failed on this rank. The driver knows already; the group ends, fresh processes do the rest."""


def run_group(job: Job, ranks: Ranks, send: Send, advance: Callable[[], None]) -> None:
    """Runs the group's trials; raises TrialFailed at the first that fails on this rank."""
    _prepare_process(job)
    _announce(ranks, send)
    cache: dict[tuple[Any, ...], Any] = {}
    for trial in job.group.trials:
        if not ranks.broadcast(send(TrialStarted(trial.id)) if ranks.first else None):
            return
        try:
            result = _run_trial(trial, job.experiment, ranks, advance, cache)
        except SkipTrial as skip:
            result = TrialResult(trial.id, "skipped", str(skip))
        except BaseException as error:
            send(failure(trial.id, ranks.rank, error))
            raise TrialFailed(f"{trial.id} on rank {ranks.rank}: {type(error).__name__}") from None
        if ranks.first:
            send(result)
        _release()


def failure(trial_id: str, rank: int, error: BaseException) -> TrialResult:
    """A row for a trial that raised: which rank, what, and the whole traceback."""
    trace = "".join(traceback.format_exception(error))
    reason = f"{type(error).__name__} on rank {rank}: {' '.join(str(error).split())[:500]}"
    return TrialResult(
        trial_id,
        outcome_of(error),
        reason,
        error_type=type(error).__name__,
        error_rank=rank,
        detail=trace,
    )


def outcome_of(error: BaseException) -> Outcome:
    """oom where device or host memory ran out, else error."""
    text = str(error).lower()
    memory_ran_out = "out of memory" in text or "can't allocate memory" in text or "cannot allocate memory" in text
    return "oom" if isinstance(error, torch.OutOfMemoryError | MemoryError) or memory_ran_out else "error"


def _prepare_process(job: Job) -> None:
    """The same threads for every strategy; the experiment's folder on the import path."""
    torch.set_num_threads(job.threads_per_device)
    if job.import_path and job.import_path not in sys.path:
        sys.path.insert(0, job.import_path)
    gc.collect()
    gc.freeze()  # what was imported stays; later collections do not walk it


def _announce(ranks: Ranks, send: Send) -> None:
    """Rank 0 tells who runs where, and one environment a node."""
    row = {
        "rank": ranks.rank,
        "local_rank": ranks.local_rank,
        "node_rank": ranks.node_rank,
        "node_id": ranks.node_id,
        "address": ranks.address,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "devices": [str(device) for device in ranks.devices],
    }
    seen = ranks.gather((row, environment.capture(ranks.node_id, ranks.devices)))
    if ranks.first:
        nodes = {facts["node_id"]: facts for _, facts in seen}
        send(GroupStarted(tuple(nodes.values()), tuple(row for row, _ in seen)))


def _run_trial(
    trial: Trial, experiment: Experiment, ranks: Ranks, advance: Callable[[], None], cache: dict[Any, Any]
) -> TrialResult:
    started_at, start = time.time(), time.perf_counter()
    _check_placement(trial, ranks)
    fresh_peak = memory.reset_peak(ranks.devices)
    workload, datasets = _workload(trial, cache)
    training = Training(trial.cell, workload, trial.seed, ranks)
    scenario = _throughput if trial.kind == "throughput" else _convergence
    measured = scenario(trial, experiment, training, workload, datasets, ranks, advance)
    peaks = memory.peak(ranks.devices) if fresh_peak else {}
    return replace(
        measured,
        started_at=started_at,
        trial_s=time.perf_counter() - start,
        unit=workload.unit,
        parameters=training.parameters,
        ranks=tuple(ranks.gather(_rank_row(ranks, peaks))),
    )


def _throughput(
    trial: Trial,
    experiment: Experiment,
    training: Training,
    workload: Any,
    datasets: Any,
    ranks: Ranks,
    advance: Callable[[], None],
) -> TrialResult:
    assert experiment.throughput
    speed = measure_throughput(
        training,
        datasets[0],
        trial.cell,
        experiment.throughput,
        trial.seed,
        ranks,
        collate=getattr(workload, "collate", None),
        advance=advance,
    )
    seen = ranks.gather((window_rows(ranks.rank, speed), step_columns(ranks.rank, speed)))
    return TrialResult(
        trial.id,
        *_verdict(speed.finite),
        steps_s=speed.steps_s,
        windows=tuple(row for windows, _ in seen for row in windows),
        steps=joined([steps for _, steps in seen]),
    )


def _convergence(
    trial: Trial,
    experiment: Experiment,
    training: Training,
    workload: Any,
    datasets: Any,
    ranks: Ranks,
    advance: Callable[[], None],
) -> TrialResult:
    assert experiment.convergence
    epochs = Epochs(training, datasets, trial.cell, trial.seed, ranks, getattr(workload, "collate", None))
    epochs.run(experiment.convergence, advance)
    return TrialResult(trial.id, *_verdict(epochs.finite), steps_s=epochs.train_s, epochs=columns_of(epochs.rows))


def _verdict(finite: bool) -> tuple[Outcome, str]:
    return ("ok", "") if finite else ("diverged", "the loss or a parameter stopped being finite")


def _workload(trial: Trial, cache: dict[Any, Any]) -> Any:
    """A workload and its data sets, read once a process for all trials that share them."""
    cell = trial.cell
    key = (cell.workload, cell.data, cell.model, repr(sorted(cell.workload_options.items())))
    if key not in cache:
        workload = workloads.build(cell)
        cache[key] = (workload, workload.datasets())
    return cache[key]


def _check_placement(trial: Trial, ranks: Ranks) -> None:
    """A placement other than the one asked for would be measured under the wrong name."""
    got = (ranks.world_size * len(ranks.devices), len(set(ranks.gather(ranks.node_id))))
    asked = (trial.cell.devices, trial.cell.nodes)
    if got != asked:
        raise RuntimeError(
            f"placed on {got[0]} devices of {got[1]} nodes, asked for {asked[0]} devices of {asked[1]} nodes"
        )


def _rank_row(ranks: Ranks, peaks: dict[str, Any]) -> dict[str, Any]:
    return {
        "rank": ranks.rank,
        "local_rank": ranks.local_rank,
        "node_rank": ranks.node_rank,
        "node_id": ranks.node_id,
        "address": ranks.address,
        "host": socket.gethostname(),
        "devices": ", ".join(str(device) for device in ranks.devices),
        "threads": torch.get_num_threads(),
        **peaks,
    }


def _release() -> None:
    """Gives back what the last trial held, so that the next one starts from the same memory."""
    gc.collect()
    memory.give_back()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
