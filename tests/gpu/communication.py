"""Claims about what devices exchange: the bandwidth of links and collectives."""

from __future__ import annotations

from typing import Any

import torch

from harness.measure.links import Meter, measure_links
from harness.measure.transfers import operations_of
from harness.train.ranks import Ranks
from tests.gpu.setting import need_cuda
from tests.gpu.verdict import Verdict, judged
from tests.gpu.world import run_ranks


def links(device: torch.device, ranks: str) -> Verdict:
    """Links and collectives between ranks are measured, and a larger message has a higher bandwidth."""
    size = int(ranks)
    seconds = 3.0 * size if device.type == "cuda" else 1.5
    return _bandwidths(run_ranks(links_of, device, size, str(seconds), within_s=seconds + 90.0)[0])


def peer_copies(device: torch.device) -> Verdict:
    """Copies between the GPUs that one process sees, as under dp, are measured like the links of ranks."""
    need_cuda(device)
    gpus = tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return _bandwidths(links_of(Ranks(0, 1, 0, 0, "here", "127.0.0.1", gpus), "6"))


def _bandwidths(found: dict[str, Any]) -> Verdict:
    best: dict[str, float] = {}
    small: dict[str, float] = {}
    for row in found["rows"]:
        rate = row["size_bytes"] / row["time_s"] / 1e9
        best[row["operation"]] = max(best.get(row["operation"], 0.0), rate)
        small.setdefault(row["operation"], rate)
    text = ", ".join(f"{name} {rate:.3g} GB/s" for name, rate in best.items()) + " at most"
    notes = f"; {'; '.join(found['notes'])}" if found["notes"] else ""
    return judged(bool(best) and all(best[name] > small[name] for name in best), text + notes, **best)


def links_of(ranks: Ranks, seconds: str) -> dict[str, Any]:
    """Return the rows of the links between these ranks, as a run measures them."""
    rows, notes = measure_links(operations_of(ranks), Meter(ranks, lambda: None), float(seconds), ranks)
    return {"rows": rows, "notes": notes}
