"""``python -m tests.without_figures MODULE ARGUMENTS``: a command that draws no figures, most of a report's time."""

from __future__ import annotations

import runpy
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))  # while it imports, as the command itself does
    from harness.report import html

    signal.signal(signal.SIGINT, signal.default_int_handler)
    html.FIGURES = {}
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
