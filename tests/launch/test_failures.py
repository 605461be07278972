"""Which outcome a failure is, which of several was the cause, and what a process leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.doctor.examine import DoctorReport, DoctorTrialFailed
from harness.launch.failures import (
    IDLE,
    blamed,
    blamed_on,
    despite,
    explained,
    found_dead,
    from_hang,
    from_launch,
    from_memory_monitor,
    held_up_by,
    last_line,
    lost_if_waiting,
    of_its_trial,
    primary,
    with_unused,
)
from harness.launch.postmortem import (
    PRINTED_BYTES,
    ProcessOutput,
    find_kill_counter,
    killed_for_memory,
    output_of_this_process,
    what_it_printed,
)
from harness.launch.startup import Registration
from harness.launch.subgroups import Alternation, Subgroups
from harness.launch.supervision import Ending, GroupEnd, Watchdog
from harness.launch.worker import failure, outcome_of
from harness.plan.cell import place
from harness.plan.known_errors import UNUSED_PARAMETERS
from harness.plan.planner import by_variant, make_plan
from harness.plan.rows import Outcome
from harness.plan.trial import Trial, TrialResult, WorkerGroup
from harness.system.files import PACKAGE_FOLDER
from tests.conftest import Make, experiment_of, laptop, variants

NO_CUBLAS = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"


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


MINE = """
import torch.distributed as dist
work = dist.all_reduce(x, async_op=True)
work.wait()
x = data[0]
"""


@pytest.mark.parametrize(
    "innermost",
    [
        '  File "/env/torch/nn/parallel/distributed.py", line 1600 in forward',
        '  File "/env/torch/_ops.py", line 900 in __call__\n  File "/env/torch/distributed/_f.py", line 9 in f',
        '  File "{mine}", line 4 in loss',
    ],
)
def test_the_rank_that_hangs_is_told_from_one_that_waits_for_it(tmp_path: Path, innermost: str) -> None:
    """The wait is in ddp's forward, in a functional collective, or in wait() of a handle in the user's own line."""
    (mine := tmp_path / "mine.py").write_text(MINE)
    rest = f'  File "{mine}", line 3 in loss\n  File "/h/harness/launch/worker.py", line 9 in run_group\n'
    head = "Current thread 0x1 (most recent call first):\n"
    waits = f"{head}{innermost.format(mine=mine)}\n{rest}"
    hangs = f'{head}  File "{mine}", line 5 in __getitem__\n{rest}'
    rank, frame = held_up_by({0: waits, 1: hangs}) or (None, None)
    assert (rank, str(frame)) == (1, "__getitem__ (mine.py:5)")


PEER = "RuntimeError on rank 0: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3"


def test_the_root_cause_is_reported_rather_than_errors_of_peers_which_alone_are_a_lost_trial() -> None:
    peer = rank_failure(0, PEER)
    cause = rank_failure(1, "ValueError on rank 1: bad sample", "ValueError")
    assert primary([peer, cause]) is primary([cause, peer]) is cause
    row = primary([peer, rank_failure(2, "NCCL error: remote process exited", "DistBackendError")])
    assert (row.outcome, row.error_rank, row.reason) == ("lost", 0, f"a peer was lost: {PEER}")


@pytest.mark.parametrize(
    ("reason", "kind", "outcome"),
    [
        ("NCCL error: CUDA out of memory; connection reset", "DistBackendError", "oom"),
        ("NCCL error: invalid usage: duplicate GPU detected", "DistBackendError", "error"),
        ("cannot read /data/gloomy/nccl.txt", "FileNotFoundError", "error"),
        ("connection reset by the data server", "ConnectionResetError", "error"),
    ],
)
def test_a_ranks_own_failure_is_not_classified_as_a_lost_peer(reason: str, kind: str, outcome: Outcome) -> None:
    one = rank_failure(0, reason, kind, outcome)
    assert primary([rank_failure(1, PEER), one]) is one
    assert primary([one]) is one


@pytest.mark.parametrize(
    ("finished", "current", "connected", "trials"),
    [
        ([], None, False, ["a", "b", "c"]),
        ([], None, True, ["a"]),  # what the first one needs is read before it starts
        ([], "a", True, ["a"]),
        (["a"], "b", True, ["b"]),
        (["a"], None, True, ["b"]),
        (["a", "b", "c"], None, True, []),
    ],
)
def test_a_group_that_ends_without_a_report_keeps_finished_trials(
    finished: list[str], current: str | None, connected: bool, trials: list[str]
) -> None:
    assert blamed(["a", "b", "c"], finished, current, connected=connected) == trials


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("x"), "error"),
        (MemoryError(), "oom"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), "oom"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), "oom"),
        (OSError("Cannot allocate memory"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "oom"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), "oom"),
        (RuntimeError(NO_CUBLAS), "error"),  # there is no GPU, full or not
        (SystemExit(3), "error"),
    ],
)
def test_outcomes_of_exceptions(error: BaseException, outcome: str) -> None:
    assert outcome_of(error) == outcome


@pytest.mark.parametrize("message", [NO_CUBLAS, "GET was unable to find an engine to execute this computation"])
@pytest.mark.parametrize(
    ("free", "reserved", "outcome"), [(1, 60, "oom"), (10, 60, "error"), (1, 0, "error"), (None, 60, "error")]
)
def test_a_library_that_fails_on_a_full_gpu_ran_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, message: str, free: int | None, reserved: int, outcome: str
) -> None:
    """Of two GPUs the process uses the second; ``free`` and ``reserved`` of its 80 GiB; None: it answers nothing."""

    def information(number: int) -> tuple[int, int]:
        if free is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return (80, free)[number] * 2**30, 80 * 2**30

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "memory_reserved": lambda number: (0, reserved)[number] * 2**30,
        "mem_get_info": information,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    assert outcome_of(RuntimeError(message)) == outcome


def test_a_failure_carries_its_type_rank_and_traceback() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no")

    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        result = failure("t", 3, error)
    assert (result.outcome, result.error_type, result.error_rank) == ("error", "ValueError", 3)
    assert result.reason == "ValueError on rank 3: two lines"
    assert "test_failures.py" in result.detail
    examined = failure("t", 1, DoctorTrialFailed(RuntimeError("no kernel"), DoctorReport(figures={"batch": "8"})))
    assert (examined.reason, examined.error_type) == ("RuntimeError on rank 1: no kernel", "RuntimeError")
    assert examined.facts["figures"] == {"batch": "8"}
    assert failure("t", 0, Mute()).reason == "Mute on rank 0: (no message: its __str__ raised ValueError)"
    assert len(failure("t", 0, ValueError("x" * 10**6)).detail) <= 100_000


def test_a_killed_or_silent_rank_is_the_cause_of_the_errors_of_its_peers() -> None:
    lost = primary([rank_failure(0, PEER)], dead_ranks=[1])
    reported = ActorDied("Task was killed due to the node running low on memory.")
    row = from_memory_monitor(lost, GroupError({0: ValueError("collateral"), 1: HealthCheckFailed(reported)}))
    assert (row.outcome, row.error_rank) == ("oom", 1)
    assert row.reason == "the host ran out of memory: Ray's memory monitor killed rank 1"
    assert from_memory_monitor(lost, GroupError({1: HealthCheckFailed(ActorDied("gone"))})) is lost
    raised = rank_failure(1, "ValueError on rank 1: bad", "ValueError")
    assert from_memory_monitor(raised, GroupError({1: HealthCheckFailed(reported)})) is raised
    row = primary([rank_failure(0, PEER)], dead_ranks=[2])
    assert (row.outcome, row.error_rank, row.error_type) == ("lost", 2, None)
    assert row.reason == "the process of rank 2 terminated unexpectedly"
    unknown = rank_failure(0, "DistBackendError on rank 0: NCCL says something new", "DistBackendError")
    assert primary([unknown], dead_ranks=[1]).error_rank == 1
    assert primary([unknown]).outcome == "error"
    assert sorted(found_dead(GroupError({1: HealthCheckFailed(ActorDied("x")), 0: ValueError("y")}))) == [1]


WAITS = """Thread 0x1 (most recent call first):
  File "/x/torch/autograd/graph.py", line 8 in _engine_run_backward
  File "/h/worker.py", line 3 in run_group

Current thread 0x2 (most recent call first):
  File "/x/ray/default_worker.py", line 1 in <module>
"""
SLEEPS = WAITS.replace("/x/torch/autograd/graph.py", "/home/me/mine.py").replace("_engine_run_backward", "loss")


def test_a_hang_is_a_timeout_with_the_stacks_and_the_rank_that_the_others_wait_for() -> None:
    (row,) = from_hang(["t"], {1: SLEEPS, 0: WAITS})
    assert (row.outcome, row.error_rank) == ("timeout", 1)
    assert "limits.trial" in row.reason and row.reason.endswith("; rank 1 in loss (mine.py:8)")
    assert row.detail.index("rank 0:") < row.detail.index("_engine_run_backward") < row.detail.index("rank 1:\n")
    (row,) = from_hang(["t"], {0: WAITS, 1: WAITS})
    assert row.error_rank is None
    assert row.reason.endswith("; waiting for other ranks: rank 0, 1 in run_group (worker.py:3)")
    (row,) = from_hang(["t"], {0: WAITS, 1: ""})
    assert row.error_rank == 1 and "rank 1:\nno stack received" in row.detail


def test_a_hang_of_ddp_beyond_the_backward_pass_of_others_names_unused_parameters(make_experiment: Make) -> None:
    """As after a batch without a token for an expert on one rank, in the last step of a window."""
    options = {"strategy_options": {"ddp": {"find_unused_parameters": [False, True]}}}
    grid = {"strategy": ["ddp", "fsdp"], "devices": [2], "per_device_batch_size": 8}
    plan = make_plan(make_experiment(grid, throughput={"blocks": 1}, **options), laptop())
    backward = WAITS.replace("/h/", f"{PACKAGE_FOLDER}/launch/")
    beyond = backward.replace("/x/torch/autograd/graph.py", "/x/torch/distributed/distributed_c10d.py")
    worker = f'  File "{PACKAGE_FOLDER}/launch/worker.py"'
    in_loss = beyond.replace(worker, f'  File "/home/me/mine.py", line 9 in loss\n{worker}')
    loading = backward.replace("/x/torch/autograd/graph.py", "/x/torch/utils/data/dataloader.py")

    def named(trial: Trial, stacks: dict[int, str]) -> bool:
        group = WorkerGroup("g", 0, place(trial.cell), "cpu", False, (trial,), "torchrun")
        (row,) = from_hang([trial.id], stacks)
        return with_unused(row, group, stacks).reason.endswith(f"; remedy: {UNUSED_PARAMETERS}")

    for trial in (trial for trial in plan.trials if trial.cell.devices == 2 and trial.scenario == "throughput"):
        lacks = trial.cell.strategy == "ddp" and not trial.cell.strategy_options.get("find_unused_parameters")
        assert named(trial, {0: WAITS, 1: beyond}) == lacks
        for other in (
            WAITS,
            in_loss,
            loading,
            SLEEPS,
            "",
        ):  # a collective, or a line, of the user's own has another cause
            assert not named(trial, {0: backward, 1: other})


def test_memory_that_ran_out_for_a_waiting_rank_is_no_fault_of_the_trial(make_experiment: Make) -> None:
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
    (group,) = make_plan(make_experiment(grid, throughput={"blocks": 1}), laptop()).groups
    small = next(trial for trial in group.trials if trial.cell.strategy == "single")
    large = next(trial for trial in group.trials if trial.cell.devices == 2)
    (rank,) = group.ranks_of(small)
    for trial, at, outcome in ((small, rank, "oom"), (small, 1 - rank, "lost"), (large, 1 - rank, "oom")):
        assert lost_if_waiting(TrialResult(trial.id, "oom", "killed", error_rank=at), group).outcome == outcome


def test_a_rank_that_waits_for_a_trial_of_other_ranks_is_not_what_they_wait_for() -> None:
    assert all(hasattr(Subgroups, name) or hasattr(Alternation, name) for name in IDLE)
    idle = WAITS.replace("/x/torch/autograd/graph.py", "/h/subgroups.py")
    idle = idle.replace("_engine_run_backward", min(IDLE))
    (row,) = from_hang(["t"], {0: idle, 1: WAITS, 2: SLEEPS})
    assert row.error_rank == 2 and "rank 0:" in row.detail
    (row,) = from_hang(["t"], {0: idle, 1: WAITS})
    assert row.reason.endswith("; waiting for other ranks: rank 1 in run_group (worker.py:3)")


def test_of_variants_that_run_at_once_the_one_fails_whose_rank_does() -> None:
    """Not the one that the driver takes for the current one; memory that all used together blames none."""
    settings = {"workload": "own:Own", "variants": {"before": "/before", "after": "/after"}}
    grid = {"strategy": ["ddp"], "devices": [2], "per_device_batch_size": 8}
    experiment = experiment_of(grid, **settings, throughput={"blocks": 1})
    (group,) = make_plan(experiment, laptop(), variants=variants("before", "after")).groups
    (turn,) = (turn for turn in group.turns() if turn[0].cell.devices == 2)
    first, second = turn

    def ended(stacks: Mapping[int, str] | None = None, finished: tuple[TrialResult, ...] = ()) -> GroupEnd:
        return GroupEnd(Ending.HUNG, finished, (), first.id, stacks=stacks or {})

    for trial in turn:
        for rank in group.ranks_of(trial):
            died = TrialResult(first.id, "lost", "died", error_rank=rank)
            assert of_its_trial(died, group, ended()).trial_id == trial.id
            assert of_its_trial(died, group, ended(finished=(TrialResult(trial.id, "ok"),))) == died
    unknown = TrialResult(first.id, "timeout", "no step")
    idle = WAITS.replace("_engine_run_backward", "wait_for_turn")
    hang = {rank: WAITS if rank in group.ranks_of(second) else idle for rank in range(4)}
    assert of_its_trial(unknown, group, ended(hang)).trial_id == second.id
    for stacks in ({}, dict.fromkeys(range(4), WAITS)):
        assert of_its_trial(unknown, group, ended(stacks)) == unknown
    (alone,) = (one for one in by_variant(group) if second in one.trials)
    for each, outcome in ((group, "lost"), (alone, "oom")):
        row = TrialResult(second.id, "oom", "killed", error_rank=each.ranks_of(second)[0])
        assert lost_if_waiting(row, each).outcome == outcome


IN_LOSS = f"""Thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce
  File "/home/me/mine.py", line 12 in loss
  File "{PACKAGE_FOLDER}/train/training.py", line 150 in _backward
  File "{PACKAGE_FOLDER}/launch/worker.py", line 70 in run_group
"""
IN_BACKWARD = f"""Thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/site-packages/torch/autograd/graph.py", line 8 in _engine_run_backward
  File "{PACKAGE_FOLDER}/train/training.py", line 160 in _backward
  File "{PACKAGE_FOLDER}/launch/worker.py", line 70 in run_group
"""


FROM_RUNPY = IN_LOSS + '  File "<frozen runpy>", line 88 in _run_code\n'
IN_LOADER = f"""Thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 4 in select
  File "/opt/env/site-packages/mylib/io.py", line 5 in read
  File "/home/me/data.py", line 7 in __getitem__
  File "{PACKAGE_FOLDER}/train/loader.py", line 30 in batches
  File "{PACKAGE_FOLDER}/launch/worker.py", line 70 in run_group
  File "<frozen runpy>", line 88 in _run_code
"""
IN_OURS = f"""Thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 4 in select
  File "{PACKAGE_FOLDER}/measure/links.py", line 30 in observe
  File "{PACKAGE_FOLDER}/launch/worker.py", line 70 in run_group
  File "<frozen runpy>", line 88 in _run_code
"""


@pytest.mark.parametrize(
    ("stacks", "reason"),
    [
        (
            {0: IN_LOSS, 1: IN_BACKWARD, 2: IN_BACKWARD},
            "; waiting for other ranks: rank 0 in loss (mine.py:12); rank 1, 2 in _backward (training.py:160)",
        ),
        ({0: FROM_RUNPY, 1: IN_LOADER}, "; rank 1 in __getitem__ (data.py:7)"),
        ({0: FROM_RUNPY, 1: FROM_RUNPY}, "; waiting for other ranks: rank 0, 1 in loss (mine.py:12)"),
        ({0: FROM_RUNPY, 1: IN_OURS}, "; rank 1 in observe (links.py:30)"),
    ],
)
def test_a_place_is_the_innermost_frame_of_the_users_code(stacks: dict[int, str], reason: str) -> None:
    (row,) = from_hang(["t"], stacks)
    assert row.reason.endswith(reason)


def test_a_crash_is_named_with_its_last_line_and_after_a_measurement_costs_its_explanation() -> None:
    printed = f"step 3\n\nFatal Python error: Segmentation fault\n\nCurrent {IN_LOSS}"
    assert last_line(printed) == "loss (mine.py:12)"
    assert last_line(IN_LOSS) == last_line("") == ""
    watch = Watchdog(lambda question, about: [printed if question == "printed" else False], 8.0)
    watch.add(Registration(0, "n0", "", "", True, pid=5, created_at=0.0, traces=ProcessOutput()))
    row = explained(TrialResult("t", "lost", "terminated", error_rank=0, detail=""), watch)
    assert row.reason == "terminated; last line of the user's code: loss (mine.py:12)"
    failed = TrialResult("t", "lost", "rank 1 died", error_rank=1, detail="trace")
    measured = TrialResult("t", "ok", facts={"steady": True}, steps={"step_s": [0.1]})
    kept = despite(failed, measured)
    assert (kept.outcome, kept.error_rank, kept.steps) == ("ok", None, measured.steps)
    assert kept.facts == {"steady": True, "explain_error": "lost after the measurement: rank 1 died"}
    assert kept.detail == "trace"
    assert despite(failed, None) is despite(failed, replace(measured, trial_id="earlier")) is failed


DIED = "the process of rank 1 terminated unexpectedly"


OUT_OF_MEMORY = "the host ran out of memory: Ray's memory monitor killed rank 1"


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (ActorDied("Worker unexpectedly exits with an exit code 3."), "lost", f"{DIED} (exit code 3)"),
        (ActorDied("The worker died because of SIGSEGV received"), "lost", f"{DIED} (SIGSEGV)"),
        (ActorDied("gone"), "lost", f"{DIED} (ActorDied)"),
        (ActorDied("killed due to the node running low on memory: OutOfMemory"), "oom", OUT_OF_MEMORY),
        (ValueError("no such device"), "error", "ValueError on rank 1: no such device"),
    ],
)
def test_a_group_that_raises_is_a_row_with_the_cause(error: Exception, outcome: str, reason: str) -> None:
    raised = isinstance(error, ValueError)
    (row,) = from_launch(["t"], GroupError({1: error if raised else HealthCheckFailed(error)}))
    assert (row.trial_id, row.outcome, row.reason) == ("t", outcome, reason)
    assert str(error) in row.detail and (row.error_type == "ValueError" or not raised)
    rows = list(from_launch(["a", "b"], RuntimeError("no placement group")))  # it never started
    assert [(row.trial_id, row.outcome) for row in rows] == [("a", "lost"), ("b", "lost")]
    assert "no placement group" in rows[0].reason


@pytest.mark.parametrize(
    ("outcome", "reason", "killed", "becomes", "printed"),
    [
        ("lost", DIED, True, "oom", "last words"),
        ("lost", DIED, False, "lost", "last words"),
        ("lost", f"{DIED} (exit code 9)", True, "lost", "last words"),
        ("lost", f"{DIED} (signal 11)", True, "lost", "last words"),
        ("lost", f"{DIED} (signal 9)", True, "oom", "last words"),
        ("error", "RuntimeError on rank 1: DataLoader worker (pid 3) is killed by signal: Killed.", True, "oom", "..."),
        ("error", "ValueError on rank 1: bad", True, "error", "last words"),
        ("lost", DIED, True, "lost", "Fatal Python error: Segmentation fault"),
    ],
)
def test_a_sigkill_is_out_of_memory_where_the_kernel_counted_one(
    outcome: Outcome, reason: str, killed: bool, becomes: str, printed: str
) -> None:
    def ask(question: str, things: Sequence[tuple[str, Any]]) -> list[Any]:
        assert [(node, what.kill_counter) for node, what in things] == [("n0", "zero"), ("n1", "one")]
        answers = {"killed_for_memory": [False, killed], "printed": ["no", printed]}
        return list(answers[question])

    watch = Watchdog(ask, 8.0)
    for rank, name in enumerate(("zero", "one")):
        traces = ProcessOutput(kill_counter=name)
        watch.add(Registration(rank, f"n{rank}", "", "", False, pid=5 + rank, created_at=0.0, traces=traces))
    row = explained(TrialResult("t", outcome, reason, error_rank=1, detail="trace"), watch)
    assert row.outcome == becomes and reason in row.reason
    assert row.detail == f"trace\n\nlast output of rank 1:\n{printed}"


V1 = "memory/{path}memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n"
V2 = "{path}memory.events", "low 0\nhigh 0\nmax 7\noom 2\noom_kill {count}\noom_group_kill 0\n"


def mount(tmp_path: Path, entries: str, file: str, text: str) -> tuple[Path, Path]:
    """A /proc and a /sys/fs/cgroup with one counter."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(entries)
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 5\noom_kill 4\n")
    counter = tmp_path / "cgroup" / file
    counter.parent.mkdir(parents=True)
    counter.write_text(text)
    return tmp_path / "proc", tmp_path / "cgroup"


@pytest.mark.parametrize(
    ("entries", "kind", "path"),
    [
        ("9:pids:/\n4:memory:/box/one\n0::/\n", V1, "box/one/"),
        ("4:cpu,memory:/docker/abc\n", V1, ""),  # in a container the mount begins at its own cgroup
        ("0::/user.slice/me\n", V2, "user.slice/me/"),
        ("0::/\n", V2, ""),
    ],
)
def test_the_count_is_that_of_the_process_own_cgroup_or_none(
    tmp_path: Path, entries: str, kind: tuple[str, str], path: str
) -> None:
    file, text = (part.replace("{path}", path) for part in kind)
    proc, cgroups = mount(tmp_path, entries, file, text.format(count=2))
    found = find_kill_counter(proc, cgroups)
    assert found == cgroups / file
    traces = ProcessOutput(kill_counter=str(found), killed_before=2)
    assert not killed_for_memory(traces)
    found.write_text(text.format(count=3))
    assert killed_for_memory(traces)
    found.unlink()  # the root cgroup of version 2 has no such file, and the whole machine's does not serve
    assert find_kill_counter(proc, cgroups) is None and find_kill_counter(tmp_path / "nowhere", cgroups) is None
    assert not killed_for_memory(ProcessOutput())


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc on this system")
def test_a_process_finds_its_own_files_and_counter(tmp_path: Path) -> None:
    script = (
        "import json, sys; from harness.launch.postmortem import *; from dataclasses import asdict\n"
        "print('x' * 30_000 + 'end'); Path(sys.argv[1]).write_text(json.dumps(asdict(output_of_this_process())))"
    )
    out, result = tmp_path / "out", tmp_path / "result"
    with out.open("w") as output:
        subprocess.run([sys.executable, "-c", script, result], stdout=output, stderr=output, check=True)
    fields = json.loads(result.read_text())
    traces = ProcessOutput(**{**fields, "printed": tuple(fields["printed"])})
    assert traces.printed == (str(out),)
    text = what_it_printed(traces)
    assert len(text) < PRINTED_BYTES and text.endswith("xend")
    assert Path(traces.kill_counter).exists() and not killed_for_memory(traces)
    assert what_it_printed(replace(traces, printed=(str(tmp_path / "gone"),))) == ""
    assert output_of_this_process().kill_counter == traces.kill_counter


def test_a_failure_between_two_trials_is_the_next_ones() -> None:
    row = TrialResult("a", "error", "a CUDA error as memory was freed")
    assert [each.trial_id for each in blamed_on(["a", "b"], row, [])] == ["a"]
    assert [each.trial_id for each in blamed_on(["b", "c"], row, ["a"])] == ["b"]
    assert blamed_on([], row, ["a"]) == []
