"""A rank that measures links and collectives over gloo, as a trial of a worker group does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from harness.measure.links import Meter, measure_links, operations_of
from harness.train.ranks import Ranks
from tests.worlds import rank_main

SECONDS, PER_NODE = "LINKS_SECONDS", "RANKS_PER_NODE"
"""Variables: the time of the placement, and the number of ranks on each node."""


def measure(rank: int, world_size: int, out: Path) -> None:
    """Write the rows and the notes that rank 0 has, and the number of times that this rank has advanced."""
    node = rank // int(os.environ[PER_NODE])
    ranks = Ranks(rank, world_size, rank, node, f"node {node}", "127.0.0.1", (torch.device("cpu"),))
    advanced: list[None] = []
    meter = Meter(ranks, lambda: advanced.append(None))
    rows, notes = measure_links(operations_of(ranks), meter, float(os.environ[SECONDS]), ranks)
    if rank == 0:
        out.write_text(json.dumps({"rows": rows, "notes": notes, "advanced": len(advanced)}))


if __name__ == "__main__":
    rank_main(measure)
