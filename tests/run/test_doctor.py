"""``harness doctor``: a cluster that is lost, and the links of a script, whose ranks are not the harness's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.cli.arguments import FAILED, exit_code_of
from harness.config.experiment import Experiment
from harness.errors import ClusterLostError
from harness.plan.planner import make_plan
from harness.run import doctor
from harness.run.events import DoctorFinished, Event, Note
from harness.run.request import Request, read_experiment
from tests.conftest import laptop

TEXT = """
name: lost
workload: mlp
grid: {strategy: single, devices: 1, per_device_batch_size: 8}
throughput: {blocks: 1}
"""


def test_the_links_of_a_script_are_measured_between_ranks_of_the_harness_on_the_same_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("")
    file = tmp_path / "e.yaml"
    file.write_text(
        "{name: s, script: train.py, device: cpu, grid: {devices: [1, 2], per_device_batch_size: 8, env.NCCL_ALGO: a},"
        " launcher: torchrun, env: {NCCL_IB_HCA: b}, cost: {per_device_hour: 1, currency: USD}, limits: {cost: 9}}"
    )
    found: list[Experiment] = []
    monkeypatch.setattr(doctor, "run", lambda request, experiment, emit: found.append(experiment))
    doctor.run_links(Request(file), read_experiment(Request(file)), lambda event: None)
    (trial,) = make_plan(found[0], laptop(2)).keeping(lambda trial: trial.purpose == "links").trials
    assert (trial.cell.strategy, trial.cell.devices, found[0].device) == ("ddp", 2, "cpu")
    assert trial.cell.launcher == "torchrun" and trial.cell.env == {"NCCL_ALGO": "a", "NCCL_IB_HCA": "b"}


def test_links_are_measured_of_a_file_whose_published_figure_is_of_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "e.yaml"
    figure = "published: [{metric: val_accuracy, value: 0.9, hardware: a GPU, source: a paper, cell: {devices: 1}}]\n"
    file.write_text(
        f"{TEXT}device: cpu\nconvergence: {{epochs: 1}}\n{figure}".replace("devices: 1,", "devices: [1, 2],", 1)
    )
    found: list[Experiment] = []
    monkeypatch.setattr(doctor, "run", lambda request, experiment, emit: found.append(experiment))
    doctor.run_links(Request(file), read_experiment(Request(file)), lambda event: None)
    assert make_plan(found[0], laptop(2)).trials


def test_a_lost_cluster_shows_the_findings_so_far_and_is_no_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def lost(*_: object) -> Iterator[None]:
        raise ClusterLostError("the mailbox is gone")
        yield

    monkeypatch.setattr(doctor, "start_ray", lost)
    (tmp_path / "e.yaml").write_text(TEXT)
    request, events = Request(tmp_path / "e.yaml"), list[Event]()
    assert exit_code_of(lambda: doctor.run_doctor(request, read_experiment(request), events.append)) == FAILED == 1
    notes = [event.text for event in events if isinstance(event, Note)]
    assert "The cluster was lost. The findings of the cells that were examined before:" in notes
    assert isinstance(events[-1], DoctorFinished)
