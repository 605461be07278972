"""Evidence of a process that has ended: its last output, and whether the kernel killed for memory while it ran."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.system import sanitize

PRINTED_BYTES = 20_000
RAYS_OWN = (":job_id:", ":actor_name:", ":task_name:")
"""Prefixes of the lines that Ray itself writes into its workers' files."""


@dataclass(frozen=True)
class ProcessOutput:
    """Files to read once a process has ended. Created by the process itself, while it runs."""

    printed: tuple[str, ...] = ()
    """The files of its standard output and error."""
    kill_counter: str = ""
    """The kernel's file that counts processes killed for memory in its cgroup; empty without one."""
    killed_before: int = 0
    """The count when the process started."""


def output_of_this_process() -> ProcessOutput:
    """Return the files of this process; empty if the system has no /proc."""
    counter = find_kill_counter(Path("/proc"), Path("/sys/fs/cgroup"))
    files = []
    for number in ("1", "2"):
        try:
            file = (Path("/proc/self/fd") / number).readlink()
        except OSError:
            continue
        if file.is_file() and str(file) not in files:
            files.append(str(file))
    return ProcessOutput(tuple(files), str(counter or ""), _killed(counter) or 0 if counter else 0)


def what_it_printed(traces: ProcessOutput) -> str:
    """Return the end of each of its files, with this machine's secrets redacted."""
    return "\n".join(text for file in traces.printed if (text := _tail(Path(file))))


def killed_for_memory(traces: ProcessOutput) -> bool:
    """Return whether the kernel killed for memory in its cgroup since the process started."""
    killed = _killed(Path(traces.kill_counter)) if traces.kill_counter else None
    return killed is not None and killed > traces.killed_before


def find_kill_counter(proc: Path, cgroups: Path) -> Path | None:
    """Return the kill counter of this process's cgroup (version 2 or 1), given where /proc and cgroups are mounted.

    None without one: the count of the whole machine would take another job's kill for this one's.
    """
    return next((file for file in _counters(proc, cgroups) if _killed(file) is not None), None)


def _counters(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield possible files; in a container the path in /proc is the host's, and the mount's root its own cgroup."""
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
    """Return the number after ``oom_kill``; None if the file has none."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
        return next((int(line[1]) for line in lines if line[:1] == ["oom_kill"]), None)
    except (OSError, ValueError, IndexError):
        return None


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            lines = sanitize.redacted_tail(opened, PRINTED_BYTES).splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if not line.startswith(RAYS_OWN)).strip()
