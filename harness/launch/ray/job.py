"""A driver that ``ray job submit`` started: the runtime environment of its job is its workers', and cannot be replaced.

Imports neither ray nor torch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray for the driver of a job, alone: the job's runtime environment and metadata."""
CACHE = "working_dir_files"
"""The folder of each node in which Ray unpacks working directories, and from which it removes them."""


def in_job() -> bool:
    """Return whether this process, or one that started it, is the driver of a Ray job."""
    return JOB_VARIABLE in os.environ


def has_working_dir() -> bool:
    """Return whether this is the driver of a Ray job that gives its workers a working directory.

    They then import the user's code from there, or from a folder that every node sees. Ray refuses a second one.
    """
    try:
        environment = json.loads(os.environ.get(JOB_VARIABLE, "{}")).get("runtime_env") or {}
    except (ValueError, AttributeError):  # another version's format: Ray reads it later, and says so
        return False
    return bool(environment.get("working_dir"))


def is_lost_with_job(folder: Path) -> bool:
    """Return whether Ray removes what a job writes to a folder: it is below the copy of the working directory."""
    return in_job() and (not folder.is_absolute() or CACHE in folder.parts)
