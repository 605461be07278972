"""Thresholds and names that the measurement on the ranks and the doubts of the analysis share."""

from __future__ import annotations

STEADY_CHANGE = 0.05
"""The maximum relative difference of two rounds' medians, or of a trend's ends, in a steady state."""
STEADY_NOISE = 0.20
"""The upper limit of that threshold when the noise of single steps raises it."""
POWER_CAP, HELD_BY_POWER = "sw power cap", "held by power"
"""A GPU's power limit as a reason for lower clocks, by NVML's bit and counter: its usual state under load."""
