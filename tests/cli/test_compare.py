"""``harness compare``, ``history`` and ``predict``: what they print and write, their exit codes, and bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from harness.analysis import history, results
from harness.analysis.prediction.collective_times import read_links
from harness.cli.arguments import parse_numbers
from harness.cli.commands import app
from harness.errors import PredictionError, RunFolderError
from harness.plan.cell import Cell
from harness.record.schema import COMPARED
from harness.report.figures.drawing import panels
from tests.analysis.prediction.world import collectives
from tests.conftest import EXAMPLE, Make
from tests.run_folders import NODE, make_run

GRID = {"model": "resnet8", "strategy": ["single", "dp", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
HOSTILE = "<script>alert(1)</script> | [x](http://x) @you \x1b[2J"


def rate(factor: float = 1.0, slow: float = 1.0) -> Callable[[Cell, int], float]:
    def speed(cell: Cell, block: int) -> float:
        return 100.0 * cell.devices * factor * (slow if cell.strategy == "ddp" and cell.devices == 2 else 1.0)

    return speed


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "80"})


@pytest.fixture(scope="module", autouse=True)
def each_run_is_loaded_once() -> Iterator[None]:
    """No test changes one."""
    loaded = lru_cache(maxsize=64)(results.load)
    with pytest.MonkeyPatch.context() as patch:
        for module in (results, history):
            patch.setattr(module, "load", loaded)
        yield


@pytest.fixture(scope="module")
def runs(make_experiment: Make, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four earlier runs, a first one, one without a change, and one with a slow ddp on two devices."""
    place = tmp_path_factory.mktemp("results")
    experiment = make_experiment(GRID, throughput={"blocks": 1})
    for day, factor in enumerate((0.99, 1.0, 1.01, 1.0)):
        make_run(place, experiment, rate(factor), started_at=1.7e9 + day)
    node = {**NODE, "packages": {"torch": HOSTILE}}
    return {
        "place": place,
        "failed": make_run(tmp_path_factory.mktemp("failed"), experiment, lambda cell, block: None),
        "first": make_run(place, experiment, rate(), started_at=1.7e9 + 10),
        "same": make_run(place, experiment, rate(1.001), started_at=1.7e9 + 11),
        "slow": make_run(place, experiment, rate(slow=0.8), started_at=1.7e9 + 12, node=node),
    }


def test_a_slow_down_is_named_with_its_page(runs: dict[str, Path]) -> None:
    result = call("compare", runs["first"], runs["slow"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "B is slower than A in 1 of 3 cells: ddp x2: 0.800" in text
    assert "0.82 % between runs (standard deviation of a cell's throughput over 4 earlier runs below" in text
    page = runs["place"] / "test" / f"compare-{runs['first'].name}-{runs['slow'].name}.html"
    assert page.is_file() and str(page) in result.stdout
    assert page.read_text().count("adjustment, which keeps the chance of any false claim at 5 %,") == 1
    tables = [line for line in result.stdout.splitlines() if not line.startswith(("A ", "B ", "Page:"))]
    assert max(map(len, tables)) <= 80


@pytest.mark.parametrize("ratio", [0.96, 1.0], ids=["adjusted away", "equal"])
def test_cells_that_holm_s_adjustment_leaves_within_noise_are_explained(
    make_experiment: Make, tmp_path: Path, ratio: float
) -> None:
    grid = {"model": "resnet8", "strategy": "single", "per_device_batch_size": [8, 16]}
    experiment = make_experiment(grid, throughput={"blocks": 1})
    factors = (0.99, 1.0, 1.01, 1.0, 1.0, ratio)
    *_, first, later = (make_run(tmp_path, experiment, rate(x), started_at=1.7e9 + n) for n, x in enumerate(factors))
    output = call("compare", first, later).stdout
    assert output.count("B / A · A in samples/s") == 1 and "single x1 · batch 8/device" in output  # one table
    text = " ".join(output.split())
    assert "no change is claimed" in text
    said = "Intervals of 2 of them exclude 1 taken alone, but not after Holm's adjustment, which keeps"
    assert (said in text) == (ratio < 1)


@pytest.mark.parametrize(
    ("which", "options", "code"),
    [
        ("same", ["--fail-if", "throughput < 0.9"], 0),
        ("slow", ["--fail-if", "throughput < 0.9"], 3),
        ("slow", ["--fail-if", "throughput < 0.9", "--only", "devices=1"], 0),
        ("same", ["--fail-if", "throughput < 1"], 4),
        ("slow", ["--fail-if", "throughput < 0.9", "--history", "{empty}"], 4),
        ("slow", ["--fail-if", "throughput < 90%", "--history", "{empty}", "--run-noise", "2%"], 3),
        ("slow", ["--fail-if", "throughput < 0.5", "--fail-if", "speedup < 0.9"], 3),
        ("slow", ["--history", "{empty}"], 0),
    ],
)
def test_exit_codes(runs: dict[str, Path], tmp_path: Path, which: str, options: list[str], code: int) -> None:
    given = [option.format(empty=tmp_path) for option in options]
    result = call("compare", runs["first"], runs[which], "--output", tmp_path / "page.html", *given)
    assert result.exit_code == code, result.output


def test_json_has_the_columns_of_the_schema_and_no_page(runs: dict[str, Path]) -> None:
    before = set(runs["place"].rglob("*"))
    result = call("compare", runs["first"], runs["slow"], "--json", "--run-noise", "0.05", "--fail-if", "throughput<.9")
    content = json.loads(result.stdout)
    assert set(runs["place"].rglob("*")) == before
    assert list(content) == [
        "version", "by", "only", "run_noise", "history", "fail_if", "exit_code", "summary", "runs", "cells", "gate",
        "unmatched", "convergence", "environment",
    ]  # fmt: skip
    assert (content["version"], content["run_noise"], content["history"]) == (1, 0.05, None)
    assert content["exit_code"] == result.exit_code == 4 and content["fail_if"] == ["throughput < 0.9"]
    names = {table.name: table.names for table in COMPARED}
    assert list(content["runs"][0]) == names["runs"] and list(content["cells"][0]) == names["comparison"]
    assert list(content["gate"][0]) == names["gate"]
    dp = next(row for row in content["cells"] if row["strategy"] == "dp")
    assert dp["change"] is None and dp["reason"] == "emulated" and dp["low"] is None
    torch = next(fact for fact in content["environment"] if fact["name"] == "torch")
    assert torch == {"name": "torch", "differs": True, "values": {"A": "2.15.0", "B": HOSTILE}}


def test_markdown_and_page_show_hostile_text_as_text(runs: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = call("compare", runs["first"], runs["slow"], "--markdown", "--output", page)
    assert result.exit_code == 0 and result.stdout.startswith("### Comparison of throughput\n")
    assert "| cell | A (samples/s) | later (samples/s) | ratio (95 %) |" in result.stdout
    assert r"\<script\>alert(1)\</script\> \| \[x\](http://x) @" in result.stdout and "@you" not in result.stdout
    assert "\x1b" not in result.stdout
    html = page.read_text()
    assert "<script>alert" not in html and "&lt;script&gt;alert(1)" in html
    assert "default-src 'none'" in html and "B is slower than A in 1 of 3 cells" in html
    assert not re.search(r'(src|href)="(?!data:|#)', html)


def test_by_an_option_shows_its_values(make_experiment: Make, tmp_path: Path) -> None:
    paths = []
    for size in (25, 1):
        options = {"ddp": {"bucket_cap_mb": size}}
        experiment = make_experiment(GRID, throughput={"blocks": 1}, strategy_options=options)
        paths.append(make_run(tmp_path, experiment, rate(), started_at=1.7e9 - size))
    result = call("compare", *paths, "--by", "ddp.bucket_cap_mb", "--run-noise", "5%")
    assert result.exit_code == 0, result.output
    assert "B / A · ddp.bucket_cap_mb 25 -> 1" in result.stdout


def bad(runs: dict[str, Path], tmp_path: Path) -> dict[str, tuple[list[Any], str]]:
    first, slow = runs["first"], runs["slow"]
    newer = shutil.copytree(first, tmp_path / "newer")
    plan = json.loads((newer / "plan.json").read_text())
    (newer / "plan.json").write_text(json.dumps({**plan, "schema": 999}))
    return {
        "no run": ([first, tmp_path], "not a run folder"),
        "a newer schema": ([first, newer], "got schema 999"),
        "no history": ([first, slow, "--history", "/nonexistent"], "--history: got /nonexistent"),
        "a long name": ([300 * "a", 300 * "b"], "not a run folder"),
        "no shared cell": ([first, slow, "--only", "model=resnet14"], "share no measured cell: A and B have none;"),
        "a threshold": ([first, slow, "--fail-if", "throughput"], "--fail-if: got 'throughput'; allowed: METRIC < NUM"),
        "a metric": ([first, slow, "--fail-if", "memory < 1"], "METRIC is throughput or speedup"),
        "a share": ([first, slow, "--run-noise", "5 per"], "--run-noise: got '5 per'; allowed: a share above 0"),
        "no noise": ([first, slow, "--run-noise", "0"], "--run-noise: got '0'"),
        "an axis": ([first, slow, "--by", "modle"], "--by: unknown axis 'modle'; did you mean 'model'?"),
        "a batch": ([first, slow, "--by", "batch_size"], "per device: fixed on each (weak scaling)"),
        "a filter": ([first, slow, "--only", "stratgy=ddp"], "unknown axis 'stratgy'"),
        "two formats": ([first, slow, "--json", "--markdown"], "only one of both can be printed"),
        "an output": ([first, slow, "--output", tmp_path], "cannot be written"),
        "no folder": ([first, slow, "--output", tmp_path / "a" / "b.html"], "No such file or directory; give another"),
    }


def test_bad_input_is_one_line_with_exit_code_2_and_writes_nothing(runs: dict[str, Path], tmp_path: Path) -> None:
    cases = bad(runs, tmp_path)
    before = set(runs["place"].rglob("*")) | set(tmp_path.rglob("*"))
    for name, (arguments, message) in cases.items():
        result = call("compare", *arguments)
        assert result.exit_code == 2, (name, result.output)
        assert message in result.stderr, (name, result.stderr)
        assert result.stderr.count("error: ") == 1 and "Traceback" not in result.output, name
        assert result.stdout == "", name
    assert set(runs["place"].rglob("*")) | set(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_history_draws_cells_over_time_and_marks_the_environment(runs: dict[str, Path], tmp_path: Path) -> None:
    picture = tmp_path / "history.svg"
    result = call("history", runs["place"], "--cell", "strategy=ddp,devices=2", "--output", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_text().lstrip().startswith("<?xml")
    text = " ".join(result.stdout.split())
    assert text.count("2023-11-14") == 8  # seven runs, and one change in the caption
    assert re.search(r" 0\.(79|80)\d ", text), text  # the last run is slow beside the one before it
    assert "Dashed: the environment changed (1: 2023-11-" in text
    listed = call("history", runs["place"], "--cell", "devices=7").stderr
    found = re.search(r"([0-9a-f]{12}): ddp x2", " ".join(listed.split()))
    assert found, listed
    by_id = call("history", runs["place"], "--cell", found[1][:8], "--output", tmp_path / "one.png")
    assert by_id.exit_code == 0 and (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert max(map(len, result.stdout.splitlines())) <= max(80, len(f"Figure: {picture}"))


@pytest.mark.slow
@pytest.mark.parametrize("more", [1, 0], ids=["13 cells", "12 cells"])
def test_history_lists_every_cell_and_draws_the_12_that_changed_most(
    make_experiment: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    sizes = [2**power for power in range(12 + more)]
    grid = {"model": "resnet8", "strategy": "single", "per_device_batch_size": sizes}
    experiment = make_experiment(grid, throughput={"blocks": 1})
    for run in range(3):  # the larger the batch, the more its speed changes: down in the second run, then back

        def speed(cell: Cell, block: int, run: int = run) -> float:
            return 100.0 * (1 - (0.0, 1e-4, 0.0)[run] * int(cell.per_device_batch_size or 1))

        make_run(tmp_path, experiment, speed, started_at=1.7e9 + run)
    drawn: list[str] = []
    monkeypatch.setattr(
        "harness.report.history.panels",
        lambda cells, *given, **named: drawn.extend(label for label, _ in cells) or panels(cells, *given, **named),
    )
    result = call("history", tmp_path, "--output", tmp_path / "all.svg")
    assert result.exit_code == 0, result.output
    assert [f"batch {size}/device" in result.stdout for size in sizes] == [True] * len(sizes)
    assert drawn == [f"single x1 · batch {size}/device" for size in sizes[-12:]]
    said = "The figure has the 12 of 13 cells whose throughput changed most" in " ".join(result.stdout.split())
    assert said == bool(more)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{failed}"], "no cell to draw"),
        (["{place}", "--cell", "devices=7"], "no cell to draw; choose some with --cell ID"),
        (["{place}", "--cell", "device"], "--cell: 1 problem"),
        (["{place}", "--output", "{tmp}/history.txt"], "allowed: a file that ends in .png, .svg, .pdf"),
        (["{place}", "--output", "{tmp}/no/history.png"], "cannot be written: No such file or directory"),
    ],
)
def test_bad_input_of_history(runs: dict[str, Path], tmp_path: Path, arguments: list[str], message: str) -> None:
    given = {"tmp": tmp_path, "place": runs["place"], "failed": runs["failed"].parent}
    result = call("history", *(argument.format(**given) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert message in result.stderr and "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_results_folder_is_one_error(runs: dict[str, Path]) -> None:
    folder = runs["first"].parent
    folder.chmod(0o500)
    try:
        result = call("compare", runs["first"], runs["same"])
    finally:
        folder.chmod(0o700)
    assert result.exit_code == 2 and "cannot be written: Permission denied" in result.stderr


def test_all_mistakes_of_a_comparison_are_one_error(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    options = ["--fail-if", "bad", "--run-noise", "x", "--only", "y", "--markdown", "--json"]
    result = call("compare", gone, tmp_path, *options)
    text = " ".join(result.output.split())
    assert result.exit_code == 2 and "error: 5 problems" in text
    parts = ("--fail-if: got 'bad'", "--run-noise: got 'x'", "--only: got 'y'", f"{gone.name}: not a run", "--json")
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize("text", ["", "a", "16,", "0", "-4", "1.5", "99999999", "4;8"])
def test_numbers_are_joined_by_commas_and_other_text_is_refused(text: str) -> None:
    assert parse_numbers("16", "--devices") == (16,) and parse_numbers("16, 32,64", "--devices") == (16, 32, 64)
    with pytest.raises(PredictionError, match=r"--devices: got .* allowed: whole numbers above 0"):
        parse_numbers(text, "--devices")


def test_links_are_read_from_a_table_of_the_same_hardware(tmp_path: Path) -> None:
    path, table = tmp_path / "collectives.csv", collectives()
    table.to_csv(path, index=False)
    table.to_parquet(path.with_suffix(".parquet"))
    for written in (path, path.with_suffix(".parquet")):
        pd.testing.assert_frame_equal(read_links(written, table), table)
    for given, message in (
        ({"device_model": "NVIDIA H100"}, "the devices of .* are NVIDIA H100, those of the run CPU"),
        ({"backend": "nccl"}, "the backend of .* are nccl, those of the run gloo"),
    ):
        collectives(**given).to_csv(path, index=False)
        with pytest.raises(PredictionError, match=message):
            read_links(path, table)
    text, other, empty = tmp_path / "links.txt", tmp_path / "other.csv", tmp_path / "empty.csv"
    text.write_text("x")
    other.write_text("a,b\n1,2\n")
    collectives()[:0].to_csv(empty, index=False)
    for path, message in (
        (text, "allowed: a run folder"),
        (tmp_path / "absent.csv", "allowed: a run folder"),
        (other, "lacks the columns operation, tier"),
        (empty, "has no collectives; measure them: harness doctor FILE --links"),
    ):
        with pytest.raises(PredictionError, match=message):
            read_links(path, collectives())
    with pytest.raises(RunFolderError):
        read_links(tmp_path, collectives())


def test_no_run_or_one_without_recorded_exchanges_is_one_line(tmp_path: Path) -> None:
    run = Path(shutil.copytree(EXAMPLE, tmp_path / "run"))
    lines = [json.loads(line) for line in (run / "trials.jsonl").read_text().splitlines()]
    (run / "trials.jsonl").write_text("".join(json.dumps({**line, "exchanges": None}) + "\n" for line in lines))
    wrong = CliRunner().invoke(app, ["predict", str(EXAMPLE), "--devices", "8", "--between-nodes", "infiniband"])
    assert wrong.exit_code == 2 and "got the link 'infiniband'; did you mean 'infiniband-" in wrong.output
    problems = ((run, "recorded no exchanges, from which steps are predicted"), (tmp_path, "not a run folder"))
    for folder, problem in problems:
        done = CliRunner().invoke(app, ["predict", str(folder), "--devices", "8"])
        assert done.exit_code == 2 and done.output.count("\n") == 1 and problem in done.output
