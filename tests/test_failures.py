"""Which outcome a failure is, and which of several was the cause."""

from __future__ import annotations

import pytest

from harness.failures import blamed, from_launch, primary
from harness.messages import Outcome, TrialResult
from harness.worker import failure, outcome_of


class HealthCheckFailed(Exception):
    """Like Ray Train's: it carries why the worker is not healthy."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("A worker health check failed.")
        self.health_check_failure = cause


class GroupError(Exception):
    """Like Ray Train's WorkerGroupError."""

    def __init__(self, worker_failures: dict[int, Exception]) -> None:
        super().__init__("A worker failed.")
        self.worker_failures = worker_failures


class ActorDied(Exception):
    pass


def rank_failure(rank: int, reason: str, kind: str = "RuntimeError", outcome: Outcome = "error") -> TrialResult:
    return TrialResult("t", outcome, reason, error_type=kind, error_rank=rank)


PEER = "RuntimeError on rank 0: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3"


def test_the_cause_is_told_not_what_its_peers_saw() -> None:
    peer = rank_failure(0, PEER)
    cause = rank_failure(1, "ValueError on rank 1: bad sample", "ValueError")
    assert primary([peer, cause]) is cause
    assert primary([cause, peer]) is cause


def test_where_every_rank_only_misses_a_peer_the_trial_is_lost() -> None:
    row = primary([rank_failure(0, PEER), rank_failure(2, "NCCL error: remote process exited", "DistBackendError")])
    assert (row.outcome, row.error_rank) == ("lost", 0)
    assert row.reason == f"a peer was lost: {PEER}"


@pytest.mark.parametrize(
    ("reason", "kind", "outcome"),
    [
        ("NCCL error: CUDA out of memory; connection reset", "DistBackendError", "oom"),
        ("NCCL error: invalid usage: duplicate GPU detected", "DistBackendError", "error"),
        ("cannot read /data/gloomy/nccl.txt", "FileNotFoundError", "error"),
        ("connection reset by the data server", "ConnectionResetError", "error"),
    ],
)
def test_a_failure_of_its_own_is_not_taken_for_a_lost_peer(reason: str, kind: str, outcome: Outcome) -> None:
    one = rank_failure(0, reason, kind, outcome)
    assert primary([rank_failure(1, PEER), one]) is one
    assert primary([one]) is one


@pytest.mark.parametrize(
    ("finished", "current", "trials"),
    [
        ([], None, ["a", "b", "c"]),
        ([], "a", ["a"]),
        (["a"], "b", ["b"]),
        (["a"], None, ["b"]),
        (["a", "b", "c"], None, []),
    ],
)
def test_a_group_that_ends_without_a_word_costs_no_finished_trial(
    finished: list[str], current: str | None, trials: list[str]
) -> None:
    assert blamed(["a", "b", "c"], finished, current) == trials


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("x"), "error"),
        (MemoryError(), "oom"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), "oom"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), "oom"),
        (OSError("Cannot allocate memory"), "oom"),
        (SystemExit(3), "error"),
    ],
)
def test_outcomes_of_exceptions(error: BaseException, outcome: str) -> None:
    assert outcome_of(error) == outcome


def test_a_failure_carries_its_type_rank_and_traceback() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        result = failure("t", 3, error)
    assert (result.outcome, result.error_type, result.error_rank) == ("error", "ValueError", 3)
    assert result.reason == "ValueError on rank 3: two lines"
    assert "test_failures.py" in result.detail


def test_a_dead_process_is_a_lost_trial() -> None:
    error = GroupError({1: HealthCheckFailed(ActorDied("killed"))})
    (row,) = from_launch(["t"], error, False, "")
    assert (row.outcome, row.trial_id) == ("lost", "t")
    assert row.reason == "a worker process died (rank 1: ActorDied)"
    assert "killed" in row.detail


def test_what_a_worker_raised_outside_of_a_trial_is_an_error() -> None:
    (row,) = from_launch(["t"], GroupError({1: ValueError("no such device")}), False, "")
    assert (row.outcome, row.error_type) == ("error", "ValueError")
    assert row.reason == "ValueError on rank 1: no such device"


def test_the_memory_monitors_kill_is_out_of_memory() -> None:
    error = GroupError({0: HealthCheckFailed(ActorDied("killed due to the node running low on memory: OutOfMemory"))})
    (row,) = from_launch(["t"], error, False, "")
    assert row.outcome == "oom"


def test_a_hang_is_a_timeout_with_the_stacks() -> None:
    (row,) = from_launch(["t"], None, True, "rank 0: here")
    assert (row.outcome, row.detail) == ("timeout", "rank 0: here")
    assert "limits.trial" in row.reason


def test_a_group_that_never_started_is_a_row_for_each_of_its_trials() -> None:
    rows = list(from_launch(["a", "b"], RuntimeError("no placement group"), False, ""))
    assert [(row.trial_id, row.outcome) for row in rows] == [("a", "lost"), ("b", "lost")]
    assert "no placement group" in rows[0].reason
