"""Which outcome a failed worker group is, and which of several failures was the cause."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from harness.messages import Outcome, TrialResult

COLLATERAL = (
    "closed by peer",
    "connection reset",
    "connection refused",
    "connection was closed",
    "broken pipe",
    "remote process exited",
    "socket timeout",
    "timed out waiting",
)
"""What a healthy rank's collective says when a peer is gone."""
_DIED = re.compile(r"rank\s*: (\d+) .*\n\s*exitcode\s*: (-?\d+)")
"""How torchrun names a rank that died."""
COLLATERAL_TYPES = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistError")


def primary(failures: Sequence[TrialResult]) -> TrialResult:
    """The failure that caused the others: the first that does not read like a lost peer.

    Where every rank only misses a peer, that peer's process or node is lost.
    """
    own = [failure for failure in failures if not _is_collateral(failure)]
    if own:
        return own[0]
    first = failures[0]
    return replace(first, outcome="lost", reason=f"a peer was lost: {first.reason}")


def blamed(planned: Sequence[str], finished: Sequence[str], current: str | None) -> list[str]:
    """The trials that get a row where a group ended without a word: those of ``planned`` that it may have cost.

    The one it was at; between two trials the next; where it never began, every one; where all are finished, none.
    """
    if current:
        return [current]
    left = [trial_id for trial_id in planned if trial_id not in set(finished)]
    return left[:1] if finished else left


def from_launch(
    trial_ids: Sequence[str], error: BaseException | None, timed_out: bool, stacks: str
) -> Iterator[TrialResult]:
    """A row for each trial to blame where a group ended without a word from its ranks."""
    if timed_out:
        outcome: Outcome = "timeout"
        reason = "no step was taken within the limit (limits.trial); the log shows where each rank stood"
        named, detail = None, stacks
    else:
        outcome, reason, named, detail = _classify(error)
    for trial_id in trial_ids:
        yield TrialResult(trial_id, outcome, reason, error_type=named, detail=detail)


def from_exit(trial_id: str, code: int | None, output: str, *, came_up: bool) -> TrialResult:
    """A row for a trial whose torchrun ended without a word from its ranks; ``output`` is what they printed last.

    ``code`` is torchrun's own; None where it was given up because no rank came up.
    """
    if not came_up:
        what = "nothing was heard of them in time" if code is None else f"torchrun ended with exit code {code}"
        return TrialResult(trial_id, "error", f"the worker processes did not start: {what}", detail=output)
    named = _DIED.findall(output)
    if not named:
        return TrialResult(trial_id, "lost", f"torchrun itself ended (exit code {code})", detail=output)
    rank, status = (int(number) for number in named[-1])  # the last is what torchrun calls the root cause
    means = f"signal {-status}" if status < 0 else f"exit code {status}"
    return TrialResult(trial_id, "lost", f"a worker process died (rank {rank}: {means})", detail=output)


def _classify(error: BaseException | None) -> tuple[Outcome, str, str, str]:
    """Outcome, reason, type and whole text of what fit() raised."""
    detail = f"{type(error).__name__}: {error}"
    failures: dict[int, BaseException] = getattr(error, "worker_failures", None) or {}
    system = {rank: cause for rank, failure in failures.items() if (cause := _system_failure(failure))}
    named = {rank: system.get(rank, failure) for rank, failure in failures.items()}
    detail += "".join(f"\n\nrank {rank}: {type(cause).__name__}: {cause}" for rank, cause in named.items())
    text = detail.lower()
    if "outofmemory" in text or "out of memory" in text or "memory pressure" in text:
        return "oom", "the host's memory ran out and a worker was ended", type(error).__name__, detail
    if system:
        rank, cause = next(iter(system.items()))
        kind = type(cause).__name__
        return "lost", f"a worker process died (rank {rank}: {kind})", kind, detail
    if named:
        rank, cause = next(iter(named.items()))
        kind = type(cause).__name__
        return "error", f"{kind} on rank {rank}: {' '.join(str(cause).split())[:300]}", kind, detail
    inner = getattr(error, "controller_failure", None) or error
    kind = type(inner).__name__
    return "lost", f"the worker group did not start or was ended: {kind}: {str(inner)[:300]}", kind, detail


def _system_failure(failure: BaseException) -> BaseException | None:
    """Why Ray found a worker unhealthy; None where the worker itself raised."""
    cause: BaseException | None = getattr(failure, "health_check_failure", None)
    return cause


def _is_collateral(failure: TrialResult) -> bool:
    text = failure.reason.lower()
    collective = failure.error_type in COLLATERAL_TYPES and failure.outcome == "error"
    return collective and any(sign in text for sign in COLLATERAL)
