"""The checkpoints of one trial: when they are written, and which one a lost trial resumes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from harness.errors import WorkloadError
from harness.train.checkpoint import files
from harness.train.checkpoint.state import capture, restore
from harness.train.ranks import Ranks
from harness.train.training import Training


@dataclass(frozen=True)
class CheckpointManager:
    """Writes a checkpoint after every ``every`` epochs and the last one, and resumes from the newest complete one.

    ``folder`` belongs to this trial only. All ranks call each method together; only rank 0 writes.
    ``trained``: what the model is of, for an evaluation.
    """

    folder: Path
    every: int
    training: Training
    ranks: Ranks
    trained: Mapping[str, object] = field(default_factory=dict)

    def save(self, epoch: int, values: Mapping[str, object], *, last: bool) -> None:
        """Write a checkpoint of this epoch if one is due; raise OSError if it cannot be written."""
        if epoch % self.every and not last:
            return
        state = capture(self.training, self.ranks)
        if self.ranks.first:
            files.write(self.folder, epoch, state, {**self._facts(epoch), **values})
        self.ranks.barrier()  # no rank continues before the checkpoint is on disk

    def _facts(self, epoch: int) -> dict[str, object]:
        return {"torch": torch.__version__, "epoch": epoch, "trained": dict(self.trained)}

    def resume(self) -> Mapping[str, Any]:
        """Restore the newest complete checkpoint and return its plain values; return {} if there is none.

        Raise WorkloadError if a rank cannot read the checkpoint that rank 0 found.
        """
        epoch = self.ranks.broadcast(self._newest() if self.ranks.first else None)
        if epoch is None:
            return {}
        state = files.read(self.folder, epoch)
        if state is None:
            raise WorkloadError(
                f"checkpoint.folder: {self.folder} has no complete checkpoint of epoch {epoch} on node "
                f"{self.ranks.address}, but has one on the node of rank 0; give a path that all nodes share"
            )
        restore(state, self.training, self.ranks)
        return state.values

    def _newest(self) -> int | None:
        return next((epoch for epoch in files.epochs(self.folder) if files.read(self.folder, epoch)), None)
