"""A claim about the profiler: whether it sees all kernels, and what it costs the trials after it."""

from __future__ import annotations

import os
from collections import Counter

import torch

from harness.measure.profiles import PROFILED_STEPS, profiled_steps
from tests.gpu.setting import SMALL, cell_of, group_of_one, keep, median_pace_s, stepper_of, steps_for
from tests.gpu.verdict import Verdict, judged, measured

WINDOWS = 7


def profiles(device: torch.device, teardown: str) -> Verdict:
    """Two profiles of a process have the same kernels, each as often in every step, and one for each launch.

    Beside that, the step time of ddp after the profiles over that before; with CUPTI taken down, and without.
    Containers often forbid CUPTI: then no kernel is seen, and collectives must be unknown, not 0. On a CPU there are
    no kernels, and one profile is taken.
    """
    os.environ["TEARDOWN_CUPTI"] = teardown  # read when the profiler is first started
    cuda = device.type == "cuda"
    with group_of_one(device):
        stepper = stepper_of(cell_of(device, {**SMALL, "strategy": "ddp"}), device)
        steps = steps_for(stepper, 0.3 if cuda else 0.1)

        def paces_s() -> float:
            return median_pace_s([stepper.window("timed", steps, detailed=False) for _ in range(WINDOWS)])

        before, again = paces_s(), paces_s()
        profiled = stepper_of(cell_of(device, {**SMALL, "strategy": "fsdp"}), device) if cuda else stepper
        taken = [profiled_steps(profiled) for _ in range(1 + cuda)]
        noise, ratio = again / before, paces_s() / again
    text = f"step time after / before {ratio:.3f}; without a profile between {noise:.3f}"
    if not cuda:
        return measured(text, ratio=ratio, noise=noise)
    events, lost = [each.events for each in taken], sum(each.lost for each in taken)
    keep(f"profile_{teardown}", [[*event] for event in events[0]])
    counts = [Counter(e.name for e in each if e.gpu is not None and not e.annotation) for each in events]
    first, second = (of_one.total() for of_one in counts)
    if not first and not second:
        return measured(f"no kernel is seen: CUPTI is not allowed here; {text}", ratio=ratio, noise=noise)
    uneven = sum(count % PROFILED_STEPS for of_one in counts for count in of_one.values())
    other = sum(((counts[0] - counts[1]) + (counts[1] - counts[0])).values())
    kernels = f"{first} and {second} kernels in {PROFILED_STEPS} steps; {other} differ, {uneven} beyond whole steps"
    kernels += f", {lost} of {sum(len(each.launched) for each in taken)} launches without one; {text}"
    return judged(not (uneven or other or lost), kernels, first=first, second=second, ratio=ratio, noise=noise)
