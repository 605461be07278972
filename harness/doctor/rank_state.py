"""State in forward on several ranks: what each rank's forward remembers of its own batches, and the others do not."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.doctor import state
from harness.doctor.check import Case, Check
from harness.doctor.steps import Steps
from harness.plan.checks.finding import Finding, join_names

ALIKE = 1e-5
"""Largest relative difference of the losses of one batch on models that are the same."""


def judge(seen: Sequence[Steps], case: Case) -> list[Finding]:
    """Compare what the steps changed beside the parameters; it matters only if the same batch has another loss.

    A buffer that rank 0 does not change always matters under ddp, which overwrites what others write. Losses that are
    not finite are a matter of the check for divergence, and say nothing of the state.
    """
    overwrites = not case.cell.traits.shards_parameters and case.cell.own_traits is None
    if overwrites and (lost := sorted({name for rank in seen for name in rank.buffers} - seen[0].state.keys())):
        ranks = ", ".join(str(number) for number, rank in enumerate(seen) if rank.state.keys() & lost)
        return [
            Finding(
                state.NAME,
                "warning",
                f"buffers that forward changes on rank {ranks} of {len(seen)}, and not on rank 0: {join_names(lost)}",
                "ddp sends rank 0's buffers to all before each forward: what other ranks write is lost",
                "change the buffer alike on every rank, from values that are exchanged (dist.all_reduce) before",
            )
        ]
    names = sorted({n for rank in seen for n in rank.state if len({other.state.get(n) for other in seen}) > 1})
    losses = [rank.same_batch_loss for rank in seen]
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    if not names or len(known) < len(losses) or max(known) - min(known) <= ALIKE * max(map(abs, known)):
        return []
    return [
        Finding(
            state.NAME,
            "warning",
            f"state that forward changes differently on each of {len(seen)} ranks: {join_names(names)}; loss of the "
            f"same batch on ranks 0 to {len(seen) - 1}: {', '.join(f'{loss:.4g}' for loss in known[:4])}",
            "each rank trains with a state of its own batches: "
            + (
                "nothing synchronises it"
                if case.cell.traits.shards_parameters
                else "ddp sends rank 0's buffers to all, and nothing synchronises attributes"
            ),
            "exchange the state between the ranks (dist.all_reduce) before it is used, or compute it from the whole "
            "batch",
        )
    ]


CHECK = Check("state on ranks", None, judge)
