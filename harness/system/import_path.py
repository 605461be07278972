"""The import path without some folders: the current one, for files from other people, or other versions of a code.

``python -m`` puts the current folder first on the import path. Imports sys and os only.
"""

import os
import sys


def leave_out_current_folder() -> None:
    """Remove the current folder from sys.path if the command line has --no-user-code; this package's home stays."""
    if "--no-user-code" in sys.argv:
        sys.path[:] = path_without(os.getcwd())


def path_without(*folders: str) -> list[str]:
    """Return sys.path without these folders, links followed; this package's home stays."""
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    left_out = {os.path.realpath(folder) for folder in folders}
    return [path for path in sys.path if path and (path == home or os.path.realpath(path) not in left_out)]
