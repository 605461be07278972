"""What a process leaves behind: the end of what it printed, and the kernel's count of kills for memory."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.launch.postmortem import (
    PRINTED_BYTES,
    ProcessOutput,
    find_kill_counter,
    killed_for_memory,
    output_of_this_process,
    what_it_printed,
)

V1 = "memory/{path}memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n"
V2 = "{path}memory.events", "low 0\nhigh 0\nmax 7\noom 2\noom_kill {count}\noom_group_kill 0\n"


def mount(tmp_path: Path, entries: str, file: str, text: str) -> tuple[Path, Path]:
    """A /proc and a /sys/fs/cgroup with one counter."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(entries)
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 5\noom_kill 4\n")
    counter = tmp_path / "cgroup" / file
    counter.parent.mkdir(parents=True)
    counter.write_text(text)
    return tmp_path / "proc", tmp_path / "cgroup"


@pytest.mark.parametrize(
    ("entries", "kind", "path"),
    [
        ("9:pids:/\n4:memory:/box/one\n0::/\n", V1, "box/one/"),
        ("4:cpu,memory:/docker/abc\n", V1, ""),  # in a container the mount begins at its own cgroup
        ("0::/user.slice/me\n", V2, "user.slice/me/"),
        ("0::/\n", V2, ""),
    ],
)
def test_the_count_is_that_of_the_process_own_cgroup(
    tmp_path: Path, entries: str, kind: tuple[str, str], path: str
) -> None:
    file, text = (part.replace("{path}", path) for part in kind)
    proc, cgroups = mount(tmp_path, entries, file, text.format(count=2))
    found = find_kill_counter(proc, cgroups)
    assert found == cgroups / file
    traces = ProcessOutput(kill_counter=str(found), killed_before=2)
    assert not killed_for_memory(traces)
    found.write_text(text.format(count=3))
    assert killed_for_memory(traces)


def test_without_a_cgroup_counter_the_count_is_none(tmp_path: Path) -> None:
    proc, cgroups = mount(tmp_path, "0::/\n", "cgroup.procs", "")  # the root cgroup of version 2 has no such file
    assert find_kill_counter(proc, cgroups) is None  # the whole machine's does not serve
    assert find_kill_counter(tmp_path / "nowhere", cgroups) is None
    assert not killed_for_memory(ProcessOutput())


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc on this system")
def test_a_process_finds_its_own_files_and_counter(tmp_path: Path) -> None:
    script = (
        "import json, sys; from harness.launch.postmortem import *; from dataclasses import asdict\n"
        "print('x' * 30_000 + 'end'); Path(sys.argv[1]).write_text(json.dumps(asdict(output_of_this_process())))"
    )
    out, result = tmp_path / "out", tmp_path / "result"
    with out.open("w") as output:
        subprocess.run([sys.executable, "-c", script, result], stdout=output, stderr=output, check=True)
    fields = json.loads(result.read_text())
    traces = ProcessOutput(**{**fields, "printed": tuple(fields["printed"])})
    assert traces.printed == (str(out),)
    text = what_it_printed(traces)
    assert len(text) < PRINTED_BYTES and text.endswith("xend")
    assert Path(traces.kill_counter).exists() and not killed_for_memory(traces)
    assert what_it_printed(replace(traces, printed=(str(tmp_path / "gone"),))) == ""
    assert output_of_this_process().kill_counter == traces.kill_counter
