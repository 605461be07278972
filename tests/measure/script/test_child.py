"""The end of a script's process: what the interpreter runs at its end runs, and then the process is gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit, sys, threading, time
from harness.measure.script.child import end_process

class Slow:
    def __del__(self):  # the objects of a process are left to the system
        print("freed")

slow = Slow()
left = open({path!r}, "w")  # which the interpreter would close
left.write("written")
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("script")
end_process({code})
"""


@pytest.mark.parametrize("code", [0, 3])
def test_threads_and_exit_functions_end_a_process_with_its_output_and_code(code: int, tmp_path: Path) -> None:
    text = SCRIPT.format(code=code, path=str(tmp_path / "left"))
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert (tmp_path / "left").read_text() == "written"
    assert (ended.returncode, ended.stdout.split("\n"), ended.stderr) == (code, ["script", "thread", "at exit", ""], "")


def test_an_output_that_is_closed_is_no_failure() -> None:
    closed = "import sys; from harness.measure.script.child import end_process; sys.stdout.close(); end_process(0)"
    assert subprocess.run([sys.executable, "-c", closed]).returncode == 0
