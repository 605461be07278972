"""Generators are found wherever a workload holds them, and what a block draws from them, or seeds, is seen."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harness.doctor.data import repeats_draws
from harness.measure.generators import UNKNOWN, State, drawing, generators_of
from tests.doctor.healthy import Samples

OF_THE_MODULE = np.random.default_rng(1)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


@dataclass
class Held:
    noise: torch.Generator = field(default_factory=seeded)


class Slots:
    __slots__ = ("noise",)

    def __init__(self) -> None:
        self.noise = seeded()


class Unreadable(random.Random):
    def getstate(self) -> Any:
        raise NotImplementedError


class NotToBeSet(random.Random):
    def setstate(self, state: Any) -> None:
        raise NotImplementedError


def closure() -> Callable[[], torch.Tensor]:
    noise = seeded()
    return lambda: torch.rand(1, generator=noise)


@pytest.mark.parametrize(
    ("held", "name"),
    [
        (seeded(), "0.held"),
        ([{"a": seeded()}], "0.held[0]['a']"),
        (Held(), "0.held.noise"),
        ({"b": [Slots()]}, "0.held['b'][0].noise"),
        (closure(), "0.held.noise"),
        (partial(torch.rand, generator=seeded()), "0.held"),
        (np.random.default_rng(1).uniform, "0.held"),
        (random.Random(1).gauss, "0.held"),
        ([nn.Linear(1, 1), Held()], "0.held[1].noise"),
        (np.random.RandomState(1), "0.held"),
    ],
)
def test_generators_are_found_in_what_a_module_holds(held: Any, name: str) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].held = held
    others = {*generators_of(nn.Linear(1, 1)), f"{__name__}.OF_THE_MODULE"}
    assert generators_of(model).keys() - others == {name}


def test_generators_of_the_workload_and_of_its_module_are_found_and_those_of_the_process_once() -> None:
    held = Held()
    held.default = torch.default_generator  # type: ignore[attr-defined]
    names = generators_of(held)
    assert [*names] == ["torch's", "NumPy's", "Python's", "Held.noise", f"{__name__}.OF_THE_MODULE"]
    assert names["Python's"].getstate() == random.getstate()
    assert State(names["NumPy's"]).digest != UNKNOWN


def seeds(held: dict[str, Any]) -> None:
    held["own"] = np.random.default_rng(3)
    held["own"].random()


@pytest.mark.parametrize(
    ("block", "drawn"),
    [
        (lambda held: None, []),
        (lambda held: held["noise"].random(), ["dict['noise']"]),
        (lambda held: (random.seed(3), random.random()), ["Python's"]),
        (lambda held: (np.random.seed(3), np.random.rand()), ["NumPy's"]),
        (seeds, ["dict['own']"]),
        (lambda held: torch.rand(1), ["torch's"]),
    ],
)
def test_a_block_that_draws_or_seeds_is_told_each_time_from_one_that_does_not(block: Any, drawn: list[str]) -> None:
    held: dict[str, Any] = {"noise": random.Random(1), "own": np.random.default_rng(3)}
    before = {name: State(each).digest for name, each in generators_of(held).items()}
    for _ in range(2):  # after the first the state is the one that the block seeds
        with drawing(held) as drew:
            block(held)
        assert [*drew()] == drawn
    after = {name: State(each).digest for name, each in generators_of(held).items()}
    assert {name for name in before if before[name] != after[name]} == set(drawn)


@pytest.mark.parametrize("kind", [Unreadable, NotToBeSet, random.SystemRandom])
def test_a_generator_that_cannot_be_read_or_set_counts_as_drawn_from(kind: type[random.Random]) -> None:
    with drawing([kind(1)]) as drew:
        pass
    assert drew() == {"list[0]": UNKNOWN}
    own = kind(1)
    assert not repeats_draws(Samples(lambda data, index: (data[index], own.random())))


def of_the_set(data: Any, index: int) -> Any:
    data.own = np.random.default_rng(7)
    return data[index][0] + data.own.random()


@pytest.mark.parametrize(
    ("read", "repeats"),
    [
        (lambda data, index: data[index], False),
        (lambda data, index: (np.random.seed(1), data[index][0] + np.random.rand()), True),
        (lambda data, index: (np.random.seed(index), data[index][0] + np.random.rand()), False),
        (lambda data, index: data[index][0] + np.random.rand(), False),
        (of_the_set, True),
    ],
)
def test_samples_of_which_each_seeds_numpys_generator_are_told(read: Any, repeats: bool) -> None:
    before = random.getstate(), np.random.get_state()[1].sum(), torch.get_rng_state().sum()  # type: ignore[index]
    assert repeats_draws(Samples(read)) is repeats
    assert before == (random.getstate(), np.random.get_state()[1].sum(), torch.get_rng_state().sum())  # type: ignore[index]
