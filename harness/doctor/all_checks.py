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
    padding,
    parameters,
    randomness,
    shapes,
    state,
    threads,
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
    randomness.STREAMS,
    threads.CHECK,
    divergence.CHECK,
    gradients.CHECK,
    loader.CHECK,
    collectives.CHECK,
)
