"""``harness doctor`` where its cluster is lost: the findings so far, and the exit code of a failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.cli.arguments import FAILED, exit_code_of
from harness.errors import ClusterLostError
from harness.run import doctor
from harness.run.events import DoctorFinished, Event, Note
from harness.run.request import Request, read_experiment

TEXT = """
name: lost
workload: mlp
grid: {strategy: single, devices: 1, per_device_batch_size: 8}
throughput: {blocks: 1}
"""


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
