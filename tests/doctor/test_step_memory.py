"""Tensors that steps leave behind: what is held counts, garbage that waits for its collection does not."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from weakref import ref

import pytest
import torch

from harness.config.values import MIB
from harness.doctor.facts import LEAST, StepMemory, least_growth
from harness.system.process import no_garbage_collection

HELD: list[torch.Tensor] = []


def hold() -> None:
    HELD.append(torch.zeros(LEAST))


def hold_a_graph() -> None:
    HELD.append(torch.zeros(1, requires_grad=True).sum())


def collect_and_hold(generation: int) -> None:
    gc.collect(generation)
    hold()


def leave_a_cycle() -> None:
    cycle: list[object] = [torch.zeros(LEAST)]
    cycle.append(cycle)


def kept_after(step: Callable[[], None]) -> list[int]:
    HELD.clear()
    gc.collect()
    with no_garbage_collection(), StepMemory() as memory:
        for _ in range(4):
            step()
            memory.note_step()
        return memory.kept_bytes()


COLLECTING = [(partial(collect_and_hold, generation), 4 * LEAST) for generation in range(3)]


@pytest.mark.parametrize(("step", "least"), [(hold, 4 * LEAST), (hold_a_graph, MIB), *COLLECTING])
def test_what_steps_hold_grows_also_if_they_collect_garbage(step: Callable[[], None], least: int) -> None:
    assert least_growth(kept_after(step)) >= least


def test_garbage_that_is_not_collected_yet_is_not_held_and_steps_that_keep_nothing_do_not_grow() -> None:
    assert kept_after(leave_a_cycle) == [] and least_growth(kept_after(lambda: None)) == 0


def test_a_new_tensor_at_the_address_of_an_earlier_one_counts() -> None:
    with StepMemory() as memory:
        kept = torch.zeros(LEAST)
        memory._before[id(kept)] = ref(torch.zeros(1))
        memory.note_step()
        assert memory.kept_bytes()[0] >= 4 * LEAST


@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_worker_has_frozen_stays_frozen(frozen: bool) -> None:
    was_frozen = bool(gc.get_freeze_count())
    (gc.freeze if frozen else gc.unfreeze)()
    try:
        assert least_growth(kept_after(hold)) >= 4 * LEAST
        assert bool(gc.get_freeze_count()) == frozen
    finally:
        (gc.freeze if was_frozen else gc.unfreeze)()
