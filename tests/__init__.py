"""The tests. They write bytecode also if PYTHONDONTWRITEBYTECODE is set: each process would compile the package."""

import sys

sys.dont_write_bytecode = False
