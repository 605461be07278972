"""Finished tables -> figures, one function a figure. Colour and marker mean strategy in every one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.plots.batches import batch_sizes
from harness.plots.common import Drawing, Tables, style
from harness.plots.convergence import learning_curves
from harness.plots.phases import step_phases
from harness.plots.ratios import paired_ratios
from harness.plots.scaling import efficiency_by_devices, throughput_by_devices
from harness.plots.steps import step_times
from harness.plots.waterfall import efficiency_waterfall

__all__ = ["FIGURES", "Drawing", "Tables", "style"]

FIGURES: Sequence[Callable[[Tables], Drawing]] = (
    throughput_by_devices,
    efficiency_by_devices,
    paired_ratios,
    batch_sizes,
    step_phases,
    efficiency_waterfall,
    step_times,
    learning_curves,
)
