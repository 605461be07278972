"""Objects in a store; a run folder in it and its copy elsewhere: what counts, what is refused."""

from __future__ import annotations

import json
import os
import re
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

import harness
from harness.errors import RunFolderError, StoreError
from harness.plan.planner import Plan, make_plan
from harness.plan.trial import TrialResult
from harness.record import store as store_module
from harness.record import writer as module
from harness.record.folder import RunFolder
from harness.record.mirror import (
    HEAD,
    copy_down,
    on_this_machine,
    read_claims,
    recorded_lines,
    runs_below,
)
from harness.record.store import Store, open_store
from harness.record.writer import LEASE_S, ClaimedError, SupersededError, Writer
from tests.conftest import Make, laptop
from tests.records import rank_row
from tests.stores import Failing, folder_store, lines_in, watched


class Run:
    """A run folder, its trials one by one, and a store for it."""

    def __init__(self, place: Path, plan: Plan) -> None:
        self.plan, self.before = plan, Failing()
        self.store = watched(place / "store", self.before)
        self.folder = RunFolder.create(place / "out", plan.experiment, plan, "name: test\n")
        self.name = f"{self.folder.path.parent.name}/{self.folder.path.name}"
        self.copy = place / "copy" / self.name

    @property
    def path(self) -> Path:
        return self.folder.path

    def record(self, number: int) -> None:
        trial = self.plan.trials[number]
        facts: Any = {"attempt": 1, "invocation": 0, "group_id": "g", "position": 0}
        columns = {"rank": [0], "window": [1], "step": [0], "warmup": [False], "step_s": [0.5], "wait_s": [0.0]}
        result = TrialResult(trial.id, "ok", ranks=(rank_row(0),), steps={**columns, "loss": [1.0]}, unit="samples")
        self.folder.append(trial, result, facts)

    def writer(self, folder: Path | None = None) -> Writer:
        writer = Writer(self.store, self.name, folder or self.path)
        writer.claim()
        return writer

    def sent(self) -> list[str]:
        """The lines in the store that count."""
        return lines_in(self.store, self.name)

    def check_sent(self, folder: Path | None = None) -> None:
        assert self.sent() == recorded_lines(folder or self.path)


@pytest.fixture
def run(make_experiment: Make, tmp_path: Path) -> Run:
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": [8, 16]}
    return Run(tmp_path, make_plan(make_experiment(grid, throughput={"blocks": 1}), laptop()))


def send(writer: Writer) -> None:
    """Send what the driver has recorded so far."""
    writer.recorded()
    writer.send(lambda: True)


def everything(writer: Writer) -> None:
    writer.recorded()
    assert writer.send(lambda: True, everything=True)
    writer.release()


def test_a_copy_elsewhere_is_the_run(run: Run, tmp_path: Path) -> None:
    writer = run.writer()
    for number in range(4):
        run.record(number)
    (run.path / "logs" / "report.txt").write_text("of this machine")
    (run.path / "report.html").write_text("<html>")
    everything(writer)
    uri = f"{run.store.address}/{run.name}"
    folder = on_this_machine(uri, tmp_path / "other")
    assert folder == tmp_path / "other" / run.name
    here, there = harness.load(run.path), harness.load(uri, tmp_path / "other")
    assert here.lines == there.lines and here.steps.equals(there.steps) and len(there.steps)
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    made = {path.relative_to(run.path).as_posix(): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert {name: content for name, content in made.items() if not name.startswith((".", "logs/"))} == {
        name: content for name, content in files.items() if not name.startswith(".lock")
    }
    assert runs_below(run.store, "test") == [run.name]


def test_a_trial_counts_once_its_line_is_there_and_its_files_come_first(run: Run) -> None:
    writer = run.writer()
    writer.send(lambda: True)
    run.record(0)
    writer.recorded()
    before = len(run.store.names)
    allowed = iter([True, True, False])  # the files of the trial, and then no more
    assert not writer.send(lambda: next(allowed)) and writer.waiting == 1
    assert [Path(name).parent.name for name in run.store.names[before:]] == ["raw"] and run.sent() == []
    assert writer.send(lambda: True) and writer.waiting == 0
    run.check_sent()
    last = run.store.names[-1]
    assert last.startswith(f"{run.name}/trials/{writer.name}/") and last.endswith("/000000.json")


def test_only_what_the_driver_has_noted_is_sent_and_a_failure_is_made_good(run: Run) -> None:
    """A line that is just being written may yet be taken back."""
    writer = run.writer()
    run.record(0)
    assert writer.send(lambda: True) and run.sent() == []
    run.record(1)
    writer.recorded()
    run.before.on = True
    with pytest.raises(StoreError, match="does not answer"):
        writer.send(lambda: True)
    assert writer.waiting == 2
    run.before.on = False
    everything(writer)
    run.check_sent()
    with (run.path / "trials.jsonl").open("a") as file:
        file.write('{"trial_id":"half')
    writer.recorded()
    assert writer.waiting == 0


def test_a_resume_elsewhere_goes_on_and_nothing_is_doubled(run: Run) -> None:
    first = run.writer()
    first.send(lambda: True)
    for number in range(2):
        run.record(number)
    send(first)
    run.record(2)  # recorded and not sent: its machine is gone
    process_gone(first, run)
    copy_down(run.store, run.name, run.copy)
    assert len(recorded_lines(run.copy)) == 2
    second = run.writer(run.copy)
    facts: Any = {"attempt": 1, "invocation": 1, "group_id": "g", "position": 0}
    RunFolder(run.copy).append(run.plan.trials[2], TrialResult(run.plan.trials[2].id, "lost"), facts)
    # the first machine is back, and sends what it had: it is refused, and what it sent unseen does not count
    first.recorded()
    with pytest.raises(SupersededError):
        first.send(lambda: True)
    for name, content in islice(first._left(everything=False), 2):
        run.store.put(name, content)
    everything(second)
    run.check_sent(run.copy)
    assert len(run.sent()) == 3
    with pytest.raises(RunFolderError, match=r"has trials that .* lacks, .*Move it away; the run is then copied"):
        copy_down(run.store, run.name, run.path)


def process_gone(writer: Writer, run: Run) -> None:
    """Make a writer's claim look as that of a process of this machine that has ended."""
    name = f"{run.name}/claims/{writer.name}.json"
    content = json.loads(run.store.get(name))
    content["holder"]["started"] -= 1000
    run.store.put(name, json.dumps(content).encode())


def test_a_local_folder_with_unsent_trials_is_the_truth(run: Run) -> None:
    first = run.writer()
    run.record(0)
    everything(first)
    run.record(1)
    before = recorded_lines(run.path)
    copy_down(run.store, run.name, run.path)
    assert recorded_lines(run.path) == before
    second = run.writer()
    assert second.waiting == 1
    everything(second)
    run.check_sent()


def test_a_copy_that_is_behind_is_brought_up(run: Run) -> None:
    writer = run.writer()
    run.record(0)
    send(writer)
    copy_down(run.store, run.name, run.copy)
    assert len(recorded_lines(run.copy)) == 1
    run.record(1)
    send(writer)
    for _ in range(2):
        copy_down(run.store, run.name, run.copy)
    assert recorded_lines(run.copy) == recorded_lines(run.path) and len(list((run.copy / "raw").iterdir())) == 4


def test_the_folder_that_was_sent_last_stays_as_it_is(run: Run) -> None:
    """Its environment may be newer than what was sent, as after a killed command; but not once another one has sent."""
    writer = run.writer()
    run.record(0)
    everything(writer)
    run.folder.set_invocation(0, {"started_at": 1.0})
    copy_down(run.store, run.name, run.path)
    assert RunFolder(run.path).environment()["invocations"][0]["started_at"] == 1.0
    copy_down(run.store, run.name, run.copy)
    RunFolder(run.copy).set_invocation(0, {"started_at": 2.0})
    everything(run.writer(run.copy))
    copy_down(run.store, run.name, run.path)
    assert RunFolder(run.path).environment()["invocations"][0]["started_at"] == 2.0


def test_without_raw_a_copy_has_what_the_choice_of_a_run_needs(run: Run) -> None:
    writer = run.writer()
    run.record(0)
    run.folder.set_invocation(0, {"started_at": 1.0})
    (run.path / "report.html").write_text("<html>")
    (run.path / "estimate.json").write_text("{}")
    writer.send(lambda: True)
    assert run.store.get(f"{run.name}/estimate.json") == b"{}"  # a resume elsewhere is graded by it
    everything(writer)
    copy_down(run.store, run.name, run.copy, raw=False)
    assert {path.name for path in run.copy.rglob("*") if path.is_file()} - {".lock"} == {*HEAD, "trials.jsonl"}


# -- one writer -----------------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_until_the_first_has_ended(run: Run, tmp_path: Path) -> None:
    first = run.writer()
    with pytest.raises(ClaimedError, match=r"another command writes it.*lapses in (300|299) s$"):
        run.writer()
    assert [claim.writer for claim in read_claims(run.store, run.name)] == [first.name]  # the second withdrew
    first.release()
    lapsing = run.writer()
    claim = tmp_path / "store" / run.name / "claims" / f"{lapsing.name}.json"
    at = claim.stat().st_mtime  # by the store's clock
    os.utime(claim, (at - LEASE_S + 60, at - LEASE_S + 60))
    with pytest.raises(ClaimedError) as error:
        run.writer()
    assert 50 < error.value.left_s <= 61
    os.utime(claim, (at - LEASE_S - 1, at - LEASE_S - 1))
    killed = run.writer()
    process_gone(killed, run)  # a killed process of this machine
    later = run.writer()
    assert later.name != killed.name and later.name in [one.writer for one in read_claims(run.store, run.name)]


@pytest.mark.parametrize("holder", [{}, {"machine": "another"}, {"pid": None}, {"started": "x"}])
def test_a_process_that_is_not_known_counts_as_alive(holder: dict[str, Any]) -> None:
    here = module._holder()
    assert module._is_gone({**here, "started": 0.0})
    assert not module._is_gone(here)
    assert not module._is_gone({**here, "started": 0.0, **holder} if holder else {})


def test_of_two_that_ask_at_once_at_most_one_writes(run: Run, tmp_path: Path) -> None:
    """Whatever the order of their puts and lists: each puts before it lists, so the later one sees the other."""
    for order in range(2):
        place = tmp_path / f"store{order}"
        others: list[BaseException | None] = []

        def before(name: str, place: Path = place, others: list[Any] = others, order: int = order) -> None:
            number = len([one for one in place.rglob("*.json")])
            if not others and number == order:  # the other asks before the first put, or between put and list
                others.append(None)
                try:
                    Writer(folder_store(place), run.name, run.path).claim()
                except ClaimedError as error:
                    others[0] = error

        first: BaseException | None = None
        try:
            Writer(watched(place, before), run.name, run.path).claim()
        except ClaimedError as error:
            first = error
        assert [first, *others].count(None) <= 1 and len(others) == 1


def test_a_run_that_went_on_elsewhere_or_has_two_last_writers_is_not_followed(run: Run) -> None:
    first = run.writer()
    first.send(lambda: True)
    first.release()
    copy_down(run.store, run.name, run.copy)
    run.record(0)
    everything(run.writer())
    with pytest.raises(StoreError, match="was resumed elsewhere while this command started; repeat it"):
        run.writer(run.copy)
    for name in ("a", "b"):  # two writers that follow neither, as in a store whose listing lags behind
        content = {"holder": {}, "released": True, "follows": {}}
        run.store.put(f"test/other/claims/{name}.json", json.dumps(content).encode())
    with pytest.raises(StoreError, match="two writers, a, b"):
        lines_in(run.store, "test/other")


# -- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def sent(run: Run) -> tuple[Run, Writer]:
    writer = run.writer()
    for number in range(3):
        run.record(number)
    everything(writer)
    return run, writer


def test_half_a_line_s_object_does_not_count(sent: tuple[Run, Writer]) -> None:
    run, writer = sent
    name = f"{run.name}/trials/{writer.name}/000002.json"
    whole = run.store.get(name)
    for cut in (0, 1, len(whole) // 2, len(whole) - 1):
        run.store.put(name, whole[:cut])
        assert run.sent() == recorded_lines(run.path)[:2]
    copy_down(run.store, run.name, run.copy)
    everything(run.writer(run.copy))
    assert run.sent() == recorded_lines(run.path)[:2]


def test_damage_before_the_end_is_named(sent: tuple[Run, Writer]) -> None:
    run, writer = sent
    name = f"{run.name}/trials/{writer.name}/000001.json"
    whole = run.store.get(name)
    run.store.put(name, whole[:-5])
    with pytest.raises(StoreError, match=r"000001\.json is damaged"):
        run.sent()
    run.store.remove(name)
    with pytest.raises(StoreError, match=r"000001\.json is missing"):
        run.sent()
    run.store.put(name, whole)
    raw = next(one for one in run.store.names if "/raw/" in one)
    run.store.put(raw, b"other")
    with pytest.raises(StoreError, match="is damaged: its hash is not that of its trial's line"):
        copy_down(run.store, run.name, run.copy)
    assert not (run.copy / "plan.json").exists()


def test_names_that_lead_outside_are_refused(sent: tuple[Run, Writer], tmp_path: Path) -> None:
    run, writer = sent
    name = f"{run.name}/trials/{writer.name}/000000.json"
    row = json.loads(run.store.get(name))
    known = next(iter(row["files"].values()))
    for path in ("../out.txt", "a/../../out.txt", "/etc/x", "a//b", "a\\b"):
        run.store.put(name, json.dumps({**row, "files": {path: known}}).encode())
        with pytest.raises(StoreError):
            copy_down(run.store, run.name, run.copy)
    assert not list(tmp_path.glob("out*.txt"))


def test_a_uri_that_is_no_run_is_one_line(tmp_path: Path) -> None:
    for uri, problem in (
        ("s3://a:b@c/d/e", "a password or a key"),
        ("file:///a", "allowed: the URI of a run"),
        ("file:///nowhere-at-all/e/r", "has no run e/r; allowed: URI/<experiment>/<time>-<id>"),
    ):
        with pytest.raises(StoreError, match=problem):
            harness.load(uri, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture(params=["folder", "memory"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return open_store(f"file://{tmp_path}/a/b")
    return Store(fs._MockFileSystem(datetime.now(UTC)), "bucket/below", "mock://bucket/below")


def test_an_object_is_written_listed_read_and_removed(any_store: Store) -> None:
    any_store.check()
    assert any_store.list() == []
    any_store.put("a/b/c.json", b"1")
    any_store.put("a/d.json", b"22")
    any_store.put("a/d.json", b"23")
    assert [one.name for one in any_store.list("a")] == ["a/b/c.json", "a/d.json"]
    assert [one.name for one in any_store.list("a", recursive=False)] == ["a/b", "a/d.json"]
    assert all(one.written for one in any_store.list("a"))
    assert any_store.get_all(["a/d.json", "a/b/c.json"]) == [b"23", b"1"]
    any_store.remove("a/d.json")
    assert [one.name for one in any_store.list("a")] == ["a/b/c.json"] and any_store.list("nowhere") == []


def test_reading_is_tried_again_and_what_is_not_there_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = folder_store(tmp_path)
    store.put("a", b"1")
    (tmp_path / "c.partial").write_bytes(b"half")
    assert [one.name for one in store.list()] == ["a"], "what is being written is no object"
    pauses: list[float] = []
    monkeypatch.setattr("harness.record.store.time.sleep", pauses.append)
    failures = iter([OSError("reset"), OSError("reset")])

    def work() -> str:
        if error := next(failures, None):
            raise error
        return "read"

    assert store._again(work) == "read" and pauses == [0.5, 1.0]
    with pytest.raises(StoreError, match="is not there"):
        store.get("b")
    assert len(pauses) == 2


@pytest.mark.parametrize(
    ("said", "uri", "expected"),
    [
        ("AWS Error ACCESS_DENIED during ListObjectsV2", "s3://b", "no access: .*from AWS_ACCESS_KEY_ID"),
        ("AWS Error NO_SUCH_BUCKET during PutObject", "s3://b", "is not there: "),
        ("curlCode: 7, Could not connect to server", "s3://b", "does not answer as it should: "),
        ("Could not create a OAuth2 access token", "gs://b", "no access: .*GOOGLE_APPLICATION_CREDENTIALS"),
        ("Failed to get token from DefaultAzureCredential", "abfs://c@a.x", "no access: .*AZURE_TENANT_ID"),
        ("signed with AKIAABCDEFGHIJKLMNOP", "s3://b", "signed with <redacted>"),
    ],
)
def test_an_error_is_one_line_with_what_to_do(said: str, uri: str, expected: str) -> None:
    text = store_module._explained(OSError(said), uri)
    assert re.search(expected, text) and "\n" not in text


def test_s3_has_one_short_attempt_and_no_key_in_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="a password or a key"):
        open_store("s3://a:b@bucket")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3 = open_store("s3://bucket/a/b?endpoint_override=127.0.0.1:9&scheme=http")
    assert s3.root == "bucket/a/b" and s3.filesystem.type_name == "s3" and s3.filesystem.region == "us-east-1"
    with pytest.raises(StoreError, match="does not answer as it should"):
        s3.put("x", b"")
