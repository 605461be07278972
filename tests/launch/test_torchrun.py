"""The control: worker groups under torchrun, without Ray."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from harness.launch import torchrun
from harness.launch.failures import from_exit
from harness.launch.mailbox import SocketMailbox
from harness.launch.postmortem import ProcessOutput
from harness.launch.protocol import ByLauncher, GroupStarted, Message, TrialStarted
from harness.launch.ray import cluster
from harness.launch.startup import Registration, ResourcesRequested, StartupTimer
from harness.launch.supervision import Ending, GroupEnd, Watchdog
from harness.launch.torchrun import Processes, TorchrunLauncher, _failed_trials, ask_here, command
from harness.launch.worker import devices_of
from harness.plan.cell import Placement
from harness.plan.comparison import base_cell
from harness.plan.planner import Plan, make_plan
from harness.plan.trial import TrialResult, WorkerGroup
from harness.run.execution import start_ray
from tests.conftest import Make, gpu_cluster, laptop
from tests.forked_launch import use_forks
from tests.listening import outside, started_since

TESTS = Path(__file__).parents[1]
QUICK = {"blocks": 1, "warmup_steps": 2, "windows": 2, "window_steps": 4, "window_seconds": 0.0}
GROUP = WorkerGroup("b0-g0", 0, Placement(1, 2, 1), "cpu", False, (), "torchrun")
GRID = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
DIED = """
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 41)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_15:00:00
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 42)
"""


# --- the plan


def test_a_list_of_launchers_is_an_axis_and_has_groups_of_its_own(make_experiment: Make) -> None:
    plan = make_plan(make_experiment(GRID, launcher=["ray", "torchrun"], throughput={"blocks": 2}), laptop())
    for name in ("ray", "torchrun"):
        cells = {t.cell for t in plan.trials if t.cell.launcher == name}
        assert {(c.strategy, c.devices) for c in cells} == {("single", 1), ("ddp", 1), ("ddp", 2)}
        assert {base_cell(c).launcher for c in cells} == {name}
    assert all({t.cell.launcher for t in group.trials} == {group.launcher} for group in plan.groups)
    assert [str(group) for group in plan.groups if group.launcher == "torchrun"] == [
        "2 workers with 1 device each by torchrun"
    ] * 2, "one a block: trials of one rank run on some of the ranks, as under Ray"


def test_checks_and_trainings_stay_with_ray(make_experiment: Make) -> None:
    sections: dict[str, Any] = {"convergence": {"epochs": 1, "seeds": 0}, "diagnostics": True}
    plan = make_plan(make_experiment(GRID, launcher=["ray", "torchrun"], **sections), laptop())
    others = [t for t in plan.trials if t.kind == "convergence" or t.purpose == "equivalence"]
    assert len(others) == 2 + 3
    assert {t.cell.launcher for t in others} == {"ray"}
    alone = make_plan(make_experiment(GRID, launcher="torchrun", **sections), laptop())
    assert any(trial.purpose == "equivalence" for trial in alone.trials)
    with start_ray(None, alone) as ready:
        assert ready is None, "no group is for it"
    trainings = {t.cell.launcher for t in alone.trials if t.kind == "convergence"}
    assert trainings == {"torchrun"}


def test_torchrun_is_for_one_machine_and_starts_no_trial_after_the_deadline(make_experiment: Make) -> None:
    experiment = make_experiment({"strategy": "ddp", "devices": 2, "per_device_batch_size": 8}, launcher="torchrun")
    group = make_plan(experiment, laptop()).groups[0]
    assert list(TorchrunLauncher(experiment, 1).launch(group, deadline=time.time())) == []
    here = laptop()
    assert not make_plan(experiment, here).skips
    for inventory in (replace(here, attached=True), gpu_cluster(nodes=2)):
        plan = make_plan(experiment, inventory)
        reason = "launcher torchrun runs on this machine only, not in a cluster"
        assert not plan.trials and {skip.text for skip in plan.skips.values()} == {reason}


def test_each_group_goes_to_the_launcher_that_its_cells_name() -> None:
    @dataclass
    class Named:
        name: str

        def launch(self, group: WorkerGroup, *, deadline: float | None) -> Any:
            yield TrialStarted(f"{self.name} until {deadline}")

    both = ByLauncher({name: Named(name) for name in ("ray", "torchrun")})
    assert list(both.launch(GROUP, deadline=3.0)) == [TrialStarted("torchrun until 3.0")]
    assert list(both.launch(replace(GROUP, launcher="ray"), deadline=None)) == [TrialStarted("ray until None")]


# --- its parts


@pytest.mark.parametrize(
    ("placement", "local_rank", "gpus", "devices", "backend"),
    [
        (Placement(1, 2, 1), 1, 0, ["cpu"], "gloo"),
        (Placement(1, 1, 2), 0, 0, ["cpu", "cpu"], "gloo"),
        (Placement(1, 2, 1), 1, 8, ["cuda:1"], "cpu:gloo,cuda:nccl"),
        (Placement(1, 1, 4), 0, 8, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"], "cpu:gloo,cuda:nccl"),
        (Placement(1, 4, 1), 3, 2, ["cuda:1"], "gloo"),  # ranks share devices
        (Placement(1, 1, 2), 0, 1, ["cuda:0", "cuda:0"], "gloo"),
    ],
)
def test_a_worker_takes_the_first_devices_and_the_backend_that_serves_them(
    placement: Placement, local_rank: int, gpus: int, devices: list[str], backend: str
) -> None:
    shared = gpus < placement.workers * placement.devices_per_worker
    group = replace(GROUP, placement=placement, device="cuda" if gpus else "cpu", oversubscribe=shared)
    visible = [torch.device("cuda", number) for number in range(gpus)]
    first = local_rank * placement.devices_per_worker
    assert devices_of(group, local_rank, visible, first) == tuple(map(torch.device, devices))
    assert group.backend == backend
    with pytest.raises(RuntimeError, match="no GPU is visible"):
        devices_of(replace(group, device="cuda"), 0, [])


@dataclass
class Ended:
    """Processes of a group that has ended. ``code``: the exit code of torchrun."""

    code: int | None
    left: int | None = None
    pids: Any = (1,)

    @property
    def watchdog(self) -> Any:
        return SimpleNamespace(connected=True, dead_ranks=())

    @property
    def agent(self) -> Any:
        return SimpleNamespace(poll=lambda: self.code)

    def output(self) -> str:
        return ""


def end(finished: str, current: str | None = None, failure: str = "") -> GroupEnd:
    failures = (TrialResult(failure, "error", "ValueError", error_rank=1),) if failure else ()
    return GroupEnd(Ending.BY_ITSELF, tuple(TrialResult(name, "ok") for name in finished), failures, current, None)


@pytest.mark.parametrize(
    ("ended", "processes", "rows"),
    [
        (end("ab"), Ended(0), []),
        (end("a"), Ended(0), []),  # a device failed: fresh processes run the rest
        (end("a", current="b"), Ended(0), [("b", "lost")]),  # a rank ended by itself
        (end("a", current="b"), Ended(None, left=1), [("b", "lost")]),  # and the others wait for it
        (end("a", failure="a"), Ended(1), [("b", "error")]),  # between two trials a rank names the group's first
        (end("a", current="b", failure="b"), Ended(1), [("b", "error")]),
        (end("ab", failure="a"), Ended(1), []),
        (end("a"), Ended(1), [("b", "lost")]),
    ],
)
def test_a_failure_of_a_group_is_a_row_of_the_trial_that_it_cost(
    ended: GroupEnd, processes: Any, rows: list[tuple[str, str]]
) -> None:
    group: Any = SimpleNamespace(trials=[SimpleNamespace(id="a"), SimpleNamespace(id="b")])
    assert [(row.trial_id, row.outcome) for row in _failed_trials(group, ended, processes)] == rows


def test_a_failure_counts_though_its_trial_was_reported_after_the_deadline(
    make_experiment: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a variant whose messages were held back, and refused then: its trial had begun before."""
    experiment = make_experiment({"strategy": "single", "per_device_batch_size": 8}, launcher=["torchrun"])
    (group, *_) = make_plan(experiment, laptop()).groups
    failed = TrialResult(group.trials[0].id, "error", "ValueError on rank 0: theirs", error_rank=0)
    mailbox = SimpleNamespace(refused=True)
    processes = SimpleNamespace(mailbox=mailbox, output=lambda: "", watchdog=None)
    monkeypatch.setattr(torchrun, "start_processes", lambda job, deadline, watchdog: contextlib.nullcontext(processes))
    for failures, rows in (((failed,), [failed.reason]), ((), [])):
        end = GroupEnd(Ending.AFTER_FAILURE, (), failures, None)
        processes.watchdog = SimpleNamespace(connected=True, dead_ranks=None, printed=lambda rank: "", failed_at=None)

        def supervise(*_: Any, end: GroupEnd = end) -> Iterator[Message]:
            yield from ()
            return end

        monkeypatch.setattr(torchrun, "supervise", supervise)
        found = TorchrunLauncher(experiment, 1).launch(group, deadline=None)
        assert [message.reason for message in found if isinstance(message, TrialResult)] == rows


def test_a_rank_that_is_gone_while_torchrun_goes_on_ends_the_group_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, lives = [0.0], {11: True, 12: True}
    monkeypatch.setattr(torchrun, "runs", lives.__getitem__)
    monkeypatch.setattr(torchrun.time, "monotonic", lambda: now[0])
    unused: Any = None
    group = Processes(Ended(None).agent, unused, unused, unused, {11: 0, 12: 1})
    assert not group.ended and group.left is None
    lives[12] = False
    assert not group.ended and group.left == 1, "torchrun may end the others itself"
    now[0], lives[11] = torchrun.LEFT_S + 1.0, False
    assert group.ended and group.left == 1


def test_torchrun_listens_on_loopback_only() -> None:
    line = command(Path("/dev/shm/harness-x/job"), 2)
    assert line[1:3] == ["-m", "torch.distributed.run"] and "--standalone" not in line  # it opens two stores to all
    assert {"--nnodes=1", "--nproc-per-node=2", "--local-addr=127.0.0.1", "--rdzv-conf=store_type=file"} < set(line)
    assert line[-3:] == ["-m", "harness.launch.torchrun", "/dev/shm/harness-x/job"]


@pytest.mark.parametrize(
    ("code", "output", "came_up", "outcome", "reason"),
    [
        (1, DIED.format(code=9), True, "lost", "the process of rank 1 terminated unexpectedly (exit code 9)"),
        (1, DIED.format(code=-9), True, "lost", "the process of rank 1 terminated unexpectedly (signal 9)"),
        (-9, "", True, "lost", "torchrun itself terminated (exit code -9)"),
        (1, "No module named x", False, "error", "the worker processes did not start: torchrun ended with exit code 1"),
        (None, "", False, "error", "the worker processes did not start: none registered with the driver in time"),
    ],
)
def test_an_end_without_a_report(code: int | None, output: str, came_up: bool, outcome: str, reason: str) -> None:
    row = from_exit("t", code, output, came_up=came_up)
    assert (row.trial_id, row.outcome, row.reason, row.detail) == ("t", outcome, reason, output)


# --- the mailbox


@pytest.fixture
def path() -> Iterator[Path]:
    """Unix sockets have short names."""
    with tempfile.TemporaryDirectory(prefix="harness-") as folder:
        yield Path(folder) / "driver"


def send_message(connection: Any, message: Any) -> bool:
    connection.send(message)
    answer: bool = connection.recv()
    return answer


def test_a_trial_starts_once_the_driver_has_handled_what_came_before(path: Path) -> None:
    """It waits for the end of a request to a store meanwhile, which would overlap with a timed window."""
    mailbox = SocketMailbox(path, deadline=None)
    assert mailbox.take(0.0) == []
    with Client(str(path), authkey=mailbox.key) as one, Client(str(path), authkey=mailbox.key) as other:
        assert send_message(one, GroupStarted((), ())) and send_message(other, GroupStarted((), ()))
        one.send(TrialStarted("a"))
        assert not one.poll(0.05)
        assert mailbox.take(1.0) == [GroupStarted((), ()), GroupStarted((), ())]
        assert not one.poll(0.05)  # they are being handled
        assert mailbox.take(5.0) == [TrialStarted("a")]
        assert one.recv() is True and not mailbox.refused
        assert send_message(other, GroupStarted((), ()))
        one.send(TrialStarted("b"))
        mailbox.close()
        assert one.recv() is False  # the driver leaves


def test_a_mailbox_refuses_connections_without_the_key_late_trials_and_once_closed_everything(path: Path) -> None:
    mailbox = SocketMailbox(path, deadline=time.time())
    with Client(str(path), authkey=mailbox.key) as one:
        assert send_message(one, GroupStarted((), ()))
        assert mailbox.take(0.0) == [GroupStarted((), ())]
        one.send(TrialStarted("a"))
        assert mailbox.take(0.0) == []
        assert one.recv() is False and mailbox.refused
        mailbox.close()
        assert not send_message(one, GroupStarted((), ()))
    with pytest.raises(OSError):
        Client(str(path), authkey=mailbox.key)
    with closing(SocketMailbox(path, deadline=None)) as mailbox:
        with pytest.raises(AuthenticationError):
            Client(str(path), authkey=b"guessed")
        with Client(str(path), authkey=mailbox.key) as one:
            assert send_message(one, TrialStarted("a"))


# --- the watch


def process(rank: int, **facts: Any) -> Registration:
    known = {"pid": 100 + rank, "created_at": 0.0, "traces": ProcessOutput(), **facts}
    return Registration(rank, "n0", f"count-{rank}", f"stack-{rank}", **known)


def test_a_group_without_a_step_hangs_once_the_limit_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now, counts = [0.0], [1, 1]
    asked: list[tuple[str, Any]] = []

    def ask(question: str, things: Sequence[tuple[str, Any]]) -> list[Any]:
        asked.append((question, list(things)))
        return counts[:] if question == "progress" else ["here", ""] if question == "stacks" else [None, None]

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch = Watchdog(ask, limit_s=8.0, start_s=120.0)
    for now[0], ending in ((119.0, None), (121.0, Ending.NEVER_STARTED), (100.0, None)):
        assert watch.poll() is ending and not asked and watch.failed_at is None  # no process has registered yet
    watch.add(process(1, connected=False))
    watch.add(process(0, connected=False))
    watch.record_progress()
    seen = []
    for now[0] in (102.0, 104.0, 106.0, 110.0, 112.0, 114.5):
        counts[1] += now[0] <= 104.0
        seen.append(watch.poll())
    assert seen == [None] * 5 + [Ending.HUNG] and watch.stacks == {0: "", 1: "here"}
    assert seen[-1].was_cut_short and watch.failed_at is not None
    watch.kill()
    assert asked[-1] == ("kill", [("n0", (101, ("count-1", "stack-1"))), ("n0", (100, ("count-0", "stack-0")))])
    assert ask_here("progress", [("torchrun", "/no/such/counter")]) == [None] and ask_here("kill", []) == []


def test_dead_ranks_are_recorded_while_the_reporting_rank_lives() -> None:
    for before, after, dead_ranks in (
        ([True, True, None], [True, True, True], [2]),  # a node that does not answer is gone with its ranks
        ([True, True, True], [True, False, True], [1]),
        ([True, True, True], [False, False, True], []),
        ([False, True, False], [True, True, True], None),
    ):
        answers = iter((before, after))
        ask = lambda question, things, answers=answers: next(answers)  # type: ignore[misc]  # noqa: E731
        watch = Watchdog(ask, limit_s=8.0, grace_s=0.0)
        for rank in range(3):
            watch.add(process(rank, connected=True))
        watch.record_result(TrialResult("t", "diverged", error_rank=0))
        assert watch.failed_at is None and watch.poll() is None
        watch.record_result(TrialResult("t", "error", error_rank=0))
        assert watch.dead_ranks == dead_ranks and watch.failed_at is not None
        time.sleep(0.001)
        assert watch.poll() == Ending.AFTER_FAILURE


def test_startup_time_is_recorded_in_parts() -> None:
    coming_up = StartupTimer(10.0, "torchrun")
    coming_up.record(process(0, created_at=12.0, connected=False), 15.0)
    assert coming_up.parts(20.0) == {}
    coming_up.record(process(1, created_at=11.0, connected=False), 16.0)
    coming_up.record(process(0, connected=True), 16.5)
    coming_up.record(process(1, connected=True), 17.0)
    assert coming_up.parts(18.0) == {"torchrun": 1.0, "worker start": 5.0, "process group": 0.5, "first word": 1.5}
    coming_up.record(ResourcesRequested(10.25), 10.5)
    reported = coming_up.parts(18.0)
    assert list(reported.items())[:3] == [("torchrun", 0.25), ("resources", 0.75), ("worker start", 5.0)]
    assert sum(reported.values()) == 8.0


# --- for real


@pytest.fixture
def group_of(make_experiment: Make) -> Callable[..., tuple[TorchrunLauncher, WorkerGroup]]:
    def make(behaviour: str | list[str], workers: int = 2) -> tuple[TorchrunLauncher, WorkerGroup]:
        experiment = make_experiment(
            {"strategy": "ddp", "devices": workers, "per_device_batch_size": 8, "workload.behaviour": behaviour},
            workload="ray_workload:ConfiguredFault",
            launcher="torchrun",
            throughput=QUICK,
            optimizer={"name": "SGD", "lr": 0.01},
            limits={"trial": 10.0},
        )
        plan: Plan = make_plan(experiment, cluster.local_inventory())
        asked = [t for group in plan.groups for t in group.trials if t.cell.strategy == "ddp"]
        if not asked:
            pytest.skip("needs two cores")
        group = replace(GROUP, placement=Placement(1, workers, 1), trials=tuple(asked))
        return TorchrunLauncher(experiment, plan.machine.threads_per_device, str(TESTS)), group

    return make


def pids_of(messages: Sequence[Message]) -> list[int]:
    return [row["pid"] for message in messages if isinstance(message, GroupStarted) for row in message.ranks]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_the_trials_of_a_group_share_its_processes_and_have_the_windows_of_every_rank(group_of: Any) -> None:
    launcher, group = group_of(["fine", "diverges"])
    messages = list(launcher.launch(group, deadline=None))
    results = {m.trial_id: m for m in messages if isinstance(m, TrialResult)}
    assert [results[trial.id].outcome for trial in group.trials] == [
        {"fine": "ok", "diverges": "diverged"}[trial.cell.workload_options["behaviour"]] for trial in group.trials
    ]
    for result in results.values():
        timed = [window for window in result.windows if window["window_kind"] == "timed"]
        assert {window["rank"] for window in timed} == {0, 1}
        assert [row["node_id"] for row in result.ranks] == ["torchrun", "torchrun"]
        assert [row["local_rank"] for row in result.ranks] == [0, 1]
    (started,) = (m for m in messages if isinstance(m, GroupStarted))
    assert len(set(pids_of(messages))) == 2 and min(started.parts.values()) >= 0.0
    variables = started.environments[0]["variables"]
    threads = str(launcher.threads_per_device)
    assert (variables["OMP_NUM_THREADS"], variables["CUDA_VISIBLE_DEVICES"]) == (threads, "")
    assert not [pid for pid in pids_of(messages) if alive(pid)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "workers", "outcome", "in_reason", "in_detail"),
    [
        ("raises", 2, "error", "ValueError on rank 1: a bad sample", "_misbehave"),
        ("dies", 1, "lost", "the process of rank 0 terminated unexpectedly (exit code 9)", "exitcode  : 9"),
        ("hangs", 2, "timeout", "no step was completed within the time limit", "_misbehave"),
    ],
)
def test_a_failure_is_a_row_and_ends_the_group(
    group_of: Any,
    behaviour: str,
    workers: int,
    outcome: str,
    in_reason: str,
    in_detail: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if behaviour != "dies":  # which torchrun itself sees, and prints
        use_forks(monkeypatch)
    launcher, group = group_of(behaviour, workers)
    again = replace(group.trials[0], block=1)
    messages = list(launcher.launch(replace(group, trials=(*group.trials, again)), deadline=None))
    (result,) = (m for m in messages if isinstance(m, TrialResult))
    assert (result.trial_id, result.outcome) == (group.trials[0].id, outcome)
    assert in_reason in result.reason and in_detail in result.detail
    assert 0.0 <= result.facts["freed_s"] < 30.0  # a collective would wait for minutes
    assert not [pid for pid in pids_of(messages) if alive(pid)]


@pytest.mark.slow
def test_closing_the_generator_ends_the_processes(group_of: Any) -> None:
    launcher, group = group_of("hangs")
    before = started_since()
    messages = launcher.launch(group, deadline=None)
    seen = [next(messages), next(messages)]
    assert isinstance(seen[1], TrialStarted) and all(map(alive, pids_of(seen)))
    children = started_since(before)
    assert set(pids_of(seen)) < {child.pid for child in children}
    reachable = outside(children)
    messages.close()
    assert not reachable
    assert not [child for child in children if alive(child.pid)]


@pytest.mark.slow
@pytest.mark.parametrize("come_up", [False, True])
def test_no_process_survives_the_driver(tmp_path: Path, come_up: bool) -> None:
    file = tmp_path / "hangs.yaml"
    file.write_text(
        "{name: hangs, workload: 'ray_workload:ConfiguredFault', launcher: torchrun, equivalence: false,"
        " preflight: false, grid: {strategy: ddp, devices: 1, per_device_batch_size: 8},"
        " workload_options: {behaviour: hangs}, throughput: {blocks: 1, twin: false, explain: false}}"
    )
    (tmp_path / "ray_workload.py").write_text((TESTS / "ray_workload.py").read_text())
    line = [sys.executable, "-m", "harness.run", str(file), "--output", str(tmp_path / "out")]
    driver = subprocess.Popen(line, cwd=TESTS.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    folder = folder_of_a_worker(driver.pid)
    while come_up and not (folder / "stack-0").exists():
        time.sleep(0.05)
    children = psutil.Process(driver.pid).children(recursive=True)
    assert "raylet" not in {child.name() for child in children}  # no group is for Ray
    pids = [child.pid for child in children]
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    until = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [pid for pid in pids if alive(pid)]
    shutil.rmtree(folder)  # what only its owner removes


def folder_of_a_worker(driver: int) -> Path:
    """Wait for a worker; return its folder, by a command line read once: the process may be a fork that ends."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        for child in psutil.Process(driver).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                line = child.cmdline()
                if child.ppid() != driver and "harness.launch.torchrun" in line:
                    return Path(line[-1]).parent
        time.sleep(0.1)
    raise AssertionError("no worker was started in time")
