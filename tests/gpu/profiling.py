"""Claims about the profiler: what it costs the trials after it, and whether it sees kernels."""

from __future__ import annotations

import os
import statistics
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

from harness.measure.profiles import PROFILED_STEPS, profiled_steps
from harness.measure.stepper import Stepper
from tests.gpu.setting import SMALL, cell_of, group_of_one, keep, median_pace_s, need_cuda, stepper_of, steps_for
from tests.gpu.verdict import Verdict, judged, measured

WINDOWS, PROFILED = 7, 3


def after_a_profile(device: torch.device, teardown: str) -> Verdict:
    """ddp's step time after a profiled trial of its process over that before; with CUPTI taken down, and without."""
    os.environ["TEARDOWN_CUPTI"] = teardown  # read when the profiler is first started
    with group_of_one(device):
        stepper = stepper_of(cell_of(device, {**SMALL, "strategy": "ddp"}), device)
        steps = steps_for(stepper, 0.5 if device.type == "cuda" else 0.1)
        before = [stepper.window("timed", steps, detailed=False) for _ in range(WINDOWS)]
        again = [stepper.window("timed", steps, detailed=False) for _ in range(WINDOWS)]
        _profile(device, stepper)
        after = [stepper.window("timed", steps, detailed=False) for _ in range(WINDOWS)]
    noise = median_pace_s(again) / median_pace_s(before)
    ratio = median_pace_s(after) / median_pace_s(again)
    text = f"step time after / before {ratio:.3f}; without a profile between {noise:.3f}"
    return measured(text, ratio=ratio, noise=noise)


def kernels_are_seen(device: torch.device) -> Verdict:
    """The profiler sees kernels: containers often forbid CUPTI, and then collectives must be unknown, not 0."""
    need_cuda(device)
    stepper = stepper_of(cell_of(device, SMALL), device)
    events = _profile(device, stepper).events() or []
    spans = [event.time_range.elapsed_us() for event in events if str(event.device_type).endswith("CUDA")]
    if not spans:
        return measured("no kernel is seen: CUPTI is not allowed here", kernels=0.0)
    text = f"{len(spans) / PROFILED:.0f} kernels a step, median {statistics.median(spans):.1f} us"
    return judged(sum(spans) > 0, text, kernels=len(spans) / PROFILED)


def profiles_agree(device: torch.device, teardown: str) -> Verdict:
    """Two profiles of a process have the same kernels, each as often in every step, and one for each launch."""
    need_cuda(device)
    os.environ["TEARDOWN_CUPTI"] = teardown
    with group_of_one(device):
        stepper = stepper_of(cell_of(device, {**SMALL, "strategy": "fsdp"}), device)
        steps = [profiled_steps(stepper) for _ in range(2)]
    profiles, lost = [each.events for each in steps], sum(each.lost for each in steps)
    keep(f"profile_{teardown}", [[*event] for event in profiles[0]])
    counts = [Counter(e.name for e in events if e.gpu is not None and not e.annotation) for events in profiles]
    uneven = sum(count % PROFILED_STEPS for of_one in counts for count in of_one.values())
    other = sum(((counts[0] - counts[1]) + (counts[1] - counts[0])).values())
    first, second = (of_one.total() for of_one in counts)
    text = f"{first} and {second} kernels in {PROFILED_STEPS} steps; {other} differ, {uneven} beyond whole steps"
    text += f", {lost} of {sum(len(each.launched) for each in steps)} launches without one"
    return judged(first > 0 and not uneven and not other and not lost, text, first=first, second=second)


def _profile(device: torch.device, stepper: Stepper) -> profile:
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(PROFILED):
            stepper.step()
        if cuda:
            torch.cuda.synchronize(device)
    return profiler
