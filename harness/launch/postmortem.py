"""What a process leaves behind: what it printed last, and whether the kernel killed for memory while it ran."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.system import sanitize

PRINTED_BYTES = 20_000
RAYS_OWN = (":job_id:", ":actor_name:", ":task_name:")
"""How the lines begin that Ray writes into its workers' files for itself."""


@dataclass(frozen=True)
class ProcessOutput:
    """Where to look once a process has ended. Made by the process itself, while it lives."""

    printed: tuple[str, ...] = ()
    """The files that its standard output and error go to."""
    kill_counter: str = ""
    """The kernel's file that counts who was killed for memory, of the process's own cgroup where it has one."""
    killed_before: int = 0
    """What stood there when the process began."""


def output_of_this_process() -> ProcessOutput:
    """This process's traces; empty where the system has no /proc."""
    counter = find_kill_counter(Path("/proc"), Path("/sys/fs/cgroup"))
    return ProcessOutput(_outputs(Path("/proc/self/fd")), str(counter or ""), _killed(counter) or 0 if counter else 0)


def what_it_printed(traces: ProcessOutput) -> str:
    """The end of each of its files, without what is secret here."""
    return "\n".join(text for file in traces.printed if (text := _tail(Path(file))))


def killed_for_memory(traces: ProcessOutput) -> bool:
    """Whether the kernel's out-of-memory killer struck since the process began."""
    killed = _killed(Path(traces.kill_counter)) if traces.kill_counter else None
    return killed is not None and killed > traces.killed_before


def find_kill_counter(proc: Path, cgroups: Path) -> Path | None:
    """This process's cgroup's (version 2 or 1), where /proc and the cgroups are mounted; None without one.

    The whole machine's count does not serve: a neighbour's death would make a crash here one for memory.
    """
    return next((file for file in _counters(proc, cgroups) if _killed(file) is not None), None)


def _counters(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Where the count may stand; in a container the path in /proc is the host's and the mount's top its own cgroup."""
    try:
        entries = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    except OSError:
        entries = []
    for _, controllers, path in entries:
        if "memory" in controllers.split(","):
            mount, name = cgroups / "memory", "memory.oom_control"
        elif not controllers:
            mount, name = cgroups, "memory.events"
        else:
            continue
        yield from (mount / path.lstrip("/") / name, mount / name)


def _killed(file: Path) -> int | None:
    """The number behind ``oom_kill``; None where the file has none."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
        return next((int(line[1]) for line in lines if line[:1] == ["oom_kill"]), None)
    except (OSError, ValueError, IndexError):
        return None


def _outputs(descriptors: Path) -> tuple[str, ...]:
    files = []
    for number in ("1", "2"):
        try:
            file = (descriptors / number).readlink()
        except OSError:
            continue
        if file.is_file() and str(file) not in files:
            files.append(str(file))
    return tuple(files)


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            lines = sanitize.redacted_tail(opened, PRINTED_BYTES).splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if not line.startswith(RAYS_OWN)).strip()
