"""What was recorded -> the tables that a person reads. Pure: rows and frames in, frames out."""

from __future__ import annotations

from harness.analyse.ratios import noise, scaling
from harness.analyse.training import convergence
from harness.analyse.trials import cells, outcomes, ranks, throughput, trials, windows

__all__ = ["cells", "convergence", "noise", "outcomes", "ranks", "scaling", "throughput", "trials", "windows"]
