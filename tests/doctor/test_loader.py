"""The rate of a loader whose workers deliver in bursts, on a clock of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from harness.doctor import speed
from harness.doctor.facts import Steps
from harness.doctor.subject import Case
from tests.doctor.conftest import only
from tests.doctor.ranks import cell_for


class Deliveries:
    """Batches of ``workers`` processes that take ``batch_s`` each and start ``start_s`` late; the clock of the test."""

    def __init__(self, workers: int, batch_s: float, start_s: float = 0.5) -> None:
        self.workers, self.batch_s, self.now = max(1, workers), batch_s, 0.0
        self.start_s, self.taken = start_s, 0

    def __iter__(self) -> Iterator[object]:
        while True:
            self.taken += 1
            rounds = -(-self.taken // self.workers)  # all workers deliver at the end of their round
            self.now = max(self.now + 1e-6, self.start_s + rounds * self.batch_s)
            yield object()

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize("workers", [0, 1, 2, 4, 8])
def test_the_rate_of_bursts_is_that_of_all_workers(workers: int) -> None:
    deliveries = Deliveries(workers, batch_s=0.1)
    batch_s, complete = speed.time_batches(iter(deliveries), workers, 2, deliveries.clock)
    assert complete and batch_s == pytest.approx(0.1 / max(1, workers), rel=0.01)
    assert deliveries.taken >= 2 * workers + 2 * workers  # the queues, and two rounds


def test_a_rate_is_a_bound_if_time_is_up() -> None:
    deliveries = Deliveries(8, batch_s=4.0)
    batch_s, complete = speed.time_batches(iter(deliveries), 8, 2, deliveries.clock)
    assert not complete and batch_s >= 4.0 / 8  # with the start of the workers
    assert deliveries.now >= speed.LIMIT_S


def test_a_fast_loader_is_timed_for_a_while() -> None:
    deliveries = Deliveries(2, batch_s=0.001)
    batch_s, _ = speed.time_batches(iter(deliveries), 2, 2, deliveries.clock)
    assert batch_s == pytest.approx(0.0005, rel=0.01) and deliveries.taken * batch_s >= speed.SECONDS


def case_of(workers: int | None, step_s: float = 0.064) -> Case:
    """Return a case of 64 samples a step, by default a millisecond each, with this number of loader workers."""
    cell = replace(cell_for("single", 1), global_batch_size=64, loader={"workers": workers})
    return replace(Case(cell), steps=(Steps(step_s=step_s),))


@pytest.mark.parametrize(
    ("sample_ms", "workers", "processors", "decided"),
    [
        *((0.05, 0, 8, 0), (0.2, 0, 8, 1), (1.6, 0, 8, 4), (9.0, 0, 8, 7), (9.0, 0, 1, 1)),
        *((0.2, 7, 8, 3), (0.01, 7, 8, 0), (0.5, 7, 8, 7)),
    ],
)
def test_workers_that_the_file_leaves_open_are_as_many_as_keep_up_with_the_model(
    sample_ms: float, workers: int, processors: int, decided: int
) -> None:
    seen = [None, speed.Rate(sample_ms / 1e3, True, processors, workers), speed.Rate(1e-6, True, processors, workers)]
    assert speed.facts(seen, case_of(None)) == {"loader_workers": decided}
    assert speed.facts(seen, case_of(workers)) == speed.facts([None], case_of(None)) == {}


def test_a_loader_without_enough_workers_is_a_note_if_trials_get_them() -> None:
    slow = [speed.Rate(0.002, True, 8, 0)]
    only(
        speed.judge(slow, case_of(None)),
        "note",
        means="trials have 4 loader workers a device, which the file leaves open",
    )
    only(speed.judge(slow, case_of(0)), "warning", advice="set loader.workers to 2")
    far = [speed.Rate(0.1, True, 8, 0)]  # no number of workers is enough
    found = only(speed.judge(far, case_of(None)), "warning", means="loader-bound")
    assert "100 workers a device, for which it has 8 processors" in found.advice and "have 7 loader" in found.means
