"""``python -m tests.without_figures MODULE ARGUMENTS``: a command that draws no figures, most of a report's time."""

from __future__ import annotations

import runpy
import sys

from harness.report import html

if __name__ == "__main__":
    html.FIGURES = {}
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
