"""Randomness: equal initial parameters on all ranks, and different dropout masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.doctor.check import Case, Check
from harness.doctor.steps import Steps
from harness.doctor.subject import Subject
from harness.plan.checks.finding import Finding, join_names
from harness.train.digests import value_digest

NAME = "randomness"


def observe(subject: Subject) -> dict[str, str]:
    """Return a digest of each parameter as this rank builds it from the shared seed."""
    model = subject.bare_model() if subject.whole_model_fits else subject.built_model()
    return {name: value_digest(parameter) for name, parameter in model.named_parameters() if not parameter.is_meta}


def judge(seen: Sequence[Mapping[str, str]], case: Case) -> list[Finding]:
    """Compare the initial parameters of the ranks, before they are wrapped."""
    names = [name for name in seen[0] if len({rank.get(name) for rank in seen}) > 1]
    if not names:
        return []
    consequence = (
        "fsdp shards the values of each rank: the model is assembled from different initializations"
        if case.cell.traits.shards_parameters
        else "ddp broadcasts rank 0's parameters; values that other ranks derived from their own are inconsistent"
    )
    return [
        Finding(
            NAME,
            "error",
            f"initial values of {len(names)} of {len(seen[0])} parameters differ between the {len(seen)} ranks: "
            f"{join_names(names)}",
            consequence,
            "in build_model(), draw from torch's default generator only, whose seed is the same on every rank; take no "
            "seed from the rank, the time or the process",
        )
    ]


def judge_streams(seen: Sequence[Steps], case: Case) -> list[Finding]:
    """Compare the random states of the ranks that draw random numbers in their steps."""
    drawing = [rank.random_state for rank in seen if rank.draws]
    if len(drawing) < 2 or len(set(drawing)) == len(drawing):
        return []
    return [
        Finding(
            NAME,
            "warning",
            f"random states after the steps on {len(drawing)} ranks that draw random numbers: {len(set(drawing))} "
            "distinct",
            "equal dropout masks on several ranks: the draws of the ranks are not independent",
            "remove torch.manual_seed from forward and loss; the harness seeds each rank differently",
        )
    ]


CHECK = Check(NAME, observe, judge, about=("build_model",), clue=r"seed\(")
STREAMS = Check("random streams", None, judge_streams)
