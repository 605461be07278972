"""Results in an object store: kill -9 at any of its requests, a store that fails, and a run with Ray."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import harness
from harness.cli.commands import app
from harness.errors import StoreError
from harness.record.mirror import runs_below
from harness.record.store import Store, open_store
from harness.run.request import AUTO, Request
from harness.system.uri import below
from tests.forks import start
from tests.object_store import CREDENTIALS, Fault, Proxy, s3_server
from tests.processes import RUN, ended
from tests.scripted import TEXT, command
from tests.stores import lines_in

pytestmark = pytest.mark.slow

BLOCKS = 2
Kill = tuple[str, int, str]
KILLS: tuple[Kill, ...] = (
    ("/claims/", 1, "after"),
    ("/plan.json", 1, "before"),
    ("/environment.jsonl", 1, "before"),
    ("/raw/", 1, "before"),
    ("/raw/", 2, "half"),
    ("/raw/", 1, "after"),
    (".json", 9, "before"),
    ("/trials/.*/000000.json", 1, "before"),
    ("/trials/.*/000001.json", 1, "half"),
    ("/trials/.*/000000.json", 1, "after"),
)
"""The object at which the driver is killed: which one of those whose names match, and whether it is written."""


def killed(request: Request, log: Path, kill: Kill | None) -> None:
    """``harness run`` without a report, killed before an object, with half of it written, or after it."""
    from harness.run import pipeline

    pipeline._report = lambda folder, began, emit, code: code  # type: ignore[assignment]
    put, count = Store._put, 0

    def counted(self: Store, name: str, content: bytes) -> None:
        nonlocal count
        wanted, number, how = kill or ("nothing", 0, "")
        count += re.search(wanted, name) is not None
        if count != number or not re.search(wanted, name):
            put(self, name, content)
            return
        if how != "before":
            put(self, name, content[: len(content) // 2] if how == "half" else content)
        os.kill(os.getpid(), signal.SIGKILL)

    Store._put = counted  # type: ignore[method-assign]
    command(request, log, 0.0)


def all_lines(store: Store) -> list[str]:
    return [line for run in runs_below(store, "scripted") for line in lines_in(store, run)]


def test_kills_at_each_point_lose_and_double_nothing_on_another_machine(tmp_path: Path) -> None:
    """Each invocation has a local folder of its own, as a new pod has: it knows only what the store has."""
    (file := tmp_path / "scripted.yaml").write_text(TEXT % 2)
    uri, log = f"file://{tmp_path}/store", tmp_path / "finished"
    seen: list[str] = []
    for machine, kill in enumerate((*KILLS, None)):
        request = Request(file, output=tmp_path / f"machine{machine}", store=uri, resume=AUTO)
        child = start(killed, request, log, kill)
        child.join()
        assert child.exitcode == (-9 if kill else 0), kill
        now = all_lines(open_store(uri))
        assert now[: len(seen)] == seen, "a trial that was in the store is gone"
        assert len(now) > len(seen) or kill != KILLS[-1], "its line was there when it was killed"
        seen = now
    runs = runs_below(open_store(uri), "scripted")  # the first two have no plan there: nothing was started
    (run,) = (run for run in runs if (tmp_path / "store" / run / "plan.json").exists())
    results = harness.load(below(uri, run), tmp_path / "reader")
    assert len(results.lines) == len(seen) and results.missing.empty
    ok = Counter((line["trial_id"], line["invocation"]) for line in results.lines if line["outcome"] == "ok")
    assert {trial for trial, _ in ok} == {t for group in results.folder.plan()["groups"] for t in group["trials"]}
    attempts = Counter((line["trial_id"], line["attempt"]) for line in results.lines)
    assert set(ok.values()) == set(attempts.values()) == {1}
    assert len(results.steps.groupby(["trial_id", "attempt"])) == sum(ok.values())


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    pytest.importorskip("moto.server")
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with s3_server(tmp_path) as proxy:
        yield proxy


def impatient(request: Request, log: Path) -> None:
    """``harness run`` with short timeouts and pauses, without a report."""
    from harness.record import store
    from harness.run import mirroring, pipeline

    os.environ.update(CREDENTIALS)
    pipeline._report = lambda folder, began, emit, code: code  # type: ignore[assignment]
    store.REQUEST_S, mirroring.PAUSE_S, mirroring.AGAIN_S = 1.0, 0.1, 0.1
    command(request, log, 0.05)


def test_a_store_that_answers_503_cuts_or_stops_costs_no_trial(s3: Proxy, tmp_path: Path) -> None:
    faults: dict[int, Fault] = {}
    faults |= dict.fromkeys(range(20, 26), "503")
    faults |= dict.fromkeys(range(30, 33), "cut")
    faults |= dict.fromkeys(range(36, 38), "cut answer")
    faults |= {42: "stop", 50: "503", 51: "cut", 52: "cut answer"}
    s3.fault = lambda number: faults.get(number, "")
    (file := tmp_path / "scripted.yaml").write_text(TEXT % BLOCKS)
    request = Request(file, output=tmp_path / "here", store=s3.uri())
    child = start(impatient, request, tmp_path / "finished")
    child.join()
    assert child.exitcode == 0 and len(s3.times) > 53
    s3.fault = lambda number: ""
    store = open_store(s3.uri())
    (run,) = runs_below(store, "scripted")
    local = (tmp_path / "here" / run / "trials.jsonl").read_text().splitlines()
    assert all_lines(store) == local and len(local) == 6 * BLOCKS
    results = harness.load(below(s3.uri(), run), tmp_path / "elsewhere")
    assert results.missing.empty and len(results.lines) == 6 * BLOCKS
    check_addresses(s3)


def check_addresses(s3: Proxy) -> None:
    """A bucket that is not there, and no answer: one line each, before anything starts."""
    with pytest.raises(StoreError, match=r"is not there: .*NO_SUCH_BUCKET"):
        open_store(s3.uri("nobucket")).check()
    s3.fault = lambda number: "503"
    with pytest.raises(StoreError, match="does not answer as it should"):
        open_store(s3.uri()).check()
    s3.fault = lambda number: ""


FILE = """
name: mirrored
workload: mlp
grid: {data: synthetic, model: small, strategy: single, per_device_batch_size: [8, 16, 32]}
throughput: {blocks: 1, twin: false, explain: false, window_seconds: 0.2, warmup_seconds: 0.1}
equivalence: false
preflight: false
"""


def test_a_run_with_ray_sends_each_trial_between_the_trials(
    s3: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_figures: None
) -> None:
    """The store is slow, so that a trial that did not wait for the last one's objects would overlap with them."""
    s3.delay_s = 0.2
    (file := tmp_path / "mirrored.yaml").write_text(FILE)
    done = ended(*RUN, file, "--output", s3.uri(), "--resume", "auto", cwd=tmp_path)
    s3.delay_s = 0.0
    (name,) = runs_below(open_store(s3.uri()), "mirrored")
    assert f"Results in s3://bucket/runs/{name}?" in done.stdout
    uri = below(s3.uri(), name)
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["report", uri, "--local", "elsewhere"])
    assert shown.exit_code == 0 and f"Report: elsewhere/{name}/report.html" in shown.output
    lines: list[Any] = harness.load(tmp_path / "elsewhere" / name).lines
    assert [line["outcome"] for line in lines] == ["ok"] * 3
    assert len({line["group_id"] for line in lines}) == 1
    for line in lines:
        inside = [path for at, path in s3.times if line["started_at"] < at < line["started_at"] + line["trial_s"]]
        assert inside == [], f"sent while {line['trial_id']} was measured"
    ends = sorted(line["started_at"] + line["trial_s"] for line in lines)
    sent = sorted(at for at, path in s3.times if path.startswith("PUT") and path.partition("?")[0].endswith(".json"))
    assert sum(at < ends[-1] for at in sent) >= 2  # the first trials were there before the last had ended
