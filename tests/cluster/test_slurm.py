"""Our batch script under a real SLURM: to a report; interrupted by USR1, queued again, completed; cancelled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.batch import cancel, interrupt_by_signal
from tests.cluster.machines import machines
from tests.cluster.slurm import Slurm, slurm, why_not

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    with machines(folder) as nodes, slurm(nodes, folder / "slurm") as running:
        yield running


def test_a_job_that_is_interrupted_is_queued_again_and_completed(cluster: Slurm, tmp_path: Path) -> None:
    results = interrupt_by_signal(cluster, tmp_path)
    assert set(results.trials["outcome"]) == {"ok"} and len(results.trials) == 4
    assert [each["ended"] for each in results.environment["invocations"]] == ["interrupted", "finished"]


def test_a_job_that_its_user_cancels_is_not_queued_again(cluster: Slurm, tmp_path: Path) -> None:
    job = cancel(cluster, tmp_path)
    assert cluster.state(job.id) == "CANCELLED" and cluster.restarts(job.id) == 0


def test_a_job_whose_batch_script_is_terminated_reports_and_is_not_queued_again(cluster: Slurm, tmp_path: Path) -> None:
    """The signal reaches the batch script alone; scancel itself ends Ray at the same time, and may leave its folder."""
    job = cancel(cluster, tmp_path, "--signal=TERM", "--batch", state="FAILED")
    assert (job.run_folder() / "report.html").is_file() and job.folders() == []
