"""Batches: their division among devices, padding, and the weight that loss() returns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from harness.doctor.check import Case, Check
from harness.doctor.steps import Steps
from harness.doctor.subject import Subject
from harness.plan.checks import BATCHES, Finding, judge_batches

PADDING = "padding"
LEAST_REAL = 0.3
"""With a smaller share of real values, most of the step computes on padding."""
LOSS_WEIGHT = "loss weight"


def observe(subject: Subject) -> tuple[int, int, bool]:
    """Return the training samples, the samples of a step, and whether the cell is trained for whole epochs."""
    return subject.training_samples, subject.cell.global_batch_size * subject.micro_batches, subject.epochs


def judge(seen: Sequence[tuple[int, int, bool]], case: Case) -> list[Finding]:
    samples, batch, epochs = seen[0]
    return judge_batches(samples, batch, case.cell, epochs=epochs)


CHECK = Check(BATCHES, observe, judge)


def judge_padding(seen: Sequence[Steps], case: Case) -> list[Finding]:
    """Compare the tokens that loss() counted in the first step with the places of the batch, and with the real ones."""
    found = []
    for rank, steps in enumerate(seen):
        padded, counted = steps.padded, steps.weights[0] if steps.weights else 0.0
        if padded.counts_tokens and padded.share < 1 and padded.real < padded.places <= counted:
            found.append(
                Finding(
                    PADDING,
                    "warning",
                    f"tokens that loss() counts in a batch of rank {rank}: {counted:g}; places {padded.places:,}, of "
                    f"which {padded.real:,} hold real tokens ({100 * padded.share:.0f} %)",
                    "throughput counts padding, and the loss averages over it: both depend on which samples meet",
                    "return the number of real tokens as the weight, and leave padding out of the loss (ignore_index)",
                )
            )
            break
    share = min((steps.padded.share for steps in seen), default=1.0)
    if share < LEAST_REAL and not found:
        found.append(
            Finding(
                PADDING,
                "note",
                f"real tokens in a padded batch: {100 * share:.0f} % of its places",
                "most of a step computes on padding",
                "batch samples of similar length together in the data set's order, or pack them",
            )
        )
    return found


def padding_figures(seen: Sequence[Steps], case: Case) -> Mapping[str, str]:
    """Return the share of real tokens, if the batch is padded."""
    shares = [steps.padded.share for steps in seen if steps.padded.places]
    return {"real tokens in a padded batch": f"{100 * sum(shares) / len(shares):.0f} %"} if shares else {}


PADDING_CHECK = Check(
    PADDING,
    None,
    judge_padding,
    figures=padding_figures,
    about=("loss",),
    clue=r"ignore_index|cross_entropy|nll_loss",
)


def judge_loss_weight(seen: Sequence[Steps], case: Case) -> list[Finding]:
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
            LOSS_WEIGHT,
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
            LOSS_WEIGHT,
            "error",
            f"weight that loss() returns for a batch of {samples} samples: {weight:g} (rank {rank})",
            "the loss of the batch cannot be averaged: with unit 'tokens' the weight is the number of its tokens",
            "return the number of tokens that the loss counts as its weight",
            stops=True,
        )
    elif weight < samples or weight != int(weight):
        yield Finding(
            LOSS_WEIGHT,
            "warning",
            f"weight that loss() returns for a batch of {samples} samples: {weight:g} tokens (rank {rank})",
            "throughput is counted in this weight, and gradients are divided by it: it is no number of tokens",
            "return the sum of the losses of the tokens, and their number as its weight",
        )


LOSS_WEIGHT_CHECK = Check(LOSS_WEIGHT, None, judge_loss_weight, about=("loss",), clue=r"return ")
