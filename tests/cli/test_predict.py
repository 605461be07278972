"""``harness predict``: its arguments, and the links of another measurement."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from harness.analysis.prediction import read_links
from harness.cli.commands import app
from harness.cli.values import parse_numbers
from harness.errors import PredictionError, RunFolderError
from tests.analysis.prediction.world import collectives

EXAMPLE = Path(__file__).parents[2] / "results" / "example" / "scaling-2-cpu-cores"


@pytest.mark.parametrize("text", ["", "a", "16,", "0", "-4", "1.5", "99999999", "4;8"])
def test_numbers_are_joined_by_commas_and_other_text_is_refused(text: str) -> None:
    assert parse_numbers("16", "--devices") == (16,) and parse_numbers("16, 32,64", "--devices") == (16, 32, 64)
    with pytest.raises(PredictionError, match=r"--devices: got .* allowed: whole numbers above 0"):
        parse_numbers(text, "--devices")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_links_are_read_from_a_table(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"collectives{suffix}"
    table = collectives()
    table.to_csv(path, index=False) if suffix == ".csv" else table.to_parquet(path)
    pd.testing.assert_frame_equal(read_links(path, collectives()), table)


def test_links_of_another_machine_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "collectives.csv"
    collectives(device_model="NVIDIA H100").to_csv(path, index=False)
    with pytest.raises(PredictionError, match=r"the devices of .* are NVIDIA H100, those of the run CPU"):
        read_links(path, collectives())
    collectives(backend="nccl").to_csv(path, index=False)
    with pytest.raises(PredictionError, match=r"the backend of .* are nccl, those of the run gloo"):
        read_links(path, collectives())


def test_what_is_no_table_of_links_is_refused(tmp_path: Path) -> None:
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
    problems = ((run, "recorded no exchanges, from which steps are predicted"), (tmp_path, "not a run folder"))
    for folder, problem in problems:
        done = CliRunner().invoke(app, ["predict", str(folder), "--devices", "8"])
        assert done.exit_code == 2 and done.output.count("\n") == 1 and problem in done.output
