"""Claims about what devices exchange: exposed communication, the bandwidth of links and collectives."""

from __future__ import annotations

from typing import Any

import torch

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.measure.links import Meter, measure_links, operations_of
from harness.measure.profiles import measure_collectives
from harness.train.ranks import Ranks
from tests.gpu.setting import SMALL, cell_of, need_cuda, pace_s, stepper_of, steps_for
from tests.gpu.verdict import Verdict, judged
from tests.gpu.world import run_ranks

SLACK = 1.05
"""An exposed time may exceed its total by what the profiler rounds."""


def exposed(device: torch.device) -> Verdict:
    """fsdp's collectives are seen, and no more of each is exposed than there is; a step with them takes longer."""
    seen = run_ranks(exposed_of, device, 2, within_s=100.0)[0]
    total, bare = seen["exchange_s"], seen["exposed_s"]
    text = ", ".join(f"{name} {_ms(total[name])} of which exposed {_ms(bare[name])}" for name in total)
    expected = {part.name for part in BUILTIN_TRAITS["fsdp"].profiled_parts}
    holds = set(total) == expected and all(0 <= bare[name] <= SLACK * total[name] for name in total)
    return judged(holds, f"{text}; a step {_ms(seen['step'])}", **seen)


def exposed_of(ranks: Ranks) -> dict[str, Any]:
    """Return fsdp's collectives as a trial records them, and the seconds of a step."""
    cell = cell_of(ranks.devices[0], {**SMALL, "strategy": "fsdp"}, devices=ranks.world_size)
    stepper = stepper_of(cell, ranks.devices[0], ranks=ranks)
    step_s = pace_s(stepper.window("timed", ranks.broadcast(steps_for(stepper, 0.3)), detailed=False))
    return {**measure_collectives(stepper), "step": step_s}


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"


def links(device: torch.device, ranks: str) -> Verdict:
    """Links and collectives between ranks are measured, and a larger message has a higher bandwidth."""
    size = int(ranks)
    seconds = 3.0 * size if device.type == "cuda" else 5.0
    found = run_ranks(links_of, device, size, str(seconds), within_s=seconds + 90.0)[0]
    return _bandwidths(found, grow=device.type == "cuda")  # a busy machine may have time for one size alone


def peer_copies(device: torch.device) -> Verdict:
    """Copies between the GPUs that one process sees, as under dp, are measured like the links of ranks."""
    need_cuda(device)
    gpus = tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return _bandwidths(links_of(Ranks(0, 1, 0, 0, "here", "127.0.0.1", gpus), "6"), grow=True)


def _bandwidths(found: dict[str, Any], *, grow: bool) -> Verdict:
    best: dict[str, float] = {}
    small: dict[str, float] = {}
    for row in found["rows"]:
        rate = row["size_bytes"] / row["time_s"] / 1e9
        best[row["operation"]] = max(best.get(row["operation"], 0.0), rate)
        small.setdefault(row["operation"], rate)
    text = ", ".join(f"{name} {rate:.3g} GB/s" for name, rate in best.items()) + " at most"
    notes = f"; {'; '.join(found['notes'])}" if found["notes"] else ""
    holds = bool(best) and (not grow or all(best[name] > small[name] for name in best))
    return judged(holds, text + notes, **best)


def links_of(ranks: Ranks, seconds: str) -> dict[str, Any]:
    """Return the rows of the links between these ranks, as a run measures them."""
    rows, notes = measure_links(operations_of(ranks), Meter(ranks, lambda: None), float(seconds), ranks)
    return {"rows": rows, "notes": notes}
