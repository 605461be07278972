"""The process of one rank of a script, as its parent sees it: started, listened to, ended; and the trial's folder."""

from __future__ import annotations

import ast
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import torch

from harness.measure.script.child import Start
from harness.plan.cell import Cell
from harness.system import sanitize
from harness.system.files import PACKAGE_FOLDER
from harness.system.process import die_with_parent
from harness.system.scratch import Scratch
from harness.train.ranks import Ranks

HIDDEN = ("TORCHELASTIC_USE_AGENT_STORE", "PYTHONSAFEPATH", "ACCELERATE_TORCH_DEVICE")
"""Variables of this process that are not for the script."""
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
MOST_LINKS = 5_000
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
        self._started: set[psutil.Process] = set()
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

    def messages(self, timeout_s: float) -> Iterator[object]:
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

    def remember_children(self) -> None:
        """Remember what the process has started by now, which may outlive it."""
        with suppress(psutil.Error):
            self._started |= {*psutil.Process(self.pid).children(recursive=True)}

    def end(self, patience_s: float) -> None:
        """Wait for the end of the process; then kill it, and what it has started."""
        self.remember_children()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        self.remember_children()
        self._process.kill()
        for process in self._started:
            with suppress(psutil.Error):  # of another process with the same number nothing is killed
                process.kill()
        self._process.wait()
        self._connection.close()
        self._reader.join(READ_S)
        if self._process.stdout and not self._reader.is_alive():  # else a process that it has left behind writes on
            self._process.stdout.close()


class InThread:
    """A Ray Train function in a thread of this process: the other end of its recorder's connection."""

    exit_code: int | None = None
    pid = 0

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: object) -> None:
        self._connection.send(message)

    def messages(self, timeout_s: float) -> Iterator[object]:
        """Yield what the loop's thread sends within a time."""
        until = time.monotonic() + timeout_s
        while (left_s := until - time.monotonic()) > 0:
            if self._connection.poll(left_s):
                yield self._connection.recv()

    def remember_children(self) -> None:
        """Do nothing: what a loop starts ends with its worker."""


Process = ScriptProcess | InThread
"""What runs the training of a rank, and can be asked to end it."""


def home_of(script: Path) -> tuple[Path, str | None]:
    """Return the folder that a script runs in, and the name as which ``python -m`` runs it; None for ``python FILE``.

    A script with relative imports at its top level is a module, and its folder that of the outermost package.
    """
    folder, names = script.parent, [script.stem]
    try:
        imports = [each for each in ast.parse(script.read_bytes()).body if isinstance(each, ast.ImportFrom)]
    except (SyntaxError, ValueError):  # which the script's own start reports
        imports = []
    if not (levels := max((each.level for each in imports), default=0)):
        return folder, None
    while folder.name and (len(names) <= levels or (folder / "__init__.py").exists()):
        folder, names = folder.parent, [folder.name, *names]
    return folder, ".".join(names)


@contextmanager
def trial_folder(ranks: Ranks, home: Path, kept: Path | None) -> Iterator[Path]:
    """Make the folder in which the ranks of a node run, with links to the script's ``home``; remove it at the end.

    ``kept``: a folder to make it in, which then stays.
    """
    with ExitStack() as stack:
        own = ""
        if ranks.local_rank == 0:
            root = unused(kept) if kept else stack.enter_context(Scratch())
            own = str(lay_out(home, root))
        gathered = ranks.gather((ranks.node_rank, own))
        yield Path(next(folder for node, folder in gathered if node == ranks.node_rank and folder))


def unused(folder: Path) -> Path:
    """Return the folder, or if it is there one with a number: that of another attempt."""
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(each for each in chain([folder], numbered) if not each.exists())


def lay_out(source: Path, root: Path) -> Path:
    """Return a folder below ``root`` with links to the files of ``source``, so that new files stay there.

    The folders above it have links to what is beside theirs, so that ``../data`` is there too.
    """
    levels = [level for level in (source, *source.parents[:ABOVE]) if level.name]
    target = root.joinpath(*(level.name for level in reversed(levels)))
    target.mkdir(parents=True, exist_ok=True)
    for level, here in zip(levels[:ABOVE], target.parents, strict=False):
        with suppress(OSError):
            beside = [path for path in level.parent.iterdir() if path.name != level.name]
            for path in beside if len(beside) <= LINKED else ():
                with suppress(FileExistsError):
                    (here / path.name).symlink_to(path)
    link_tree(source, target)
    return target


def link_tree(source: Path, target: Path, left: int = MOST_LINKS) -> int:
    """Make the folders below ``source`` in ``target``, with a link to each file; return how many more may be linked.

    Python files are copied, so that what they find beside their own file is in ``target`` too. Hidden folders are left
    out, and what holds ``target``. Folders with many entries, and all of them once many are linked, are linked whole.
    """
    for name in sorted(os.listdir(source)):
        here, there = source / name, target / name
        if (name.startswith(".") and here.is_dir()) or name in SKIPPED or target.is_relative_to(here):
            continue
        left -= 1
        with suppress(OSError):
            whole = here.is_symlink() or (here / "pyvenv.cfg").exists() or left < 0
            if here.is_dir() and not whole and len(os.listdir(here)) <= LINKED:
                there.mkdir(exist_ok=True)
                left = link_tree(here, there, left)
            elif name.endswith(".py") and here.is_file():
                shutil.copyfile(here, there)
            else:
                there.symlink_to(here)
    return left


def environment_of(
    ranks: Ranks, cell: Cell, master: tuple[str, int], gpus: str | None = None, *, plain: bool = False
) -> dict[str, str]:
    """Return the environment of a rank as torchrun sets it, beside that of this process.

    ``plain``: without the variables of ranks, as ``python SCRIPT`` has it. ``gpus``: CUDA_VISIBLE_DEVICES.
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
        "MASTER_ADDR": master[0],
        "MASTER_PORT": master[1],
        "TORCHELASTIC_RUN_ID": "harness",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    variables = {
        **({} if plain else ranked),
        **({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}),
        "PYTHONUNBUFFERED": 1,
        "KINETO_LOG_LEVEL": 99,  # its notes would be in the script's output
        "OMP_NUM_THREADS": torch.get_num_threads(),
        "MKL_NUM_THREADS": torch.get_num_threads(),
    }
    hidden = {*HIDDEN, *ranked}
    path = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(PACKAGE_FOLDER.parent)]
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    texts = {name: str(value) for name, value in variables.items()}
    return {**inherited, **texts, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}


def visible_gpus(ranks: Ranks) -> str | None:
    """Return CUDA_VISIBLE_DEVICES of the scripts on this node: the GPUs of its ranks, by local rank; None on a CPU."""
    of_ranks = ranks.gather((ranks.node_rank, ranks.local_rank, [device.index for device in ranks.devices]))
    if ranks.devices[0].type != "cuda":
        return None
    here = [index for node, _, devices in sorted(of_ranks) if node == ranks.node_rank for index in devices]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ",".join(named.split(",")[index] if named else str(index) for index in here)


def master_address(ranks: Ranks, cell: Cell) -> tuple[str, int]:
    """Return the address and a free port of rank 0, for the process group of the script."""
    address = "127.0.0.1" if cell.nodes == 1 else ranks.address
    port = 0
    if ranks.first:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
            free.bind((address, 0))
            port = free.getsockname()[1]
    found: tuple[str, int] = ranks.broadcast((address, port))
    return found
