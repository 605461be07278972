"""What was recorded -> the tables that a person reads. Pure: rows and frames in, frames out."""

from __future__ import annotations

from harness.analyse.agreement import agreement, disagreeing
from harness.analyse.doubts import doubts
from harness.analyse.findings import figures, findings
from harness.analyse.gpus import gpus
from harness.analyse.missing import missing
from harness.analyse.pairs import noise, parity, versus
from harness.analyse.phases import host_phases, ledger, phases
from harness.analyse.ratios import scaling
from harness.analyse.steps import StepTimes, step_times
from harness.analyse.training import convergence
from harness.analyse.trials import cells, outcomes, ranks, throughput, trials, windows
from harness.analyse.waterfall import waterfall

__all__ = [
    "StepTimes",
    "agreement",
    "cells",
    "convergence",
    "disagreeing",
    "doubts",
    "figures",
    "findings",
    "gpus",
    "host_phases",
    "ledger",
    "missing",
    "noise",
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
