"""Every check of the doctor, in the order in which they are observed and judged."""

from __future__ import annotations

from typing import Any

from harness.doctor import (
    batches,
    collectives,
    copies,
    data,
    devices,
    divergence,
    gradients,
    loader,
    loss_parameters,
    loss_weight,
    memory,
    memory_growth,
    padding,
    parameters,
    randomness,
    rank_state,
    shapes,
    slow_rank,
    state,
    threads,
    train_mode,
    transfer,
    validation,
    wrapper,
)
from harness.doctor.check import Check

CHECKS: tuple[Check[Any], ...] = (
    transfer.CHECK,
    devices.CHECK,
    randomness.CHECK,
    loss_parameters.CHECK,
    state.CHECK,
    shapes.CHECK,
    data.CHECK,
    validation.CHECK,
    memory.CHECK,
    batches.CHECK,
    copies.CHECK,
    # judged after the real steps:
    loss_weight.CHECK,
    padding.CHECK,
    wrapper.CHECK,
    parameters.CHECK,
    train_mode.CHECK,
    rank_state.CHECK,
    memory_growth.CHECK,
    slow_rank.CHECK,
    randomness.STREAMS,
    threads.CHECK,
    divergence.CHECK,
    gradients.CHECK,
    loader.CHECK,
    collectives.CHECK,
)
