"""Padding: the share of real values in padded batches, and padding that is counted as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.doctor.check import Case, Check
from harness.doctor.steps import Steps
from harness.plan.checks.finding import Finding

NAME = "padding"
LEAST_REAL = 0.3
"""With a smaller share of real values, most of the step computes on padding."""


def judge(seen: Sequence[Steps], case: Case) -> list[Finding]:
    """Compare the tokens that loss() counted in the first step with the places of the batch, and with the real ones."""
    found = []
    for rank, steps in enumerate(seen):
        padded, counted = steps.padded, steps.weights[0] if steps.weights else 0.0
        if padded.counts_tokens and padded.share < 1 and padded.real < padded.places <= counted:
            found.append(
                Finding(
                    NAME,
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
                NAME,
                "note",
                f"real tokens in a padded batch: {100 * share:.0f} % of its places",
                "most of a step computes on padding",
                "batch samples of similar length together in the data set's order, or pack them",
            )
        )
    return found


def figures(seen: Sequence[Steps], case: Case) -> Mapping[str, str]:
    """Return the share of real tokens, if the batch is padded."""
    shares = [steps.padded.share for steps in seen if steps.padded.places]
    return {"real tokens in a padded batch": f"{100 * sum(shares) / len(shares):.0f} %"} if shares else {}


CHECK = Check(NAME, None, judge, figures=figures, about=("loss",), clue=r"ignore_index|cross_entropy|nll_loss")
