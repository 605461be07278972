"""The step counter that another process reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.launch.supervision import StepCounter, read_counter


def test_another_process_sees_the_steps(tmp_path: Path) -> None:
    path = tmp_path / "counter"
    with StepCounter(path) as counter:
        assert read_counter(path) == 0
        for _ in range(5):
            counter.advance()
        script = "import sys; from harness.launch.supervision import *; print(read_counter(Path(sys.argv[1])))"
        done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "5"
    assert read_counter(path) is None
    path.write_bytes(b"abc")  # torn
    assert read_counter(path) is None
