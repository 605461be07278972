"""``python -m harness.doctor FILE``."""

from harness.cli.__main__ import main

if __name__ == "__main__":  # a worker process that multiprocessing spawns imports this file too
    main("doctor")
