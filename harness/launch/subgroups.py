"""A worker group whose trials run on some of its ranks: a process group for each trial, while other ranks wait.

Only groups without NCCL have such trials: to connect NCCL again after it was destroyed has an open race (pytorch issue
119196). Ranks of another variant may run a trial of their own at the same time: of both, one computes at a time.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from harness.doctor.gate import SKIP_RULES
from harness.launch.protocol import Job, Measured, Sent, TrialStarted
from harness.plan.trial import Trial
from harness.system.user_code import is_the_users
from harness.train.ranks import LOADER_WORKERS, Cache, Ranks

EXTENSIONS = tuple(EXTENSION_SUFFIXES)
NEVER = timedelta(days=1000)
"""The timeout of a rank that waits: the driver ends a group that hangs."""
Send = Callable[[Sent], bool]
"""Sends to the driver and waits for its answer; False asks the group to stop before its next trial."""
Work = Callable[[Trial, Ranks, Send, Callable[[], None] | None], bool]
"""Runs a trial on one of its ranks; the last argument lets the trials that run at once compute, None if there are none.

Returns whether the next trial follows.
"""


class Subgroups:
    """The trials of a worker group on this rank, by a store of the group: a file, which no other user can open.

    Destroys the process group of all ranks; each trial has its own.
    """

    def __init__(self, job: Job, ranks: Ranks, file: Path) -> None:
        self._job, self._ranks = job, ranks
        name = ranks.broadcast(str(file))
        ranks.barrier()  # no rank disconnects while another still receives
        dist.destroy_process_group()
        self._store = dist.FileStore(name, ranks.world_size)  # type: ignore[attr-defined]
        self._modules: dict[int, dict[str, ModuleType]] = {}
        self._size = ranks.world_size

    def run(self, turn: Sequence[Trial], work: Work, send: Send, cache: Cache) -> bool:
        """Run this rank's trial of those that run at once, and wait for the end of all; return whether more follow.

        The rules of a doctor trial are known to all ranks then.
        """
        own = next((trial for trial in turn if self._ranks.rank in self._job.group.ranks_of(trial)), None)
        if own:
            members = self._job.group.ranks_of(own)
            with self._connected(own, members) as ranks:
                goes_on = self._work(turn, own, partial(work, own, ranks), send)
                self._store.set(self._key(own, self._ranks.rank), "")
                if ranks.first:
                    self._store.wait([self._key(own, rank) for rank in members], NEVER)
                    learned = {key: cache[key] for key in (SKIP_RULES, LOADER_WORKERS) if key in cache}
                    state = pickle.dumps((goes_on, learned))
                    self._store.set(self._key(own, "end"), state)  # type: ignore[arg-type]  # takes bytes too
                ends = self._wait_for_ends(turn)  # no rank disconnects while another still receives
        else:
            ends = self._wait_for_ends(turn)
        states = list(map(pickle.loads, ends))
        cache.update(states[-1][1])
        return all(goes_on for goes_on, _ in states)

    def _work(
        self, turn: Sequence[Trial], own: Trial, work: Callable[[Send, Callable[[], None] | None], bool], send: Send
    ) -> bool:
        """Run this rank's trial; return whether the next one follows."""
        if len(turn) == 1:
            return work(send, None)
        earlier, settings = turn[: turn.index(own)], self._job.experiment.throughput
        windows = settings.windows if settings else 0
        alternation = Alternation(self._store, self._key(turn[0], "turns"), len(earlier), len(turn), windows)
        sender = Sender(self._store, self._key(turn[0], "refused"), send, partial(self._wait_for_ends, earlier))
        try:
            alternation.wait_for_turn()
            goes_on = work(sender.hold if earlier else sender.send_first, alternation.let_others_run)
            alternation.leave()
        except BaseException:
            with suppress(RuntimeError):  # of the store, which would hide the failure
                alternation.leave(every_rank=True)  # the others may wait for this one in a collective
            raise
        finally:
            sender.release()
        return goes_on

    def _wait_for_ends(self, trials: Sequence[Trial]) -> list[bytes]:
        """Wait for the end of these trials; return of each whether the next one follows, and the rules, pickled."""
        keys = [self._key(trial, "end") for trial in trials]
        self._store.wait(keys, NEVER)
        return [self._store.get(key) for key in keys]

    def _key(self, trial: Trial, what: object) -> str:
        return f"{trial.id}/{what}"

    @contextmanager
    def _connected(self, trial: Trial, members: range) -> Iterator[Ranks]:
        """Connect the trial's ranks; disconnect them afterwards, unless the trial raised: the process then ends."""
        rank, size = self._ranks.rank - members.start, len(members)
        variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        os.environ.update({name: str(value) for name, value in variables.items()})
        self._use_modules(size)
        dist.init_process_group(
            self._job.group.backend,
            store=dist.PrefixStore(trial.id, self._store),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=self._job.experiment.limits.collective_s),
        )
        yield replace(self._ranks, rank=rank, world_size=size, local_rank=rank)
        dist.destroy_process_group()

    def _use_modules(self, size: int) -> None:
        """Import the user's modules anew for another number of ranks, which they may have read while imported.

        Modules that cannot be imported twice, such as those that register an operator, stay as they are.
        """
        if size == self._size:
            return
        names = self._job.experiment.own_modules
        before = {name: sys.modules.pop(name) for name in own_modules(names)}
        sys.modules.update(self._modules.get(size, {}))
        try:
            for name in names:
                importlib.import_module(name)
        except (Exception, SystemExit):
            for name in own_modules(names):
                del sys.modules[name]
            sys.modules.update(before)
        self._modules[self._size], self._size = before, size


class Sender:
    """The messages of a trial that runs beside others: for the driver trials follow each other.

    ``refused``: the key of the store for a turn whose first trial may not start. ``wait``: for the trials before it.
    """

    def __init__(self, store: Any, refused: str, send: Send, wait: Callable[[], object]) -> None:
        self._store, self._refused, self._send, self._wait = store, refused, send, wait
        self._held: list[Sent] = []

    def send_first(self, message: Sent) -> bool:
        """Send a message of the first trial."""
        accepted = self._send(message)
        if isinstance(message, TrialStarted) and not accepted:
            self._store.set(self._refused, "")
        return accepted

    def hold(self, message: Sent) -> bool:
        """Keep a message of a later trial until the trials before it have ended; return False if it may not start.

        A measured trial waits for them here, so that it is explained, and may fail, as the driver's current one.
        """
        if isinstance(message, TrialStarted) and self._store.check([self._refused]):
            return False
        self._held.append(message)
        if isinstance(message, Measured):
            self.release()
        return True

    def release(self) -> None:
        """Send what is held, after the end of the trials before."""
        if self._held:
            self._wait()
        while self._held:
            self._send(self._held.pop(0))


class Alternation:
    """The order in which the trials of several variants compute, on a rank of one of them: in turn, at each window.

    ``store``: torch's. ``place``: of this rank's trial among the ``trials``. ``windows``: the number of timed windows
    of each.
    """

    def __init__(self, store: Any, name: str, place: int, trials: int, windows: int) -> None:
        self._store, self._name, self._place, self._trials, self._windows = store, name, place, trials, windows
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._done = 0

    def let_others_run(self) -> None:
        """Let each other trial compute once; return when it is this trial's turn again. All of its ranks call it."""
        self._store.set(self._key(self._place, self._rank, self._done), "")
        self._done += 1
        self.wait_for_turn()

    def wait_for_turn(self) -> None:
        """Wait until every rank of the other trials has stopped; the first trial begins at once."""
        others = (place for place in range(self._trials) if place != self._place)
        last = ((place, self._done - (place > self._place)) for place in others)
        keys = [self._key(place, rank, done) for place, done in last if done >= 0 for rank in range(self._size)]
        if keys:
            self._store.wait(keys, NEVER)

    def leave(self, *, every_rank: bool = False) -> None:
        """Let the other trials compute without this rank's, or without any rank of its trial."""
        for rank in range(self._size) if every_rank else (self._rank,):
            for done in range(self._done, self._windows + 2):
                self._store.set(self._key(self._place, rank, done), "")

    def _key(self, place: int, rank: int, done: int) -> str:
        return f"{self._name}/{place}/{rank}/{done}"


def own_modules(names: Iterable[str]) -> list[str]:
    """Return the imported modules and packages of the folders of these modules, without libraries and extensions."""
    files = {name: file for name, module in sys.modules.items() if (file := _file_of(module))}
    known = [(name, files[name]) for name in names if name in files]
    roots = {Path(file).parents[name.count(".") + file.endswith("__init__.py")] for name, file in known}
    return [
        name
        for name, file in files.items()
        if is_the_users(file) and not file.endswith(EXTENSIONS) and roots & {*Path(file).parents}
    ]


def _file_of(module: ModuleType) -> str:
    """Return the file of a module; of a package without __init__.py one that it could have; else an empty text."""
    if file := getattr(module, "__file__", None):
        return str(file)
    paths = [*getattr(module, "__path__", ())]
    return str(Path(paths[0]) / "__init__.py") if paths else ""
