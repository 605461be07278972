"""The forecast of ``--memory`` as a table and lines of text, for the console."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from harness.plan.cell import Cell
from harness.plan.checks.memory import REFUSE, WARN
from harness.plan.memory_forecast import CUDA_ALLOWANCE, Forecast
from harness.run.events import MemoryForecast
from harness.system.sanitize import escape_control
from harness.system.units import GIB, MIB

STATE = ("para-\nmeters", "gradi-\nents", "opti-\nmizer", "buckets")
REST = ("activa-\ntions", "allow-\nance")
WIDE = 120
"""The least columns of a terminal in which each part of the state has a column of its own."""
COLOURS = {"fits": "green", "may not fit": "yellow", "will not fit": "red"}
MISSING = "-"


def memory_table(event: MemoryForecast, width: int) -> Table:
    """Return a row for each cell: its peak on one device, the parts of it in MiB, and the verdict.

    ``width``: columns of the terminal; in a narrow one the parts of the state are one.
    """
    wide = width >= WIDE
    table = Table(
        title="Will it fit: estimated peak memory of one device, MiB",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("cell", overflow="fold")
    for heading in ("peak", *(STATE if wide else ("state",)), *REST):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for cell, found in sorted(event.forecasts.items(), key=lambda item: _order(item[0])):
        verdict = Text(found.verdict, style=COLOURS.get(found.verdict, ""))
        verdict.append(" (counted)" if found.how == "counted" else "", style="")
        table.add_row(escape_control(event.labels.of_cell(cell)), *map(_mib, _sizes(found, wide=wide)), verdict)
    return table


def _order(cell: Cell) -> tuple[str, int, int, str]:
    return (cell.strategy, cell.devices, cell.global_batch_size, cell.id)


def _sizes(found: Forecast, *, wide: bool) -> list[int | None]:
    """Return the peak and its parts."""
    state = found.state
    parts = (state.parameters, state.gradients, state.optimizer, state.buckets) if state else (None,) * len(STATE)
    kept = parts if wide else (state.total if state else None,)
    return [found.peak, *kept, found.activations, found.allowance]


def _mib(size: int | None) -> str:
    if size is None:
        return MISSING
    return f"{size / MIB:,.0f}" if size >= 100 * MIB or not size else f"{size / MIB:.1f}"


def memory_lines(event: MemoryForecast) -> list[str]:
    """Return what the numbers of the table mean and are compared with, and the reasons of those that are missing."""
    forecasts = event.forecasts
    lines = []
    for on_cpu in sorted({cell.device == "cpu" for cell in forecasts}):
        first = next(found for cell, found in forecasts.items() if (cell.device == "cpu") is on_cpu)
        lines += [_available(first, on_cpu=on_cpu), _allowance(on_cpu=on_cpu)]
    lines.append(
        "State: parameters, gradients, the optimizer's state and ddp's buckets. A training step is traced on tensors "
        "without memory, as PyTorch runs it on a CPU: without workspaces of kernels, and without compilation. "
        "Activations are what its peak is above the other parts, temporary tensors included."
    )
    if any(found.how == "counted" for found in forecasts.values()):
        lines.append("Counted: from the sizes of the model and the trace of one device; the strategy is not traced.")
    reasons: dict[str, list[Cell]] = {}
    for cell, found in forecasts.items():
        if found.reason:
            reasons.setdefault(found.reason, []).append(cell)
    for reason, cells in reasons.items():
        more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        lines.append(f"Not traced: {event.labels.of_cell(cells[0])}{more}: {reason}.")
    return lines


def _available(found: Forecast, *, on_cpu: bool) -> str:
    if found.available is None:
        place, advice = ("node", "") if on_cpu else ("GPU", "; --assume NODESxGPUS:NAME gives it, as 1x8:H100-80GB")
        return f"The memory of a {place} is not known, so there is no verdict{advice}."
    place = "node, for all of its processes" if on_cpu else "GPU"
    return (
        f"Memory of a {place}: {found.available / GIB:.1f} GiB. Above {WARN:g} of it a cell may not fit, above "
        f"{REFUSE:g} it will not."
    )


def _allowance(*, on_cpu: bool) -> str:
    if on_cpu:
        return "Allowance: the process with its libraries and data, as it was before the model was built."
    return (
        f"Allowance: {CUDA_ALLOWANCE / MIB:,.0f} MiB, assumed and not measured, for the CUDA context, kernels and "
        "workspaces of cuBLAS and cuDNN, and NCCL's buffers."
    )
