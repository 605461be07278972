"""``harness evaluate``: the validation metrics of a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.common import NoUserCode, away_from_current_folder, exit_code_of, show

Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="RUN_FOLDER/checkpoints/TRIAL/epoch-N, or the folder of the trial.")
]
OwnFile = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="The experiment file, for a workload of your own.")
]


def evaluate_command(checkpoint: Checkpoint, file: OwnFile = None, no_user_code: NoUserCode = False) -> None:
    """Print the validation metrics of the model in CHECKPOINT, on one device of this machine."""
    here, beside = checkpoint.absolute(), file.absolute() if file else None

    def work() -> int:
        from contextlib import nullcontext

        with away_from_current_folder() if no_user_code else nullcontext():
            from harness.run.evaluation import evaluate

            for name, value in sorted(evaluate(here, beside, no_user_code=no_user_code).items()):
                show(f"{name} {value:.6g}")
        return 0

    raise typer.Exit(exit_code_of(work))
