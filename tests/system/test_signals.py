"""Ctrl-C and SIGTERM, as one process receives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from harness.cli.arguments import exit_code_of
from harness.errors import HarnessError, WriteError
from harness.system.process import REPEAT_S, deferred_interrupts, handle_signals
from tests.processes import ROOT, ended

SIGNALS = [signal.SIGINT, signal.SIGTERM]
STUBBORN = """
import time
from harness.system.process import handle_signals
with handle_signals():
    try:
        print("up", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("ending", flush=True)
        time.sleep(60)
"""

STUCK = """
import hashlib
from harness.system.process import handle_signals
with handle_signals():
    print("up", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2_000_000_000)  # the main thread is in C for many minutes
"""
ORDERLY = """
import time
from harness.system.process import handle_signals
try:
    with handle_signals():
        print("up", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    print("ended in order", flush=True)
"""


@contextmanager
def started(*words: str, first: str = "up", **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A process of this Python that has printed its first line; killed in the end."""
    environment = {**os.environ, **variables}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, *words], stdout=pipe, stderr=pipe, env=environment, text=True) as process:
        try:
            assert process.stdout and process.stdout.readline() == f"{first}\n"
            yield process
        finally:
            process.kill()


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_raises_and_the_handlers_come_back(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(one) for one in SIGNALS]
    with pytest.raises(KeyboardInterrupt), handle_signals():
        send(number)
    assert [signal.getsignal(one) for one in SIGNALS] == before
    assert "press Ctrl-C again to quit immediately" in capfd.readouterr().err


@pytest.mark.parametrize("number", SIGNALS)
def test_recording_is_finished_before_an_interruption(number: int) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), handle_signals():
        with deferred_interrupts(), deferred_interrupts():
            send(number)
            done.append("line")
        done.append("too far")
    assert done == ["line"]


def test_a_signal_that_a_wrapper_hands_on_is_the_same_one(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.system.process.time.monotonic", lambda: 1000.0)  # however late the second comes
    ended, threads = [], threading.active_count()
    with handle_signals():
        try:
            send(signal.SIGINT)
        except KeyboardInterrupt:
            send(signal.SIGINT)  # ends nothing: so soon it is no second Ctrl-C
            send(signal.SIGTERM)
            ended.append("in order")
    assert ended == ["in order"] and threading.active_count() == threads  # none that would count a signal later
    assert capfd.readouterr().err.count("press Ctrl-C again to quit immediately") == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_ends_the_process_at_once(number: int) -> None:
    with started("-c", STUBBORN) as process:
        process.send_signal(number)
        assert process.stdout and process.stdout.readline() == "ending\n"
        time.sleep(REPEAT_S + 0.1)
        process.send_signal(number)
        assert process.wait(20) == 130  # it would sleep for a minute


@pytest.mark.parametrize(("error", "code"), [(HarnessError("x"), 2), (WriteError("x"), 1), (KeyboardInterrupt(), 130)])
def test_exit_codes_of_exceptions(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        raise error

    assert exit_code_of(work) == code
    assert "Traceback" not in capsys.readouterr().err


def test_an_interruption_while_the_command_is_imported_is_no_traceback(tmp_path: Path) -> None:
    """What it needs takes seconds to import: torch most of all, pydantic first."""
    (tmp_path / "pydantic.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(60)\n")
    command = ("-m", "harness.run", str(ROOT / "experiments" / "smoke.yaml"))
    with started(*command, first="importing", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}") as process:
        asleep = 0  # times in a row: an exception in a callback of Python's import locks would be ignored
        while asleep < 10:
            time.sleep(0.05)
            asleep = asleep + 1 if psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING else 0
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=50)
    assert process.returncode == 130 and "Traceback" not in error


@pytest.mark.slow
def test_a_second_signal_is_handled_while_the_main_thread_is_in_c() -> None:
    with started("-c", STUCK) as process:
        time.sleep(0.5)  # until it is there
        sent, until = 0, time.monotonic() + 30.0
        # two signals may come together to a process that was not scheduled: they are one then
        while process.poll() is None and time.monotonic() < until:
            process.send_signal(signal.SIGINT)
            sent += 1
            with suppress(subprocess.TimeoutExpired):
                process.wait(2 * REPEAT_S)
        assert process.poll() == 130 and sent > 1


def test_a_closed_stderr_does_not_change_an_interruption() -> None:
    with started("-c", ORDERLY) as process:
        assert process.stdout and process.stderr
        process.stderr.close()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "ended in order\n"


def test_the_exit_code_is_ours_wherever_the_interruption_came(tmp_path: Path) -> None:
    """Inside an exec() of a string, as of every dataclass that is being imported, ``python -m`` notes it."""
    (tmp_path / "interrupted.py").write_text(
        "import sys\n"
        "from harness.cli.arguments import exit_code_of\n"
        "sys.exit(exit_code_of(lambda: exec('raise KeyboardInterrupt') or 0))\n"
    )
    assert ended(sys.executable, "-m", "interrupted", cwd=tmp_path, code=130).returncode == 130
