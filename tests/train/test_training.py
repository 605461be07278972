"""One optimizer step: in one pass or in micro-batches, clipped or not."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from harness.plan.cell import Cell
from harness.train.loader import batches, epoch_shares
from harness.train.ranks import Ranks
from harness.train.training import Training
from tests.equivalence import BATCH, SAMPLES, SEED, Regression

CPU = torch.device("cpu")
CELL = Cell("w", None, None, "single", "cpu", 1, 1, "strong", None, BATCH, optimizer={"name": "SGD", "lr": 0.1})


def trained(cell: Cell, unit: str = "samples") -> tuple[torch.Tensor, float, Training]:
    """All parameters and the sum of the losses after one epoch, whose last batch holds one sample."""
    ranks = Ranks(0, 1, 0, 0, "n", "127.0.0.1", tuple(CPU for _ in range(cell.devices)))
    workload = Regression(unit)
    training = Training(cell, workload, SEED, ranks)
    shares = list(epoch_shares(SAMPLES, BATCH, SEED, 0, 0, 1))
    parts = cell.micro_batches
    source = batches(workload.datasets()[0], shares, seed=SEED, ranks=ranks, options={}, micro_batches=parts)
    steps = [training.step(islice(source, parts) if parts > 1 else next(source), share) for share in shares]
    weight = sum(float(weight) for _, weight in steps)
    assert unit == "tokens" or weight == SAMPLES
    flat = torch.cat([parameter.detach().flatten() for parameter in training.model.parameters()])
    return flat, sum(float(loss) for loss, _ in steps) / weight, training


@pytest.mark.parametrize("unit", ["samples", "tokens"])
@pytest.mark.parametrize("strategy", ["single", "dp"])
@pytest.mark.parametrize("accumulation", [2, 7, 9])
def test_micro_batches_train_as_the_whole_batch_does(accumulation: int, strategy: str, unit: str) -> None:
    cell = replace(CELL, strategy=strategy, devices=2 if strategy == "dp" else 1)
    whole, loss, _ = trained(CELL, unit)
    parts, same_loss, _ = trained(replace(cell, training={"accumulation": accumulation}), unit)
    assert torch.allclose(parts, whole, rtol=1e-5, atol=1e-7)
    assert same_loss == pytest.approx(loss, rel=1e-5)


def test_a_clipped_step_is_as_long_as_its_norm_allows() -> None:
    start = Training(CELL, Regression(), SEED, Ranks(0, 1, 0, 0, "n", "127.0.0.1", (CPU,)))
    before = torch.cat([parameter.detach().flatten() for parameter in start.model.parameters()])
    one_step = replace(CELL, global_batch_size=SAMPLES)

    def moved(training: dict[str, Any]) -> torch.Tensor:
        ranks = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (CPU,))
        stepped = Training(replace(one_step, training=training), Regression(), SEED, ranks)
        share = next(epoch_shares(SAMPLES, SAMPLES, SEED, 0, 0, 1))
        data = Regression().datasets()[0]
        stepped.step(next(batches(data, [share], seed=SEED, ranks=ranks, options={})), share)
        return torch.cat([parameter.detach().flatten() for parameter in stepped.model.parameters()]) - before

    free = moved({})
    assert float(free.norm()) > 0.002
    assert float(moved({"clip_grad_norm": 0.02}).norm()) == pytest.approx(0.1 * 0.02, rel=1e-3)
    assert float(moved({"clip_grad_value": 0.02}).abs().max()) == pytest.approx(0.1 * 0.02, rel=1e-3)


def test_the_rate_is_scaled_with_the_global_batch() -> None:
    cell = replace(CELL, training={"lr_scaling": "linear", "lr_base_batch_size": 2})
    training = Training(cell, Regression(), SEED, Ranks(0, 1, 0, 0, "n", "127.0.0.1", (CPU,)))
    assert training.effective_lr == pytest.approx(0.1 * BATCH / 2)
    assert training.optimizer.param_groups[0]["lr"] == training.effective_lr


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bf16_computes_in_bf16_while_training_and_evaluating_and_keeps_fp32_parameters(
    precision: str, accumulation: int
) -> None:
    class Looks(Regression):
        def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16)
            return super().loss(model, batch)

    seen: list[bool] = []
    cell = replace(CELL, precision=precision, training={"accumulation": accumulation})
    workload = Looks("samples")
    ranks = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (CPU,))
    training = Training(cell, workload, SEED, ranks)
    share = next(iter(epoch_shares(SAMPLES, BATCH, SEED, 0, 0, 1)))
    data = workload.datasets()[0]
    parts = list(batches(data, [share], seed=SEED, ranks=ranks, options={}, micro_batches=accumulation))
    training.step(parts if accumulation > 1 else parts[0], share)
    (whole,) = batches(data, [share], seed=SEED, ranks=ranks, options={})
    training.evaluate(whole, share)
    assert len(seen) == accumulation + 1 and set(seen) == {precision == "bf16"}
    assert {parameter.dtype for parameter in training.model.parameters()} == {torch.float32}
