"""Batch divisibility: the samples of each device in the last global batch of an epoch."""

from __future__ import annotations

from collections.abc import Sequence

from harness.doctor.check import Case, Check
from harness.doctor.subject import Subject
from harness.plan.checks import batches
from harness.plan.checks.finding import Finding


def observe(subject: Subject) -> tuple[int, int, bool]:
    """Return the training samples, the samples of a step, and whether the cell is trained for whole epochs."""
    return subject.training_samples, subject.cell.global_batch_size * subject.micro_batches, subject.epochs


def judge(seen: Sequence[tuple[int, int, bool]], case: Case) -> list[Finding]:
    samples, batch, epochs = seen[0]
    return batches.judge(samples, batch, case.cell, epochs=epochs)


CHECK = Check(batches.NAME, observe, judge)
