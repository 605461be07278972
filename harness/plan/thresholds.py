"""Thresholds that the measurement on the ranks and the doubts of the analysis share."""

from __future__ import annotations

STEADY_CHANGE = 0.05
"""How far the medians of two rounds, or the ends of a trend, may lie apart in a steady state."""
STEADY_NOISE = 0.20
"""The most that noise may excuse where single steps scatter widely."""
