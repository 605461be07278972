"""The steps of a training script, counted inside its process, and its end at the step that its parent names.

An optimizer's step is seen by torch's hook for all optimizers, samples and waits by the DataLoader's iterator. Devices
are synchronised only at the edges of the windows.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness import probe
from harness.measure.peak_memory import peak
from harness.measure.script import messages
from harness.measure.script.batches import TRAINS, Iteration, count_datasets, time_loaders
from harness.measure.script.child import Counting
from harness.measure.script.profiling import StepProfiler
from harness.measure.script.reports import Reports, Values, read_libraries
from harness.measure.window import synchronize

TICK_S = 0.2
"""How often the steps of the warm-up are sent."""
MOST_EVENTS = 20_000
"""The most CUDA events of a window; the steps of a longer one are timed by the host's clock."""
ZERO = "ZeroRedundancyOptimizer"
clock = time.perf_counter


class StepRecorder(probe.Recorder):
    """Counts the steps of this process, sends them to the parent and ends the script after the last window.

    ``advance``: counts a step for the watchdog.
    """

    def __init__(self, parent: Connection, advance: Callable[[], None], counting: Counting) -> None:
        self._parent, self._advance, self._counting = parent, advance, counting
        self._reports = Reports() if counting.trains else None
        self._all_samples = self._all_pauses_s = 0.0
        self._profiler: StepProfiler | None = None
        self._lock = threading.Lock()
        self._steps = messages.Steps()
        self._edges: deque[int] = deque()
        self._next_edge = sys.maxsize
        self._events: list[torch.cuda.Event] = []
        self._wait_s = self._samples = self._pause_s = 0.0
        self._untrained: list[Iteration] = []
        self._touched: list[Iteration] = []
        """The iterations that delivered a batch since the last step."""
        self._last: Iteration | None = None
        """The iteration of the last batch."""
        self._trained_on: weakref.WeakSet[object] = weakref.WeakSet()
        """The loaders of what was trained on: a pass backward followed a batch of it, before the next one."""
        self._own_batches = False
        """Whether a step was taken without any loader: the script has batches of its own."""
        self._read_at, self._read, self._reads = 0.0, 0.0, False
        """When a batch came without gradients last, the samples in this pause, and whether their iteration goes on."""
        self._counts = False
        """Whether the script counts its samples itself."""
        self._batches = self._all_batches = 0
        self._trained = 0
        """The steps and backward passes so far, of which an evaluation has none."""
        self._paused_at: float | None = None
        self._inner_pauses = 0
        self._by_probe = self._done = self._validates = False
        self.measured = False
        """Whether the last window, or the script, has ended."""
        self._may_go_on = threading.Event()
        self._may_go_on.set()
        self._late: int | None = None
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._names: list[str] = []
        self._connected = 0
        self._event_device: torch.device | None = None
        self._counted: weakref.ref[torch.optim.Optimizer] | None = None
        self._evaluations = 0
        self._evaluated_at = -1
        """The steps before the last evaluation."""
        self._thread = threading.get_ident()

    def install(self) -> None:
        """Install the hooks; from a thread, send the steps of the warm-up, or all of a training."""
        register_optimizer_step_post_hook(self._after_optimizer)
        torch.autograd.backward = self._noting(torch.autograd.backward)  # which Tensor.backward calls
        probe.record_by(self)
        time_loaders(self)
        if self._reports:
            read_libraries(self.report)
        threading.Thread(target=self._follow, daemon=True, name="harness").start()

    def _send(self, message: object) -> None:
        with self._lock:
            self._parent.send(message)

    def _follow(self) -> None:
        """Send steps until the schedule arrives, those of a training until its end; return if the parent is gone."""
        sent, named = 0, False
        with suppress(OSError, EOFError):
            while not named or (self._reports and not self.measured):
                if named:
                    time.sleep(TICK_S)  # what the parent sends now is for the thread that trains
                elif self._parent.poll(TICK_S):
                    named = self._obey(self._parent.recv())
                sent = self._send_progress(sent)
        self._may_go_on.set()

    def _obey(self, message: object) -> bool:
        """Do what the parent says; return whether it says nothing more to this thread."""
        if isinstance(message, messages.Hold):
            self._may_go_on.clear()  # before the steps are read: who has passed this by now has counted its step
            self._send(messages.Held(len(self._steps.ended)))
            return False
        if isinstance(message, messages.Schedule):  # else the end of a training that has ended by itself
            self._edges = deque(message.edges)
            self._next_edge = message.start
            self._may_go_on.set()
        return True

    def _send_progress(self, sent: int) -> int:
        """Send the steps after the first ``sent``; return how many are sent now."""
        count = len(self._steps.ended)
        if count > sent:
            ended, paused = self._steps.ended, self._steps.pause_s
            self._send(
                messages.Progress([ended[i] - ended[i - 1] - paused[i] for i in range(max(sent, 1), count)], count)
            )
        return count

    # -- what a step is

    def count_datasets(self) -> None:
        """Count the batches of Ray Data too, which is imported by now if it is used."""
        count_datasets(self, consumes=self._counting.ingests)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._counting.ingests:
            raise RuntimeError(TRAINS)
        if self._by_probe:
            self._optimizers.add(optimizer)  # whose devices are those of the trial
            return
        if is_inside_own_step(optimizer):
            return
        if self._counted is None or self._counted() is not optimizer:
            replaced = self._counted is not None and self._counted() is None  # as by that of the next training
            first = optimizer not in self._optimizers
            if first:
                self._optimizers.add(optimizer)
                if not replaced:
                    self._names.append(type(optimizer).__name__)
            if not replaced and not (first and len(self._names) == self._counting.optimizer + 1):
                return
            self._counted = weakref.ref(optimizer)
        self._take()

    def _noting(self, backward: Callable[..., None]) -> Callable[..., None]:
        """Return torch's backward, which also notes that it ran, but not inside another, as of a checkpoint."""

        @functools.wraps(backward)
        def noting(*given: object, **named: object) -> None:
            self._trained += torch._C._current_graph_task_id() == -1
            backward(*given, **named)

        return noting

    def begin(self) -> None:
        """Begin a step that the script marks; from then on the optimizers' do not count."""
        self._by_probe = True

    def step(self) -> None:
        self._take()

    def count(self, samples: float) -> None:
        if not self._counts:  # what loaders delivered before is the same
            self._samples, self._counts = 0.0, True
        self._samples += samples

    def pause(self) -> None:
        if self._paused_at is None:
            synchronize(self._devices())
            self._paused_at = clock()
        else:
            self._inner_pauses += 1

    def go_on(self) -> None:
        if self._inner_pauses:
            self._inner_pauses -= 1
        else:
            self._end_pause()

    def _end_pause(self, at: float | None = None) -> None:
        self._inner_pauses = 0
        if self._paused_at is not None:
            synchronize(self._devices())
            paused_s = (clock() if at is None else at) - self._paused_at
            self._pause_s += paused_s
            self._all_pauses_s += paused_s
            self._paused_at = None
            self._validates = False

    def _end_pause_at_step(self) -> None:
        """End a pause that no fetch with gradients has ended.

        One for validation ended with its last batch, unless the training itself fetches its batches without gradients.
        """
        if self._validates and self._reads and not self._batches and not self._own_batches:
            self._paused_at, self._validates = None, False
            self._samples += 0.0 if self._counts else self._read
        else:
            self._end_pause(self._read_at if self._validates else None)

    def report(self, values: Values) -> None:
        """Keep what the script reports of its training; in a trial of its speed nothing."""
        if self._reports is None or not values:
            return
        self._reports.add(values, len(self._steps.ended), self._train_s, self._all_samples)
        self._advance()  # an evaluation between steps is no hang

    def _train_s(self) -> float:
        """Return the seconds since the end of the first step, without pauses."""
        now = clock() if self._paused_at is None else self._paused_at
        return now - self._steps.ended[0] - self._all_pauses_s if self._steps.ended else 0.0

    def _take(self) -> None:
        steps = self._steps
        if self._done:
            raise messages.EndOfTrial(0)
        if self._paused_at is not None:
            self._end_pause_at_step()
        if not steps.edges and not self._counting.trains:  # else the warm-up is paced by the launches of its steps
            synchronize(self._devices())
        now = clock()
        self._own_batches |= not (self._batches or self._pause_s or self._reads or self._untrained)
        self._reads = False
        steps.wait_s.append(self._wait_s)
        steps.samples.append(self._trained_samples())
        steps.pause_s.append(self._pause_s)
        steps.ended.append(now)  # last: the other thread reads as many of each as there are ends
        self._all_samples += steps.samples[-1]
        self._all_batches += self._batches
        self._wait_s = self._samples = self._pause_s = 0.0
        self._batches = 0
        self._trained += 1
        self._advance()
        self._may_go_on.wait()
        if len(steps.ended) == 1:
            self._all_pauses_s = 0.0
            self._note_group()
            if self._reports:
                read_libraries(self.report)  # a Trainer that takes steps is imported
        if self._profiler:
            if self._profiler.step(steps.wait_s[-1], steps.pause_s[-1]):
                self._send(messages.Profiled(self._profiler.end()))
                self._end()
        elif self._events and len(steps.ended) < self._next_edge:
            self._record(len(steps.ended) - steps.edges[-1][0])
        elif len(steps.ended) >= self._next_edge:
            self._at_edge(len(steps.ended))

    def _at_edge(self, count: int) -> None:
        """End a window and begin the next one, or send all steps and begin the profile, or end the script."""
        steps, edge = self._steps, self._edges.popleft()
        if count != edge:
            self._late = count
        taken = count - steps.edges[-1][0] if steps.edges else 0
        if self._events:
            self._record(taken)
        synchronize(self._devices())
        self._note_group()
        of_window, self._events = self._events[: taken + 1], []
        steps.device_s += [first.elapsed_time(second) / 1000.0 for first, second in pairwise(of_window)]
        if not steps.edges:
            self._evaluations = 0
            self._send(messages.WindowsBegun())
        goes_on = bool(self._edges) and self._late is None
        if goes_on:
            self._next_edge = self._edges[0]
            if self._devices() and self._next_edge - count < MOST_EVENTS:
                self._event_device = self._devices()[0]
                self._events = [torch.cuda.Event(enable_timing=True) for _ in range(self._next_edge - count + 1)]
                for number in range(len(self._events)):
                    self._record(number)  # torch creates an event when it is first recorded: not in the window
                synchronize(self._devices())
        steps.edges.append((count, clock()))
        if goes_on:
            if self._events:
                self._record(0)
            return
        self._send_all(by_itself=False)
        if not self._counting.profiles or self._late is not None:
            self._end()
        self._profiler = StepProfiler(self._devices())

    def _end(self) -> NoReturn:
        """End the script once no other rank needs it."""
        self._done = True
        self._parent.recv()
        raise messages.EndOfTrial(0)

    def _devices(self) -> list[torch.device]:
        """Return the GPUs of an optimizer's parameters, or the current one; none if CUDA is not used."""
        if not torch.cuda.is_initialized():
            return []
        optimizer = self._counted() if self._counted else next(iter(self._optimizers), None)
        groups = optimizer.param_groups if optimizer else []
        found = dict.fromkeys(each.device for group in groups for each in group["params"] if each.is_cuda)
        return [*found] or [torch.device("cuda", torch.cuda.current_device())]

    def _record(self, number: int) -> None:
        self._events[number].record(torch.cuda.current_stream(self._event_device))

    def _note_group(self) -> None:
        """Remember the size of the process group: the script destroys it at its end."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._connected = max(self._connected, torch.distributed.get_world_size())

    def finish(self) -> None:
        """Send all steps after the script has ended by itself."""
        if self.measured:
            self._not_profiled()
        else:
            self._send_all(by_itself=True)

    def _send_all(self, *, by_itself: bool) -> None:
        self._send(messages.Finished(self._steps, self.facts(), by_itself, self._late, self._reports))
        self.measured = True

    def fail(self, kind: str, message: str) -> None:
        """Send the error that ended the script, unless that was after the last window."""
        if self.measured:
            self._not_profiled()
        else:
            self._send(messages.Raised(kind, message, len(self._steps.ended)))

    def _not_profiled(self) -> None:
        """Send that the profile is missing, and stop it: torch may crash at the end of a process that profiles."""
        if not self._done:
            if self._profiler:
                self._profiler.end()
            self._send(messages.Profiled(None))

    def facts(self) -> messages.Facts:
        """Return what is known of the process now."""
        self._note_group()
        devices = self._devices()
        memory = peak(devices or [torch.device("cpu")])  # before sums of parameters
        memory.pop("allocated_by_device", None)
        memory.pop("reserved_by_device", None)
        return messages.Facts(
            optimizers=self._names,
            evaluations=self._evaluations,
            connected=self._connected,
            # the first to step of a ZeroRedundancyOptimizer is one of its own, with the rank's share of the parameters
            parameters=[] if ZERO in self._names else digests(self._counted() if self._counted else None),
            # a script may hide GPUs from its ranks: each then names its own cuda:0
            gpus=[f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in devices],
            threads=torch.get_num_threads(),
            workers=len(multiprocessing.active_children()),
            memory=memory,
            counted=self._counts,
            passes=round(self._trained / max(1, len(self._steps.ended))) - 1,  # a step counts too
            batches=round(self._all_batches / max(1, len(self._steps.ended))),
        )

    # -- what a loader delivers

    def fetching(self) -> float:
        """Return the time; begin or end a pause for evaluation."""
        start = clock()
        if self._counting.pauses and threading.get_ident() == self._thread:
            if not torch.is_grad_enabled():
                if self._paused_at is None:
                    self.pause()
                    self._validates, self._read, self._read_at, self._reads = True, 0.0, clock(), False
            elif self._validates:  # a pause of the script's own ends by itself
                self._end_pause()
        return start

    def waited(self, start: float) -> None:
        """Add a wait for data to the step; an ingest does nothing else."""
        if not self._counting.ingests and self._trains() and threading.get_ident() == self._thread:
            self._wait_s += clock() - start

    def fetched(self, start: float, samples: int, iteration: Iteration) -> None:
        """Count the batch that was fetched since a time, and its samples if it may be trained on."""
        if self._trains():
            self._note_training(iteration)
            if not iteration.of_step:
                self._touched.append(iteration)
            iteration.add(samples, self._trained)
            self._last = iteration
            self._batches += 1
            self._samples += 0.0 if self._counts else samples
        elif self._paused_at is None:
            self._evaluate()
        elif threading.get_ident() == self._thread:
            self._read_at, self._reads = clock(), True
            self._read += samples
        self.waited(start)

    def _note_training(self, iteration: Iteration) -> None:
        """Note the loader of an iteration as trained on if a pass backward followed its last batch."""
        if iteration.loader is not None and iteration.last is not None and iteration.last < self._trained:
            with suppress(TypeError):  # a loader of a class of one's own without a hash
                self._trained_on.add(iteration.loader)

    def _evaluate(self) -> None:
        """Count what was read between two steps and not trained on as one evaluation."""
        self._evaluations += self._evaluated_at != len(self._steps.ended)
        self._evaluated_at = len(self._steps.ended)

    def iterated(self, iteration: Iteration) -> None:
        """Note the end of an iteration; one that nothing was trained in may be an evaluation with gradients enabled."""
        self._note_training(iteration)
        if self._paused_at is not None and threading.get_ident() == self._thread:
            self._read_at, self._reads = clock(), False
        if iteration.began == self._trained:
            self._untrained.append(iteration)
            iteration.began = None

    def _trained_samples(self) -> float:
        """Return the step's samples without those of evaluations.

        What was never trained on is one beside what was, unless it delivered the last batch, as a new loader of the
        training does, or if its iteration has ended; before anything was trained on an iteration that ended without a
        pass backward. What all samples belong to then is none: a loader that fetches ahead has ended before its last
        batch is trained on.
        """
        touched, self._touched = self._touched, []
        ended, self._untrained = self._untrained, []
        known = [*self._trained_on]
        others = [each for each in touched if known and not any(each.loader is loader for loader in known)]
        if len(others) == len(touched):  # another loader may have taken the place of the one that was trained on
            others = [each for each in others if each in ended]
        others = [each for each in others if each is not self._last or each in ended]
        samples = self._samples - sum(each.samples_of_step for each in others) * (not self._counts)
        batches = sum(each.of_step for each in others)
        more = [each for each in ended if each not in others]
        of_more = sum(each.samples for each in more) * (not self._counts)
        if of_more < samples:
            samples -= of_more
            others += more
            batches += sum(each.batches for each in more)
        if others:
            self._evaluate()
        self._batches -= batches
        for each in touched:
            each.of_step, each.samples_of_step = 0, 0.0
        return max(samples, 0.0)

    def _trains(self) -> bool:
        """Return whether batches may be trained on: not without gradients, nor in a pause of the script's thread."""
        paused = self._paused_at is not None and threading.get_ident() == self._thread
        return torch.is_grad_enabled() and not paused


def is_inside_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step() of a derived class, which torch's hooks follow too, has called this one."""
    hooked = sum(hasattr(vars(each).get("step"), "hooked") for each in type(optimizer).__mro__)
    if hooked < 2:
        return False
    frame, calls = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer:  # that of profile_hook_step
            calls += 1
    return calls > 1


MOST_PARAMETERS = 50
"""The most parameters that are compared over ranks."""


def digests(optimizer: torch.optim.Optimizer | None) -> list[tuple[tuple[int, ...], str]]:
    """Return shape and sum of an optimizer's first parameters; nothing if they may be shards.

    Those of fully_shard are of a class of their own, those of FullyShardedDataParallel have one dimension.
    """
    groups = optimizer.param_groups if optimizer else []
    found = [parameter for group in groups for parameter in group["params"]][:MOST_PARAMETERS]
    whole = all(type(each) in (torch.nn.Parameter, torch.Tensor) for each in found)
    if not whole or all(each.dim() <= 1 for each in found):
        return []
    with torch.no_grad(), suppress(RuntimeError):  # of memory: the steps are measured
        return [(tuple(each.shape), repr(each.sum(dtype=torch.float64).item())) for each in found]
    return []
