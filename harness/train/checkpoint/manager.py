"""One trial's checkpoints: when they are written, and from which a lost trial goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    """Writes a checkpoint every so many epochs and after the last one, and finds the newest that is whole.

    ``folder`` is the trial's own. All ranks call each method together; rank 0 alone writes.
    """

    folder: Path
    every: int
    training: Training
    ranks: Ranks

    def save(self, epoch: int, values: Mapping[str, object], *, last: bool) -> None:
        """Keeps the training as it is after this epoch, where its turn has come. Raises OSError."""
        if epoch % self.every and not last:
            return
        state = capture(self.training, self.ranks)
        if self.ranks.first:
            files.write(self.folder, epoch, state, {"torch": torch.__version__, "epoch": epoch, **values})
        self.ranks.barrier()  # what one rank has gone on from, no other may lose

    def resume(self) -> Mapping[str, Any]:
        """Puts back the newest checkpoint that is whole, and gives its plain values; empty where there is none.

        Raises WorkloadError where a rank does not see what rank 0 sees.
        """
        epoch = self.ranks.broadcast(self._newest() if self.ranks.first else None)
        if epoch is None:
            return {}
        state = files.read(self.folder, epoch)
        if state is None:
            raise WorkloadError(
                f"checkpoint.folder: {self.folder} has no whole checkpoint of epoch {epoch} on node "
                f"{self.ranks.address}, but on the first rank's; give a path that all nodes see"
            )
        restore(state, self.training, self.ranks)
        return state.values

    def _newest(self) -> int | None:
        return next((epoch for epoch in files.epochs(self.folder) if files.read(self.folder, epoch)), None)
