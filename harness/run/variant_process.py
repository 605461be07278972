"""The process that imports one version of the user's code for the driver: ``-m harness.run.variant_process JOB``."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from harness.errors import HarnessError

RESULT = "result"
"""The file beside the job that gets the value of the job's function and the messages of its HarnessError."""


def main(job: Path) -> None:
    """Import the version and call the job's function with its argument."""
    version, function, argument = pickle.loads(job.read_bytes())  # ours; imports what the function needs, torch too
    version.use()
    value, messages = None, []
    try:
        value = function(argument)
        version.check()
    except HarnessError as error:  # as text: its class may be the user's own, which the driver does not import
        messages = [str(part) for part in error.parts or (error,)]
    partial = job.with_suffix(".partial")
    partial.write_bytes(pickle.dumps((value, messages)))
    os.replace(partial, job.parent / RESULT)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # threads and exit handlers of the user's code must not keep the driver waiting
