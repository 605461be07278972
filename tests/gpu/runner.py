"""Claims in processes of their own: those that may share the machine side by side, then the others one by one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.gpu import one
from tests.gpu.claims import Claim
from tests.gpu.forked import forked
from tests.gpu.verdict import Verdict

ROOT = Path(__file__).parents[2]
OUTPUT_CHARACTERS = 20_000
LEAST_S = 5.0
"""Seconds that must be left for a claim to be started."""


@dataclass(frozen=True)
class Done:
    """A claim's verdict, the seconds of its process, and the end of what the process printed."""

    claim: Claim
    verdict: Verdict
    seconds: float
    output: str = ""


@dataclass(frozen=True)
class Machine:
    """``device``: cuda or cpu. ``gpus``: how many torch sees. ``beside``: how many claims may run side by side."""

    device: str
    gpus: int
    beside: int = 1

    def reason_not_to_run(self, claim: Claim) -> str | None:
        """Return why a claim cannot be answered here; None if it can."""
        if self.device == "cpu":
            return None if claim.cpu else f"needs {_gpus(claim.gpus)}"
        return None if claim.gpus <= self.gpus else f"needs {_gpus(claim.gpus)}"


def _gpus(count: int) -> str:
    return "a GPU" if count == 1 else f"{count} GPUs"


def run_all(claims: Sequence[Claim], machine: Machine, until: float) -> Iterator[Done]:
    """Yield each claim as it ends. ``until``: the time (time.monotonic) at which the last process is killed."""
    possible: list[Claim] = []
    for claim in claims:
        if reason := machine.reason_not_to_run(claim):
            yield Done(claim, Verdict("not run", reason), 0.0)
        else:
            possible.append(claim)
    with ThreadPoolExecutor(machine.beside) as pool:
        longest = sorted((claim for claim in possible if not claim.alone), key=lambda claim: -claim.takes_s)  # first
        beside = [pool.submit(run_one, claim, machine.device, until) for claim in longest]
        yield from (future.result() for future in as_completed(beside))
    yield from (run_one(claim, machine.device, until) for claim in possible if claim.alone)


def run_one(claim: Claim, device: str, until: float) -> Done:
    """Return a claim's verdict from a process of its own; a crash or a hang is a FAIL."""
    began = time.monotonic()
    if until - began < LEAST_S:
        return Done(claim, Verdict("not run", "the time is up (--minutes)"), 0.0)
    limit_s = min(claim.limit_s, until - began)
    with tempfile.TemporaryDirectory() as folder:
        file, output = Path(folder) / "verdict", Path(folder) / "output"
        process = start(claim, device, file, output)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill(process)
        printed = output.read_bytes().decode(errors="replace")[-OUTPUT_CHARACTERS:] if output.exists() else ""
        verdict = _verdict(file, code, limit_s)
    return Done(claim, verdict, time.monotonic() - began, printed)


class Started(Protocol):
    """The process of a claim."""

    pid: int

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raise TimeoutExpired."""


def start(claim: Claim, device: str, file: Path, output: Path) -> Started:
    """Start a claim's process: a new one for CUDA, which no fork can use, else a fork that has torch already."""
    if device == "cpu":
        return forked(output, one.main, claim, device, file, leads=True)
    with output.open("wb") as stream:
        return subprocess.Popen(
            command_of(claim, device, file),
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,  # so that what it starts is killed with it
        )


def command_of(claim: Claim, device: str, file: Path) -> list[str]:
    """Return the command of a claim's process."""
    return [sys.executable, "-m", "tests.gpu.one", claim.name, device, str(file)]


def _verdict(file: Path, code: int | None, limit_s: float) -> Verdict:
    if code is None:
        return Verdict("FAIL", f"killed after {limit_s:.0f} s")
    if file.exists():
        return Verdict(**json.loads(file.read_text()))
    return Verdict("FAIL", f"killed by signal {-code}" if code < 0 else f"left with exit code {code}")


def _kill(process: Started) -> None:
    """Kill the process and what is left of its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def failed(done: Iterable[Done]) -> list[Done]:
    """Return the claims that do not hold."""
    return [one for one in done if one.verdict.status == "FAIL"]
