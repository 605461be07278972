"""The report in a real browser: hostile names and messages run nothing and fetch nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from harness.plan.planner import make_plan
from harness.plan.trial import TrialResult
from harness.record.folder import RunFolder
from harness.record.lines import with_counts
from harness.report.html import write_report
from harness.report.page import SCRIPT, render
from tests.conftest import Make, laptop
from tests.report import test_page
from tests.report.test_html import NODE, NOWHERE, append_skips, measured

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")]
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
PAYLOADS = (
    "<script>document.title = 'owned'</script>",
    "</title></style></script><script src=http://HOST/script.js></script>",
    "<img src=http://HOST/image.png onerror=\"document.title = 'owned'\">",
    "\"'><svg onload=\"document.title = 'owned'\"><image href=http://HOST/svg.png></svg>",
    "--><script>document.title = 'owned'</script><!--",
    "<link rel=stylesheet href=http://HOST/style.css><iframe src=http://HOST/frame></iframe>",
    "<base href=http://HOST/><object data=http://HOST/object></object>",
    "<meta http-equiv=refresh content='0;url=http://HOST/refresh'>",
    "<style>body { background: url(http://HOST/background.png) }</style>",
    "{{ 7 * 7 }}{% include 'http://HOST/template' %}${HOST}",
    "$\\frac{1}{$ \\input{/etc/passwd} ]]><b>",
)


class Server:
    """Hears on loopback what a page asks for."""

    def __init__(self) -> None:
        asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                """Says nothing."""

        self.asked = asked
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    heard = Server()
    thread = threading.Thread(target=heard.http.serve_forever)
    thread.start()
    yield heard
    heard.http.shutdown()
    thread.join()
    heard.http.server_close()


def opened(page: Path, place: str = "") -> str:
    """The document as it stands after its scripts, if any, have run."""
    assert BROWSER
    profile = f"--user-data-dir={page.parent / 'profile'}"
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    quiet += ["--disable-component-update", "--disable-extensions", "--disable-sync"]
    command = [BROWSER, *quiet, profile, "--virtual-time-budget=2000", "--dump-dom", page.absolute().as_uri() + place]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


class Elements(HTMLParser):
    """The elements of a document, and the texts of its scripts."""

    def __init__(self, dom: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.scripts: list[str] = []
        self.feed(dom)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts.append(data)


def title(dom: str) -> str:
    found = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)
    return found[1] if found else ""


@pytest.fixture
def hostile(make_experiment: Make, tmp_path: Path, server: Server) -> RunFolder:
    """A run with hostile text wherever the file, the workload, an exception or a node can put one."""
    texts = [payload.replace("HOST", server.host) for payload in PAYLOADS]
    every = " ".join(texts)
    names = {"model": texts[:2], "data": texts[5]}
    experiment = make_experiment(
        {"strategy": ["single", "ddp"], "devices": [1, 2, 4], "per_device_batch_size": 8, **names},
        workload="own:Own",
        workload_options={"note": texts[3:5], texts[0]: texts[1:3], "plain": every},
        throughput={"blocks": 1},
        convergence={"epochs": 2, "seeds": [0], "target": {"metric": texts[0], "at_least": 0.5}},
    )  # fmt: skip
    plan = make_plan(experiment, laptop())
    folder = RunFolder.create(tmp_path, experiment, plan, f"name: test\n# {every}\n")
    folder.set_invocation(0, {"started_at": 1.7e9, "git_commit": texts[0], "wall_s": 90.0, "command": texts})
    node = {**NODE, "host": every, "cpu": every, "system": every, "python": every, "packages": {texts[0]: every},
            "variables": {texts[1]: every}}  # fmt: skip
    folder.add_environment({"group_id": "b0-g0", "invocation": 0, "whole_s": 30.0, "nodes": [node], "ranks": []})
    for number, trial in enumerate(plan.trials):
        result = measured(trial, of_rank={"device_model": every, "throttled": every}, flops_reason=every, steady=False)
        if trial.kind != "convergence" and number % 9 == 4:
            result = TrialResult(trial.id, "error", every, error_type=texts[0], detail=every)
        folder.append(trial, result, {**NOWHERE, "group_id": every, "position": number})
    append_skips(folder, plan, every)
    lines = [{**line, "log": line["log"] and every, "outcome": line["outcome"]} for line in folder.lines()]
    (folder.path / "trials.jsonl").write_text("".join(json.dumps(with_counts(line)) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("is_allowed", [True, False], ids=["without a policy", "with the policy of a page"])
def test_a_page_without_escaping_is_detected_and_made_harmless_by_its_content_policy(
    tmp_path: Path, server: Server, is_allowed: bool
) -> None:
    """The same text, as markup: so that the test of a whole report can fail."""
    policy = POLICY.search(render("compare.html", title="", sentences=(), parts=()))
    assert policy
    page = tmp_path / "page.html"
    head = "" if is_allowed else policy[0]
    chosen = (0, 2, 5) if is_allowed else (0, 1, 2, 3, 4, 5, 6, 8)
    body = "".join(PAYLOADS[number] for number in chosen).replace("HOST", server.host)
    page.write_text(f"<!doctype html><head>{head}<title>good</title></head><body>{body}")
    assert title(opened(page)) == ("owned" if is_allowed else "good")
    assert {"/image.png", "/style.css", "/frame"} <= set(server.asked) if is_allowed else server.asked == []


def test_hostile_text_runs_nothing_and_fetches_nothing(hostile: RunFolder, server: Server) -> None:
    write_report(hostile.path)
    dom = opened(hostile.report)
    assert title(dom) == "test · scaling report"
    assert hostile.report.read_text().count(POLICY.pattern[:40]) == 1
    assert server.asked == []
    assert "document.title" in dom and "{{ 7 * 7 }}" in dom  # it is there, as text
    elements = Elements(dom)
    assert elements.scripts == [SCRIPT]
    assert not {"iframe", "link", "object", "base", "svg"} & {*elements.names}
    for figure in sorted(hostile.figures.glob("*.svg"))[:2]:
        assert "<script" not in re.sub(r"<!--.*?-->", "", opened(figure), flags=re.DOTALL)
    assert server.asked == []


CLICKS = """
const button = document.querySelector("th.n button");
const seen = () => [...document.querySelectorAll("tbody tr")].map(row => row.cells[0].textContent[0]).join("");
const states = [seen()];
button.focus();
const focused = document.activeElement === button;
for (let press = 0; press < 3; press++) {
  button.click();
  states.push(`${seen()} ${button.closest("th").getAttribute("aria-sort")}`);
}
document.title = JSON.stringify([focused, states]);
"""


def test_a_table_sorts_by_its_numbers_and_a_script_that_the_policy_does_not_name_does_not_run(tmp_path: Path) -> None:
    clicking = test_page.page().replace("</body>", f"<script>{CLICKS}</script></body>")
    page = tmp_path / "page.html"
    page.write_text(clicking)
    assert not title(opened(page)).startswith("[")
    allowed = base64.b64encode(hashlib.sha256(CLICKS.encode()).digest()).decode()
    page.write_text(clicking.replace("script-src ", f"script-src 'sha256-{allowed}' ", 1))
    # d has the largest number and b none, which stays last; the third press restores the order
    assert json.loads(title(opened(page))) == [True, ["abcd", "cadb ascending", "dacb descending", "abcd null"]]


VISITS = """
const [link, fold] = [document.querySelector('a[href="#inside"]'), document.querySelector("details")];
const seen = () => [fold.open, Math.abs(document.getElementById("inside").getBoundingClientRect().top) < innerHeight];
const states = [seen()];
for (let press = 0; press < 2; press++) {
  link.click();
  states.push(seen());
  fold.open = false;
}
dispatchEvent(new Event("beforeprint"));
document.title = JSON.stringify([...states, fold.open]);
"""


def test_a_link_into_a_fold_opens_it_and_goes_there_and_a_printed_page_has_every_fold(tmp_path: Path) -> None:
    fold = '<details><summary>s</summary><b id="inside">x</b></details>'
    body = f'<a href="#inside">to</a><p style="height: 9000px"></p>{fold}'
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><body>{body}<script>{SCRIPT}</script><script>{VISITS}</script>")
    assert json.loads(title(opened(page))) == [[False, False], [True, True], [True, True], True]
    page.write_text(f"<!doctype html><body>{body}<script>{SCRIPT}</script>")
    assert "<details open" in opened(page, "#inside") and "<details open" not in opened(page)
