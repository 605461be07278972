"""What a training needs to go on where it stood: taken between epochs, kept in files, put back."""

from __future__ import annotations

from harness.train.checkpoint.manager import CheckpointManager

__all__ = ["CheckpointManager"]
