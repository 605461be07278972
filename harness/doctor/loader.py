"""Loader throughput: samples/s of the loader alone against those of the model alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import islice

from harness.doctor.check import Case, Check
from harness.doctor.subject import Subject
from harness.plan.cell import int_option
from harness.plan.checks.finding import Finding
from harness.train.loader import batches, endless_shares

NAME = "loader throughput"
SECONDS = 0.3
MOST, MOST_SAMPLES = 50, 64
"""Largest number of batches, and of samples in the batch of a rank."""


def observe(subject: Subject) -> float | None:
    """Return seconds a sample of all ranks' loaders, from the second batch on; None if the data is on the device."""
    cell, ranks = subject.cell, subject.ranks
    if cell.data == "synthetic_device":
        return None
    batch = min(cell.global_batch_size, MOST_SAMPLES * ranks.world_size)
    shares = endless_shares(subject.training_samples, batch, subject.seed, ranks.rank, ranks.world_size)
    collate = getattr(subject.workload, "collate", None)
    fetch = batches(
        subject.datasets[0],
        islice(shares, MOST + 1),
        seed=subject.seed,
        ranks=ranks,
        options=cell.loader,
        collate=collate,
    )
    next(fetch)
    times: list[float] = []
    start = last = time.perf_counter()  # the first batch starts the loader's workers
    for _ in fetch:
        now = time.perf_counter()
        times.append(now - last)
        last = now
        if now - start > SECONDS and len(times) >= 3:
            break
    return statistics.median(times) / batch


def judge(seen: Sequence[float | None], case: Case) -> list[Finding]:
    rates = [sample_s for sample_s in seen if sample_s is not None]
    if not rates:
        return []
    loader = max(rates)
    model = _step_s(case) / case.cell.global_batch_size
    if loader <= model:
        return []
    workers = int_option(case.cell.loader, "workers", 0)
    return [
        Finding(
            NAME,
            "warning",
            f"loader alone, {workers} workers: {1 / loader:,.0f} samples/s; model alone: {1 / model:,.0f} samples/s",
            "loader-bound: the measured throughput and scaling are those of the loader",
            "raise loader.workers if cores are free, make samples cheaper, or measure with data: synthetic_device",
        )
    ]


def figures(seen: Sequence[float | None], case: Case) -> dict[str, str]:
    """Return the rates of the model and of the loader, by title."""
    rates_by_title = {"model alone": f"{case.cell.global_batch_size / _step_s(case):,.0f} samples/s"}
    if rates := [sample_s for sample_s in seen if sample_s is not None]:
        rates_by_title["loader alone"] = f"{1 / max(rates):,.0f} samples/s"
    return rates_by_title


def _step_s(case: Case) -> float:
    """Return the step time of the slowest rank, without the loader."""
    return max(rank.step_s for rank in case.steps)


def _redundant(findings: Sequence[Finding]) -> bool:
    """Return whether there is an error or a warning: the step time may then be that of a faulty model."""
    return any(finding.severity != "note" for finding in findings)


CHECK = Check(NAME, observe, judge, needs_steps=True, redundant=_redundant, figures=figures)
