"""Collectives in the user's own loss: measured and explained; what fails in an explanation costs no measurement."""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config.strategy_traits import OWN_COLLECTIVES, SPARSE
from harness.launch.ray import cluster
from harness.launch.torchrun import TorchrunLauncher
from harness.launch.worker import run_scenario
from harness.measure.exchanges import TO_ONE_RANK
from harness.measure.scenarios import TrialContext
from harness.plan.cell import Placement
from harness.plan.planner import make_plan
from harness.plan.trial import TrialResult, WorkerGroup
from harness.train.ranks import Ranks
from tests.collective_workload import LATE_S
from tests.conftest import experiment_of, laptop
from tests.forked_launch import use_forks
from tests.worlds import ROOT, fork_ranks

pytestmark = pytest.mark.slow
QUICK = {"blocks": 1, "warmup_steps": 2, "windows": 2, "window_steps": 4, "window_seconds": 0.0, "explain": True}
TWO = {"strategy": "ddp", "devices": 2, "per_device_batch_size": 8}
SGD = {"optimizer": {"name": "SGD", "lr": 0.01}}


def run(how: str) -> TrialResult:
    """The result of the trial of ddp on two ranks, one of which fails while it is explained."""
    workload = {"workload": "tests.collective_workload:FailsWhenExplained", "workload_options": {"how": how}}
    experiment = experiment_of(TWO, launcher="torchrun", throughput=QUICK, limits={"trial": 8.0}, **SGD, **workload)
    plan = make_plan(experiment, cluster.local_inventory())
    asked = [t for group in plan.groups for t in group.trials if t.cell.devices == 2 and not t.purpose]
    if not asked:
        pytest.skip("needs two cores")
    group = WorkerGroup("b0-g0", 0, Placement(1, 2, 1), "cpu", False, (asked[0],), "torchrun")
    messages = TorchrunLauncher(experiment, 1, str(ROOT)).launch(group, deadline=None)
    (result,) = (message for message in messages if isinstance(message, TrialResult))
    return result


OWN_BYTES = {
    "contrastive": {"allgather": 4},
    "logged": {"allreduce": 4},
    "late": {"allreduce": 4},
    "kept": {"allgather": 4},
    "grouped": {"allreduce": 4},
    "ring": {"recv": 4, "send": 4},
    "compiled": {"all_reduce": 4},
    "sparse": {"sparse gradients": 2 * (8 + 5 * 4)},
    "beside": {"sparse gradients": 2 * (8 + 4)},
    "none": {},
}
"""Operation, or part of the waterfall, and bytes in a step of the exchanges of each kind."""


def measure_each(rank: int, world_size: int, out: Path) -> None:
    """Measures and examines a cell of each kind, on all ranks."""
    ranks = Ranks(rank, world_size, rank, 0, "n", "127.0.0.1", (torch.device("cpu"),))
    found: dict[str, Any] = {}
    for kind in OWN_BYTES:
        workload = {"workload": "tests.collective_workload:Collectives", "workload_options": {"kind": kind}}
        experiment = experiment_of(
            {**TWO, "compile": kind == "compiled"}, diagnostics=True, throughput=QUICK, **SGD, **workload
        )
        planned = [t for t in make_plan(experiment, laptop()).trials if t.cell.devices == 2]
        cache: dict[Hashable, Any] = {}
        asked = (next(trial for trial in planned if trial.purpose == purpose) for purpose in ("", "doctor"))
        timed, examined = (run_scenario(TrialContext(trial, experiment, ranks, lambda: None, cache)) for trial in asked)
        found[kind] = {
            "kinds": [window["window_kind"] for window in timed.windows],
            "in_turn_s": [window.get("in_turn_s") for window in timed.windows if window["window_kind"] == "alone"],
            "facts": {name: timed.facts.get(name) for name in ("flops_per_unit", "explain_error")},
            "late_s": [row.get("late_s", 0.0) / row["steps"] for row in timed.windows if row["window_kind"] == "alone"],
            "own": {"exchange_s": {}, "exchange_bytes": {}, **timed.facts},
            "errors": [one for one in examined.facts["findings"] if one["severity"] == "error"],
            "sparse": any("sparse=False" in one["advice"] for one in examined.facts["findings"]),
            "unknown": examined.facts["figures"].get("equivalence of gradients", ""),
        }
    if rank == 0:
        out.write_text(json.dumps(found))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(fork_ranks(measure_each, 2, tmp_path_factory.mktemp("ranks")).read_text())
    return found


@pytest.mark.parametrize("kind", OWN_BYTES)
def test_a_loss_with_collectives_is_examined_measured_and_explained(measured: dict[str, Any], kind: str) -> None:
    seen = measured[kind]
    assert {"timed", "alone", "together"} <= set(seen["kinds"]) and None not in seen["in_turn_s"]
    assert seen["facts"]["explain_error"] == (TO_ONE_RANK if kind == "ring" else None)
    assert seen["facts"]["flops_per_unit"] > 0
    # torch 2.14's ddp divides the gradients of layers beside a sparse table twice; versions that do not find nothing
    assert not seen["errors"] or (kind == "beside" and seen["sparse"])
    own = seen["own"]
    assert own["exchange_bytes"] == OWN_BYTES[kind]
    # of messages between two ranks no seconds are known
    assert (own["exchange_s"].get(OWN_COLLECTIVES, 0.0) > 0) == (kind not in ("ring", "sparse", "beside", "none"))
    assert (own["exchange_s"].get(SPARSE, 0.0) > 0) == (kind in ("sparse", "beside"))
    if kind == "late":  # rank 0 waits for rank 1, which is no time of the all-reduce
        first, second = (seen["late_s"][rank * len(seen["late_s"]) // 2] for rank in (0, 1))
        assert LATE_S / 2 < first > second + LATE_S / 4 and own["exchange_s"][OWN_COLLECTIVES] < LATE_S / 2
    # only what keeps the number of its ranks, or a group of them, has no pass on one device
    why = {"kept": "RuntimeError: ", "grouped": "OtherRanksNeeded: "}.get(kind, "")
    assert seen["unknown"].startswith(why and f"unknown: on one device, with the whole batch: {why}"), seen
    assert bool(seen["unknown"]) == bool(why)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("hangs", "timeout after the measurement: no step"),
        ("dies", "lost after the measurement: the process of rank 1"),
    ],
)
def test_an_explanation_that_ends_the_group_costs_itself_alone(
    how: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_forks(monkeypatch)
    result = run(how)
    assert result.outcome == "ok" and result.facts["explain_error"].startswith(reason), result.facts
    assert {window["window_kind"] for window in result.windows} >= {"timed"} and len(result.steps["step_s"])
    assert len(result.ranks) == 2 and result.trial_s
