"""The windows of a script, made of its counted steps and of the profile that follows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from harness.config.sections import Throughput
from harness.config.strategy_traits import COLLECTIVES
from harness.measure.profiles import PROFILED_STEPS
from harness.measure.script.messages import Finished
from harness.measure.script.parent import ScriptFailed
from harness.measure.script.profiling import ProfiledSteps
from harness.measure.window import Window
from harness.plan.rows import TrialFacts, WindowKind

LEAST_TIMED = 2
"""The least number of steps that make a window of a script that ends early."""


def profiled_windows(profile: ProfiledSteps) -> list[Window]:
    """Return the profiled steps without their exchange and, on a GPU, whose timed windows mark no wait, whole.

    ``idle_s`` is the part of the GPU's idle time in which the host waits for data.
    """

    def window(kind: WindowKind, step_s: float) -> Window:
        steps, idle_s = PROFILED_STEPS, profile.idle_s
        duration_s = steps * step_s
        by_host = with_rest({"wait": steps * profile.wait_s}, duration_s)
        phases = by_host if idle_s is None else with_rest({"idle": steps * min(idle_s, profile.wait_s)}, duration_s)
        seconds = [step_s] * steps
        of_host = {} if idle_s is None else by_host
        return Window(kind, duration_s, seconds, [0.0] * steps, phases, of_host)

    of_gpu = [] if profile.idle_s is None else [window("phases", profile.step_s)]
    return [window("alone", profile.step_s - profile.exposed_s), *of_gpu]


def with_rest(phases: Mapping[str, float], duration_s: float) -> dict[str, float]:
    """Return the seconds of phases with those of the rest of a window."""
    return {**phases, "rest": duration_s - sum(phases.values())}


def exchange_of(profiles: Sequence[ProfiledSteps]) -> TrialFacts:
    """Return the seconds a step in which collectives ran, and were exposed, of the rank that waits least for them.

    The others wait for that rank, which is no cost of exchange.
    """
    exchanging = [profile for profile in profiles if profile.exchange_s]
    least = min(exchanging, key=lambda profile: profile.exposed_s, default=None)
    if least is None:
        return {}
    name = COLLECTIVES.name
    return {"exchange_s": {name: least.exchange_s}, "exposed_s": {name: least.exposed_s}}


def windows_of(end: Finished, settings: Throughput, stated: float | None) -> list[Window]:
    """Return the warm-up and the timed windows of a script's steps.

    ``stated``: samples of a step; None: those that were counted. Of a script that ended early the complete windows
    count; without one all steps after the warm-up, or after half of them. Raises ScriptFailed if they are too few.
    """
    steps = end.steps
    ended = np.asarray(steps.ended)
    edges = list(steps.edges)
    if len(edges) < 2:
        first = min(settings.warmup_steps, len(ended) // 2)
        if first < 1 or len(ended) - first < LEAST_TIMED:
            said = f"the script ended by itself after {len(ended)} steps of an optimizer; at least {1 + LEAST_TIMED}"
            raise ScriptFailed("ScriptEnded", f"{said} are needed")
        edges = [(first, float(ended[first - 1])), (len(ended), float(ended[-1]))]
    pause = np.asarray(steps.pause_s)
    samples = np.asarray(steps.samples) if stated is None else np.full(len(ended), stated)
    waits = np.asarray(steps.wait_s)

    def window(
        kind: WindowKind, edge: tuple[int, float], end_edge: tuple[int, float], by_device: Sequence[float] = ()
    ) -> Window:
        """Return the window of the steps after that of the first edge, up to that of the second."""
        (first, began), (last, over) = edge, end_edge
        of = slice(first, last)
        duration = over - began - float(pause[of].sum())
        seconds = np.diff(np.concatenate([[began], ended[of]])) - pause[of]
        if len(by_device) == last - first:  # a pause is in the stream's time too
            seconds = np.where(pause[of] > 0, seconds, by_device)
        # a GPU may compute while the host waits
        phases = {} if end.facts.gpus else with_rest({"wait": float(waits[of].sum())}, duration)
        weight = float(samples[of].sum())
        return Window(kind, duration, seconds.tolist(), waits[of].tolist(), phases, {}, weight)

    start = edges[0][0]
    warm_up = [window("warmup", (1, float(ended[0])), (start, float(ended[start - 1])))] if start > 1 else []
    timed = [
        window("timed", edge, end_edge, steps.device_s[edge[0] - start : end_edge[0] - start])
        for edge, end_edge in pairwise(edges)
    ]
    return warm_up + timed
