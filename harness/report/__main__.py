"""``python -m harness.report RUN_FOLDER``."""

from harness.cli import report_main

report_main()
