"""Machines inside a machine: each a network, mount, pid, uts and ipc namespace, joined by a pair of virtual links.

The pid namespace is not optional: ``ray stop`` ends every Ray that it can see. It makes the end certain too: if the
first process of a machine ends, all do.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
TOOLS = ("ip", "nsenter", "unshare", "mount")
INIT = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
print("ready", flush=True)
while True:  # a first process reaps what others leave
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        signal.sigtimedwait([signal.SIGCHLD], 1)
"""
SETUP = """
set -e
hostname {name}
mkdir -p /tmp/ray
mount --bind {folder}/ray /tmp/ray
mount --bind {hosts} /etc/hosts
exec {python} -c {init}
"""


@dataclass(frozen=True)
class Machine:
    """A running machine. ``pid``: of its first process, seen from outside; ``folder``: its own files.

    ``link``: its interface of the link between both machines, in the namespace ``netns``.
    """

    name: str
    address: str
    netns: str
    link: str
    pid: int
    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def command(self, *words: str, cwd: Path = ROOT) -> list[str]:
        """Return the words that run a command on this machine."""
        return ["nsenter", "--all", "--target", str(self.pid), f"--wd={cwd}", "--", *words]

    def run(self, *words: str, cwd: Path = ROOT, timeout: float = 120, check: bool = True, **more: str) -> str:
        """Run a command to its end and return its output; AssertionError with the output if it fails."""
        done = subprocess.run(
            self.command(*words, cwd=cwd),
            env={**clean_environment(), **self.variables, **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert not check or done.returncode == 0, f"{words}: exit code {done.returncode}: {done.stdout}"
        return done.stdout

    def start(self, *words: str, log: Path, cwd: Path = ROOT, **more: str) -> subprocess.Popen[bytes]:
        """Start a command and return its process; its output goes to a file."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self.command(*words, cwd=cwd),
                env={**clean_environment(), **self.variables, **more},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def processes(self) -> list[psutil.Process]:
        """Return every process of the machine but its first."""
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != self.pid and os.readlink(f"/proc/{process.pid}/ns/pid") == space:
                    found.append(process)
            except OSError:
                continue
        return found

    def commands(self) -> list[str]:
        """Return the command line of every living process of the machine but its first."""
        found = []
        for process in self.processes():
            with suppress(psutil.Error):  # it ended, or is a zombie
                found.append(" ".join(process.cmdline()))
        return found


def why_not() -> str | None:
    """Return why no machine can be made here; None if it can."""
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"namespaces are refused: {done.stderr.strip()}" if done.returncode else None


def clean_environment() -> dict[str, str]:
    """Return this process's environment without Ray's variables, with this Python first on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
    path = f"{Path(sys.executable).parent}:{kept['PATH']}"
    return {**kept, "PATH": path, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}


@contextmanager
def machines(folder: Path, count: int = 2, **variables: str) -> Iterator[list[Machine]]:
    """Yield one or two machines, n0 and n1 at 10.77.0.1 and 10.77.0.2, with these environment variables."""
    prefix = f"h{os.getpid()}"
    hosts = folder / "hosts"
    names = [f"n{i}" for i in range(2)]
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"10.77.0.{i + 1} {name}\n" for i, name in enumerate(names)))
    inits: list[subprocess.Popen[str]] = []
    spaces = [f"{prefix}{name}" for name in names]
    try:
        _link(spaces, prefix)
        made = []
        for i, name in enumerate(names[:count]):
            init = _boot(spaces[i], name, folder / name, hosts)
            inits.append(init)
            pid = psutil.Process(init.pid).children()[0].pid
            made.append(Machine(name, f"10.77.0.{i + 1}", spaces[i], f"{prefix}v{i}", pid, folder / name, variables))
        yield made
    finally:
        for init in inits:
            with init:  # which closes its output
                init.kill()  # and with it, by --kill-child, the machine's first process
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _link(spaces: Sequence[str], prefix: str) -> None:
    for space in spaces:
        _ip("netns", "add", space)
    _ip("link", "add", f"{prefix}v0", "netns", spaces[0], "type", "veth", "peer", f"{prefix}v1", "netns", spaces[1])
    for i, space in enumerate(spaces):
        _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", space, "addr", "add", f"10.77.0.{i + 1}/24", "dev", f"{prefix}v{i}")
        _ip("-n", space, "link", "set", f"{prefix}v{i}", "up")


def _boot(space: str, name: str, folder: Path, hosts: Path) -> subprocess.Popen[str]:
    """Start a machine; return the process whose end is the machine's."""
    (folder / "ray").mkdir(parents=True)
    # not `ip netns exec`: it mounts another /sys, without /sys/fs/cgroup
    words = ["nsenter", f"--net=/run/netns/{space}", "unshare", "--mount", "--uts", "--ipc", "--pid", "--fork"]
    words += ["--kill-child", "--mount-proc", "bash", "-c"]
    init = SETUP.format(name=name, folder=folder, hosts=hosts, python=sys.executable, init=shlex.quote(INIT))
    process = subprocess.Popen([*words, init], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "ready\n", f"{name} did not start"
    return process


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def wait_for(what: Any, within_s: float, about: Any = "") -> None:
    """Wait until ``what()`` is true; AssertionError with ``about()`` after the time."""
    until = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < until, f"waited {within_s:.0f} s in vain; {about() if callable(about) else about}"
        time.sleep(0.2)
