"""The trial of a script on one rank: follow its warm-up, name its windows, and make rows of its steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from harness.config.axes import PLAIN_AXES
from harness.config.script import GIVEN, ScriptExperiment
from harness.config.sections import Convergence, Throughput
from harness.config.values import PlainValue
from harness.measure.profiles import PROFILED_STEPS
from harness.measure.scenarios import TrialContext
from harness.measure.script import messages
from harness.measure.script.child import Counting, Start
from harness.measure.script.counting import TICK_S
from harness.measure.script.judging import Seen, judge, together
from harness.measure.script.parent import (
    END_S,
    Process,
    ScriptFailed,
    ScriptProcess,
    environment_of,
    home_of,
    master_address,
    trial_folder,
    visible_gpus,
)
from harness.measure.script.profiling import ProfiledSteps
from harness.measure.script.reports import NOTHING, Report, Reports, curve_of, first_not_finite, judge_reports
from harness.measure.script.windows import exchange_of, profiled_windows, windows_of
from harness.measure.stepper import columns_of, recorded, step_quantiles
from harness.measure.throughput import LoadMonitor, WarmUp, window_length
from harness.plan.cell import Cell
from harness.plan.checks import Finding
from harness.plan.rows import FindingRow, RankFacts, TrialFacts
from harness.plan.trial import Trial, TrialResult
from harness.train.ranks import Ranks, processors

MARGIN_TICKS = 4
"""How long before the first window its step is named, in looks at the script, at the pace of the steps before."""
RECENT, MOST_MARGIN = 50, 10_000
PROFILE_S, PROFILE_STEPS, MOST_PROFILE_S = 30.0, 10 * (1 + PROFILED_STEPS), 240.0
"""The longest wait for the profile of a few steps: beside ten times their time in the windows, and in all."""
NOT_PROFILED = "the steps after the windows were not profiled: they paused, or ended, or profile themselves"
WAIT_S, LAST_OUTPUT_S = 1.0, 2.0
"""Timeouts of a look at a script's messages, and of its end after it has failed."""


@dataclass(frozen=True)
class Followed:
    """What the ranks of a script did: this rank's end and profile, and whether the warm-up was steady."""

    end: messages.Finished
    load: RankFacts
    steady: bool
    profile: ProfiledSteps | None


def script(context: TrialContext) -> TrialResult:
    """Run a script on this rank until its last window, or the end of its training.

    Raise ScriptFailed if it fails, takes too few steps, or reports nothing of a training.
    """
    experiment, trial, ranks = context.experiment, context.trial, context.ranks
    assert isinstance(experiment, ScriptExperiment) and experiment.script
    master, gpus = master_address(ranks, trial.cell), visible_gpus(ranks)
    kept = Path(experiment.keep) / trial.id if isinstance(experiment.keep, str) else None
    home, module = home_of(file := Path(experiment.script))
    with trial_folder(ranks, home, kept) as folder:
        values = values_of(trial.cell, trial.seed, folder, ranks.local_rank)
        stated = experiment.stated_samples(values)
        start = Start(
            script=str(folder / file.relative_to(home)),
            module=module,
            folder=str(folder),
            source=str(home),
            arguments=tuple(experiment.command(values)),
            counting=counting_of(context, experiment),
        )
        plain = experiment.one_rank == "python" and ranks.world_size == 1
        process = ScriptProcess(start, environment_of(ranks, trial.cell, master, gpus, plain=plain), folder)
        try:
            with context.part("script"):
                followed = follow(process, context, experiment, start.counting.profiles)
            with context.part("end of the script"):
                process.end(END_S)
            return result(context, experiment, followed, stated, process.output())
        except ScriptFailed as error:
            process.end(LAST_OUTPUT_S)
            error.output = process.output()
            raise
        finally:
            process.end(0.0)


def values_of(cell: Cell, seed: int, folder: Path, local_rank: int) -> dict[str, PlainValue]:
    """Return the values of a script's placeholders."""
    values = {name: cell.axis(name) for name in (*GIVEN, *PLAIN_AXES)}
    return {**values, **cell.workload_options, "seed": seed, "folder": str(folder), "local_rank": local_rank}


def counting_of(context: TrialContext, experiment: ScriptExperiment) -> Counting:
    """Return what is counted in a trial; steps after its windows are profiled, but not those of a training."""
    trial, step = context.trial, experiment.step
    trains = trial.kind == "convergence"
    return Counting(
        optimizer=step.optimizer,
        pauses=step.pause == "validation",
        profiles=not trains and experiment.profiles(trial.purpose, trial.cell.traits),
        trains=trains,
        ingests=not trial.cell.traits.trains,
    )


def follow(process: Process, context: TrialContext, experiment: ScriptExperiment, profiles: bool) -> Followed:
    """Follow the process to the end of its windows, or of its training, on all ranks alike.

    ``profiles``: wait for the profile too, and meanwhile advance the watchdog's counter.
    """
    ranks, trial = context.ranks, context.trial
    profile, load, steady = None, RankFacts(), True
    if trial.kind == "convergence":
        assert experiment.convergence
        end = _followed_training(process, ranks, experiment.convergence)
    else:
        settings = experiment.throughput_of(trial.purpose)
        end, load, steady = _followed_windows(process, ranks, settings, shared=trial.cell.oversubscribed)
        if profiles and not end.by_itself:
            profile = _profiled(process, end.steps, context.advance)
    process.remember_children()
    ranks.barrier()  # no rank's script ends while another still needs it
    process.send("end")
    return Followed(end, load, steady, profile)


def _followed_training(process: Process, ranks: Ranks, settings: Convergence) -> messages.Finished:
    """Follow a training to its own end or its limit; return this rank's end.

    It ends at the end of the step after the last one, so that an evaluation after that is reported. Once its seconds
    are over, every rank waits at the end of a step until all know which one is the last.
    """
    if settings.steps:
        process.send(messages.Schedule(settings.steps + 1))
    until: list[float] = []

    def limit(seconds: list[float], count: int) -> messages.Hold | None:
        if settings.seconds and count and not until:
            until.append(time.monotonic() + settings.seconds)
        return messages.Hold() if until and time.monotonic() > until[0] else None

    count, end = _to_schedule(process, ranks, limit, WAIT_S, waits=True)
    if end is None:
        held = _awaited(process, count, messages.Held)
        counts = ranks.gather(held.count if isinstance(held, messages.Held) else len(held.steps.ended))
        process.send(messages.Schedule(max(counts) + 1))  # no rank has ended a later step
        end = held if isinstance(held, messages.Finished) else _awaited(process, count, messages.Finished)
    if end.late is not None:  # of a script whose first steps are faster than the message before them
        said = f"rank {ranks.rank} was at step {end.late} before it knew where its training ends"
        raise ScriptFailed("StepsIrregular", f"{said}; raise convergence.steps")
    return end


def _followed_windows(
    process: Process, ranks: Ranks, settings: Throughput, *, shared: bool
) -> tuple[messages.Finished, RankFacts, bool]:
    """Follow the warm-up and name the windows; return this rank's end, its load, and whether the warm-up was steady."""
    warm_up = WarmUp(settings, ranks.devices[0].type)

    def windows(seconds: list[float], count: int) -> messages.Schedule | None:
        if not warm_up.is_over(seconds):
            return None
        steps = window_length(settings, warm_up.pace_s)
        return messages.Schedule(count + _margin(seconds, TICK_S), steps, settings.windows)

    count, end = _to_schedule(process, ranks, windows, TICK_S)
    monitor = LoadMonitor(ranks, shared, own_pids=[process.pid])
    begun = _awaited(process, count, messages.WindowsBegun) if end is None else end
    if isinstance(begun, messages.WindowsBegun):
        monitor.begin()
    end = begun if isinstance(begun, messages.Finished) else _awaited(process, count, messages.Finished)
    if end.late is not None:
        said = f"rank {ranks.rank} was at step {end.late} before it knew that its windows begin"
        raise ScriptFailed("StepsIrregular", f"{said}: its steps are irregular; raise throughput.warmup_steps")
    load = monitor.columns(samples=sum(end.steps.samples))
    return end, load if isinstance(begun, messages.WindowsBegun) else RankFacts(), ranks.broadcast(warm_up.steady)


def _profiled(process: Process, steps: messages.Steps, advance: Callable[[], None]) -> ProfiledSteps | None:
    """Wait for the profile of the steps after the windows, which are measured already: a script may fail in it."""
    (first, began), (last, over) = steps.edges[0], steps.edges[-1]
    until = time.monotonic() + min(MOST_PROFILE_S, PROFILE_S + PROFILE_STEPS * (over - began) / (last - first))
    while time.monotonic() < until and process.exit_code is None:
        advance()
        for message in process.messages(WAIT_S):
            if isinstance(message, messages.Profiled):
                return message.steps
    return None


T = TypeVar("T")


def _awaited(process: Process, count: int, kind: type[T]) -> T | messages.Finished:
    """Return the next message of this type, or the end of the script; raise ScriptFailed if it fails before."""
    while True:
        for message in process.messages(WAIT_S):
            count = message.count if isinstance(message, messages.Progress) else count
            if isinstance(message, kind):
                return message
            if end := _end_of(message):
                return end
        _check(process, None, count)


def _to_schedule(
    process: Process,
    ranks: Ranks,
    named: Callable[[list[float], int], messages.Schedule | messages.Hold | None],
    tick_s: float,
    *,
    waits: bool = False,
) -> tuple[int, messages.Finished | None]:
    """Follow the steps until rank 0 names a schedule, or all ranks have ended; return this rank's steps, and end.

    ``named``: of rank 0's seconds of steps so far and the most steps of a rank, what is sent to all, once it is known.
    ``waits``: whether a rank that takes steps after another one's end is waited for.
    """
    seconds: list[float] = []
    counts: list[int] = []
    count, end = 0, None
    first_end: float | None = None
    while True:
        for message in process.messages(tick_s):
            if isinstance(message, messages.Progress):
                seconds += message.seconds
                count = message.count
            end = _end_of(message) or end
        _check(process, end, count)
        before, counts = counts, ranks.gather(len(end.steps.ended) if end else count)
        ended = ranks.gather(end is not None)
        schedule = ranks.broadcast(named(seconds, max(counts)) if ranks.first and not any(ended) else None)
        if schedule:
            process.send(schedule)
        if schedule or all(ended):
            return count, end
        different = any(ended) and len({*counts}) > 1 and not (waits and counts != before)
        first_end = (first_end or time.monotonic()) if different else None
        if first_end and time.monotonic() - first_end > END_S:
            _different(counts)


def _margin(seconds: Sequence[float], tick_s: float) -> int:
    """Return how many steps ahead a step is named, so that every rank knows it before."""
    shortest = float(np.percentile(seconds[-RECENT:], 10)) if seconds else 0.0  # much shorter between evaluations
    return min(max(2, math.ceil(MARGIN_TICKS * tick_s / shortest)), MOST_MARGIN) if shortest > 0 else MOST_MARGIN


def _different(counts: Sequence[int]) -> None:
    each = ", ".join(map(str, counts))
    raise ScriptFailed("RanksDiffer", f"the ranks took different numbers of steps until one ended: {each}")


def _end_of(message: object) -> messages.Finished | None:
    """Return the message if it is the end of the script; raise ScriptFailed if it is a failure."""
    if isinstance(message, messages.Raised):
        before = "" if message.steps else ", before its first optimizer step"
        raise ScriptFailed(message.kind, f"{message.message}{before}")
    return message if isinstance(message, messages.Finished) else None


def _check(process: Process, end: messages.Finished | None, count: int) -> None:
    """Raise ScriptFailed if the process has ended and sent nothing."""
    code = process.exit_code
    if end is None and code is not None:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise ScriptFailed("ScriptEnded", f"the script's process ended ({how}) after {count} steps")


def result(
    context: TrialContext, experiment: ScriptExperiment, followed: Followed, stated: float | None, output: str
) -> TrialResult:
    """Return the rows of all ranks; ``stated``: samples of a step, None if they were counted."""
    ranks, end, trial = context.ranks, followed.end, context.trial
    if len({*(counts := ranks.gather(len(end.steps.ended)))}) > 1:
        _different(counts)
    if end.reports is not None:
        return _trained(context, experiment, end, end.reports, stated, output)
    settings, trains = experiment.throughput_of(trial.purpose), trial.cell.traits.trains
    unit = str(experiment.step.unit) if trains else "samples"
    seen, weight = ranks.gather(Seen.of(end, ranks.node_rank, processors())), stated
    if stated is None and not all(each.samples for each in seen):
        weight, unit = 1.0 if trial.cell.scaling == "weak" else 1.0 / ranks.world_size, "batches"
    elif stated is None and not all(each.facts.counted for each in seen):
        unit = "samples"
    windows = windows_of(end, settings, weight)
    profiles = ranks.gather(followed.profile)
    if own := followed.profile if None not in profiles else None:
        windows += profiled_windows(own)
    facts = end.facts
    context.rank_facts |= {
        **followed.load,
        **step_quantiles(windows),
        **facts.memory,
        "settings": "",
    }
    for part, kind in {"warmup": "warmup", "windows": "timed"}.items():
        context.parts[part] = sum(each.duration_s for each in windows if each.kind == kind)
    context.parts["script"] -= context.parts["warmup"] + context.parts["windows"]
    rows, kept, _ = recorded(ranks, windows, settings.keep_steps)
    known = [each for each in profiles if each] if own else []
    asked = experiment.profiles(trial.purpose, trial.cell.traits) and not end.by_itself
    judged = trial.purpose == "doctor" or not (trial.block or trial.threads)
    found: TrialFacts = {
        "findings": _findings(experiment, trial, seen, stated, known) if judged else [],
        "steady": followed.steady and not end.by_itself,
        "optimizers": ", ".join(facts.optimizers),
        "ended_early": end.by_itself,
        "evaluations": facts.evaluations,
        "connected_ranks": together([each.facts for each in seen]),
        **exchange_of(known),
        **({} if trains else {"ingest": True}),
        **({"explain_error": NOT_PROFILED} if asked and not known else {}),
    }
    return TrialResult(
        trial.id,
        "ok",
        unit=unit,
        steps_s=context.parts["warmup"] + context.parts["windows"],
        windows=rows,
        steps=kept,
        facts=found,
        detail=output,
    )


def _findings(
    experiment: ScriptExperiment,
    trial: Trial,
    seen: Sequence[Seen],
    stated: float | None,
    profiles: Sequence[ProfiledSteps],
) -> list[FindingRow]:
    """Return the findings on a script's steps."""
    if experiment.throughput is None:  # examined for trainings alone, which end by themselves
        seen = [replace(each, by_itself=False) for each in seen]
    how = {"examined": trial.purpose == "doctor", "pauses": experiment.step.pause == "validation"}
    return rows_of(judge(seen, trial.cell, stated, profiles, **how), experiment)


def rows_of(findings: Iterable[Finding], experiment: ScriptExperiment) -> list[FindingRow]:
    """Return findings on a script as rows; on a loop in that word."""
    worded = experiment.worded
    return [
        replace(each, seen=worded(each.seen), means=worded(each.means), advice=worded(each.advice)).row()
        for each in findings
    ]


def _trained(
    context: TrialContext,
    experiment: ScriptExperiment,
    end: messages.Finished,
    reports: Reports,
    stated: float | None,
    output: str,
) -> TrialResult:
    """Return the learning curve of a training: what the first rank that reports anything has reported.

    Raise ScriptFailed if none has.
    """
    ranks, trial, steps = context.ranks, context.trial, end.steps
    own = reports.end()
    summaries = ranks.gather(reports.summary())
    chosen = next((rank for rank, each in enumerate(summaries) if each.names), None)
    if chosen is None:
        raise ScriptFailed("NothingReported", NOTHING.format(steps=len(steps.ended)))
    if not steps.ended:
        said = "the script reported metrics, and no optimizer of torch took a step; probe.steps counts"
        raise ScriptFailed("NoSteps", said)
    counts = stated is not None or all(ranks.gather(sum(steps.samples) > 0))

    def samples_of(report: Report) -> float | None:
        own = report.samples if stated is None else stated * report.step
        return round(own * ranks.world_size) if counts and experiment.step.unit == "samples" else None

    rows = ranks.gather(curve_of(own, samples_of) if ranks.rank == chosen else [])[chosen]
    train_s = steps.ended[-1] - steps.ended[0] - sum(steps.pause_s[1:])
    context.parts |= {"script": context.parts["script"] - train_s, "epochs": train_s}
    seen = ranks.gather(Seen.of(end))
    findings = [] if trial.block else rows_of(judge_reports(summaries, chosen, rows), experiment)
    facts: TrialFacts = {
        "findings": findings,
        "optimizers": ", ".join(end.facts.optimizers),
        "connected_ranks": together([each.facts for each in seen]),
    }
    diverged = first_not_finite(rows)
    return TrialResult(
        trial.id,
        "diverged" if diverged else "ok",
        diverged or "",
        unit=str(experiment.step.unit),
        steps_s=train_s,
        epochs=columns_of(rows),
        facts=facts,
        detail=output,
    )
