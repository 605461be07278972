"""The acceptance on a GPU: ``python -m tests.gpu`` runs each claim about CUDA and prints a table.

Each claim runs in a process of its own with a time limit; pytest is not needed. Exit code 1 if a claim does not hold.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path

from tests.gpu import table
from tests.gpu.claims import CLAIMS, named
from tests.gpu.modules import missing
from tests.gpu.runner import Done, Machine, failed, run_all
from tests.gpu.setting import KEPT

MINUTES, MINUTES_EACH = 8.0, 4.0
"""The time limit on one GPU or on a CPU, and what is added for more GPUs."""
BESIDE = 8
"""The most claims side by side; on a GPU each has two cores, for its process or the processes of its run."""


def main(arguments: list[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    if asked.list:
        sys.stdout.write("".join(f"{claim.name}\n" for claim in CLAIMS))
        return 0
    try:
        claims, machine, facts = named(asked.only), *_machine(asked.device)
        claims = [claim for claim in claims if asked.part in (None, claim.part)]
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if asked.output:
        asked.output.mkdir(parents=True, exist_ok=True)
        os.environ[KEPT] = str(asked.output.resolve())
    minutes = asked.minutes or MINUTES + (MINUTES_EACH if machine.gpus > 1 else 0.0)
    _say("\n".join(f"{name}: {value}" for name, value in facts.items()))
    if lacking := missing():
        _say(f"missing modules: {' '.join(lacking)}")
    _say(table.HEADING)
    done: list[Done] = []
    for one in run_all(claims, machine, time.monotonic() + 60 * minutes):
        done.append(one)
        _say(table.lines_of(one))
        if asked.output:
            table.write(asked.output, facts, done)
    for one in failed(done):
        if one.output:
            _say(f"\n{one.claim.name}, end of its output:\n{one.output[-2000:]}")
    _say(f"{'-' * table.WIDTH}\n{table.summary(done)}")
    return 1 if failed(done) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the claims with a meaning there"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="claims with one of these in the name")
    parser.add_argument("--part", type=int, choices=(1, 2), help="2: the claims that time steps; 1: the others")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where acceptance.json and .md are written")
    parser.add_argument("--minutes", type=float, help="time limit; default 8 on one GPU, 12 on several")
    parser.add_argument("--list", action="store_true", help="print the names of the claims and stop")
    return parser


def _machine(device: str) -> tuple[Machine, dict[str, str]]:
    """Return this machine and its description; raise ValueError if torch or a GPU is not there."""
    try:
        import torch
    except ModuleNotFoundError:
        raise ValueError("torch is not installed; install it first (see pyproject.toml)") from None
    facts = {"python": platform.python_version(), "torch": torch.__version__}
    cores = len(os.sched_getaffinity(0))
    if device == "cpu":
        return Machine("cpu", 0, beside=max(1, min(BESIDE // 2, cores))), {"device": "cpu", **facts}
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here; allowed: --device cpu")
    count = torch.cuda.device_count()  # asks NVML: this process makes no context of its own
    facts |= {"CUDA": str(torch.version.cuda), "GPUs": str(count)}
    return Machine("cuda", count, beside=max(1, min(BESIDE, cores // 2))), facts


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
