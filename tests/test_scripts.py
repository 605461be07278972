"""Training scripts as they are, in processes of their own: measured on one rank and on two, and failing in each way."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.config.load import parse_experiment
from harness.launch.inline import InlineLauncher
from harness.launch.ray import cluster
from harness.launch.torchrun import TorchrunLauncher
from harness.measure.script import following
from harness.measure.script.child import COUNTER_VARIABLE, STACK_VARIABLE
from harness.measure.script.profiling import STEPS
from harness.plan.inventory import Inventory
from harness.plan.planner import make_plan
from harness.plan.trial import TrialResult
from harness.system.process import read_counter
from tests.cluster.machines import wait_for
from tests.conftest import laptop
from tests.forked_launch import ForkedScript, use_forks
from tests.processes import ROOT

pytestmark = pytest.mark.slow
QUICK = {"blocks": 1, "twin": False, "warmup_steps": 3, "warmup_rounds": 2, "windows": 2, "window_steps": 4}
QUICK |= {"window_seconds": 0.0, "explain": False}
STEP = """
import os, sys, time, torch
weight = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
def step():
    weight.sum().backward()
    optimizer.step()
    time.sleep(0.005)
"""


def results(
    folder: Path, text: str, inventory: Inventory | None = None, devices: int = 1, **sections: Any
) -> list[TrialResult]:
    """Run a script of this text on ranks of this machine; return the results of its trials."""
    (folder / "train.py").write_text(STEP + textwrap.dedent(text))
    grid = {"devices": devices, "per_device_batch_size": 8}
    content = {"name": "s", "script": str(folder / "train.py"), "grid": grid, "throughput": QUICK, **sections}
    experiment = parse_experiment(content, source="s.yaml")
    plan = make_plan(experiment, inventory or laptop(2))
    (group,) = (group for group in plan.groups if any(trial.cell.devices == devices for trial in group.trials))
    group = group.keeping(lambda trial: trial.cell.devices == devices)
    launcher = InlineLauncher(experiment) if devices == 1 else TorchrunLauncher(experiment, 1, None)
    messages = launcher.launch(group, deadline=None)
    return [message for message in messages if isinstance(message, TrialResult)]


@pytest.fixture
def two_ranks() -> dict[str, Any]:
    """How a script runs on two ranks of this machine; a skip if it has one core."""
    inventory = cluster.local_inventory()
    if inventory.nodes[0].cores < 2:
        pytest.skip("needs two cores")
    return {"inventory": inventory, "devices": 2, "launcher": "torchrun"}


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork scripts and torchrun's ranks; three tests undo it."""
    use_forks(monkeypatch)


def no_process_is_left() -> bool:
    ended = all(each.poll() is not None for each in ForkedScript.started)
    return ended and not any("child" in " ".join(each.cmdline()) for each in psutil.Process().children(recursive=True))


FAILING = {
    "raises": ("raise RuntimeError('no data at /nowhere')", "RuntimeError on rank 0: no data at /nowhere, before"),
    "out of memory": ("step(); raise MemoryError('out of memory')", "MemoryError on rank 0: out of memory"),
    "exit code": ("print('usage'); sys.exit(3)", "SystemExit on rank 0: the script ended with exit code 3, before"),
    "os._exit": ("step(); os._exit(7)", r"ScriptEnded on rank 0: the script's process ended \(exit code 7\)"),
    "killed": ("os.kill(os.getpid(), 9)", r"ScriptEnded on rank 0: the script's process ended \(signal 9\)"),
    "no step": ("print('evaluated')", "ScriptEnded on rank 0: the script ended by itself after 0 steps of an"),
    "other ranks": (
        "import torch.multiprocessing as mp; mp.spawn(print, nprocs=2)",
        "SpawnsRanks on rank 0: the script starts its ranks itself, 2 by torch.multiprocessing.spawn",
    ),
    "ranks not waited for": (
        "import torch.multiprocessing as mp; mp.start_processes(print, join=False)",
        "SpawnsRanks on rank 0: the script starts its ranks itself, by torch.multiprocessing.start_processes with join",
    ),
    "syntax": ("def", "SyntaxError on rank 0: "),
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_script_that_fails_is_a_row_with_its_own_error(tmp_path: Path, kind: str) -> None:
    text, reason = FAILING[kind]
    (result,) = results(tmp_path, text)
    assert result.outcome == ("oom" if kind == "out of memory" else "error")
    assert re.match(reason, result.reason), result.reason
    assert no_process_is_left() and [path.name for path in tmp_path.iterdir()] == ["train.py"]
    said = {"exit code": "usage", "no step": "evaluated", "raises": f'File "{tmp_path}/train.py", line'}
    assert said.get(kind, "") in result.detail


def test_a_script_is_ended_after_its_last_window_whatever_it_catches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the process is the real one
    monkeypatch.setattr(following, "END_S", 1.0)
    (counter := tmp_path.parent / "steps").write_bytes(bytes(8))
    monkeypatch.setenv(COUNTER_VARIABLE, str(counter))
    monkeypatch.setenv(STACK_VARIABLE, str(tmp_path.parent / "stack"))
    (result,) = results(
        tmp_path,
        """
        assert not [name for name in os.environ if name.startswith("HARNESS_")] and os.environ["RANK"] == "0"
        print("x" * 3_000_000)
        open("made-here.txt", "w").write("x")
        if __name__ == "__main__" and sys.argv[1:] == ["8", "a b"]:
            while True:
                try:
                    step()
                except BaseException:
                    pass
        """,
        arguments="{per_device_batch_size} 'a b'",
    )
    assert result.outcome == "ok", result.reason
    kinds = [window["window_kind"] for window in result.windows]
    assert kinds == ["warmup", "timed", "timed"] and {window["steps"] for window in result.windows[1:]} == {4}
    assert result.unit == "batches" and result.facts["optimizers"] == "SGD" and not result.facts["ended_early"]
    assert (read_counter(counter) or 0) >= 3 + 4 + 4, "the watchdog sees the steps of the script"
    assert 0.005 < result.windows[1]["duration_s"] / 4 < 0.5
    assert len(result.detail) <= 100_000
    assert no_process_is_left() and [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_what_a_script_writes_stays_in_the_trial_s_folder(tmp_path: Path) -> None:
    before = {"log.txt": "theirs", "best.pt": "theirs", "runs/old.json": "theirs"}
    for name, text in before.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (result,) = results(
        tmp_path,
        """
        from pathlib import Path
        here = Path(__file__).parent
        assert Path("log.txt").read_text() == (here / "log.txt").read_text() == "theirs"
        with open("log.txt", "a") as log:
            log.write("more")
        (here / "runs/old.json").write_text("x")
        (here / "runs/new.json").write_text("x")
        (Path(__file__).resolve().parent / "found.txt").write_text("x")
        torch.save({"x": weight}, "best.pt")
        assert Path("log.txt").read_text() == "theirsmore" and torch.load("best.pt")
        while True: step()
        """,
    )
    assert result.outcome == "ok", result.detail
    left = {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*") if path.is_file()}
    assert {name: path.read_text() for name, path in left.items() if name != "train.py"} == before


def test_a_script_that_ends_early_counts_with_the_steps_that_it_took(tmp_path: Path) -> None:
    (result,) = results(tmp_path, "for _ in range(6): step()")
    assert result.outcome == "ok" and result.facts["ended_early"] and not result.facts["steady"]
    assert [window["steps"] for window in result.windows] == [2, 3]


def test_a_script_that_is_examined_for_trainings_alone_may_end_early(tmp_path: Path) -> None:
    alone = {"throughput": None, "convergence": {"seeds": 0}, "preflight": True}
    found = results(tmp_path, "for _ in range(6): step()", **alone)
    examined = next(result for result in found if result.trial_id.endswith("d"))
    assert examined.outcome == "ok" and not [f for f in examined.facts["findings"] if "ended by itself" in f["seen"]]


LOADED = """
from harness import probe
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.zeros(40, 2))
for epoch in range(1000):
    for (x,) in DataLoader(data, 16, num_workers={workers}, drop_last=True):
        step()
        time.sleep(0.05)  # the windows are named as many steps ahead as would fit into 0.8 s without evaluations
    with torch.no_grad():
        for (x,) in DataLoader(data, 8):
            time.sleep(0.1)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_the_loader_s_with_gradients_and_evaluation_can_be_left_out(tmp_path: Path, workers: int) -> None:
    text = LOADED.format(workers=workers)
    (whole,) = results(tmp_path, text)
    found = [whole] if workers else [whole, *results(tmp_path, text, step={"pause": "validation"})]
    for result in found:
        assert result.outcome == "ok", result.reason
        assert [window["weight"] for window in result.windows if window["window_kind"] == "timed"] == [64.0, 64.0]
        assert result.unit == "samples" and (result.facts["evaluations"] > 0) == (result is whole)
    seen = [" ".join(finding["seen"] for finding in result.facts["findings"]) for result in found]
    assert ["evaluations in" in each for each in seen] == [True, False][: len(found)]
    # 4 steps are 2 epochs: 10 batches of 100 ms without gradients; a pause of the machine is in one window at most
    whole_s, *paused_s = (min(window["duration_s"] for window in result.windows[1:]) for result in found)
    assert whole_s > 1.0 and all(seconds < 1.0 for seconds in paused_s)


def test_an_iteration_without_a_backward_pass_is_an_evaluation_also_with_gradients_enabled(tmp_path: Path) -> None:
    text = """
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.zeros(32, 2))
        for epoch in range(1000):
            for (x,) in DataLoader(data, 16):
                weight.sum().backward()
            for (x,) in DataLoader(data, 8):  # as in an evaluation that computes without gradients
                time.sleep(0.01)
            optimizer.step()
    """
    (result,) = results(tmp_path, text)
    assert result.outcome == "ok", result.reason
    assert [window["weight"] for window in result.windows[1:]] == [4 * 32.0] * 2
    (seen,) = [finding["seen"] for finding in result.facts["findings"] if "evaluation" in finding["seen"]]
    assert seen.endswith(f"timed windows: {2 * 4}")


SPAWNS = """
import torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

def train(rank, world_size, port):
    assert os.environ["MASTER_PORT"] == str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    import socket
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # which the spawned ranks inherit
    world_size = int(sys.argv[1])
    mp.spawn(train, args=(world_size, port), nprocs=world_size)
"""


def test_what_a_script_spawns_as_its_ranks_is_called_in_those_that_are_there(
    tmp_path: Path, two_ranks: dict[str, Any]
) -> None:
    for sections in ({}, two_ranks):
        (result,) = results(tmp_path, SPAWNS, arguments="{devices}", **sections)
        assert result.outcome == "ok", result.reason
        assert result.facts["connected_ranks"] == sections.get("devices", 1)


def test_arguments_of_spawned_ranks_that_cannot_be_pickled_are_one_error(
    tmp_path: Path, two_ranks: dict[str, Any]
) -> None:
    text = "import torch.multiprocessing as mp; mp.spawn(print, (mp.get_context('spawn').SimpleQueue(),), nprocs=2)"
    found = results(tmp_path, text, **two_ranks)
    assert "SpawnsRanks on rank 0: the script starts its ranks itself, by torch.multiprocessing.spawn with arg" in (
        found[0].reason
    )


def test_a_script_with_relative_imports_runs_as_a_module_from_the_folder_of_its_package(tmp_path: Path) -> None:
    """And without torchrun's variables, if one rank is to be plain Python."""
    package = tmp_path / "mine" / "training"
    package.mkdir(parents=True)
    (tmp_path / "mine" / "__init__.py").touch()
    (tmp_path / "mine" / "sizes.py").write_text("BATCH = 8")
    (tmp_path / "config.txt").write_text("theirs")
    text = """
        from ..sizes import BATCH
        import mine.sizes
        assert "RANK" not in os.environ
        assert __name__ == "__main__" and __package__ == "mine.training" and BATCH == mine.sizes.BATCH
        assert open("config.txt").read() == "theirs" and sys.argv[1:] == ["0"]
        open("config.txt", "w").write("ours")
        while True: step()
    """
    (result,) = results(package, text, arguments="{local_rank}", one_rank="python")
    assert result.outcome == "ok", result.detail
    assert (tmp_path / "config.txt").read_text() == "theirs"


def test_the_probe_s_steps_and_samples_take_the_place_of_the_optimizer_s(tmp_path: Path) -> None:
    (result,) = results(
        tmp_path,
        """
        from harness import probe
        for batch in probe.steps(range(1000)):
            step(); step()
            probe.count(5)
            with probe.pause():
                time.sleep(0.2)
        """,
    )
    assert result.outcome == "ok", result.reason
    assert [window["weight"] for window in result.windows[1:]] == [20.0, 20.0]
    assert min(window["duration_s"] for window in result.windows[1:]) < 0.7  # a pause of the machine is in one


def test_two_ranks_end_at_one_step_and_agree_with_the_script_s_clock(
    tmp_path: Path, two_ranks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # under torchrun itself
    text = (ROOT / "experiments" / "my_script.py").read_text()
    step = "            optimizer.step()\n"
    # steps of 100 ms, beside which a pause of the machine is small
    clocked = text.replace(step, f"            sleep(0.1)\n{step}            print(clock())\n")
    clocked = clocked.replace("import argparse\n", "import argparse\nfrom time import perf_counter as clock, sleep\n")
    explained = {"arguments": "--batch-size {per_device_batch_size}", "throughput": {**QUICK, "explain": True}}
    (result,) = results(tmp_path, clocked, **explained, **two_ranks)
    assert result.outcome == "ok", result.reason
    assert result.facts["connected_ranks"] == 2 and not result.facts["findings"]
    assert len(result.ranks) == 2 and len({window["steps"] for window in result.windows if window["window"] == 1}) == 1
    printed = [float(line) for line in result.detail.split() if re.fullmatch(r"\d+\.\d+", line)]
    timed = [window for window in result.windows if window["window_kind"] == "timed" and window["rank"] == 0]
    steps = sum(window["steps"] for window in timed)
    # all profiled steps but the last, at which it ends, print; the last timed one does once the profile has begun
    last, second, before = printed[-STEPS - 1], printed[-STEPS - steps], printed[-STEPS - steps - 1]
    # a pause of the machine may be in the first step, which the script's clock has with what is before the window
    assert 0.5 * (last - second) <= sum(window["duration_s"] for window in timed) <= 1.5 * (last - before)
    exposed, exchange = (result.facts[name]["exposed communication"] for name in ("exposed_s", "exchange_s"))
    alone = [window["duration_s"] / window["steps"] for window in result.windows if window["window_kind"] == "alone"]
    assert 0 <= exposed <= exchange and exchange > 0 and len(alone) == 2 and min(alone) > 0


def test_a_script_that_ends_was_connected_and_what_it_started_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_ranks: dict[str, Any]
) -> None:
    monkeypatch.undo()  # a fork is of the process group of its server, which is not ended
    text = f"""
        import subprocess, torch.distributed as dist
        dist.init_process_group("gloo")
        subprocess.Popen(["sleep", "77.{os.getpid()}"])
        for _ in range(8): step()
        if dist.get_rank() == 0: time.sleep(1)
        dist.destroy_process_group()
    """
    (result,) = results(tmp_path, text, **two_ranks)
    assert result.outcome == "ok" and result.facts["connected_ranks"] == 2, result.reason
    assert result.facts["ended_early"]
    started = ["sleep", f"77.{os.getpid()}"]  # a process that is killed is there until it is scheduled
    wait_for(lambda: started not in [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])], 10)


def test_ranks_that_take_different_steps_are_one_error(tmp_path: Path, two_ranks: dict[str, Any]) -> None:
    text = "for _ in range(20 if os.environ['RANK'] == '0' else 40): step()"
    found = results(tmp_path, text, **two_ranks)
    assert {result.outcome for result in found} == {"error"}
    assert re.search("the ranks took different numbers of steps until one ended: 20, 40", found[0].reason)
