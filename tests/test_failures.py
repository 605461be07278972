"""Which outcome a failure is, and which of several was the cause."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.config import Experiment
from harness.failures import from_launch, primary
from harness.messages import TrialResult
from harness.plan import WorkerGroup, make_plan
from harness.worker import failure, outcome_of
from tests.conftest import laptop


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


@pytest.fixture
def group(make_experiment: Callable[..., Experiment]) -> WorkerGroup:
    grid = {"strategy": "ddp", "devices": 2, "per_device_batch_size": [8, 16]}
    return make_plan(make_experiment(grid, throughput={"blocks": 1}), laptop()).groups[0]


def rank_failure(rank: int, reason: str) -> TrialResult:
    return TrialResult("t", "error", reason, error_rank=rank)


def test_the_cause_is_told_not_what_its_peers_saw() -> None:
    peer = rank_failure(0, "RuntimeError on rank 0: [gloo/transport/tcp/pair.cc] Connection closed by peer")
    cause = rank_failure(1, "ValueError on rank 1: bad sample")
    assert primary([peer, cause]) is cause
    assert primary([cause, peer]) is cause


def test_where_every_rank_only_misses_a_peer_the_trial_is_lost() -> None:
    row = primary([rank_failure(0, "NCCL error: remote process exited"), rank_failure(2, "NCCL error")])
    assert (row.outcome, row.error_rank) == ("lost", 0)
    assert row.reason == "a peer was lost: NCCL error: remote process exited"


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


def test_a_dead_process_is_a_lost_trial(group: WorkerGroup) -> None:
    error = GroupError({1: HealthCheckFailed(ActorDied("killed"))})
    (row,) = from_launch(group, group.trials[0].id, error, False, "")
    assert (row.outcome, row.trial_id) == ("lost", group.trials[0].id)
    assert row.reason == "a worker process died (rank 1: ActorDied)"
    assert "killed" in row.detail


def test_the_memory_monitors_kill_is_out_of_memory(group: WorkerGroup) -> None:
    error = GroupError({0: HealthCheckFailed(ActorDied("killed due to the node running low on memory: OutOfMemory"))})
    (row,) = from_launch(group, group.trials[0].id, error, False, "")
    assert row.outcome == "oom"


def test_a_hang_is_a_timeout_with_the_stacks(group: WorkerGroup) -> None:
    (row,) = from_launch(group, group.trials[1].id, None, True, "rank 0: here")
    assert (row.outcome, row.detail) == ("timeout", "rank 0: here")
    assert "limits.trial" in row.reason


def test_a_group_that_never_started_is_a_row_for_each_of_its_trials(group: WorkerGroup) -> None:
    rows = list(from_launch(group, None, RuntimeError("no placement group"), False, ""))
    assert [row.trial_id for row in rows] == [trial.id for trial in group.trials]
    assert {row.outcome for row in rows} == {"lost"}
    assert "no placement group" in rows[0].reason
