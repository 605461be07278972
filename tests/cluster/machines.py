"""Machines inside a machine: each a network, mount, pid, uts and ipc namespace, joined by a pair of virtual links.

The pid namespace is not optional: ``ray stop`` ends every Ray that it can see. It makes the end certain too: if the
first process of a machine ends, all do, and it ends with the process that made it, even if that is killed. No namespace
has a name and no mount is outside of them, so that nothing remains.
"""

from __future__ import annotations

import os
import secrets
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
TOOLS = ("ip", "tc", "nsenter", "unshare", "setpriv", "mount", "hostname")
ISOLATED = ("setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork")
ISOLATED += ("--kill-child", "--mount-proc")
"""Words that run a command as the first process of a machine; they end with this process, and it with them."""
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

    ``link``: its interface of the link between both machines.
    """

    name: str
    address: str
    link: str
    pid: int
    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def command(self, *words: str, cwd: Path = ROOT) -> list[str]:
        """Return the words that run a command on this machine."""
        return ["nsenter", "--all", "--target", str(self.pid), f"--wd={cwd}", "--", *words]

    def run(self, *words: str, cwd: Path = ROOT, timeout: float = 120, check: bool = True, **more: str) -> str:
        """Run a command to its end and return its output; AssertionError with the output if it fails."""
        command, env = self.command(*words, cwd=cwd), self._environment(more)
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, env=env, text=True, timeout=timeout, check=False, **pipes)
        assert not check or done.returncode == 0, f"{words}: exit code {done.returncode}: {done.stdout}"
        return done.stdout

    def start(self, *words: str, log: Path, cwd: Path = ROOT, **more: str) -> subprocess.Popen[bytes]:
        """Start a command and return its process; its output goes to a file."""
        command, env = self.command(*words, cwd=cwd), self._environment(more)
        with log.open("ab") as output:
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            return subprocess.Popen(command, env=env, **pipes)

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        return {**clean_environment(), **self.variables, **more}

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


def why_not(script: str = "ip link add v0 type veth peer v1") -> str | None:
    """Return why no machine can be made here that can run this shell script; None if one can."""
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    words = [*ISOLATED, "bash", "-ec", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    return f"refused on this machine: {' '.join(done.stderr.split())}" if done.returncode else None


def new_token() -> dict[str, str]:
    """Return the variables of a Ray cluster with a token of its own."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}


def clean_environment() -> dict[str, str]:
    """Return this process's environment without Ray's variables, with this Python first on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
    path = f"{Path(sys.executable).parent}:{kept['PATH']}"
    return {**kept, "PATH": path, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}


@contextmanager
def machines(folder: Path, count: int = 2, **variables: str) -> Iterator[list[Machine]]:
    """Yield one or two machines, n0 and n1 at 10.77.0.1 and 10.77.0.2, with these environment variables."""
    hosts = folder / "hosts"
    names = [f"n{i}" for i in range(count)]
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"10.77.0.{i + 1} {name}\n" for i, name in enumerate(names)))
    inits: list[subprocess.Popen[str]] = []
    made = []
    try:
        for i, name in enumerate(names):
            inits.append(_start(name, folder / name, hosts))
            assert _first_line(inits[-1]) == "ready", f"{name} did not start"
            (first,) = psutil.Process(inits[-1].pid).children()
            made.append(Machine(name, f"10.77.0.{i + 1}", f"v{i}", first.pid, folder / name, variables))
        _connect(made)
        yield made
    finally:
        for init in inits:
            with init:  # which closes its output
                init.kill()  # and with it, by --kill-child, the machine's first process


def _start(name: str, folder: Path, hosts: Path) -> subprocess.Popen[str]:
    """Start a machine; return the process whose end is the machine's."""
    (folder / "ray").mkdir(parents=True)
    init = SETUP.format(name=name, folder=folder, hosts=hosts, python=sys.executable, init=shlex.quote(INIT))
    words = [*ISOLATED, "bash", "-c", init]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


def _connect(made: Sequence[Machine]) -> None:
    """Make a link between the machines; of one machine alone, both ends are its own."""
    ends = [str(made[0].pid), str(made[-1].pid)]
    words = ["ip", "link", "add", "v0", "netns", ends[0], "type", "veth", "peer", "v1", "netns", ends[1]]
    subprocess.run(words, check=True, capture_output=True)
    made[-1].run("ip", "link", "set", "v1", "up")
    for machine in made:
        machine.run("ip", "link", "set", "lo", "up")
        machine.run("ip", "addr", "add", f"{machine.address}/24", "dev", machine.link)
        machine.run("ip", "link", "set", machine.link, "up")


def start_ray(machine: Machine, *words: str, head: Machine | None = None, cpus: int = 1) -> None:
    """Start Ray on a machine: a node of ``head``'s cluster, or the head of its own."""
    joins = [f"--address={head.address}:6379"] if head else ["--head", "--port=6379"]
    place = [f"--node-ip-address={machine.address}", f"--num-cpus={cpus}", "--disable-usage-stats"]
    machine.run("ray", "start", *joins, *place, *words, cwd=Path("/"), PYTHONPATH="")


def wait_for(what: Any, within_s: float, about: Any = "") -> None:
    """Wait until ``what()`` is true; AssertionError with ``about()`` after the time."""
    until = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < until, f"waited {within_s:.0f} s in vain; {about() if callable(about) else about}"
        time.sleep(0.2)
