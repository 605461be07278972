"""What was recorded -> the tables that a person reads. Pure: rows and frames in, frames out."""

from __future__ import annotations

from harness.analysis.convergence import convergence
from harness.analysis.doubts import doubts
from harness.analysis.equivalence import agreement, not_equivalent
from harness.analysis.findings import figures, findings
from harness.analysis.gpus import gpus
from harness.analysis.missing import missing
from harness.analysis.pairs import noise, parity, versus
from harness.analysis.phases import host_phases, ledger, phases
from harness.analysis.ratios import scaling
from harness.analysis.steps import StepTimes, step_times
from harness.analysis.trials import cells, outcomes, ranks, throughput, trials, windows
from harness.analysis.waterfall import waterfall

__all__ = [
    "StepTimes",
    "agreement",
    "cells",
    "convergence",
    "doubts",
    "figures",
    "findings",
    "gpus",
    "host_phases",
    "ledger",
    "missing",
    "noise",
    "not_equivalent",
    "outcomes",
    "parity",
    "phases",
    "ranks",
    "scaling",
    "step_times",
    "throughput",
    "trials",
    "versus",
    "waterfall",
    "windows",
]
