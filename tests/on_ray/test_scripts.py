"""Training scripts under Ray: two sizes in one worker group, and one that hangs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest

from harness.analysis.results import Results
from harness.config.load import parse_experiment
from harness.launch.ray import cluster
from tests.conftest import ROOT
from tests.on_ray.conftest import Execute

pytestmark = pytest.mark.slow
QUICK = {"blocks": 1, "twin": False, "warmup_steps": 3, "warmup_rounds": 2, "windows": 1, "window_steps": 4}
QUICK |= {"window_seconds": 0.0}
GRID = {"devices": [1, 2], "per_device_batch_size": 64}
HANGS = """
import torch
weight = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
def stuck():
    while True:
        pass
for _ in range(4):
    weight.sum().backward()
    optimizer.step()
stuck()
"""


def run(execute: Execute, script: Path, **sections: object) -> Results:
    content = {"name": "script", "script": str(script), "grid": GRID, "throughput": QUICK, **sections}
    results, _ = execute(parse_experiment(content, source="script.yaml"))
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(script.parent) in " ".join(p.info["cmdline"] or ())]
    return results


def test_a_script_for_torchrun_is_measured_on_one_rank_and_on_two_and_named_as_connected(execute: Execute) -> None:
    if cluster.local_inventory().nodes[0].cores < 2:
        pytest.skip("needs two cores")
    script = ROOT / "experiments" / "my_script.py"
    results = run(execute, script, arguments="--batch-size {per_device_batch_size}")
    trials = results.trials.set_index("devices")
    assert trials["outcome"].tolist() == ["ok", "ok"], trials["reason"].tolist()
    assert trials["group_id"].nunique() == 1
    assert trials.loc[2, "connected_ranks"] == 2 and results.findings.empty
    scaling = results.scaling.set_index("devices")
    assert scaling.loc[2, "equivalence"] == "connected" and scaling.loc[2, "base_id"] == scaling.loc[1, "cell_id"]
    assert scaling["throughput_per_s"].notna().all() and scaling["excluded"].isna().all()


def test_a_script_that_hangs_is_named_by_its_own_line_and_leaves_nothing(execute: Execute, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HANGS)
    results = run(execute, tmp_path / "train.py", grid={**GRID, "devices": 1}, limits={"trial": 15.0})
    (reason,) = results.trials["reason"]
    assert results.trials["outcome"].tolist() == ["timeout"]
    assert re.search(r"rank 0 in stuck \(train.py:[67]\)$", reason), reason
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def loop(execute: Execute, name: str, **sections: object) -> Results:
    content = {"name": "loop", "loop": name, "grid": GRID, "throughput": QUICK, **sections}
    results, _ = execute(parse_experiment(content, source="loop.yaml"))
    return results


def test_a_ray_train_function_is_measured_in_a_worker_group_of_its_own_for_each_size(
    execute: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cluster.local_inventory().nodes[0].cores < 2:
        pytest.skip("needs two cores")
    config = {"batch_size": "{per_device_batch_size}", "width": 64, "lr": 0.01, "epochs": 100_000}
    results = loop(execute, "tests.ray_loops:trains", config=config)
    trials = results.trials.set_index("devices")
    assert trials["outcome"].tolist() == ["ok", "ok"], trials["reason"].tolist()
    assert trials["group_id"].nunique() == 2 and set(trials["unit"]) == {"samples"}
    assert results.scaling.set_index("devices").loc[2, "equivalence"] == "connected" and results.findings.empty


def test_a_ray_train_function_gets_its_part_of_ray_data_s_datasets_and_its_reports_are_its_learning_curve(
    execute: Execute,
) -> None:
    if cluster.local_inventory().nodes[0].cores < 2:
        pytest.skip("needs two cores")
    results = loop(
        execute,
        "tests.ray_loops:reads_datasets",
        config={"batch_size": "{per_device_batch_size}", "epochs": 3},
        datasets={"train": "tests.ray_loops:numbers"},
        throughput=None,
        convergence={"seeds": 0, "target": {"metric": "loss", "at_most": 1000.0}},
        limits={"trial": 120.0},
    )
    assert results.trials["outcome"].tolist() == ["ok", "ok"], results.trials["reason"].tolist()
    epochs = results.epochs.merge(results.trials[["trial_id", "devices"]], on="trial_id")
    assert epochs["val_rows"].tolist() == [640 / devices for devices in epochs["devices"]]
    assert epochs["epoch"].tolist() == [1, 2, 3] * 2 and (epochs["reported_loss"] > 0).all()
    assert epochs["samples"].tolist() == [640, 1280, 1920] * 2
    trained = results.convergence.set_index("devices")
    assert trained["target"].unique().tolist() == ["reported_loss <= 1000"] and trained["reached"].all()
    assert trained.loc[2, "equivalence"] == "connected"


def test_the_ingest_of_a_loop_is_measured_beside_its_training_and_is_no_speed_of_training(execute: Execute) -> None:
    results = loop(
        execute,
        "tests.ray_loops:reads_datasets",
        grid={"devices": 1, "per_device_batch_size": 64, "mode": ["train", "ingest"]},
        config={"batch_size": "{per_device_batch_size}", "epochs": 100_000},
        datasets={"train": "tests.ray_loops:many_numbers"},
        throughput={**QUICK, "explain": False},
    )
    trials = results.trials
    assert trials["outcome"].tolist() == ["ok", "ok"], trials["reason"].tolist()
    modes = {
        options["workload.mode"]: ingest for options, ingest in zip(trials["options"], trials["ingest"], strict=True)
    }
    assert modes["ingest"] and pd.isna(modes["train"])
    timed = results.windows[results.windows["window_kind"] == "timed"]
    assert set(trials["unit"]) == {"samples"} and (timed["weight"] == 4 * 64).all()
    assert results.leaders["options"].tolist() == [{"workload.mode": "train"}]
    assert "ingest" in set(results.verdict["topic"]) and "choice" not in set(results.verdict["topic"])


def test_a_trainer_of_hugging_face_over_ray_data_is_measured_as_it_is(execute: Execute) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers, of the extra trainers")
    datasets = {"train": "tests.ray_loops:labelled", "evaluation": "tests.ray_loops:labelled"}
    of_both: dict[str, Any] = {"datasets": datasets, "grid": {"devices": 1, "per_device_batch_size": 64}}
    config = {"batch_size": "{per_device_batch_size}", "steps": 100_000, "every": 40}
    results = loop(execute, "tests.ray_loops:fine_tunes", config=config, **of_both)
    assert results.trials["outcome"].tolist() == ["ok"], results.trials["reason"].tolist()
    timed = results.windows[results.windows["window_kind"] == "timed"]
    assert (timed["weight"] == 4 * 64).all() and set(results.trials["unit"]) == {"samples"}
    config |= {"steps": 24, "every": 8}
    trained = {"throughput": None, "convergence": {"seeds": 0}}
    results = loop(execute, "tests.ray_loops:fine_tunes", config=config, **trained, **of_both)
    assert results.trials["outcome"].tolist() == ["ok"], results.trials["reason"].tolist()
    assert results.epochs["samples"].tolist() == [512, 1024, 1536] and (results.epochs["val_loss"] > 0).all()


def test_datasets_that_cannot_be_made_are_a_row(execute: Execute) -> None:
    grid = {"devices": 1, "per_device_batch_size": 8}
    datasets = {"train": "tests.ray_loops:no_file"}
    results = loop(execute, "tests.ray_loops:reads_datasets", grid=grid, datasets=datasets, config={"epochs": 1})
    assert results.trials["outcome"].tolist() == ["error"], results.trials[["outcome", "reason"]].to_dict()
    assert "FileNotFoundError: no file numbers.csv" in results.trials["reason"].iloc[0]


def test_a_loop_that_takes_no_step_is_a_row(execute: Execute) -> None:
    """One that raises: tests/measure/script/test_following.py."""
    results = loop(execute, "tests.ray_loops:no_step", grid={"devices": 1, "per_device_batch_size": 8})
    assert results.trials["outcome"].tolist() == ["error"]
    assert results.trials["reason"].iloc[0].startswith("ScriptEnded on rank 0: the loop ended by itself")
