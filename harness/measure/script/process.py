"""The process of one rank of a script, as its parent sees it: started, listened to, ended; and the trial's folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import torch

import harness
from harness.measure.script.child import Start
from harness.plan.cell import Cell
from harness.system import sanitize
from harness.system.process import die_with_parent
from harness.system.scratch import Scratch
from harness.train.ranks import Ranks

COUNTER_VARIABLE, STACK_VARIABLE = "HARNESS_STEPS_FILE", "HARNESS_STACK_FILE"
"""Where a rank's process leaves the files of its watchdog for the process of its script."""
KEPT_BYTES = 100_000
"""The end of the script's output that is kept."""
READ_BYTES, READ_S = 65_536, 1.0
"""Of one look at the output, and the longest time to read the rest of it after the end."""
END_S = 10.0
"""The longest time of a script between its last step and its end; then it is killed."""
LINKED = 2_000
"""The most entries of a folder that are linked one by one; one with more is linked whole."""
ABOVE = 2
"""The folders above the script's whose other entries are linked too."""
SKIPPED = ("__pycache__", "node_modules")


class ScriptFailed(Exception):
    """The script raised an exception, or ended before its steps could be measured.

    ``kind``: the type of its exception. ``output``: the end of what it printed.
    """

    def __init__(self, kind: str, message: str) -> None:
        self.kind, self.output = kind, ""
        super().__init__(message)


class ScriptProcess:
    """A started script. ``output``: the end of its standard output and error, without this machine's secrets."""

    def __init__(self, start: Start, environment: Mapping[str, str], folder: Path) -> None:
        self._connection, childs = Pipe()
        self._names = {str(folder): str(start.source)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.child", str(childs.fileno())],
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[childs.fileno()],
            preexec_fn=die_with_parent,
        )
        childs.close()
        self._connection.send(start)
        self._kept: deque[bytes] = deque()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def send(self, message: object) -> None:
        with suppress(OSError):  # it has ended, which its next message or its exit code says
            self._connection.send(message)

    def messages(self, timeout_s: float) -> Iterator[Any]:
        """Yield what the process sends within a time; return as soon as it has ended and sent nothing more."""
        until = time.monotonic() + timeout_s
        with suppress(OSError, EOFError):
            while self._connection.poll(max(0.0, min(0.05, until - time.monotonic()))) or time.monotonic() < until:
                ended = self.exit_code is not None
                if self._connection.poll():
                    yield self._connection.recv()
                elif ended:
                    return

    def output(self) -> str:
        self._reader.join(READ_S if self.exit_code is not None else 0.0)
        text = b"".join(self._kept).decode(errors="replace")[-KEPT_BYTES:]
        for linked, own in self._names.items():
            text = text.replace(linked, own)
        return sanitize.redact_text(text)

    def _read(self) -> None:
        assert self._process.stdout
        kept = 0
        while part := self._process.stdout.read1(READ_BYTES):  # type: ignore[attr-defined]  # of a BufferedReader
            self._kept.append(part)
            kept += len(part)
            while kept - len(self._kept[0]) > KEPT_BYTES:
                kept -= len(self._kept.popleft())

    def end(self, patience_s: float) -> None:
        """Wait for the end of the process; then kill it with its children."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        with suppress(psutil.Error):
            children = psutil.Process(self.pid).children(recursive=True)
            for process in children if self.exit_code is None else ():
                with suppress(psutil.Error):
                    process.kill()
        self._process.kill()
        self._process.wait()
        self._connection.close()
        self._reader.join(READ_S)
        if self._process.stdout and not self._reader.is_alive():  # else a process that it has left behind writes on
            self._process.stdout.close()


@contextmanager
def trial_folder(ranks: Ranks, script: str, kept: Path | None) -> Iterator[Path]:
    """Make the folder in which the ranks of a node run, with links to the script's folder; remove it at the end.

    ``kept``: a folder to make it in, which then stays.
    """
    scratch = Scratch() if ranks.local_rank == 0 and kept is None else None
    root = kept or (scratch.path if scratch else None)
    own = str(lay_out(Path(script).parent, root)) if root and ranks.local_rank == 0 else ""
    made = {node: folder for node, local, folder in ranks.gather((ranks.node_rank, ranks.local_rank, own)) if not local}
    try:
        yield Path(made[ranks.node_rank])
    finally:
        if scratch:
            scratch.close()


def lay_out(source: Path, root: Path) -> Path:
    """Return a folder below ``root`` with links to the files of ``source``, so that new files stay there.

    The folders above it have links to what is beside theirs, so that ``../data`` is there too.
    """
    levels = [source, *source.parents[:ABOVE]]
    target = root.joinpath(*(level.name for level in reversed(levels) if level.name))
    target.mkdir(parents=True, exist_ok=True)
    for level, inner in zip(levels[1:], levels, strict=False):
        here = target.parents[levels.index(level) - 1]
        with suppress(OSError):
            beside = [name for name in os.listdir(level) if name != inner.name]
            for name in beside if len(beside) <= LINKED else ():
                with suppress(FileExistsError):
                    (here / name).symlink_to(level / name)
    link_tree(source, target)
    return target


def link_tree(source: Path, target: Path) -> None:
    """Make the folders below ``source`` in ``target``, with a link to each file, so that new files stay in ``target``.

    Hidden files are left out. A folder with many entries, or one that cannot be read, is linked whole.
    """
    names = [name for name in os.listdir(source) if not name.startswith(".") and name not in SKIPPED]
    for name in names:
        here, there = source / name, target / name
        with suppress(OSError):
            environment = (here / "pyvenv.cfg").exists()
            if here.is_dir() and not here.is_symlink() and not environment and len(os.listdir(here)) <= LINKED:
                there.mkdir(exist_ok=True)
                link_tree(here, there)
                continue
        with suppress(FileExistsError):
            there.symlink_to(here)


def environment_of(ranks: Ranks, cell: Cell, address: str, port: int, *, plain: bool = False) -> dict[str, str]:
    """Return the environment of a rank as torchrun sets it, beside that of this process.

    ``plain``: without the variables of ranks, as ``python SCRIPT`` has it.
    """
    per_node = ranks.world_size // cell.nodes
    ranked = {
        "RANK": ranks.rank,
        "LOCAL_RANK": ranks.local_rank,
        "WORLD_SIZE": ranks.world_size,
        "LOCAL_WORLD_SIZE": per_node,
        "GROUP_RANK": ranks.node_rank,
        "NODE_RANK": ranks.node_rank,
        "GROUP_WORLD_SIZE": cell.nodes,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "harness",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    variables = {
        **({} if plain else ranked),
        "PYTHONUNBUFFERED": 1,
        "OMP_NUM_THREADS": torch.get_num_threads(),
        "MKL_NUM_THREADS": torch.get_num_threads(),
    }
    hidden = {"TORCHELASTIC_USE_AGENT_STORE", "PYTHONSAFEPATH", COUNTER_VARIABLE, STACK_VARIABLE, *ranked}
    root = str(Path(harness.__file__).parents[1])
    path = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), root]
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    texts = {name: str(value) for name, value in variables.items()}
    return {**inherited, **texts, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}


def meeting_place(ranks: Ranks, cell: Cell) -> tuple[str, int]:
    """Return the address and a free port of rank 0, at which the script's ranks may meet."""
    address = "127.0.0.1" if cell.nodes == 1 else ranks.address
    port = 0
    if ranks.first:
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
    found: tuple[str, int] = ranks.broadcast((address, port))
    return found
