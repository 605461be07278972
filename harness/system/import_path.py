"""The import path without the current folder, for experiment files from other people.

``python -m`` puts the current folder first on the import path. Imports sys and os only.
"""

import os
import sys


def leave_out_current_folder() -> None:
    """Remove the current folder from sys.path if the command line has --no-user-code; this package's home stays."""
    if "--no-user-code" in sys.argv:
        here, home = os.getcwd(), os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        sys.path[:] = [path for path in sys.path if path and (path == home or os.path.realpath(path) != here)]
