"""The process of one rank of a script: ``-m harness.measure.script.child CONNECTION``, a fresh interpreter.

It installs the hooks and runs the script as ``python SCRIPT ARGUMENTS`` or ``python -m MODULE ARGUMENTS`` does: in the
main thread, as ``__main__``, with its own sys.argv and its folder first on the import path. What it spawns as its ranks
is called in this process.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import io
import itertools
import os
import pickle
import runpy
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from harness.system.process import counting_in

SPAWNED = (
    "the script starts its ranks itself, by torch.multiprocessing.{name} with {what}, but here each rank is a process "
    "already, as under torchrun: take that call out and call its function with int(os.environ['LOCAL_RANK'])"
)
OTHER_COUNT = (
    "the script starts its ranks itself, {nprocs} by torch.multiprocessing.{name}, and this cell has {count} on each "
    "node: have it start int(os.environ['LOCAL_WORLD_SIZE']), or, on one node, {{devices}} of the file's arguments"
)
ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
COUNTER_VARIABLE, STACK_VARIABLE = "HARNESS_STEPS_FILE", "HARNESS_STACK_FILE"
"""Where a rank's process leaves the files of its watchdog: of the steps, and of the stack on SIGUSR1."""
NEVER = timedelta(days=1000)
"""The timeout of a rank that waits for the first one; the watchdog ends a trial that hangs."""


@dataclass(frozen=True)
class Counting:
    """What a StepRecorder counts.

    ``optimizer``: the number of the optimizer whose steps count. ``pauses``: whether evaluation is no training time.
    ``profiles``: whether steps after the windows are profiled. ``trains``: whether the trial is a training, whose
    reports are kept. ``ingests``: whether batches of Ray Data are consumed without training.
    """

    optimizer: int = 0
    pauses: bool = False
    profiles: bool = False
    trains: bool = False
    ingests: bool = False


@dataclass(frozen=True)
class Start:
    """What a rank's process needs to know.

    ``script``: in ``folder``, that of the trial, with links to the files of ``source``, the user's folder. ``module``:
    its name if ``python -m`` runs it.
    """

    script: str
    module: str | None
    folder: str
    source: str
    arguments: tuple[str, ...]
    counting: Counting


class SpawnsRanks(Exception):
    """The script starts processes for its ranks, which cannot be called in those that are there."""


def run_script(parent: Connection, start: Start) -> int:
    """Run the script with hooks in this process; return the exit code that it asks for."""
    if path := os.environ.pop(STACK_VARIABLE, None):
        stack = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    import torch.multiprocessing  # after the fault handler: it takes seconds

    from harness.measure.script.counting import StepRecorder
    from harness.measure.script.messages import EndOfTrial

    counter = os.environ.pop(COUNTER_VARIABLE, None)
    advance = counting_in(Path(counter)) if counter else lambda: None
    recorder = StepRecorder(parent, advance, start.counting)
    recorder.install()
    for name in ("spawn", "start_processes"):
        setattr(torch.multiprocessing, name, partial(_call_as_rank, start.folder, name))
    sys.addaudithook(partial(_before_open, start.folder))
    torch.save = _saving(torch.save, start.folder)
    sys.argv = [start.script, *start.arguments]
    sys.path[0] = start.folder
    try:
        if start.module:
            runpy.run_module(start.module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(start.script, run_name="__main__")
    except EndOfTrial:
        return 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if code:
            recorder.fail("SystemExit", f"the script ended with exit code {end.code}")
        else:
            recorder.finish()
        return code
    except BaseException as error:
        traceback.print_exception(error.with_traceback(_of_script(error, start.script)))
        recorder.fail(type(error).__name__, str(error))
        return 1
    recorder.finish()
    return 0


_calls = itertools.count()
WRITES = os.O_WRONLY | os.O_RDWR


def _before_open(folder: str, event: str, arguments: tuple[object, ...]) -> None:
    """Before the script opens a linked file of the user's to write to it, put a copy in the link's place."""
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES:
        own_copy(folder, arguments[0], whole=not arguments[2] & os.O_TRUNC)


def _saving(save: Callable[..., None], folder: str) -> Callable[..., None]:
    """Return torch.save, which opens files in C++, with the same care."""

    def saving(obj: object, f: object, *given: object, **named: object) -> None:
        own_copy(folder, f, whole=False)
        save(obj, f, *given, **named)

    return saving


def own_copy(folder: str, path: object, *, whole: bool) -> None:
    """Replace a link in the folder by a copy of its file, or by nothing if the file is about to be replaced."""
    if isinstance(path, str | os.PathLike) and os.path.islink(path):
        link = os.path.abspath(path)
        if link.startswith(folder + os.sep) and os.path.isfile(link):
            source = os.path.realpath(link)
            with suppress(FileNotFoundError):  # another rank was first
                os.unlink(link)
                if whole:
                    shutil.copyfile(source, link)


def _of_script(error: BaseException, script: str) -> TracebackType | None:
    """Return the traceback of an error from the script on; all of it if it has not begun, as at a syntax error."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return trace


def _call_as_rank(
    folder: str,
    name: str,
    fn: Callable[..., object],
    args: tuple[object, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    **_: object,
) -> None:
    """Call the function that a script spawns as its ranks in this process, which is one of them, with its number.

    All ranks of a node get the arguments and the address of its first one, with a port that was free. Raise SpawnsRanks
    if the ranks are others than those of the cell, or not waited for, or if the arguments cannot be pickled.
    """
    rank, count = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if nprocs != count:
        raise SpawnsRanks(OTHER_COUNT.format(name=name, nprocs=nprocs, count=count))
    if not join:
        raise SpawnsRanks(SPAWNED.format(name=name, what="join=False"))
    if count > 1:
        import torch.distributed as dist

        store = dist.FileStore(f"{folder}/.spawned-{next(_calls)}", count)  # type: ignore[attr-defined]
        if rank == 0:
            try:
                given = pickle.dumps((args, {name: os.environ[name] for name in ADDRESS if name in os.environ}))
            except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
                raise SpawnsRanks(SPAWNED.format(name=name, what="arguments that cannot be pickled")) from error
            store.set("arguments", given)  # type: ignore[arg-type]  # takes bytes too
        store.wait(["arguments"], NEVER)
        args, address = pickle.loads(store.get("arguments"))
        os.environ.update(address)
    fn(rank, *args)


def end_process(code: int) -> NoReturn:
    """End this process as the interpreter does, except that its objects are left to the system.

    To free those of torch takes 0.7 s a trial. Files that the script did not close are flushed.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    files = (each for each in gc.get_objects() if issubclass(type(each), io.IOBase))
    for file in (sys.stdout, sys.stderr, *files):
        with suppress(OSError, ValueError, AttributeError):  # the script may have closed or replaced it
            file.flush()
    ctypes.CDLL(None).fflush(None)  # of C, as extensions print by it
    os._exit(code & 0xFF)


if __name__ == "__main__":
    connection = Connection(int(sys.argv[1]))
    end_process(run_script(connection, connection.recv()))
