"""Versions of a user's code and environment variables as axes, under Ray and torchrun: each row is of its own."""

from __future__ import annotations

import pytest

import harness
from harness.analysis.results import Results
from harness.report.tables.ratios import versus_table
from harness.report.tables.text import NO_BREAK
from tests.processes import RUN, ended

pytestmark = pytest.mark.slow

FILE = """
name: versions
workload: own_model:Own
variants: {before: old, after: .}
grid: {strategy: [single, ddp], devices: [1, 2], per_device_batch_size: 8, env.OWN_WIDTH: [null, 6]}
env: {NCCL_ALGO: Tree}
launcher: [ray, torchrun]
exclude: [{strategy: ddp, devices: 1}, {strategy: ddp, launcher: torchrun}, {variant: before, env.OWN_WIDTH: 6}]
throughput: {blocks: 1, warmup_steps: 2, warmup_rounds: 2, windows: 1, window_steps: 4, window_seconds: 0, twin: false,
  explain: false}
optimizer: {name: SGD, lr: 0.001}
"""
WORKLOAD = """
import importlib.util
import os

import own_helper
import torch

LATER = importlib.util.find_spec("own_later") is not None
WIDTH = int(os.environ.get("OWN_WIDTH", own_helper.OUT))  # read once, as NCCL reads its own


class Own:
    unit = "samples"

    def build_model(self):
        return torch.nn.Linear(4, WIDTH + LATER)

    def datasets(self):
        data = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
        return data, data

    def loss(self, model, batch):
        return model(batch[0]).square().sum(), torch.tensor(len(batch[0]))
"""
BEFORE, AFTER = "OUT = 1\n", "OUT = 2\n"
PARAMETERS = {("before", None): 5, ("after", None): 15, ("after", 6): 35}
"""By version and OWN_WIDTH."""
MEASURED = {("single", "ray"), ("ddp", "ray"), ("single", "torchrun")}
"""Strategy and launcher of the cells of each of them: several ranks are started by one launcher."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A run whose second version, in the experiment file's own folder, has a larger layer.

    It has a module more: were that found from the first version, its layer would be larger too.
    """
    home = tmp_path_factory.mktemp("home")
    (home / "old").mkdir()
    for folder, helper in ((home / "old", BEFORE), (home, AFTER)):
        (folder / "own_model.py").write_text(WORKLOAD)
        (folder / "own_helper.py").write_text(helper)
    (home / "own_later.py").write_text("")
    (home / "versions.yaml").write_text(FILE)
    ended(*RUN, "versions.yaml", "--output", "results", cwd=home)
    (folder,) = (home / "results" / "versions").iterdir()
    return harness.load(folder)


def test_every_row_is_of_its_version_and_variables(results: Results) -> None:
    trials = results.trials
    assert set(trials["outcome"]) == {"ok"}
    measured = list(trials[trials["kind"] == "throughput"].itertuples())
    seen = [(r.variant, r.options["env.OWN_WIDTH"], r.strategy, r.launcher, r.parameters) for r in measured]
    wanted = {(*own, *placed, count) for own, count in PARAMETERS.items() for placed in MEASURED}
    assert len(seen) == len(wanted) and set(seen) == wanted
    of_null, of_6 = ({r.group_id for r in measured if r.options["env.OWN_WIDTH"] == width} for width in (None, 6))
    assert not of_null & of_6, "a process has one value"
    nodes = [node for group in results.environment["groups"] for node in group["nodes"]]
    assert {node["variables"].get("NCCL_ALGO") for node in nodes} == {"Tree"}
    assert {label.partition("OWN_WIDTH=")[2].split()[0] for label in results.cells["label"]} == {"null", "6"}
    codes = {name: facts["code"] for name, facts in results.environment["invocations"][0]["variants"].items()}
    assert list(codes) == ["before", "after"]
    assert {line["variant"]: line["code"] for line in results.lines if line["kind"] == "throughput"} == codes
    groups = trials.groupby(["group_id", "invocation"])["variant"].nunique()
    assert set(groups) == {1, 2}  # side by side, but for OWN_WIDTH 6, which is of one


def test_the_later_version_is_compared_with_the_earlier_one_by_block(results: Results) -> None:
    along = results.versus[results.versus["axis"] == "variant"]
    assert set(zip(along["value"], along["other_value"], strict=True)) == {("after", "before")}
    assert set(zip(along["strategy"], along["launcher"], strict=True)) == MEASURED
    trials = results.trials[results.trials["kind"] == "throughput"].set_index("cell_id")
    rates = {"after": along["cell_id"], "before": along["other_id"]}
    for variant, cells in rates.items():
        assert set(trials.loc[cells, "variant"]) == {variant}
        rates[variant] = trials.loc[cells, "throughput_per_s"].to_numpy()
    assert along["ratio"].tolist() == pytest.approx(rates["after"] / rates["before"])
    assert "after / before" in versus_table(along).rows[0].cells[0].replace(NO_BREAK, " ")


def test_each_version_is_checked_against_its_own_device(results: Results) -> None:
    checks = results.equivalence
    assert set(checks["variant"]) == {"before", "after"}
    assert checks["equivalent"].all()
    bases = results.cells.set_index("cell_id")["variant"]
    assert (results.scaling["base_id"].map(bases) == results.scaling["variant"]).all()
    assert set(results.findings["severity"]) <= {"note", "warning"}
