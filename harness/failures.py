"""Which outcome a failed worker group is, and which of several failures was the cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from harness.messages import Outcome, TrialResult
from harness.plan import WorkerGroup

COLLATERAL = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "socket timeout",
    "gloo",
    "nccl",
    "processgroup",
)
"""What a healthy rank says when a peer is gone."""


def primary(failures: Sequence[TrialResult]) -> TrialResult:
    """The failure that caused the others: the first that does not read like a lost peer.

    Where every rank only misses a peer, that peer's process or node is lost.
    """
    own = [failure for failure in failures if not _is_collateral(failure)]
    if own:
        return own[0]
    first = failures[0]
    return replace(first, outcome="lost", reason=f"a peer was lost: {first.reason}")


def from_launch(
    group: WorkerGroup, current: str | None, error: BaseException | None, timed_out: bool, stacks: str
) -> Iterator[TrialResult]:
    """A group that ended without a word from its ranks: one row for the trial it was at.

    Where it was at none, it never started, and every trial of it gets the row.
    """
    if timed_out:
        outcome: Outcome = "timeout"
        reason = "no step was taken within the limit (limits.trial); the log shows where each rank stood"
        detail = stacks
    else:
        outcome, reason, detail = _classify(error)
    for trial_id in [current] if current else [trial.id for trial in group.trials]:
        yield TrialResult(trial_id, outcome, reason, error_type=type(error).__name__ if error else None, detail=detail)


def _classify(error: BaseException | None) -> tuple[Outcome, str, str]:
    detail = f"{type(error).__name__}: {error}"
    failures: dict[int, BaseException] = getattr(error, "worker_failures", None) or {}
    causes = {rank: getattr(cause, "health_check_failure", None) or cause for rank, cause in failures.items()}
    detail += "".join(f"\n\nrank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes.items())
    text = detail.lower()
    if "outofmemory" in text or "out of memory" in text or "memory pressure" in text:
        return "oom", "the host's memory ran out and a worker was ended", detail
    if causes:
        rank, cause = next(iter(causes.items()))
        return "lost", f"a worker process died (rank {rank}: {type(cause).__name__})", detail
    inner = getattr(error, "controller_failure", None) or error
    return "lost", f"the worker group did not start or was ended: {type(inner).__name__}: {str(inner)[:300]}", detail


def _is_collateral(failure: TrialResult) -> bool:
    text = failure.reason.lower()
    return any(sign in text for sign in COLLATERAL)
