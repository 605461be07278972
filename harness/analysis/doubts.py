"""Doubts about a number: name, threshold, meaning and test of each, and which of them are a run's usual state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb, inf
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from harness.analysis.common import (
    KEYS,
    Lines,
    Row,
    Rows,
    TrialKey,
    bases_of,
    by_cell,
    grouped,
    measured,
    nearest,
    rows_of,
    trial_key,
)
from harness.analysis.evidence import (
    RANK_COLUMNS,
    foreign_cores,
    group_environments,
    signature,
    slow_ranks,
    steps_in_epochs,
    throttling,
    window_drift,
)
from harness.analysis.phases import ROWS
from harness.analysis.step_times import STALL_RATIO, STALL_S, StepTimes, trial_starts
from harness.plan.checks import SLOW_RANK
from harness.plan.rows import STEADY_CHANGE, STEADY_NOISE
from harness.plan.run_environment import RunEnvironment

WIDE_SPREAD = 0.10
DRIFT = 1.05
CLOCK_CHANGE = 1.10
FOREIGN_CORES = 0.25
WAITS = 0.5
UNLIKE_EPOCHS = 2.0
FEW_EVALUATIONS = 10
TOO_EFFICIENT = 1.5
"""An efficiency beyond this is no result of caches, whose effect is smaller, or of noise."""


class Doubt(NamedTuple):
    """A reason to distrust a number: in plain words, and its meaning with the threshold.

    ``own`` tests a trial alone, and may return a text that follows the name as it is (" 1", ": x"); ``beside`` against
    its base's trial. A trial has some columns of its row, the rows of its ``ranks``, and what ``doubts`` adds; None if
    it is unknown.
    ``widens``: it varies from block to block, so that the interval of a ratio has its effect, and is only wider.
    """

    words: str
    meaning: str
    own: Callable[[Row], bool | str] = lambda trial: False
    beside: Callable[[Row, Row], bool] = lambda trial, base: False
    widens: bool = False


def _known(trial: Row, name: str) -> set[Any]:
    """Return the known values of a column over the trial's ranks."""
    return {rank[name] for rank in trial.ranks if not pd.isna(rank[name])}


def _differ(trial: Row, base: Row, name: str) -> bool:
    """Return whether the known values of a column are not the base's; False without ranks."""
    return bool(trial.ranks and base.ranks) and _known(trial, name) != _known(base, name)


def _per_device(trial: Row) -> float | None:
    return None if trial.throughput_per_s is None else float(trial.throughput_per_s / trial.devices)


def _settings(trial: Row) -> str:
    found = {setting for text in _known(trial, "settings") if text for setting in text.split(", ")}
    return f": {', '.join(sorted(found))}" if found else ""


def _unlike_epochs(trial: Row) -> str:
    factors = sorted(trial.in_epochs or (1.0, 1.0))
    if factors[0] > 1 / UNLIKE_EPOCHS and factors[1] < UNLIKE_EPOCHS:
        return ""
    return f": a step of an epoch takes {' to '.join(dict.fromkeys(f'{each:.2g}' for each in factors))} times as long"


def _foreign_load(trial: Row) -> bool:
    nodes = grouped(trial.ranks, lambda rank: rank["node_rank"])
    return any((foreign_cores(node) or 0.0) > FOREIGN_CORES for node in nodes.values())


def _other_clock(trial: Row, base: Row) -> bool:
    """Return whether the slowest GPU's clock is not the base's, on GPUs of the same model."""
    lowest = sorted(min(_known(one, "sm_clock_mhz"), default=0) for one in (trial, base))
    return lowest[0] > 0 and not _differ(trial, base, "device_model") and lowest[1] > CLOCK_CHANGE * lowest[0]


DOUBTS: Mapping[str, Doubt] = {
    "impossible efficiency": Doubt(
        "a speedup that more devices cannot explain",
        f"the throughput of a device is more than {TOO_EFFICIENT:g} times the base's, which neither caches nor noise "
        "explain: a base that waits for data or shares its cores, a weight of loss() that counts too much, or steps "
        "that leave out work",
        beside=lambda trial, base: (
            trial.cell_id != base.cell_id  # a twin is as far from its base by noise alone, for which the A/A test is
            and (_per_device(trial) or 0.0) > TOO_EFFICIENT * (_per_device(base) or inf)
        ),
    ),
    "waits for data": Doubt(
        "most of the step is a wait for data",
        f"the step waits for data for more than {100 * WAITS:.0f} % of its time: a ratio is one of loaders, not of "
        "strategies",
        own=lambda trial: (trial.wait_fraction or 0.0) > WAITS,
    ),
    "other speed in epochs": Doubt(
        "its epochs run at another speed than its timed steps",
        f"from the second epoch on, a step of the same setting takes more than {UNLIKE_EPOCHS:g} times as long as in "
        "the timed windows, or less than half: data that is cached, epochs so short that their start counts, or speed "
        "that changes during a training. The ratio of timed steps is not that of trainings: decide by the time to a "
        "target",
        own=_unlike_epochs,
    ),
    "evaluates": Doubt(
        "few evaluations are in its timed steps",
        f"the timed windows of a script hold an evaluation, and fewer than {FEW_EVALUATIONS}: one more or less, by "
        "chance or by the number of steps in an epoch, changes the speed. Leave evaluation out by `step: {pause: "
        "validation}` or probe.pause(), or measure windows of many epochs",
        own=lambda trial: trial.kind == "throughput" and 0 < (trial.evaluations or 0) < FEW_EVALUATIONS,
    ),
    "inline": Doubt(
        "it ran in the command's own process",
        "the trial ran in the command's own process (--inline), where a debugger may have stopped it; no ratio uses it",
        own=lambda trial: bool(trial.inline),
    ),
    "no steady state": Doubt(
        "the speed had not settled after the warm-up",
        "the warm-up reached its limit before the medians of two successive rounds of steps, and the ends of the last "
        f"round's trend, agreed within {100 * STEADY_CHANGE:.0f} % (or within their noise, up to "
        f"{100 * STEADY_NOISE:.0f} %)",
        own=lambda trial: trial.steady is False,
    ),
    "skipped updates": Doubt(
        "fp16 skipped updates",
        "in fp16, the loss scale skipped the update of one or more timed steps, which took less time than others",
        own=lambda trial: (trial.skipped_updates or 0) > 0,
    ),
    "wide spread": Doubt(
        "the times of single steps vary widely",
        f"the interquartile range of the timed steps exceeds {100 * WIDE_SPREAD:.0f} % of their median",
        own=lambda trial: trial.spread is not None and trial.spread > WIDE_SPREAD,
        widens=True,
    ),
    "windows drift": Doubt(
        "the speed changed during a measurement",
        f"the rates of the trial's timed windows differ by more than {100 * (DRIFT - 1):.0f} %: the speed changed "
        "during the measurement, because of a clock, a temperature or another load",
        own=lambda trial: trial.drift is not None and trial.drift > DRIFT,
        widens=True,
    ),
    "stalled": Doubt(
        "single steps took seconds",
        f"a timed step of a rank took more than {STALL_RATIO:g} times the trial's median and more than {STALL_S:g} s, "
        "as if a link is down, a disk slow or a process stopped; the table stalls has its seconds and ranks, and the "
        "throughput without such windows",
        own=lambda trial: trial.stalled,
        widens=True,
    ),
    "slow rank": Doubt(
        "one device was slower than the others",
        f"that rank's step without gradient exchange takes more than {SLOW_RANK:g} times the median rank's "
        "(known only if throughput.explain times ddp's steps without exchange)",
        own=lambda trial: "" if trial.slow_rank is None else f" {trial.slow_rank}",
    ),
    "settings of the process": Doubt(
        "the process ran with settings that change its speed",
        "a rank's process ran with settings that change its speed or its arithmetic, and that the experiment file does "
        "not name: a mode for debugging, a profiler, a variable, parameters of another dtype than the precision's, "
        "processors that several ranks are pinned to, or torch.compile that found nothing to compile",
        own=_settings,
    ),
    "foreign load": Doubt(
        "other programs used the processor",
        f"other processes kept more than {FOREIGN_CORES:g} cores of a node busy during the timed steps",
        own=_foreign_load,
        widens=True,
    ),
    "memory swapped": Doubt(
        "memory was swapped to disk",
        "the node swapped memory during the timed steps",
        own=lambda trial: any(swapped > 0 for swapped in _known(trial, "swapped_bytes")),
    ),
    "clocks throttled": Doubt(
        "a GPU lowered its clock, for heat or a fault",
        "a GPU's clocks were throttled by heat or hardware for more than 1 % of the timed steps, or at their end; a "
        "power limit is a GPU's usual state under load, and no doubt: the table of GPUs has it",
        own=lambda trial: any(map(throttling, trial.ranks)),
    ),
    "other clock than the base's": Doubt(
        "the GPUs' clock differs",
        f"the SM clock after the timed steps differs from the base's by more than {100 * (CLOCK_CHANGE - 1):.0f} %: "
        "a ratio is partly one of clocks",
        beside=_other_clock,
    ),
    "foreign load on the GPU": Doubt(
        "other programs used a GPU",
        "other processes computed on a GPU during the timed steps",
        own=lambda trial: any(processes > 0 for processes in _known(trial, "foreign_gpu_processes")),
        widens=True,
    ),
    "threads differ from the base's": Doubt(
        "the number of threads per device differs",
        "the number of threads per device is not the base's",
        beside=lambda trial, base: trial.purpose != "threads" and _differ(trial, base, "threads"),
    ),
    "other devices than the base's": Doubt(
        "the devices are of another model",
        "the device models are not the base's",
        beside=lambda trial, base: _differ(trial, base, "device_model"),
    ),
    "other dtypes than the base's": Doubt(
        "it computes in other dtypes than its base (fsdp does not with mixed_precision: autocast)",
        "the dtypes of weights, gradients, forward pass or loss are not the base's: a ratio is partly one of "
        "arithmetic. In bf16 and fp16 one device keeps residuals and norms in float32 under autocast, which casts the "
        "weights in each forward pass; fsdp's policy computes all but BatchNorm in 16 bits. "
        "`fsdp.mixed_precision: autocast` is the arithmetic of one device",
        beside=lambda trial, base: None not in (trial.dtypes, base.dtypes) and trial.dtypes != base.dtypes,
    ),
    "other hosts than the base's": Doubt(
        "the machines are others",
        "a host of the base is not among the trial's hosts",
        # a cell on several nodes may use more hosts than its base
        beside=lambda trial, base: bool(trial.ranks) and not _known(base, "host") <= _known(trial, "host"),
    ),
    "environment differs from the base's": Doubt(
        "versions or settings differ",
        "versions, settings or hardware differ from those of the base's worker group",
        beside=lambda trial, base: None not in (trial.signature, base.signature) and trial.signature != base.signature,
    ),
    "block cut in two": Doubt(
        "an interruption lies between the trials of a ratio",
        "the trial and its base are of two invocations of the command, in equal environments: an interruption lies "
        "between them, and what changed with it is in the ratio",
        beside=lambda trial, base: bool(trial.invocation != base.invocation),
    ),
}
"""Doubts in the order in which a trial lists them."""
LOUD = ("impossible efficiency", "waits for data", "other speed in epochs")
"""Doubts that stand beside an efficiency in words, and mark each cell that has them, however many have."""


def doubts(
    trials: pd.DataFrame,
    times: StepTimes,
    windows: pd.DataFrame,
    ranks: pd.DataFrame,
    environment: RunEnvironment,
    epochs: pd.DataFrame,
    lines: Lines,
) -> pd.Series[Any]:
    """Return the names of each row's doubts in ``trials``, as a tuple."""
    rows = rows_of(trials)
    in_epochs = steps_in_epochs(trials, windows, epochs)
    dtypes = {(line["trial_id"], line["attempt"]): line["facts"].get("dtypes") for line in lines}
    steps, slow, drift = times.by_trial, slow_ranks(windows), window_drift(windows)
    spread = ((steps["q3_s"] - steps["q1_s"]) / steps["step_median_s"]).to_dict()
    signatures = {key: signature(nodes) for key, nodes in group_environments(environment).items()}
    of_ranks = _rows_by_trial(ranks[[*RANK_COLUMNS]])
    for row in rows:
        key = trial_key(row)
        row["spread"] = spread.get(key)  # the interquartile range of the timed steps over their median
        row |= {"slow_rank": slow.get(key), "drift": drift.get(key), "stalled": key in times.stalled}
        row |= {"in_epochs": in_epochs.get(key), "dtypes": dtypes.get(key)}
        row["signature"] = signatures.get((row.group_id, row.invocation))  # of its worker group's nodes and settings
    ok = [row for row in rows if row.outcome == "ok" and not row.purpose]
    measured_in = grouped(ok, lambda row: (row.cell_id, row.block))
    bases = bases_of(by_cell(rows_of(measured(trials))))
    found: list[tuple[str, ...]] = []
    for row in rows:
        names = []
        if row.outcome == "ok" and row.throughput_per_s is not None:
            base = nearest(row, measured_in.get((bases.get(row.cell_id, row.base_id), row.block), ()))
            if base is not None and base.trial_id == row.trial_id:
                base = None
            row = Row(row, ranks=of_ranks(trial_key(row)))
            base = base and Row(base, ranks=of_ranks(trial_key(base)))
            for name, doubt in DOUBTS.items():
                if seen := doubt.own(row) or (base is not None and doubt.beside(row, base)):
                    names.append(f"{name}{seen}" if isinstance(seen, str) else name)
        found.append(tuple(names))
    return pd.Series(found, index=trials.index, dtype=object)


def _rows_by_trial(ranks: pd.DataFrame) -> Callable[[TrialKey], Rows]:
    """Return the function of a trial's rows, which stand together.

    As mappings rows take several times the memory of a frame: two parts of about ROWS are kept, of a trial and of its
    base.
    """
    starts = trial_starts(ranks)
    numbers = starts // ROWS
    part_of = dict(zip(map(trial_key, rows_of(ranks[KEYS].iloc[starts])), numbers.tolist(), strict=True))

    @lru_cache(maxsize=2)
    def part(number: int) -> Mapping[TrialKey, Rows]:
        first, last = np.append(starts, len(ranks))[np.searchsorted(numbers, [number, number + 1])]
        return grouped(rows_of(ranks.iloc[first:last]), trial_key)

    return lambda key: part(part_of[key])[key] if key in part_of else []


def kind_of(name: str) -> str:
    """Return the name of a trial's doubt in DOUBTS: 'slow rank' for 'slow rank 1'."""
    return max((kind for kind in DOUBTS if name.startswith(kind)), key=len)


def doubt_of(name: str) -> Doubt:
    """Return the doubt that a trial's doubt, whose name may be longer, is one of: 'slow rank 1'."""
    return DOUBTS[kind_of(name)]


def plain_doubt(name: str) -> str:
    """Return a trial's doubt in plain words, with what its name has after a colon: settings."""
    words, (_, _, which) = doubt_of(name).words, name.partition(": ")
    return f"{words}: {which}" if which else words


@dataclass(frozen=True)
class CountedDoubt:
    """A doubt of ``count`` of a cell's ``trials``. ``role``: the cell's in a ratio, 'base' or the like, if not first.

    As text: 'base: wide spread (2 of 3)'.
    """

    name: str
    count: int
    trials: int
    role: str = ""

    @property
    def repeats(self) -> bool:
        """Whether most of the trials have it: what differs from block to block is in the intervals."""
        return 2 * self.count > self.trials

    def __str__(self) -> str:
        role = f"{self.role}: " if self.role else ""
        return f"{role}{self.name} ({self.count} of {self.trials})"


def tally(rows: Rows, role: str = "") -> tuple[CountedDoubt, ...]:
    """Return each doubt of a cell's trials with its number of trials."""
    counts = Counter(name for row in rows for name in row.doubts)
    return tuple(CountedDoubt(name, count, len(rows), role) for name, count in counts.items())


USUAL = 0.5
"""A doubt is usual if more than this share of the run's timed trials have it: it says little about any one cell."""
CLEARLY = 0.05
"""A cell has clearly more of a usual doubt if chance gives it as many trials with a smaller probability than this."""
Share = tuple[int, int]
"""(trials with the doubt, timed trials)."""


def timed(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the timed trials, among which doubts are counted, without those with other threads."""
    own = trials["purpose"].fillna("") != "threads"
    return trials[trials["throughput_per_s"].notna() & (trials["outcome"] == "ok") & own]


def usual_doubts(trials: pd.DataFrame) -> dict[str, Share]:
    """Return the usual doubts of a run by name, without ranks; the most frequent first."""
    counted = timed(trials)
    counts = Counter(kind for names in counted["doubts"] for kind in dict.fromkeys(map(kind_of, names)))
    return {
        kind: (count, len(counted))
        for kind, count in counts.most_common()
        if count > USUAL * len(counted) and kind not in LOUD
    }


def unusual(doubts: Sequence[CountedDoubt], usual: Mapping[str, Share]) -> tuple[CountedDoubt, ...]:
    """Return a cell's doubts that are not usual, or that clearly more of its trials have than usual."""
    found = []
    for doubt in doubts:
        count, trials = usual.get(kind_of(doubt.name), (0, 1))
        if not count or tail(doubt.count, doubt.trials, count / trials) < CLEARLY:
            found.append(doubt)
    return tuple(found)


def tail(count: int, trials: int, share: float) -> float:
    """Return the probability of ``count`` or more of ``trials`` if each has it with probability ``share``."""
    return sum(comb(trials, k) * share**k * (1 - share) ** (trials - k) for k in range(count, trials + 1))
