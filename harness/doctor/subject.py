"""What a check is, and its subject: the workload of one cell on one rank, with models, batches and trainings of it."""

from __future__ import annotations

import copy
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from traceback import extract_tb, walk_stack
from types import FrameType, FunctionType, ModuleType
from typing import IO, Generic, TypeVar
from weakref import finalize

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from harness.doctor.facts import MOST_BYTES, Steps
from harness.measure.generators import KINDS, LEAVES, MOST_ITEMS, module_of_the_user, parts_of
from harness.plan.cell import MOST_MICRO_BATCH, Cell
from harness.plan.checks import Finding
from harness.plan.comparison import base_cell
from harness.plan.memory_forecast import Mode, at_smaller_batch
from harness.plan.rows import MemoryFacts, TrialFacts
from harness.system.files import PACKAGE_FOLDER
from harness.system.user_code import INSTALLED, STANDARD, is_the_users
from harness.train.loader import Batches, Share, endless_shares
from harness.train.model import init_weights_of, initialised
from harness.train.ranks import Ranks
from harness.train.training import Training
from harness.train.transfer import copier
from harness.train.workloads import Collate, Datasets, Workload, Wrapper, as_loss, collate_of, innermost

T = TypeVar("T")
HELPERS = ("resource_tracker", "forkserver", "semaphore_tracker", "compile_worker")
"""Processes that Python and torch start for their own purposes."""
SLOW_S = 1.0
"""A build that takes longer is not repeated."""
ROOM = 4
"""Models that must fit into the free memory of the host, or on its disk, for one to be kept there."""
MOST_OBJECTS = 1_000_000
"""Objects of a workload that are searched for parts of its model."""
SMALL = 4
"""Samples of a batch for checks that need only shapes."""


@dataclass(frozen=True)
class ProcessState:
    """The number of computing threads, and the Python threads and child processes by identity and name."""

    threads: int
    others: dict[int, str]

    @classmethod
    def now(cls) -> ProcessState:
        """Read the state of this process."""
        frames = sys._current_frames()
        running = {
            id(thread): f"thread {thread.name}"
            for thread in threading.enumerate()
            if not _is_of_library(frames.get(thread.ident or 0))
        }
        return cls(torch.get_num_threads(), running | _children())

    def started_since(self, earlier: ProcessState) -> list[str]:
        """Return the names of the threads and processes that were not there before."""
        return [name for key, name in self.others.items() if key not in earlier.others]


def _is_of_library(frame: FrameType | None) -> bool:
    """Return whether the outermost code of a thread, the standard library's left out, is a library's."""
    files = [frame.f_code.co_filename for frame, _ in walk_stack(frame)] if frame else []
    outside = [file for file in reversed(files) if STANDARD not in file or INSTALLED in file]
    return bool(outside) and any(part in outside[0] for part in (INSTALLED, f"{PACKAGE_FOLDER}/"))


def _children() -> dict[int, str]:
    found = {}
    for child in psutil.Process().children():
        try:
            if not any(helper in part for helper in HELPERS for part in child.cmdline()):
                found[-child.pid] = f"process {child.name()}"
        except psutil.Error:  # it has ended
            continue
    return found


@dataclass
class Kept:
    """The model that was built first, as it was then, in memory or, if several do not fit there, in a file.

    ``links``: the workload's attributes that are parts of it. The file has no name, so that it ends with the process.
    """

    model: nn.Module | None = None
    file: IO[bytes] | None = None
    links: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, type[nn.Module]] = field(default_factory=dict)
    """The classes of the modules of the models that were built, by name; "" is the model's own."""

    @property
    def is_copied(self) -> bool:
        """Whether later models are copies of the first."""
        return self.model is not None or self.file is not None

    def keep(self, model: nn.Module) -> None:
        """Keep a copy where there is room for it, if anywhere. Raises whatever copying a model of the user raises."""
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        if _fits_into_memory(size):
            self.model = copy.deepcopy(model)
        elif ROOM * size < shutil.disk_usage(_disk()).free:
            with ExitStack() as stack:
                file = stack.enter_context(tempfile.TemporaryFile(dir=_disk()))
                torch.save(model, file)
                self.file, _ = file, finalize(self, stack.pop_all().close)

    def copied(self) -> nn.Module | None:
        """Return a copy of the model; None if there is none."""
        if self.file is None:
            return copy.deepcopy(self.model)
        self.file.seek(0)
        # of the user's own class; nothing but keep() can write the file
        model: nn.Module = torch.load(self.file, weights_only=False)
        return model


def _fits_into_memory(size: int) -> bool:
    return ROOM * size < psutil.virtual_memory().available


def _disk() -> str:
    """Return a folder on a disk: that for temporary files may be in memory."""
    return "/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir()


class FewBuilds(Wrapper):
    """A workload that hands out copies of its first model if a build takes longer than SLOW_S.

    A copy lacks the hooks of parameters, so that real steps are taken with ``inner``, which builds anew. If a model
    cannot be copied, or the workload keeps parts of it in another way than as modules in its attributes (in a list, a
    parameter), each is built.
    """

    def __init__(self, inner: Workload, kept: Kept | None = None) -> None:
        super().__init__(inner)
        self.kept = kept or Kept()

    def __copy__(self) -> FewBuilds:
        return FewBuilds(copied(self.inner), self.kept)

    def build_model(self) -> nn.Module:
        """Return a new model, or a copy of the first."""
        if (model := self.kept.copied()) is not None:
            for attribute, name in self.kept.links.items():
                setattr(self.inner, attribute, model.get_submodule(name))
            return model
        start = time.perf_counter()
        model = self.inner.build_model()
        self.kept.kinds = {name: type(module) for name, module in model.named_modules()}
        if time.perf_counter() - start > SLOW_S and not any(parameter.is_meta for parameter in model.parameters()):
            names = {id(module): name for name, module in model.named_modules()}
            attributes = vars(self.inner).items()
            self.kept.links = {name: names[id(value)] for name, value in attributes if id(value) in names}
            with suppress(Exception):  # a model that cannot be copied is built each time
                own = (value for name, value in attributes if name not in self.kept.links)
                if not _reaches(chain(own, _closures(model)), model):
                    self.kept.keep(model)
        return model


def copied(workload: Workload) -> Workload:
    """Return a copy with its own plain state, such as a mean in a helper object: no training changes another one's.

    Models, data sets, optimizers and what libraries make are shared.
    """
    made, memo = copy.copy(workload), dict[int, object]()
    for name, value in getattr(made, "__dict__", {}).items() if not isinstance(made, FewBuilds) else ():
        if all(map(_is_plain, (part for _, part in parts_of({"": value})))):
            with suppress(Exception):  # what cannot be copied is shared
                setattr(made, name, copy.deepcopy(value, memo))
    return made


def _is_plain(part: object) -> bool:
    """Return whether a part of a value is a number, a generator, a small container or tensor, or a plain object."""
    if isinstance(part, Tensor | np.ndarray):
        return part.nbytes <= MOST_BYTES and not getattr(part, "requires_grad", False)
    if isinstance(part, dict | list | tuple | set | frozenset | deque):
        return len(part) <= MOST_ITEMS
    if isinstance(part, nn.Module | Dataset):
        return False
    return isinstance(part, (*LEAVES, *KINDS)) or module_of_the_user(type(part)) is not None


def _closures(model: nn.Module) -> Iterator[object]:
    """Yield the functions in attributes and hooks of the model's modules, which a copy of the model shares with it."""
    for module in model.modules():
        for value in vars(module).values():
            held = value.values() if isinstance(value, dict) else [value]
            yield from (each for each in held if isinstance(each, FunctionType))


def _reaches(values: Iterable[object], model: nn.Module) -> bool:
    """Return whether objects hold a module, parameter or buffer of the model; also if there are too many to know."""
    parts = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    waiting = list(values)
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in parts or len(seen) > MOST_OBJECTS:
            return True
        if id(value) not in seen:
            seen.add(id(value))
            waiting += _held(value)
    return False


def _held(value: object) -> Iterator[object]:
    """Yield the objects that an object holds; of code, what it was created with, not the modules that it uses."""
    if isinstance(value, type | ModuleType):
        return
    if isinstance(value, FunctionType):
        held = [value.__closure__, value.__defaults__, value.__kwdefaults__]
    else:
        held = gc.get_referents(value)
    yield from filter(gc.is_tracked, held)


def doctor_cell(cell: Cell) -> Cell:
    """Return the cell that the doctor trains: a micro-batch a step at the whole batch's learning rate.

    It is not compiled, and keeps all activations.
    """
    recipe = {name: value for name, value in cell.training.items() if name not in ("accumulation", MOST_MICRO_BATCH)}
    return at_smaller_batch(
        replace(cell.eager, activation_checkpointing="none", training=recipe),
        cell.micro_batches,
    )


@dataclass(frozen=True)
class Case:
    """A cell as it is examined; the same on every rank."""

    cell: Cell
    _: KW_ONLY
    planned: Cell | None = None
    """The planned cell, if it is examined with another batch or without compilation."""
    memory: MemoryFacts | None = None
    """Sizes of the model; None if it cannot be built."""
    steps: Sequence[Steps] = ()
    """The real steps of every rank; empty before they are taken."""


@dataclass(frozen=True)
class Subject(Case):
    """A cell on one rank. ``advance`` resets the watchdog."""

    workload: Workload
    datasets: Datasets
    seed: int
    ranks: Ranks
    advance: Callable[[], None] = lambda: None
    modes: Sequence[Mode] = ()
    """The modes of the cells whose memory is estimated; empty: the cell's own mode."""
    whole_model_fits: bool = True
    """One device has the memory to train the whole model."""
    epochs: bool = False
    """The cell is trained for whole epochs too."""
    explains: bool = False
    """Its timed trials are explained."""
    process: ProcessState | None = None
    """The threads and processes before the examination."""

    def fresh(self) -> Subject:
        """Return a copy with a copied workload, so that attributes set by one check do not reach the next."""
        return replace(self, workload=copied(self.workload))

    @property
    def device(self) -> torch.device:
        return self.ranks.devices[0]

    @property
    def training_samples(self) -> int:
        return len(self.datasets[0])

    @property
    def to_device(self) -> Callable[[object], object]:
        """A function that moves a batch to this rank's first device."""
        return copier(self.device, {})

    def built_model(self) -> nn.Module:
        """Build the workload's model from the seed, on the host or on the meta device, as the workload does."""
        torch.manual_seed(self.seed)
        model: nn.Module = self.workload.build_model()
        return model

    def bare_model(self) -> nn.Module:
        """Build the workload's model from the seed, on the device, without a wrapper."""
        return self.on_device(self.built_model())

    def loss(self, model: nn.Module, batch: object) -> tuple[Tensor, Tensor]:
        """Return the sum and weight of the workload's loss; raise WorkloadError if it returns anything else."""
        return as_loss(self.workload.loss(model, batch))

    def on_device(self, model: nn.Module) -> nn.Module:
        """Move a model to the device; one that is built on the meta device is initialised first, on the host."""
        return initialised(model, init_weights_of(self.workload)).to(self.device)

    def training(self, workload: Workload | None = None) -> Training:
        """Make the training of the cell, as a trial does: without ``workload``, of a model that is built for it."""
        return Training(self.cell, workload or innermost(self.workload), self.seed, self.ranks)

    def single_device_training(self, workload: Workload | None = None) -> Training:
        """Make the training of one device, on this rank only; at the learning rate of the cell's global batch."""
        cell = replace(base_cell(self.cell), global_batch_size=self.cell.global_batch_size)
        ranks = replace(self.ranks, rank=0, world_size=1, local_rank=0, node_rank=0, devices=self.ranks.devices[:1])
        return Training(cell, workload or self.workload, self.seed, ranks)

    def first_samples(self, count: int, device: torch.device | None = None) -> object:
        """Return a batch of the first samples, on the rank's device or on another one."""
        keys = tuple((0, index % self.training_samples) for index in range(count))
        return copier(device or self.device, {})(next(self._batches([Share(keys, count, count)])))

    def stream(self, steps: int, *, whole: bool = False, collate: Collate | None = None) -> list[tuple[Share, object]]:
        """Return this rank's shares of the first steps with their batches; ``whole``: the global batches instead.

        ``collate``: instead of the workload's own.
        """
        rank, world_size = (0, 1) if whole else (self.ranks.rank, self.ranks.world_size)
        shares = endless_shares(self.training_samples, self.cell.global_batch_size, self.seed, rank, world_size)
        first = list(islice(shares, steps))
        return [
            (share, self.to_device(batch)) for share, batch in zip(first, self._batches(first, collate), strict=True)
        ]

    @cached_property
    def replicas(self) -> int:
        """The number of devices of this rank."""
        return len(self.ranks.devices)

    def _batches(self, shares: Sequence[Share], collate: Collate | None = None) -> Iterator[object]:
        collate = collate or collate_of(self.workload)
        options = {"pin_memory": False}
        loader = Batches(self.datasets[0], seed=self.seed, ranks=self.ranks, options=options, collate=collate)
        return loader.of(shares)


@dataclass(frozen=True)
class Check(Generic[T]):
    """One check of a cell. ``T``: the observation of one rank, which is sent to every rank: it must be picklable.

    By default each rank observes alone, before any real step, and the observations are judged at once; if one raises,
    the check is left out, with a finding. ``needs_peers`` and ``needs_steps`` change this.
    """

    observe: Callable[[Subject], T] | None
    """None: the check judges ``Case.steps``, the real steps."""
    judge: Callable[[Sequence[T], Case], Iterable[Finding]]
    """The findings from the observations of all ranks, in the order of the ranks; the same on every rank."""
    needs_peers: bool = False
    """The observation is made after the real steps, by all ranks at the same time: it may call collectives."""
    needs_steps: bool = False
    """The observation is made by each rank alone, but judged after the real steps."""
    needs_whole_model: bool = False
    """The observation has the whole model on one device; it is left out if the model does not fit there."""
    stops: bool = False
    """After an error of this check no real step is taken."""
    redundant: Callable[[Sequence[Finding]], bool] | None = None
    """Given the earlier findings, returns True if this check would only repeat them; it is then left out."""
    figures: Callable[[Sequence[T], Case], Mapping[str, str]] | None = None
    """Measurements in words, by title; reported also if the check is redundant."""
    facts: Callable[[Sequence[T], Case], TrialFacts] | None = None
    """Facts of the trial's row, unless the check is redundant."""
    about: tuple[str, ...] = ()
    """The methods of the workload, or ``forward`` of its model, that its findings are about."""
    clue: str = ""
    """A pattern of the lines in these methods that cause findings."""
    name: str = ""
    """Unique, from the row of the check. Findings may have another name, if several checks share it."""

    @property
    def after_steps(self) -> bool:
        """The check is judged after the real steps."""
        return self.observe is None or self.needs_peers or self.needs_steps


def first_found(seen: Sequence[Sequence[Finding]], case: Case) -> Sequence[Finding]:
    """Return the findings of the first rank with an error, else with any: each rank has judged what it observed."""
    found = [findings for findings in seen if findings]
    errors = [findings for findings in found if any(finding.severity == "error" for finding in findings)]
    return next(iter(errors or found), ())


def describe_error(error: BaseException, most: int = 300) -> str:
    """Return an exception's type and the first ``most`` characters of its message, on one line, with its place.

    A longer message ends with a whole word and an ellipsis. The place is the last line of the user's own code on the
    way to the error, if there is one.
    """
    frames = [frame for frame in extract_tb(error.__traceback__) if is_the_users(frame.filename)]
    place = f" [{frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno}]" if frames else ""
    text = " ".join(str(error).split())
    if len(text) > most:
        text = f"{text[:most].rpartition(' ')[0] or text[:most]} ..."
    return f"{type(error).__name__}: {text}{place}"


def any_error(findings: Sequence[Finding]) -> bool:
    """Return whether there is an error among the findings."""
    return any(finding.severity == "error" for finding in findings)
