"""Axes of figures: ticks, shared limits, intervals that are clipped."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import pytest
from matplotlib.figure import Figure

from harness.report.figures.scales import (
    common_limits,
    device_axis,
    draw_interval,
    linear_values,
    log2_axis,
    log_limits,
    log_values,
    tick_text,
    value_ticks,
)


@pytest.mark.parametrize(
    ("limits", "ticks"),
    [
        ((90, 2200), [100, 200, 500, 1000, 2000]),
        ((0.9, 11), [1, 2, 5, 10]),
        ((4000, 9000), [4000, 5000, 6000, 7000, 8000, 9000]),  # 5,000 alone would not describe the axis
        ((0.9, 1.1), [0.9, 0.95, 1.0, 1.05, 1.1]),
        ((0.5, 2e8), [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8][::2]),
    ],
)
def test_ticks_of_values_are_1_2_5_or_equal_steps(limits: tuple[float, float], ticks: list[float]) -> None:
    assert value_ticks(*limits) == pytest.approx(ticks)


def test_ticks_are_written_in_full_and_shares_in_per_cent() -> None:
    assert [tick_text(value) for value in (20000.0, 0.05, 1.5, 0.1 + 0.2)] == ["20,000", "0.05", "1.5", "0.3"]
    first, second = Figure().subplots(1, 2)
    linear_values(first, "y", (0.0, 1.1), percent=True)
    log_values(second, "y", (90.0, 600.0))
    assert [label.get_text() for label in first.get_yticklabels()][:3] == ["0 %", "20 %", "40 %"]
    assert [label.get_text() for label in second.get_yticklabels()] == ["100", "200", "500"]


@pytest.mark.parametrize(
    ("devices", "ticks"), [([1, 2, 4, 8], [1, 2, 4, 8]), ([1, 6], [1, 2, 4]), ([3], [3]), ([5, 6, 7], [5, 6, 7])]
)
def test_device_axes_have_ticks_at_powers_of_two(devices: list[int], ticks: list[int]) -> None:
    axes = Figure().subplots()
    device_axis(axes, pd.Series(devices))
    assert axes.get_xticks().tolist() == ticks
    assert axes.get_xlim() == pytest.approx((devices[0] / 1.3, devices[-1] * 1.3))


@pytest.mark.parametrize(("batches", "ticks"), [([8, 24, 64], [8, 24, 64]), (range(3, 65), [4, 8, 16, 32, 64])])
def test_an_axis_of_batches_has_ticks_at_the_measured_values_unless_there_are_many(
    batches: Sequence[int], ticks: list[int]
) -> None:
    axes = Figure().subplots()
    log2_axis(axes, pd.Series(batches))
    assert axes.get_xticks().tolist() == ticks


def test_panels_share_limits_unless_one_would_be_too_small_and_intervals_extend_an_axis_by_two_at_most() -> None:
    assert common_limits([(0, 10), (0, 20)]) == [(0, 20), (0, 20)]
    assert common_limits([(0, 10), (0, 2000)]) == [(0, 10), (0, 2000)]
    assert common_limits([(1, 10), (5, 500)], log=True) == [(1, 500), (1, 500)]
    assert common_limits([(9, 10), (10, 1000)], log=True) == [(9, 10), (10, 1000)]
    assert log_limits([10.0, 20.0], [9.0, 25.0, None]) == pytest.approx((9 / 1.1, 25 * 1.1))
    assert log_limits([10.0, 20.0], [1.0, 1e6]) == log_limits([10.0, 20.0], [5.0, 40.0])


@pytest.mark.parametrize(("ends", "marks"), [((2, 3), ["_", "_"]), ((0, 3), ["v", "_"]), ((2, 9), ["_", "^"])])
def test_an_interval_has_arrows_where_it_is_clipped(ends: tuple[float, float], marks: list[str]) -> None:
    axes = Figure().subplots()
    draw_interval(axes, "y", 1.0, ends, (1.0, 5.0), "black")
    draw_interval(axes, "x", 1.0, (None, float("nan")), (1.0, 5.0), "black")  # a missing one is not drawn
    bar, *caps = axes.get_lines()
    assert [str(one.get_marker()) for one in caps] == marks
    assert list(bar.get_ydata()) == [max(ends[0], 1.0), min(ends[1], 5.0)]
