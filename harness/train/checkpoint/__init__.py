"""Checkpoints of a training: captured between epochs, kept in files, restored."""

from __future__ import annotations

from harness.train.checkpoint.manager import CheckpointManager

__all__ = ["CheckpointManager"]
