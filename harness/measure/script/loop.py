"""A Ray Train function as it is, in the thread of its rank: its steps are counted, followed and ended as a script's."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.config.script import ScriptExperiment
from harness.measure.scenarios import TrialContext
from harness.measure.script.counting import StepRecorder
from harness.measure.script.following import counting_of, follow, result, values_of
from harness.measure.script.messages import EndOfTrial
from harness.measure.script.parent import InThread, ScriptFailed
from harness.plan.trial import TrialResult
from harness.system.process import in_thread
from harness.system.user_code import load_from
from harness.train.ranks import Ranks, connecting_on_use


def loop(context: TrialContext) -> TrialResult:
    """Run a Ray Train function on this rank until its last window; raise ScriptFailed if it takes too few steps.

    The processes end with the trial: the function may leave anything behind.
    """
    experiment, trial, ranks = context.experiment, context.trial, context.ranks
    assert isinstance(experiment, ScriptExperiment) and experiment.loop
    context.device_failed = True
    values = values_of(trial.cell, trial.seed, Path(), ranks.local_rank)
    # a batch of an ingest is no step, which may have several
    stated = experiment.stated_samples(values) if trial.cell.traits.trains else None
    ours, theirs = Pipe()
    counting = counting_of(context, experiment)
    recorder = StepRecorder(theirs, context.advance, counting)
    recorder.install()  # before the user's module may import a function that is replaced
    function = load_from(experiment.loop, "function", what=f"loop {experiment.loop!r}")
    recorder.count_datasets()
    try:
        with _own_group(ranks) as control, context.part("script"):
            following = in_thread(
                lambda: follow(InThread(ours), replace(context, ranks=control), experiment, counting.profiles)
            )
            _run(function, experiment.config_of(values), recorder)
            # other ranks may go on for as long as they take steps: the time without one is limits.trial, outside
            followed = following.result()
        return result(context, experiment, followed, stated, "")
    except ScriptFailed as error:
        raise ScriptFailed(error.kind, experiment.worded(str(error))) from error


def _run(function: Callable[..., object], config: Mapping[str, object], recorder: StepRecorder) -> None:
    """Call the function; its own errors are raised, unless they come after its last window, and its end is not."""
    try:
        function(config)
    except EndOfTrial:
        return
    except SystemExit as end:
        recorder.fail("SystemExit", f"the loop ended with exit code {end.code}")
        return
    except Exception as error:
        traceback.print_exc()
        if not recorder.measured:
            raise
        recorder.fail(type(error).__name__, str(error))
        return
    recorder.finish()


@contextmanager
def _own_group(ranks: Ranks) -> Iterator[Ranks]:
    """Give the thread that follows a process group of its own, beside which the loop uses the default one."""
    group: Any = None
    if ranks.world_size > 1 and not ranks.exchange:
        with connecting_on_use(dist.get_backend_config()):
            group = dist.new_group(backend="gloo")
    yield replace(ranks, group=group)
    if group is not None:
        with suppress(ValueError, RuntimeError):  # the loop has destroyed all groups
            dist.destroy_process_group(group)
