"""The run folder refuses to be written, or is another's: the whole command over a launcher that measures nothing."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import harness
from harness.errors import ClusterLostError
from harness.run.request import AUTO, Request
from harness.system.process import INTERRUPTED, UNSETTLED
from tests.forks import start
from tests.scripted import TEXT, command

pytestmark = pytest.mark.slow

BLOCKS, TRIALS = 2, 12
AT = 5
"""How many trials are recorded before the disk refuses."""
SOON_S = 60.0
Act = Callable[[Request], None]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder outside pytest's own, which a small disk may be mounted in."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def request(place: Path, **more: Any) -> Request:
    file = place / "scripted.yaml"
    if not file.exists():
        file.write_text(TEXT % BLOCKS)
    return Request(file=file, **{"output": place / "out", **more})


def call(place: Path, act: Act | None = None, at: int = AT, **more: Any) -> tuple[int | None, str]:
    """Exit code and stderr of a call of the command; ``act`` is what happens before trial ``at``."""
    process = start(child, request(place, **more), place / "finished", place / "message", act, at)
    process.join(120)
    return process.exitcode, (place / "message").read_text()


def child(request: Request, finished_log: Path, message: Path, act: Act | None, at: int) -> None:
    def before(count: int) -> None:
        if act and count == at:
            act(request)

    if act is made_read_only and os.geteuid() == 0:
        _without_override()  # before there is another thread: each has rights of its own
    number = os.open(message, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(number, 1)
    os.dup2(number, 2)
    command(request, finished_log, before=before)


def folder_of(place: Path) -> Path:
    (path,) = place.glob("out/scripted/*")
    return path


def limited(request: Request) -> None:
    """No file may grow beyond a few lines: a limit of the system, as real to root as a full disk."""
    size = _recorded(request).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))


def made_read_only(request: Request) -> None:
    """The folder becomes read-only, and the run goes on without root's right to pass over that."""
    folder = _recorded(request).parent
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)


def filled(request: Request) -> None:
    """Somebody else fills the disk while the run is on."""
    _recorded(request)
    with suppress(OSError), (request.output / "others").open("wb", buffering=0) as file:
        while file.write(b"x" * 512):
            pass


def lost(request: Request) -> None:
    raise ClusterLostError("the mailbox is gone")


def interrupted(request: Request) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def terminated(request: Request) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def waiting(request: Request) -> None:
    time.sleep(600)


def _recorded(request: Request) -> Path:
    """Where the lines are, when those of the trials so far are on disk: the run goes on after a second without."""
    (lines,) = request.output.glob("*/*/trials.jsonl")
    ends = time.monotonic() + SOON_S
    while lines.read_text().count('"outcome":"ok"') < AT:
        assert time.monotonic() < ends
        time.sleep(0.01)
    return lines


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Rights(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


def _without_override() -> None:
    """Gives up CAP_DAC_OVERRIDE (bit 1), see capset(2): another user could not read the virtual environment."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, rights = _Header(0x20080522, 0), (_Rights * 2)()
    assert libc.capget(ctypes.byref(header), rights) == 0
    rights[0].effective &= ~(1 << 1)
    assert libc.capset(ctypes.byref(header), rights) == 0


def lost_nothing(place: Path, code: int | None, message: str, cause: str) -> Path:
    """Check that the command ended with one error and every trial so far on disk; return the run folder."""
    assert code == 1, message
    assert message.count("error: ") == 1 and f"cannot be written: {cause}" in message
    assert "Traceback" not in message
    folder = folder_of(place)
    results = harness.load(folder)
    assert [line["outcome"] for line in results.lines].count("ok") == AT and len(results.missing) == TRIALS - AT
    assert len(results.steps) > 0
    return folder


@pytest.mark.parametrize(
    ("act", "cause"),
    [(limited, "File too large"), (made_read_only, "Permission denied")],
    ids=["file too large", "read-only"],
)
def test_a_read_only_disk_is_one_error_and_loses_nothing(place: Path, act: Act, cause: str) -> None:
    code, message = call(place, act)
    folder = lost_nothing(place, code, message, cause)
    assert f"--resume {folder}\n" in message and f"python -m harness.report {folder}" in message
    done = {line["trial_id"] for line in harness.load(folder).lines if line["outcome"] == "ok"}
    assert not list(folder.rglob("*.partial"))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    code, message = call(place, resume=folder)
    assert code == 0, message
    assert {line["trial_id"] for line in harness.load(folder).lines} >= done
    assert harness.load(folder).missing.empty


@pytest.fixture
def small_disk(place: Path) -> Iterator[Path]:
    """A disk of 300 KB, where this user may make one."""
    disk = place / "out"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs a right that this user has not")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_is_one_error_and_loses_nothing(place: Path, small_disk: Path) -> None:
    code, message = call(place, filled, output=small_disk)
    assert small_disk in lost_nothing(place, code, message, "No space left on device").parents


def test_a_lost_cluster_leaves_a_report_and_a_resumable_run(tmp_path: Path) -> None:
    code, message = call(tmp_path, lost)
    folder = folder_of(tmp_path)
    assert code == 1 and "Traceback" not in message
    assert "the mailbox is gone. Every finished trial is recorded" in message and f"--resume {folder}\n" in message
    results = harness.load(folder)
    assert results.folder.report.exists() and len(results.missing) == TRIALS - AT
    assert call(tmp_path, resume=folder)[0] == 0


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    first = start(child, request(tmp_path), tmp_path / "finished", tmp_path / "first", waiting, 1)
    while not (tmp_path / "finished").exists() or not (tmp_path / "finished").read_text():
        first.join(0.02)
    folder = folder_of(tmp_path)
    code, message = call(tmp_path, resume=folder)
    assert code == 2
    assert f"another run is writing into this folder (pid {first.pid} on " in message
    first.kill()
    first.join()
    code, message = call(tmp_path, interrupted, 2, resume=folder)
    assert code == 130, message  # it went on
    assert len({line["invocation"] for line in harness.load(folder).lines}) == 2


@pytest.mark.parametrize(("at", "code"), [(0, UNSETTLED), (1, INTERRUPTED)])
def test_an_invocation_that_settled_no_trial_says_so_and_has_its_own_exit_code(
    tmp_path: Path, at: int, code: int
) -> None:
    """Before a trial is measured; after one; and, in a second invocation, before another one."""
    for resume, trials, expected in ((None, 0, code), (AUTO, at, UNSETTLED)):
        found, message = call(tmp_path, terminated, 0 if resume else at, resume=resume)
        assert found == expected, message
        left = f"settled no trial: {TRIALS - trials} trials to measure at its start and at its end"
        assert (left in message) == (expected == UNSETTLED), message
    assert call(tmp_path, resume=AUTO)[0] == 0


@pytest.mark.parametrize(("checkpoint", "code"), [(False, UNSETTLED), (True, INTERRUPTED)])
def test_epochs_of_a_training_with_checkpoints_are_progress(tmp_path: Path, checkpoint: bool, code: int) -> None:
    if checkpoint:
        training = f"convergence: {{epochs: 1, seeds: [0]}}\ncheckpoint: {{folder: {tmp_path / 'kept'}}}\n"
        (tmp_path / "scripted.yaml").write_text(f"{TEXT % BLOCKS}\n{training}")
    assert call(tmp_path, terminated, 0)[0] == code
