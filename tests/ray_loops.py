"""Ray Train functions of a user, as they are."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import ray
import ray.data
import ray.train
import ray.train.torch
import torch

from experiments.my_loop import train_loop_per_worker


def trains(config: dict[str, Any]) -> None:
    train_loop_per_worker(config)


def no_step(config: dict[str, Any]) -> None:
    pass


def numbers() -> ray.data.Dataset:
    return ray.data.range(640)


def many_numbers() -> ray.data.Dataset:
    """Of thousands of batches: the windows are named hundreds of them ahead, and an epoch takes a second to begin."""
    return ray.data.range(256_000)


def reads_datasets(config: dict[str, Any]) -> None:
    """Train on the shard of this rank; report its size and the loss."""
    shard = ray.train.get_dataset_shard("train")
    model = ray.train.torch.prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(config["epochs"]):
        rows = 0
        for batch in shard.iter_torch_batches(batch_size=config["batch_size"]):
            optimizer.zero_grad()
            loss = model((batch["id"] / 1000.0).unsqueeze(1)).square().mean()
            loss.backward()
            optimizer.step()
            rows += len(batch["id"])
        ray.train.report({"val_rows": rows, "loss": loss.item()})


def no_file() -> ray.data.Dataset:
    raise FileNotFoundError("no file numbers.csv")


def labelled() -> ray.data.Dataset:
    x = np.random.default_rng(0).normal(size=(4096, 4)).astype(np.float32)
    return ray.data.from_items([{"x": row, "labels": int(row.sum() > 0)} for row in x])


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"logits": logits, "loss": torch.nn.functional.cross_entropy(logits, labels)}


def fine_tunes(config: dict[str, Any]) -> None:
    """Train with Hugging Face's Trainer on Ray Data, as Ray Train's documentation has it."""
    from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
    from transformers import Trainer, TrainingArguments

    shards = {
        name: ray.train.get_dataset_shard(name).iter_torch_batches(batch_size=config["batch_size"])
        for name in ("train", "evaluation")
    }
    every = {f"{what}_steps": config["every"] for what in ("logging", "eval", "save")}
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=config["steps"],
        eval_strategy="steps",
        save_strategy="steps",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **every,
    )
    trainer = Trainer(Classifier(), arguments, train_dataset=shards["train"], eval_dataset=shards["evaluation"])
    trainer.add_callback(RayTrainReportCallback())
    prepare_trainer(trainer).train()
