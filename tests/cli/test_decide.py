"""``harness decide``: what it prints and writes, and bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.commands import app
from harness.config.load import parse_experiment
from harness.plan.cell import Cell
from tests.analysis.test_time_to_target import CONTENT
from tests.run_folders import make_run


def rate(cell: Cell, block: int) -> float:
    return 1000.0 * cell.devices * (1.01 if cell.strategy == "single" else 1.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three batches whose trainings reach 0.9 in their one epoch of 100 samples."""
    return make_run(tmp_path, parse_experiment(CONTENT, source="test"), rate)


def test_a_table_what_to_use_a_figure_and_the_pilot(run: Path) -> None:
    done = CliRunner().invoke(
        app, ["decide", str(run), "--target", "val_accuracy=0.9", "--price", "2", "--devices", "1"]
    )
    assert done.exit_code == 0, done.output
    assert "Time and price to val_accuracy >= 0.9" in done.output
    assert "no need of more was seen at larger ones" in done.output, done.output
    assert "the cheapest is single on 1 device, global batch" in done.output
    assert (run / "figures" / "decision.png").exists() and (run / "pilot.yaml").exists()
    assert done.output.rstrip().splitlines()[-1].endswith("pilot.yaml")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target", "0.9"], "--target: got '0.9'; allowed: METRIC=VALUE"),
        (["--target", "val_accuracy=0.9", "--price", "inf"], "not finite; allowed: a number above 0"),
        (["--target", "val_accuracy=0.9", "--budget", "3"], "--budget: needs a price; give --price"),
        (["--target", "val_accuracy=0.9", "--within", "soon"], "got 'soon'; allowed: a time above 0"),
        (["--target", "val_accuracy=0.9", "--between-nodes", "ethernet-10g"], "give them with --devices"),
        (["--target", "val_accuracy=0.9", "--nodes", "2"], "--nodes: is for sizes that were not measured"),
        (["--target", "val_accuracy=0.9", "--links", "/nowhere"], "--links: is for sizes that were not measured"),
        (["--target", "val_accuracy=0.9", "--devices", "4", "--nodes", "1,2"], "--nodes: got 2 numbers for 1"),
        (["--target", "val_accuracy=0.9", "--devices", "4", "--links", "/nowhere"], "/nowhere"),
        (["--target", "val_accuracy=0.9", "--devices", "two"], "--devices: got 'two'"),
    ],
)
def test_bad_input_is_one_error(run: Path, options: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["decide", str(run), *options])
    assert done.exit_code == 2 and words in done.output


def test_what_is_refused_ends_with_0_and_an_unknown_metric_has_no_pilot(run: Path) -> None:
    missed = CliRunner().invoke(app, ["decide", str(run), "--target", "val_accuracy=0.99"])
    assert missed.exit_code == 0 and "not reached by each training" in missed.output
    unknown = CliRunner().invoke(app, ["decide", str(run), "--target", "val_f1>=0.9"])
    assert unknown.exit_code == 0 and "no such metric was recorded" in unknown.output and "pilot" not in unknown.output
