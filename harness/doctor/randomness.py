"""Randomness: ranks start from the same weights and draw different dropout masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.doctor.check import Case, Check
from harness.doctor.digest import digest_of
from harness.doctor.steps import Steps
from harness.doctor.subject import Subject
from harness.plan.checks.finding import Finding, join_names

NAME = "randomness"


def observe(subject: Subject) -> dict[str, str]:
    """Return a digest of each parameter as this rank builds it from the shared seed."""
    return {name: digest_of(parameter) for name, parameter in subject.bare_model().named_parameters()}


def judge(seen: Sequence[Mapping[str, str]], case: Case) -> list[Finding]:
    """Compare the initial parameters of the ranks, before they are wrapped."""
    names = [name for name in seen[0] if len({rank.get(name) for rank in seen}) > 1]
    if not names:
        return []
    consequence = (
        "fsdp shards each rank's own values: the model is put together from different ones"
        if case.cell.traits.shards_parameters
        else "ddp starts from rank 0's; what the other ranks set up from their own is wrong"
    )
    return [
        Finding(
            NAME,
            "error",
            f"{len(names)} of {len(seen[0])} parameters start from different values on the {len(seen)} ranks: "
            f"{join_names(names)}",
            consequence,
            "build_model() must draw from torch's generator alone, which is seeded alike on every rank: no seed from "
            "the rank, the time or the process",
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
            f"{len(drawing)} ranks draw random numbers in their steps, from {len(set(drawing))} different state(s)",
            "dropout masks repeat from rank to rank: the ranks' samples are not independent draws",
            "leave out torch.manual_seed in forward and loss; each rank gets a stream of its own here",
        )
    ]


CHECK = Check(NAME, observe, judge)
STREAMS = Check("random streams", None, judge_streams)
