"""How often 95 % intervals hold the truth, where it is known: ``python -m tests.benchmarks.coverage``.

Each study measures a cell and its base in every block. A block has a speed of its own that both share (drift), and
each measurement has noise. The interval is that of harness.analysis.stats, fixed or two-stage.

Each comparison of two runs has k earlier runs. A run has a speed of its own that its cells share, and each cell of a
run has noise. Nothing has changed: a claim on any cell is a false alarm. Were each of them tested at 5 % without
Holm's adjustment, or were the blocks of both runs taken as replicates, there would be more.

Each comparison with a stated run noise is of two runs whose spread is some times that noise. Their blocks show it: the
means of runs differ as much as single blocks of a run, or as means of independent blocks do.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from harness.analysis import stats
from harness.analysis.history import RunRatio, noise_within
from harness.analysis.improvements import (
    COMBINATION,
    CONFIRMATION,
    CONFIRMING_BLOCKS,
    SCREENING,
    SCREENING_BLOCKS,
    is_kept,
)
from harness.analysis.ratios import within
from harness.analysis.results import load
from harness.analysis.stats import CLEAR, LEAST_BLOCKS, LOOKS_SIGNIFICANCE, deciding_blocks, geometric_mean, holm
from harness.analysis.stats import SIGNIFICANCE as ALPHA
from harness.analysis.verdict.rules import GOOD_BLOCKS
from harness.analysis.verdict.rules import HALFWIDTH as EQUAL_WITHIN
from harness.config.sections import LOOKS

TRUTH = 1.7
DRAWS = 2000
BLOCKS = (3, 6, 12)
DRIFT = 0.15
"""Standard deviation of a block's own speed, relative."""
HALFWIDTH = 0.06
MOST = 400
"""Blocks that a two-stage study may take here: enough that the rule, not the limit, decides."""
EXAMPLE = Path(__file__).parents[2] / "results/example/scaling-2-cpu-cores"
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


def recorded(folder: Path) -> Noise:
    """The noise of a recorded run: what is left of its cells' speeds without the cells' means and the blocks'."""
    trials = load(folder).trials
    timed = trials[(trials["kind"] == "throughput") & trials["outcome"].eq("ok") & trials["throughput_per_s"].notna()]
    own = timed["cell_id"] + timed["purpose"].fillna("")  # a twin is a measurement of its own
    speeds = np.log(timed.pivot_table(index=own, columns="block", values="throughput_per_s").dropna().to_numpy(float))
    left = speeds - speeds.mean(axis=1, keepdims=True) - speeds.mean(axis=0, keepdims=True) + speeds.mean()
    cells, blocks = left.shape
    left *= math.sqrt(left.size / ((cells - 1) * (blocks - 1)))  # the means took their part of it
    return lambda random, count: np.exp(random.choice(left.ravel(), count))


MUST_COVER: Mapping[str, Noise] = {
    "normal 3 %": normal(0.03),
    "normal 10 %": normal(0.10),
    "lognormal 3 %": lognormal(0.03),
    "lognormal 10 %": lognormal(0.10),
}
FOR_INFORMATION: Mapping[str, Noise] = {"heavy tails 10 %": heavy(0.10), "one-sided 10 %": one_sided(0.10)}


def covers(noise: Noise, blocks: int, two_stage: bool, random: np.random.Generator) -> bool:
    """One study: whether its interval holds TRUTH."""
    most = MOST if two_stage else blocks
    drift = np.exp(DRIFT * random.standard_normal(most) + np.linspace(0, 0.3, most))
    bases = 1000 * drift * noise(random, most)
    speeds = 1000 * TRUTH * drift * noise(random, most)
    n = blocks
    if two_stage:
        pilot = (speeds[:blocks] / bases[:blocks]).tolist()
        n = min(most, stats.stein_blocks(pilot, HALFWIDTH))
    ratios = (speeds[:n] / bases[:n]).tolist()
    estimate = geometric_mean(ratios, pilot=blocks if two_stage else 0)
    assert estimate.low is not None and estimate.high is not None
    return estimate.low <= TRUTH <= estimate.high


def coverage(noise: Noise, blocks: int, two_stage: bool, *, draws: int = DRAWS, seed: int = 1) -> float:
    """The part of the studies whose interval holds the truth."""
    random = np.random.default_rng([seed, blocks, two_stage])
    return sum(covers(noise, blocks, two_stage, random) for _ in range(draws)) / draws


EARLIER_RUNS, CELLS = (3, 5, 10), (1, 6)
OF_RUN, OF_CELL, OF_BLOCK = 0.02, 0.01, 0.005
"""Standard deviations of the logarithm: of a run's own speed, of a cell in a run, and of a block."""
COMPARED_BLOCKS = 6


def claims(earlier: int, cells: int, random: np.random.Generator) -> tuple[bool, bool, bool]:
    """One comparison without a change: whether a cell is claimed: as compare does, not adjusted, and by blocks."""
    shape = (earlier + 2, cells, COMPARED_BLOCKS)
    of_cell = OF_RUN * random.standard_normal((shape[0], 1)) + OF_CELL * random.standard_normal(shape[:2])
    blocks = of_cell[:, :, None] + OF_BLOCK * random.standard_normal(shape)
    logs = blocks.mean(axis=2)
    p_values = []
    for cell in range(cells):
        sd, freedom = stats.pooled_deviation([logs[:earlier, cell].tolist()])
        ratio = math.exp(logs[-1, cell] - logs[-2, cell])
        p_values.append(RunRatio(1.0, ratio, [(sd, freedom)], earlier).p_value() or 0.0)
    by_blocks = [
        stats.ratio_p_value(np.exp(blocks[-1, cell] - blocks[-2, cell]).tolist()) or 0.0 for cell in range(cells)
    ]
    return min(holm(p_values)) <= ALPHA, min(p_values) <= ALPHA, min(holm(by_blocks)) <= ALPHA


def false_alarms(earlier: int, cells: int, *, draws: int = DRAWS, seed: int = 1) -> tuple[float, float, float]:
    """The parts of comparisons without a change in which one is claimed, as ``claims`` orders them."""
    random = np.random.default_rng([seed, earlier, cells])
    found = np.array([claims(earlier, cells, random) for _ in range(draws)])
    adjusted, unadjusted, by_blocks = found.mean(axis=0).tolist()
    return adjusted, unadjusted, by_blocks


STATED = 0.05
"""A stated standard deviation between runs."""


def stated_claims(
    times: float, blocks: int, cells: int, *, shared: bool, planted: float = 0.0, draws: int = DRAWS, seed: int = 1
) -> tuple[float, float]:
    """The parts of comparisons in which a cell is claimed: as compare does, and by the stated noise alone.

    ``times``: the spread over STATED. ``shared``: whether the blocks of a run share so much that its mean varies as a
    single block. ``planted``: a change of the first cell alone, in spreads; then claims of that cell are counted.
    """
    random = np.random.default_rng([seed, int(100 * times), blocks, cells, shared])
    spread = times * STATED
    of_run = spread * math.sqrt(1 - 1 / blocks) if shared else 0.0
    found = []
    for _ in range(draws):
        logs = of_run * random.standard_normal((2, cells, 1)) + spread * random.standard_normal((2, cells, blocks))
        logs[1, 0] -= planted * spread
        p_values: list[list[float]] = [[], []]
        for cell in range(cells):
            first, later = np.exp(logs[:, cell]).tolist()
            ratio = math.exp(logs[1, cell].mean() - logs[0, cell].mean())
            for each, of_blocks in zip(p_values, (noise_within(first, later), []), strict=True):
                each.append(RunRatio(1.0, ratio, [(STATED, None), *of_blocks]).p_value() or 0.0)
        adjusted = [holm(each) for each in p_values]
        found.append([(each[0] if planted else min(each)) <= ALPHA for each in adjusted])
    as_compare_does, by_stated = np.array(found).mean(axis=0).tolist()
    return as_compare_does, by_stated


FOR_LOOKS = {name: MUST_COVER[name] for name in ("normal 3 %", "lognormal 10 %")} | dict(FOR_INFORMATION)
EQUAL, MOST_LOOKS, MOST_BLOCKS = 4, 8, 100


def false_decisions(noise: Noise, *, draws: int = DRAWS, seed: int = 1) -> tuple[float, float, float]:
    """The parts of studies of equal settings in which a difference is clear at some time.

    First of a cell and its base, to which blocks are added as the verdict says, until it is clear or about equal; then
    of EQUAL settings, of which the fastest is compared with the others after the declared blocks, as in leaders; last,
    of the same settings with blocks added in the same way.
    """
    random = np.random.default_rng([seed, 77])
    found = [(decides_falsely(noise, random), *leads_falsely(noise, random)) for _ in range(draws)]
    looks, leader, leader_of_looks = np.array(found).mean(axis=0).tolist()
    return looks, leader, leader_of_looks


def decides_falsely(noise: Noise, random: np.random.Generator) -> bool:
    ratios = (noise(random, MOST_BLOCKS) / noise(random, MOST_BLOCKS)).tolist()
    blocks = LEAST_BLOCKS
    for look in range(1, MOST_LOOKS + 1):
        seen = ratios[:blocks]
        if stats.word(stats.ratio_p_value(seen), stats.look_significance(look)) == CLEAR:
            return True
        if within(geometric_mean(seen), EQUAL_WITHIN) or blocks == MOST_BLOCKS:
            return False
        blocks = more_blocks([seen], look + 1)
    return False


def more_blocks(ratios: list[list[float]], look: int) -> int:
    """Return the blocks of the next look, as the verdict says, for these comparisons."""
    needed = [deciding_blocks(each, EQUAL_WITHIN, stats.look_significance(look)) for each in ratios]
    return min(MOST_BLOCKS, max(len(ratios[0]) + 1, GOOD_BLOCKS, *needed))


def four_times(noise: Noise) -> Noise:
    """Four times the noise, as of a logarithm."""
    return lambda random, count: noise(random, count) ** 4


def by_looks(
    cell: Noise, base: Noise, *, drift: float = 0.0, draws: int = DRAWS, seed: int = 1
) -> tuple[float, float, float]:
    """Return, of studies of equal settings with ``blocks: decide``: the part that tells them apart, the part whose
    interval holds the truth, and the mean number of blocks.

    ``drift``: by which the cell, and not its base, becomes faster from the first block to the last.
    """
    random = np.random.default_rng([seed, 88])
    trend = np.linspace(-drift / 2, drift / 2, LOOKS[-1])
    apart, held, taken = 0, 0, 0
    for _ in range(draws):
        ratios = (cell(random, LOOKS[-1]) / base(random, LOOKS[-1]) * np.exp(trend)).tolist()
        blocks = next((look for look in LOOKS[:-1] if stats.is_decided(ratios[:look])), LOOKS[-1])
        estimate = geometric_mean(ratios[:blocks], significance=LOOKS_SIGNIFICANCE)
        assert estimate.low is not None and estimate.high is not None
        apart += stats.word(stats.ratio_p_value(ratios[:blocks]), LOOKS_SIGNIFICANCE) == CLEAR
        held += estimate.low <= 1.0 <= estimate.high
        taken += blocks
    return apart / draws, held / draws, taken / draws


def leads_falsely(noise: Noise, random: np.random.Generator) -> tuple[bool, bool]:
    """Return whether the fastest is clearly faster than another setting at the first look, and at any look."""
    speeds = np.array([noise(random, MOST_BLOCKS) for _ in range(EQUAL)])
    blocks = GOOD_BLOCKS
    for look in range(1, MOST_LOOKS + 1):
        seen = speeds[:, :blocks]
        first = int(np.log(seen).mean(axis=1).argmax())
        ratios = [(seen[first] / other).tolist() for other in np.delete(seen, first, axis=0)]
        if min(holm([stats.ratio_p_value(each) or 0.0 for each in ratios])) <= stats.look_significance(look):
            return look == 1, True
        if blocks == MOST_BLOCKS:
            break
        blocks = more_blocks(ratios, look + 1)
    return False, False


CANDIDATES = 6


def improves_falsely(noise: Noise, *, draws: int = DRAWS, seed: int = 1) -> tuple[float, float]:
    """The parts of improvements by options that change nothing: those that claim a gain, and those that confirm one.

    CANDIDATES and their first combinations are screened, and the fastest is confirmed, as ``--improve`` does. The first
    number is of all improvements, the second of those that had something to confirm.
    """
    random = np.random.default_rng([seed, 99])

    def kept(step: str, settings: int, blocks: int) -> list[int]:
        """Return the settings that go on, the fastest first."""
        own = noise(random, blocks)
        estimates = [geometric_mean((noise(random, blocks) / own).tolist()) for _ in range(settings)]
        ranked = sorted(range(settings), key=lambda at: -estimates[at].value)
        rows = [{"ratio": estimates[at].value, "low": estimates[at].low, "blocks": blocks} for at in ranked]
        return [at for at, row in zip(ranked, rows, strict=True) if is_kept(step, row, first=row is rows[0])]

    tried, claimed = 0, 0
    for _ in range(draws):
        helped = kept(SCREENING, CANDIDATES, SCREENING_BLOCKS)
        if len(helped) > 1:
            kept(COMBINATION, len(helped), SCREENING_BLOCKS)
        if helped:
            tried += 1
            claimed += bool(kept(CONFIRMATION, 1, CONFIRMING_BLOCKS))
    return claimed / draws, claimed / max(tried, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--recorded", type=Path, nargs="*", default=[EXAMPLE], help="runs whose noise is drawn from")
    asked = parser.parse_args()
    draws = asked.draws
    noises = FOR_LOOKS | {f"as recorded in {run.name}": recorded(run) for run in asked.recorded}
    title = f"Part of {draws} studies whose 95 % interval holds the truth"
    table = Table("noise of a measurement", "blocks or pilot", "fixed", "two-stage", title=title)
    for (name, noise), blocks in product({**MUST_COVER, **FOR_INFORMATION}.items(), BLOCKS):
        found = [coverage(noise, blocks, two_stage, draws=draws) for two_stage in (False, True)]
        table.add_row(name, str(blocks), *(f"{100 * value:.1f} %" for value in found))
    headings = ("earlier runs", "cells", "compare", "without Holm's adjustment", "blocks as replicates")
    alarms = Table(*headings, title=f"Part of {draws} comparisons without a change in which one is claimed")
    for earlier, cells in product(EARLIER_RUNS, CELLS):
        rates = false_alarms(earlier, cells, draws=draws)
        alarms.add_row(str(earlier), str(cells), *(f"{100 * rate:.1f} %" for rate in rates))
    title = f"Part of {draws} comparisons with a stated run noise of 5 % in which a cell is claimed"
    headings = ("blocks", "cells", "no change", "by the stated noise alone", "changed by 5 spreads")
    stated = Table("spread of runs", *headings, title=title)
    for times, blocks, cells in product((1.5, 4.0), (2, 3, 5), CELLS):
        both = stated_claims(times, blocks, cells, shared=True, draws=draws)
        changed, _ = stated_claims(times, blocks, cells, shared=True, planted=5, draws=draws)
        rates = (f"{100 * rate:.1f} %" for rate in (*both, changed))
        stated.add_row(f"{100 * times * STATED:.1f} %", str(blocks), str(cells), *rates)
    title = f"Part of {draws} studies of equal settings in which a difference is clear"
    of_leader = f"the fastest of {EQUAL}", f"the fastest of {EQUAL}, added blocks, any look"
    decided = Table("noise of a measurement", "added blocks, any look", *of_leader, title=title)
    for name, noise in noises.items():
        decided.add_row(name, *(f"{100 * rate:.1f} %" for rate in false_decisions(noise, draws=draws)))
    headings = ("told apart", "interval holds 1", "blocks")
    looked = Table("noise of cell, base", *headings, title=f"{draws} studies of equal settings with blocks: decide")
    for name, noise in noises.items():
        kinds = {f"{name}, {name}": (noise, noise)}
        if not name.startswith("one-sided"):  # four times of it is slower, too
            kinds |= {f"4 x {name}, {name}": (four_times(noise), noise), f"{name}, 4 x": (noise, four_times(noise))}
        for both, (cell, base) in kinds.items():
            first, held, blocks = by_looks(cell, base, draws=draws)
            looked.add_row(both, f"{100 * first:.1f} %", f"{100 * held:.1f} %", f"{blocks:.1f}")
    first, held, blocks = by_looks(normal(0.03), normal(0.03), drift=0.05, draws=draws)
    looked.add_row("normal 3 %, drift of 5 %", f"{100 * first:.1f} %", f"{100 * held:.1f} %", f"{blocks:.1f}")
    headings = ("all", "that have something to confirm")
    title = f"Part of {draws} improvements by {CANDIDATES} options that change nothing in which a gain is claimed"
    improved = Table("noise of a measurement", *headings, title=title)
    for name, noise in noises.items():
        improved.add_row(name, *(f"{100 * rate:.1f} %" for rate in improves_falsely(noise, draws=draws)))
    Console().print(table, alarms, stated, decided, looked, improved)


if __name__ == "__main__":
    main()
