"""What is sent while a run measures, when, and what is said of the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.errors import StoreError
from harness.launch.protocol import GroupStarted, Message, TrialStarted
from harness.plan.planner import Plan, make_plan
from harness.plan.trial import TrialResult, WorkerGroup
from harness.record.folder import RunFolder
from harness.record.mirror import read_claims, recorded_lines
from harness.record.writer import ClaimedError, Writer
from harness.run import mirroring
from harness.run.events import Event, GroupStarting, Note, Unsent
from harness.run.execution import Execution
from harness.run.mirroring import Sending, mirrored
from harness.run.request import Request
from tests.conftest import Make, laptop
from tests.stores import Failing, Watched, lines_in, watched

RESUME = "harness run e.yaml --resume file:///store/test/run"


class Measuring:
    """A launcher whose trials take a moment; ``measuring`` is true inside."""

    def __init__(self, at_trial: Callable[[int], None] = lambda number: None) -> None:
        self.measuring = False
        self.at_trial, self.count = at_trial, 0

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        time.sleep(0.01)
        yield GroupStarted((), ())
        for trial in group.trials:
            yield TrialStarted(trial.id)
            self.measuring = True
            self.at_trial(self.count)
            time.sleep(0.01)
            self.count += 1
            self.measuring = False
            yield TrialResult(trial.id, "ok", facts={}, steps={"rank": [0], "window": [1], "step": [0], "loss": [1.0]})


class Sent:
    """A run with a mirror, and what it said."""

    def __init__(self, place: Path, plan: Plan, before: Callable[[str], None] = lambda name: None) -> None:
        self.plan, self.events = plan, list[Event]()
        self.folder = RunFolder.create(place / "out", plan.experiment, plan, "name: test\n")
        self.store: Watched = watched(place / "store", before)
        self.run = f"{self.folder.path.parent.name}/{self.folder.path.name}"
        self.writer = Writer(self.store, self.run, self.folder.path)

    @contextmanager
    def sending(self) -> Iterator[Sending]:
        self.writer.claim()
        sending = Sending(self.writer, self.store.address, self.events.append)
        yield sending
        sending.finish(RESUME)

    def execute(self, launcher: Measuring) -> Sending:
        with self.sending() as sending:
            Execution(self.plan, self.folder, launcher, sending).run()
        return sending

    def check_complete(self) -> None:
        assert self.lines == recorded_lines(self.folder.path) and len(self.lines) == 12

    @property
    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note)]

    @property
    def unsent(self) -> list[int]:
        return [event.trials for event in self.events if isinstance(event, Unsent)]

    @property
    def lines(self) -> list[str]:
        return lines_in(self.store, self.run)


@pytest.fixture
def plan(make_experiment: Make) -> Plan:
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": [8, 16]}
    return make_plan(make_experiment(grid, throughput={"blocks": 2}), laptop())


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of a test, in the proportions of the real ones."""
    set_times(
        monkeypatch, GAP_S=10, REQUEST_S=10, PAUSE_S=0.01, LONGEST_PAUSE_S=0.02, FINAL_S=10, AGAIN_S=0.01, TICK_S=0.005
    )


def set_times(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    for name, value in seconds.items():
        monkeypatch.setattr(mirroring, name, value)


def test_every_trial_is_sent_before_the_next_one_and_nothing_inside_a_trial(plan: Plan, tmp_path: Path) -> None:
    inside: list[str] = []
    behind: list[int] = []

    def before(name: str) -> None:
        time.sleep(0.03 if "environment" in name else 0.002)  # which is sent while the next group starts
        if launcher.measuring:
            inside.append(name)

    launcher = Measuring(lambda number: behind.append(sent.writer.waiting))
    sent = Sent(tmp_path, plan, before)
    assert sent.execute(launcher).complete
    assert inside == [] and set(behind) == {0} and len(behind) == 12
    sent.check_complete()
    assert set(sent.unsent) == {0} and sent.notes == [f"Results in {sent.store.address}"]
    assert read_claims(sent.store, sent.run)[0].released


def test_a_store_that_fails_stops_no_trial_and_gets_all_later(plan: Plan, tmp_path: Path) -> None:
    failing = Failing()

    def at_trial(number: int) -> None:
        failing.on = 2 <= number < 7

    sent = Sent(tmp_path, plan, failing)
    assert sent.execute(Measuring(at_trial)).complete
    sent.check_complete()
    assert max(sent.unsent) >= 3 and sent.unsent[-1] == 0
    assert sent.notes == [
        f"the store does not answer. The run goes on; 1 trial in {sent.folder.path} alone",
        f"{sent.store.address} has every recorded trial again",
        f"Results in {sent.store.address}",
    ]


def test_what_is_left_at_the_end_is_said_with_the_command_that_sends_it(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_times(monkeypatch, FINAL_S=0.2)
    failing = Failing()
    sent = Sent(tmp_path, plan, failing)

    def at_trial(number: int) -> None:
        failing.on = number >= 9

    assert not sent.execute(Measuring(at_trial)).complete
    assert sent.unsent[-1] == 3 and len(sent.lines) == 9
    assert sent.notes[-2:] == [
        f"Sending 3 trials and the report to {sent.store.address}",
        f"the store does not answer. NOT in {sent.store.address}: 3 trials and the report. They are in "
        f"{sent.folder.path}; send them with:\n{RESUME}",
    ]


def test_a_request_that_does_not_end_delays_one_gap_and_no_more(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver waits once for it, and starts no other request beside it."""
    set_times(monkeypatch, GAP_S=5, REQUEST_S=15)
    go_on, stuck, gaps, in_vain = threading.Event(), list[str](), list[float](), list[float]()
    ended = Sending._wait

    def wait(sending: Sending, most_s: float) -> bool:
        """Find the request that is stuck still there, as after ``most_s``."""
        while sending._thread.is_alive() and not stuck:
            time.sleep(0.001)
        if not stuck or go_on.is_set():
            return ended(sending, most_s)
        in_vain.append(most_s)
        return False

    def before(name: str) -> None:
        if "000002" in name and not go_on.is_set():
            stuck.append(name)
            go_on.wait(60)

    monkeypatch.setattr(Sending, "_wait", wait)
    sent = Sent(tmp_path, plan, before)

    def at_trial(number: int) -> None:
        gaps.append(sent.writer.waiting)
        if number == 10:
            go_on.set()

    assert sent.execute(Measuring(at_trial)).complete
    assert len(stuck) == 1 and gaps[:3] == [0, 0, 0] and gaps[3:11] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert in_vain == [5, 15]
    assert sent.notes[0].startswith(f"{sent.store.address}: a request takes over 15 s. The run goes on; 1 trial in ")
    sent.check_complete()


def test_who_is_superseded_sends_no_more_and_measures_on(plan: Plan, tmp_path: Path) -> None:
    sent = Sent(tmp_path, plan)

    def at_trial(number: int) -> None:
        if number == 4:
            other = Writer(sent.store, sent.run, sent.folder.path)
            other._alive = lambda claims: iter(())  # type: ignore[method-assign]
            other.claim()

    assert not sent.execute(Measuring(at_trial)).complete
    assert len(recorded_lines(sent.folder.path)) == 12 and len(sent.lines) == 4
    assert sent.notes[0].startswith(
        f"{sent.store.address}: {sent.run}: was resumed by another command. The run goes on"
    )
    assert "Not sent: 8 trials and the report; they are in" in sent.notes[-1] and RESUME not in sent.notes[-1]


def test_an_interruption_ends_the_wait(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch, GAP_S=60.0, REQUEST_S=60.0)
    go_on = threading.Event()

    def before(name: str) -> None:
        if "000001" in name:
            go_on.wait(20)

    sent = Sent(tmp_path, plan, before)
    monkeypatch.setattr(mirroring, "interrupted", lambda: True)
    with sent.sending() as sending:
        Execution(sent.plan, sent.folder, Measuring(), sending).run()
        go_on.set()
    assert len(recorded_lines(sent.folder.path)) == 12 and sending.complete
    assert not any("takes over" in note for note in sent.notes)


class Clock:
    """Time that passes while the driver sleeps. ``at``: what happens once it has slept so long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: tuple[float, Callable[[], None]]) -> None:
        self.now, self.slept, self._at = 1000.0, list[float](), at
        monkeypatch.setattr("harness.run.mirroring.time.sleep", self.sleep)
        monkeypatch.setattr("harness.run.mirroring.time.monotonic", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        if self.now - seconds < 1000.0 + self._at[0] <= self.now:
            self._at[1]()


@pytest.fixture
def holder(plan: Plan, tmp_path: Path) -> Writer:
    """Another command, which writes the run."""
    (tmp_path / "run").mkdir()
    holder = Writer(watched(tmp_path / "store"), "test/run", tmp_path / "run")
    holder.claim()
    return holder


def test_a_claim_is_waited_for_until_it_is_released_even_if_the_store_fails_once(
    holder: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    clock = Clock(monkeypatch, (12.0, holder.release))
    later = Writer(holder.store, holder.run, holder.folder)
    answer, looks = later.stands, list[float]()

    def stands(refused: ClaimedError) -> bool:
        looks.append(clock.now)
        if len(looks) == 2:
            raise StoreError("the store does not answer")
        return answer(refused)

    monkeypatch.setattr(later, "stands", stands)
    mirroring._claim(later, events.append)
    assert sum(clock.slept) == 15.0 and max(clock.slept) == mirroring.LOOK_S
    (note,) = (event.text for event in events if isinstance(event, Note))
    assert note.endswith("If it was killed, its claim lapses in 300 s. Waiting for that") and "remove" not in note
    assert [claim.released for claim in read_claims(holder.store, holder.run)].count(False) == 1


def test_a_killed_command_s_claim_is_waited_for_until_it_lapses_but_not_a_renewed_one(
    holder: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, (12.0, lambda: holder._put_claim(released=False)))
    later = Writer(holder.store, holder.run, holder.folder)
    with pytest.raises(ClaimedError, match="another command writes it"):
        mirroring._claim(later, [].append)
    assert sum(clock.slept) == 15.0
    assert [claim.writer for claim in read_claims(holder.store, holder.run)] == [holder.name]
    clock = Clock(monkeypatch, (300.0, lambda: monkeypatch.setattr("harness.record.writer.LEASE_S", 0.0)))
    mirroring._claim(later, [].append)
    assert 300.0 <= sum(clock.slept) <= 301.0
    assert {claim.writer for claim in read_claims(holder.store, holder.run)} == {holder.name, later.name}


def test_what_is_sent_amid_the_end_is_not_everything(plan: Plan, tmp_path: Path) -> None:
    """The run ends while the thread still sends what was asked for before: the report is sent after that."""
    amid = threading.Event()

    def before(name: str) -> None:
        if "environment" in name:
            amid.set()
            time.sleep(0.3)

    sent = Sent(tmp_path, plan, before)
    (sent.folder.path / "report.html").write_text("<html>")
    with sent.sending() as sending:
        sent.folder.set_invocation(0, {"started_at": 0.0})
        sending(GroupStarting(plan.groups[0]))
        assert amid.wait(10)
    assert sending.complete and f"{sent.run}/report.html" in sent.store.names


def test_a_store_that_answers_slowly_costs_one_gap(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a pause follows, as after a failure; what was sent of a trial is not sent again."""
    set_times(monkeypatch, GAP_S=0.02, PAUSE_S=600.0, LONGEST_PAUSE_S=600.0)
    waiting: list[int] = []
    given_up, ended = threading.Event(), Sending._wait

    def wait(sending: Sending, most_s: float) -> bool:
        found = ended(sending, most_s)
        if most_s == mirroring.GAP_S:
            given_up.set()
        return found

    def before(name: str) -> None:
        assert "/raw/" not in name or given_up.wait(60)  # longer than GAP_S, whatever the machine does meanwhile

    monkeypatch.setattr(Sending, "_wait", wait)
    sent = Sent(tmp_path, plan, before)

    def at_trial(number: int) -> None:
        waiting.append(sum("/raw/" in name for name in sent.store.names))

    assert sent.execute(Measuring(at_trial)).complete
    assert waiting == [0, *[1] * 11]
    assert [*dict.fromkeys(sent.unsent)] == [*range(13)]  # said in the pause too
    assert sum("/raw/" in name for name in sent.store.names) == 12
    sent.check_complete()


def test_a_further_problem_is_said_too_but_not_once_for_every_object(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_times(monkeypatch, PAUSE_S=0, LONGEST_PAUSE_S=0, FINAL_S=0.1)  # every trial is tried to be sent
    failing = Failing()
    sent = Sent(tmp_path, plan, failing)

    def at_trial(number: int) -> None:
        failing.on = number >= 2
        failing.says = f"no access: 'key {number}'" if number >= 6 else f"no answer for 'key {number}'"

    sent.execute(Measuring(at_trial))
    told = [note.partition(";")[0] for note in sent.notes if "The run goes on" in note]
    assert told == ["no answer for 'key 2'. The run goes on", "no access: 'key 6'. The run goes on"]


def test_a_local_file_that_cannot_be_read_is_said_and_without_a_store_nothing(plan: Plan, tmp_path: Path) -> None:
    sent = Sent(tmp_path, plan)

    def unreadable(path: Path) -> bytes:
        raise PermissionError(13, "denied", str(path))

    with pytest.MonkeyPatch.context() as patch, sent.sending() as sending:
        Execution(sent.plan, sent.folder, Measuring(), sending).run()
        patch.setattr(Path, "read_bytes", unreadable)
        patch.setattr(mirroring, "FINAL_S", 0.2)
        sending.finish(RESUME)
        assert not sending.complete
    assert f"{sent.folder.path}: cannot be sent: PermissionError: [Errno 13] denied" in sent.notes[0]
    events: list[Event] = []
    with mirrored(Request(tmp_path / "e.yaml"), sent.folder, events.append) as nothing:
        assert nothing is None and not events
