"""A worker group whose trials have different numbers of ranks: a process group for each trial, while other ranks wait.

Only groups without NCCL have such trials: to connect NCCL again after it was destroyed has an open race (pytorch issue
119196).
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from harness.doctor.gate import SKIP_RULES
from harness.launch.protocol import Job
from harness.plan.trial import Trial
from harness.system.user_code import is_the_users
from harness.train.ranks import Cache, Ranks

EXTENSIONS = tuple(EXTENSION_SUFFIXES)
NEVER = timedelta(days=1000)
"""The timeout of a rank that waits: the driver ends a group that hangs."""


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

    def run(self, trial: Trial, work: Callable[[Ranks], bool], cache: Cache) -> bool:
        """Run a trial if this rank is one of its ranks, else wait for its end; return whether the next one follows.

        ``work``: returns that on each of the trial's ranks. The rules of a doctor trial are known to all ranks then.
        """
        members = self._job.group.ranks_of(trial)
        if self._ranks.rank in members:
            with self._connected(trial, members) as ranks:
                goes_on = work(ranks)
                self._store.set(self._key(trial, self._ranks.rank), "")
                if ranks.first:
                    self._store.wait([self._key(trial, rank) for rank in members], NEVER)
                    state = pickle.dumps((goes_on, cache.get(SKIP_RULES, [])))
                    self._store.set(self._key(trial, "end"), state)  # type: ignore[arg-type]  # takes bytes too
                end = self._wait_for_end(trial)  # no rank disconnects while another still receives
        else:
            end = self._wait_for_end(trial)
        goes_on, cache[SKIP_RULES] = pickle.loads(end)
        return bool(goes_on)

    def _wait_for_end(self, trial: Trial) -> bytes:
        """Wait for the end of a trial; return whether the next one follows, and the rules of doctor trials, pickled."""
        self._store.wait([self._key(trial, "end")], NEVER)
        end: bytes = self._store.get(self._key(trial, "end"))
        return end

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
