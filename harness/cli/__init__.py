"""The command line: ``harness run``, ``plan``, ``doctor``, ``report``; commands.py has all of them."""
