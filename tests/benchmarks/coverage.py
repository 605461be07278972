"""How often 95 % intervals hold the truth, where it is known: ``python -m tests.benchmarks.coverage``.

Each study measures a cell and its base in every block. A block has a speed of its own that both share (drift), and
each measurement has noise. The interval is that of harness.analysis.stats, fixed or two-stage.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from itertools import product

import numpy as np
from rich.console import Console
from rich.table import Table

from harness.analysis.stats import paired_ratio, stein_blocks

TRUTH = 1.7
DRAWS = 2000
BLOCKS = (3, 6, 12)
DRIFT = 0.15
"""Standard deviation of a block's own speed, relative."""
HALFWIDTH = 0.06
MOST = 400
"""Blocks that a two-stage study may take here: enough that the rule, not the limit, decides."""
Noise = Callable[[np.random.Generator, int], np.ndarray]


def normal(size: float) -> Noise:
    return lambda random, count: 1 + size * random.standard_normal(count)


def lognormal(size: float) -> Noise:
    return lambda random, count: np.exp(size * random.standard_normal(count))


def heavy(size: float) -> Noise:
    """Student's t with 3 degrees of freedom: now and then a block far off."""
    return lambda random, count: np.exp(size * random.standard_t(3, count) / math.sqrt(3))


def one_sided(size: float) -> Noise:
    """Disturbed measurements are only ever slower: exponential."""
    return lambda random, count: 1 / (1 + size * random.exponential(1, count))


MUST_COVER: Mapping[str, Noise] = {
    "normal 3 %": normal(0.03),
    "normal 10 %": normal(0.10),
    "lognormal 3 %": lognormal(0.03),
    "lognormal 10 %": lognormal(0.10),
}
FOR_INFORMATION: Mapping[str, Noise] = {
    "heavy tails 10 %": heavy(0.10),
    "one-sided 10 %": one_sided(0.10),
}


def covers(noise: Noise, blocks: int, two_stage: bool, random: np.random.Generator) -> bool:
    """One study: whether its interval holds TRUTH."""
    most = MOST if two_stage else blocks
    drift = np.exp(DRIFT * random.standard_normal(most) + np.linspace(0, 0.3, most))
    bases = 1000 * drift * noise(random, most)
    speeds = 1000 * TRUTH * drift * noise(random, most)
    n = blocks
    if two_stage:
        pilot = (speeds[:blocks] / bases[:blocks]).tolist()
        n = min(most, stein_blocks(pilot, HALFWIDTH))
    first = [block < blocks for block in range(n)] if two_stage else None
    estimate = paired_ratio(speeds[:n].tolist(), bases[:n].tolist(), pilot=first)
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low <= TRUTH <= estimate.high


def coverage(noise: Noise, blocks: int, two_stage: bool, *, draws: int = DRAWS, seed: int = 1) -> float:
    """The part of the studies whose interval holds the truth."""
    random = np.random.default_rng([seed, blocks, two_stage])
    return sum(covers(noise, blocks, two_stage, random) for _ in range(draws)) / draws


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=DRAWS)
    draws = parser.parse_args().draws
    table = Table(title=f"Part of {draws} studies whose 95 % interval holds the truth")
    for title in ("noise of a measurement", "blocks or pilot", "fixed", "two-stage"):
        table.add_column(title)
    for (name, noise), blocks in product({**MUST_COVER, **FOR_INFORMATION}.items(), BLOCKS):
        found = [coverage(noise, blocks, two_stage, draws=draws) for two_stage in (False, True)]
        table.add_row(name, str(blocks), *(f"{100 * value:.1f} %" for value in found))
    Console().print(table)


if __name__ == "__main__":
    main()
