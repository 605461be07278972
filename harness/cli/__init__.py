"""The command line: ``harness run``, ``harness plan``, ``harness doctor``, ``harness report``."""
