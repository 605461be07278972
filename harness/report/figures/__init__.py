"""Finished tables -> figures, one function a figure. Colour and marker mean strategy in every one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from harness.analysis.improvements import CONFIRMATION
from harness.analysis.results import Results, improving_runs
from harness.report.figures.devices import bus_bandwidth, memory_by_gpu
from harness.report.figures.drawing import Drawing, style
from harness.report.figures.learning_curves import learning_curves, losses_by_step
from harness.report.figures.prediction import predicted_steps
from harness.report.figures.scaling import batch_sizes, efficiency_by_devices, paired_ratios, throughput_by_devices
from harness.report.figures.steps import efficiency_waterfall, step_phases, step_times

__all__ = ["FIGURES", "Drawing", "style"]


def improved_waterfall(results: Results) -> Drawing:
    """Draw the waterfall of the confirmation of ``--improve``: the cell before and after."""
    runs = (run for _, step, run in improving_runs(results.folder) if step == CONFIRMATION)
    title = "Efficiency loss by part, before and after what was tried"
    if (run := next(runs, None)) is None:
        return Drawing(title, "Left out: no setting was confirmed by --improve.", None)
    return replace(efficiency_waterfall(run), title=title)


FIGURES: Mapping[str, Callable[[Results], Drawing]] = {
    "throughput": throughput_by_devices,
    "efficiency": efficiency_by_devices,
    "waterfall": efficiency_waterfall,
    "improved": improved_waterfall,
    "ratios": paired_ratios,
    "batch_sizes": batch_sizes,
    "prediction": predicted_steps,
    "convergence": learning_curves,
    "step_times": step_times,
    "phases": step_phases,
    "training_steps": losses_by_step,
    "device_memory": memory_by_gpu,
    "links": bus_bandwidth,
}
"""Every figure of figures/ and of the report: its name and the function that draws it, in the order of the page."""
