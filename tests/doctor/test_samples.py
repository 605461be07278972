"""Validation samples that are copies of training samples, by value; the distinct samples of an epoch."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import IO, Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from harness.doctor import data
from harness.doctor import validation as validation_check
from harness.doctor.subject import Case, Subject
from harness.doctor.validation import Copies, copies_by_value
from harness.train.ranks import Ranks
from tests.doctor.conftest import only
from tests.doctor.healthy import Healthy, Samples
from tests.doctor.ranks import cell_for, subject_of

ROWS = torch.arange(600.0).reshape(200, 3)
FORKS = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads


def rows(part: torch.Tensor) -> TensorDataset:
    return TensorDataset(part, torch.zeros(len(part)))


@pytest.mark.parametrize(
    ("validation", "found"),
    [
        (rows(ROWS[50:80].clone()), Copies(30, 30, 200)),
        (rows(torch.cat([ROWS[:10], -ROWS[1:91]])), Copies(10, 100, 200)),
        (rows(-ROWS[1:]), Copies(0, 199, 200)),
        ([(array, torch.tensor(0.0)) for array in ROWS[:20].numpy()], Copies(20, 20, 200)),
        (TensorDataset(ROWS[:50], torch.ones(50)), Copies(0, 50, 200)),
    ],
    ids=["a part", "some", "none", "as arrays", "other labels"],
)
def test_equal_values_are_counted(clock: list[float], validation: Any, found: Copies) -> None:
    assert copies_by_value(rows(ROWS), validation, seed=0) == found


def test_a_few_equal_samples_may_be_chance_and_those_of_few_values_too(clock: list[float]) -> None:
    assert not Copies(7, 10, 200).is_many and Copies(8, 160, 200).is_many
    assert not Copies(8, 200, 200).is_many and Copies(10, 200, 200).is_many
    assert copies_by_value(rows((ROWS % 2).float()), rows((ROWS[:50] % 2).float()), seed=0) == Copies()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of the check's own clock."""
    seconds = [0.0]
    monkeypatch.setattr(validation_check.time, "perf_counter", lambda: seconds[0])
    return seconds


class Slow(Sequence[Any]):
    """A set of which each sample takes a second of ``clock``."""

    def __init__(self, values: torch.Tensor, clock: list[float]) -> None:
        self.values, self.clock, self.read = values, clock, list[int]()

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> object:
        self.clock[0] += 1.0
        self.read.append(index)
        return self.values[index]


def test_a_slow_training_set_is_read_in_part_all_over_it(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation_check, "SECONDS", 50.0)
    monkeypatch.setattr(validation_check, "MOST", 50)
    train = Slow(ROWS[:100], clock)
    found = copies_by_value(train, list(ROWS[80:100].clone()), seed=0)  # type: ignore[arg-type]
    assert found == Copies(10, 20, 63) and sorted(train.read[:50]) == [*range(0, 100, 2)]


def test_slow_sets_are_read_in_part_within_one_time(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation_check, "SECONDS", 40.0)
    train, validation = Slow(ROWS, clock), Slow(ROWS.clone(), clock)
    found = copies_by_value(train, validation, seed=0)
    assert (found.compared, found.read, clock[0]) == (31, 15, 46.0)  # 1, 2, 4, ... at once: at most twice the time
    assert max(validation.read[:16]) > 150  # spread over the set


def test_the_generators_are_as_before() -> None:
    noisy: Any = Samples(lambda data, index: (torch.rand(2), np.float64(index)))
    before = torch.get_rng_state()
    copies_by_value(noisy, noisy, seed=0)
    assert torch.equal(before, torch.get_rng_state())


DATA = TensorDataset(torch.arange(100.0))


@pytest.mark.parametrize(
    ("trains", "number"),
    [
        ((DATA,), 100),
        ((DATA, DATA), 100),
        ((DATA, TensorDataset(torch.arange(50.0))), None),
        ((Subset(DATA, range(40)),) * 2, 40),
        ((Subset(DATA, [3] * 40),) * 2, 1),
        ((Subset(Subset(DATA, range(0, 100, 2)), range(20)), Subset(DATA, range(0, 40, 2))), 20),
        ((Subset(DATA, range(0, 100, 2)), Subset(DATA, range(1, 100, 2))), 50),
    ],
    ids=["one device", "two ranks", "sizes differ", "a part", "one sample", "nested", "sharded again"],
)
def test_samples_count_once(trains: tuple[Any, ...], number: int | None) -> None:
    seen = []
    for rank, train in enumerate(trains):
        ranks = Ranks(rank, len(trains), rank, 0, "n", "127.0.0.1", (torch.device("cpu"),))
        subject = Subject(cell_for("ddp", len(trains), 10), Healthy(), (train, DATA), 0, ranks)
        seen.append(data.Samples(len(train), [], [], [], drawn=data.drawn_samples(subject)))
    assert data.distinct(seen) == number


class Rows(Sequence[Any]):
    """Rows of a file that is opened once, whose position forked loader workers share."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self.file.write(ROWS.numpy().tobytes())

    def __len__(self) -> int:
        return len(ROWS)

    def opened(self) -> IO[bytes]:
        return self.file

    def close(self) -> None:
        self.opened().close()
        self.file.close()

    def __getitem__(self, index: Any) -> object:
        file = self.opened()
        file.seek(12 * index)
        time.sleep(0.0002)  # the time of a larger row
        return np.frombuffer(file.read(12), dtype=np.float32).copy(), index % 3


class OpensLate(Rows):
    """Opens the file at the first use, as h5py's and LMDB's users do: in a process that has not read before."""

    own: IO[bytes] | None = None

    def opened(self) -> IO[bytes]:
        if self.own is None:
            self.own = open(f"/proc/self/fd/{self.file.fileno()}", "rb", buffering=0)  # noqa: SIM115
        return self.own


class Normalised(Sequence[Any]):
    """Sums of many numbers, whose last digit depends on the number of threads."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: Any) -> object:
        image = torch.rand(3, 224, 224, generator=torch.Generator().manual_seed(index))
        return (image - image.mean()) / image.std()

    def close(self) -> None:
        pass


class Unseeded(Normalised):
    """Differs in the process itself too, which another check names."""

    def __getitem__(self, index: Any) -> object:
        return float(np.random.random())


class FailsInWorkers(Normalised):
    def __getitem__(self, index: Any) -> object:
        if torch.utils.data.get_worker_info():
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return index


def subject_with(data_set: Any, workers: int | None) -> Subject:
    """A data set under a cell with loader workers."""

    class Own(Healthy):
        def datasets(self) -> tuple[Any, Any]:
            return data_set, data_set

    return subject_of(Own(), replace(cell_for("single", 1), loader={"workers": workers}))


@pytest.mark.slow
@FORKS
@pytest.mark.parametrize(
    ("data_set", "workers", "differ", "compared"),
    [
        *((Rows, 2, True, 200), (Rows, 0, False, 0), (OpensLate, 2, False, 200), (Normalised, 2, False, 40)),
        (Unseeded, 2, False, 0),
    ],
)
def test_samples_are_compared_between_processes(
    monkeypatch: pytest.MonkeyPatch, data_set: type[Any], workers: int, differ: bool, compared: int
) -> None:
    monkeypatch.setattr(data, "MOST_S", 60.0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # as a rank may have, and no loader worker has
    with closing(data_set()) as opened:
        seen = data.observe_workers(subject_with(opened, workers))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
    assert seen.compared == compared and (seen.differ > 5) == differ and not seen.failed, seen
    found = list(data.judge_workers([data.ByWorkers(), seen], Case(cell_for("single", 1))))
    if differ:
        only(found, "error", seen="of 200 compared samples differ", advice="loader.workers: 0")
    else:
        assert found == []


@pytest.mark.slow
@FORKS
def test_loader_workers_that_fail_are_a_finding_and_no_error_of_the_samples() -> None:
    found = data.judge_workers([data.observe_workers(subject_with(FailsInWorkers(), 1))], Case(cell_for("single", 1)))
    only(found, "warning", seen="re-initialize CUDA", advice="tensors of a data set on the CPU")


@pytest.mark.slow
@FORKS
@pytest.mark.parametrize(("data_set", "severity"), [(Rows, "warning"), (FailsInWorkers, "warning"), (OpensLate, None)])
def test_data_that_cannot_be_read_by_workers_that_are_left_open_are_read_without(
    data_set: type[Any], severity: str | None
) -> None:
    opened = data_set()
    found = [*data.judge_workers([data.observe_workers(subject_with(opened, None))], Case(cell_for("single", 1)))]
    assert [finding.severity for finding in found] == [severity] * bool(severity)
    assert all(data.NO_WORKERS in finding.means for finding in found)
    if hasattr(opened, "close"):
        opened.close()


def test_a_sample_that_is_changed_in_place_is_not_stable() -> None:
    class Grows(Sequence[Any]):
        values = torch.ones(100, 2)

        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: Any) -> object:
            self.values[index] *= 1.5
            return self.values[index]

    seen = data.observe(subject_with(Grows(), 0))
    found = only(data.judge([seen], Case(cell_for("single", 1))))
    assert found.severity == "error" and "change when they are read again" in found.seen


@pytest.mark.parametrize(
    ("read_s", "elsewhere", "cached"),
    [
        ((0.1, 0.001), (0.1, 0.001), True),
        ((0.1, 0.001), (0.001, 0.001), False),  # other load delayed the first reading
        ((0.1, 0.05), (0.1, 0.05), False),
        ((0.004, 0.0001), (0.004, 0.0001), False),  # too short to tell
    ],
)
def test_samples_are_cached_if_two_readings_of_two_sets_of_them_say_so(
    read_s: tuple[float, float], elsewhere: tuple[float, float], cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter((*read_s, *elsewhere))
    timed = data._timed
    monkeypatch.setattr(data, "_timed", lambda *a: (timed(*a)[0], next(seconds)))
    subject = subject_with(rows(ROWS), 0)
    found = [*data.judge([data.observe(subject)], Case(cell_for("single", 1)))]
    seconds = iter((*read_s, *elsewhere))
    on_device = replace(subject, cell=replace(subject.cell, data="synthetic_device"))
    assert data.observe(on_device).read_s == (0.0, 0.0), "its steps are timed without a loader"
    if cached:
        only(found, "note", seen="reading 64 samples for the first time: 100 ms, again: 1 ms")
    else:
        assert found == []
