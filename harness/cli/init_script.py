"""``harness init --script``: an experiment file for a training script, from the options that its argparse names."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import NamedTuple

from harness.errors import ExperimentError

BATCH = re.compile(r"(^|[-_])(batch|bs|bsz)([-_]|$)|batch[-_]?size", re.IGNORECASE)
EPOCHS = re.compile(r"epochs|n[-_]?iter|max[-_](iters|steps)|num[-_]steps|iterations", re.IGNORECASE)
MANY = 100_000
"""A number of epochs or steps that no trial reaches: it is ended after its last window."""
UNKNOWN_BATCH = 32


class Option(NamedTuple):
    """An option of a script's command line, and its default; None if it has none, or not a constant."""

    flag: str
    default: str | int | float | bool | None
    required: bool

    def __str__(self) -> str:
        return f"{self.flag} {self.default}" if self.default not in (None, "") else self.flag


def options_of(text: str) -> list[Option]:
    """Return the options that ``add_argument("--name", default=...)`` calls in Python code name; raise SyntaxError."""
    found: dict[str, Option] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            flags = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            named = sorted((flag for flag in flags if flag.startswith("-")), key=len)
            constants = {key.arg: key.value.value for key in node.keywords if isinstance(key.value, ast.Constant)}
            default = constants.get("default")
            if named:
                value = default if isinstance(default, str | int | float | bool) else None
                found[named[-1]] = Option(named[-1], value, constants.get("required") is True)
    return list(found.values())


def script_text(script: Path, file: Path) -> str:
    """Return the experiment file of a script, to be written to ``file``; raise ExperimentError if it cannot be read."""
    try:
        text = script.read_text(encoding="utf-8")
        options = options_of(text)
    except (OSError, UnicodeError) as error:
        raise ExperimentError("--script", [f"got {str(script)!r}; it cannot be read: {error}"]) from None
    except SyntaxError as error:
        raise ExperimentError("--script", [f"got {str(script)!r}; line {error.lineno}: {error.msg}"]) from None
    batch = next((each for each in options if BATCH.search(each.flag)), None)
    size = batch.default if batch and isinstance(batch.default, int) and batch.default > 0 else UNKNOWN_BATCH
    long = next((each for each in options if EPOCHS.search(each.flag)), None)
    others = [each for each in options if each not in (batch, long)]
    required = [f"{each.flag} VALUE" for each in others if each.required]
    given = [f"{batch.flag} {{per_device_batch_size}}"] if batch else []
    given += [f"{long.flag} {MANY}"] if long else []
    given += required
    lines = [
        f"# How does {script.name} scale? harness plan, doctor and run {file.name}",
        f"name: {_name(script)}",
        f"script: {os.path.relpath(script, file.parent)}",
        f"arguments: {' '.join(given)}" if given else "# arguments: --batch-size {per_device_batch_size}",
        "# Each name in braces in arguments is an axis, and its values stand in grid."
        + (f" Other options of the script: {'; '.join(map(str, others))}" if others else " What does the script take?"),
        "# step: {samples: 32}             # of a rank and step, if no DataLoader of torch delivers its batches",
        "grid:",
        "  devices: [1, 2]                 # GPUs, or CPU slots; each is a rank",
        f"  per_device_batch_size: [{size}]     # of a rank; or global_batch_size, here and above: of all ranks",
        "effort: quick                     # 5 blocks of short windows; normal and careful take longer",
        "# Learning curves, of probe.report() in the script or a Trainer's logs; the epochs to train are in arguments:",
        "# convergence: {seeds: [0], target: {metric: val_loss, at_most: 1}}",
        "limits: {trial: 5m}               # the longest time without a step, from the start of the script on",
        "",
    ]
    return "\n".join(lines)


def _name(script: Path) -> str:
    """Return a name for the experiment, of the characters that names may have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", script.stem).lstrip("._-")[:60] or "script"
