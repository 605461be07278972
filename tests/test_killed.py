"""Kill -9 of the driver at random instants: nothing is lost, nothing is doubled, nothing is unreadable."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import harness
from harness.run.request import Request
from tests.forks import start
from tests.scripted import TEXT, command

pytestmark = pytest.mark.slow

KILLS, BLOCKS = 25, 8
Line = dict[str, Any]


class Killed:
    """One run, killed again and again until it is finished; looks at its folder after each kill."""

    def __init__(self, place: Path, chance: random.Random) -> None:
        self.chance, self.output, self.finished_log = chance, place / "out", place / "result"
        self.file = place / "scripted.yaml"
        self.file.write_text(TEXT % BLOCKS)
        self.kills = self.reports = self.vain = 0
        self.lines: list[Line] = []
        self.plan: bytes | None = None

    @property
    def folder(self) -> Path | None:
        """Where a run can go on; a folder without a plan is one in which nothing was started."""
        return next((path.parent for path in self.output.glob("*/*/plan.json")), None)

    def invocation(self, kill_after_s: float | None) -> int | None:
        """One call of the command, killed after so many seconds; its exit code."""
        request = Request(file=self.file, output=self.output, resume=self.folder)
        child = start(command, request, self.finished_log)
        child.join(kill_after_s)
        if child.is_alive():
            child.kill()
            child.join()
        return child.exitcode

    def look(self) -> None:
        """What holds after a kill at any instant."""
        self.vain += 1
        if self.folder is None:
            return
        results = harness.load(self.folder)
        assert results.lines[: len(self.lines)] == self.lines, "a recorded trial is gone or other than it was"
        self.vain = 0 if len(results.lines) > len(self.lines) else self.vain
        self.lines = results.lines
        result = self.finished_log.read_text().splitlines() if self.finished_log.exists() else []
        recorded = [f"{line['trial_id']} {line['attempt']}" for line in self.lines]
        assert set(result) <= set(recorded), "a trial that was reported as finished is not recorded"
        assert len(recorded) == len(set(recorded)), "one attempt has two lines"
        steps = results.steps.groupby(["trial_id", "attempt"]).size()
        assert len(steps) == sum(line["outcome"] == "ok" for line in self.lines)
        plan = (self.folder / "plan.json").read_bytes()
        assert self.plan in (None, plan), "the plan is another one"
        self.plan = plan
        assert isinstance(results.environment, dict) and isinstance(results.missing, pd.DataFrame)

    def tear(self) -> None:
        """What a crash of the machine may leave besides: a last line without its end, a file half written."""
        if self.folder and self.lines:
            file = self.folder / "trials.jsonl"
            whole, _, _ = file.read_bytes().rpartition(b"\n")  # a line takes the place of what the last crash left
            line = whole.rpartition(b"\n")[2]
            file.write_bytes(whole + b"\n" + line[: self.chance.randint(1, len(line))])
            (self.folder / "raw" / "half.parquet.partial").write_bytes(b"PAR1 half")


def check_the_end(killed: Killed) -> None:
    """The finished run: all that was planned, once, with the planned seeds, and a pair in every block."""
    assert killed.folder
    results = harness.load(killed.folder)
    assert results.missing.empty
    ok = Counter(line["trial_id"] for line in results.lines if line["outcome"] == "ok")
    planned = [trial for group in results.folder.plan()["groups"] for trial in group["trials"]]
    assert set(ok) == set(planned) and len(planned) == 6 * BLOCKS
    assert set(ok.values()) == {1}, "what was ok was measured again"
    by_invocation = Counter((line["trial_id"], line["invocation"]) for line in results.lines)
    assert set(by_invocation.values()) == {1}
    assert {line["seed"] for line in results.lines} == {results.experiment.seed}
    assert results.scaling["speedup"].tolist() == pytest.approx(results.scaling["devices"].tolist(), rel=1e-9)
    assert set(results.scaling["blocks"]) == {BLOCKS}, "a block has no pair"
    assert results.folder.report.exists()
    assert not list(killed.folder.rglob("*.partial"))


@dataclass
class Times:
    """When a call of the command that nobody kills begins to measure, has measured, and ends, in seconds."""

    first_s: float
    last_s: float
    end_s: float

    @classmethod
    def of_a_run(cls, place: Path) -> Times:
        killed = Killed(place, random.Random(0))
        killed.invocation(0.0)  # the server that forks is up from now on
        began, seen = time.monotonic(), []
        child = start(command, Request(file=killed.file, output=killed.output), killed.finished_log)
        while child.is_alive():
            if len(seen) < 2 and killed.finished_log.exists():
                result = len(killed.finished_log.read_text().splitlines())
                seen += [time.monotonic() - began] if result >= (1, 6 * BLOCKS)[len(seen)] else []
            child.join(0.002)
        assert child.exitcode == 0
        end_s = time.monotonic() - began
        return cls(*seen, *[end_s] * (2 - len(seen)), end_s)  # if this process was not scheduled meanwhile

    def draw(self, killed: Killed) -> float | None:
        """How long the next call may take: while it starts, while it measures, while it reports; in the end, all.

        The longer, the more calls before it have measured nothing: the machine may have become slower since.
        """
        slower = 1 + killed.vain / 10
        chance, done = killed.chance, {line["trial_id"] for line in killed.lines if line["outcome"] == "ok"}
        if killed.reports > 2:
            return None
        if len(done) == 6 * BLOCKS:
            killed.reports += 1
            return chance.uniform(0, self.end_s - self.last_s + self.first_s)
        if chance.random() < 0.2:
            return slower * chance.uniform(0, self.first_s)
        return slower * self.first_s + chance.expovariate(20 / max(0.1, self.last_s - self.first_s))


def test_forty_kills_lose_and_duplicate_nothing(tmp_path: Path) -> None:
    chance = random.Random(20261121)
    kills = runs = 0
    (tmp_path / "times").mkdir()
    times = Times.of_a_run(tmp_path / "times")
    while kills < KILLS:
        (place := tmp_path / str(runs)).mkdir()
        killed = Killed(place, chance)
        while (code := killed.invocation(times.draw(killed))) != 0:
            assert code == -9
            killed.look()
            killed.kills += 1
            if chance.random() < 0.3:
                killed.tear()
        killed.look()
        check_the_end(killed)
        kills, runs = kills + killed.kills, runs + 1


def test_blocks_are_added_to_a_finished_run(tmp_path: Path) -> None:
    killed = Killed(tmp_path, random.Random(0))
    assert killed.invocation(None) == 0
    killed.look()
    before, folder = killed.lines, killed.folder
    request = Request(file=killed.file, resume=folder, add_blocks=2)
    child = start(interrupted, request, killed.finished_log)
    child.join()
    assert child.exitcode == 130 and folder
    assert killed.invocation(None) == 0  # a plain --resume does the rest of what was added
    results = harness.load(folder)
    assert results.lines[: len(before)] == before
    added = results.lines[len(before) :]
    assert {line["block"] for line in added if line["outcome"] == "ok"} == {BLOCKS, BLOCKS + 1}
    assert set(results.scaling["blocks"]) == {BLOCKS + 2} and results.missing.empty
    assert f"{BLOCKS + 2} blocks, 2 of them added later" in folder.joinpath("report.html").read_text()


def interrupted(request: Request, finished_log: Path) -> None:
    """Ctrl-C at the fourth trial."""

    def before(count: int) -> None:
        if count == 3:
            os.kill(os.getpid(), signal.SIGINT)

    command(request, finished_log, before=before)
