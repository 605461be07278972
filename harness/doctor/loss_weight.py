"""Loss weight: the weight that loss() returns counts the samples, or the tokens, of its batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from harness.doctor.check import Case, Check
from harness.doctor.steps import Steps
from harness.plan.checks.finding import Finding

NAME = "loss weight"


def judge(seen: Sequence[Steps], case: Case) -> list[Finding]:
    """Compare the weights of the real steps with the samples of each batch; the first deviation counts."""
    for rank, steps in enumerate(seen):
        for weight, samples in zip(steps.weights, steps.samples, strict=False):
            look = _of_samples if steps.unit == "samples" else _of_tokens
            if found := list(look(weight, samples, rank)):
                return found
    return []


def _of_samples(weight: float, samples: int, rank: int) -> Iterator[Finding]:
    if weight != samples:
        yield Finding(
            NAME,
            "error",
            f"weight that loss() returns for a batch of {samples} samples: {weight:g} (rank {rank})",
            "losses of batches of different sizes cannot be averaged, and the trial would stop: with unit 'samples' "
            "the weight is the number of samples",
            "return the sum of the losses of the samples, as with reduction='sum', and len(batch) as its weight; "
            "tokens are counted with unit = 'tokens'",
            stops=True,
        )


def _of_tokens(weight: float, samples: int, rank: int) -> Iterator[Finding]:
    if samples and not (math.isfinite(weight) and weight > 0):
        yield Finding(
            NAME,
            "error",
            f"weight that loss() returns for a batch of {samples} samples: {weight:g} (rank {rank})",
            "the loss of the batch cannot be averaged: with unit 'tokens' the weight is the number of its tokens",
            "return the number of tokens that the loss counts as its weight",
            stops=True,
        )
    elif weight < samples or weight != int(weight):
        yield Finding(
            NAME,
            "warning",
            f"weight that loss() returns for a batch of {samples} samples: {weight:g} tokens (rank {rank})",
            "throughput is counted in this weight, and gradients are divided by it: it is no number of tokens",
            "return the sum of the losses of the tokens, and their number as its weight",
        )


CHECK = Check(NAME, None, judge, about=("loss",), clue=r"return ")
