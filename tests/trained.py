"""What one rank trains for the tests that compare strategies, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import torch

from tests import equivalence, recipe_ranks


def main(rank: int, world_size: int, out: Path) -> None:
    """Both tests' trainings: starting a process costs more than they do."""
    plain = equivalence.results(rank, world_size)
    plain |= equivalence.trained_otherwise(rank, world_size)
    found = plain | recipe_ranks.results(rank, world_size, out.parent / "checkpoints")
    if rank == 0:
        torch.save(found, out)
