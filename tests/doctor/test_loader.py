"""The rate of a loader whose workers deliver in bursts, on a clock of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.doctor import speed


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
