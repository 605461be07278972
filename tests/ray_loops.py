"""Ray Train functions of a user, as they are."""

from __future__ import annotations

from typing import Any

import ray
import ray.data
import ray.train
import torch

from experiments.my_loop import train_loop_per_worker


def trains(config: dict[str, Any]) -> None:
    train_loop_per_worker(config)


def raises(config: dict[str, Any]) -> None:
    raise ValueError("no such column")


def no_step(config: dict[str, Any]) -> None:
    pass


def numbers() -> ray.data.Dataset:
    return ray.data.range(640)


def many_numbers() -> ray.data.Dataset:
    """Of thousands of batches: the windows are named hundreds of them ahead, and an epoch takes a second to begin."""
    return ray.data.range(256_000)


def reads_datasets(config: dict[str, Any]) -> None:
    """Train on the shard of this rank, which it reports the size of."""
    shard = ray.train.get_dataset_shard("train")
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(config["epochs"]):
        rows = 0
        for batch in shard.iter_torch_batches(batch_size=config["batch_size"]):
            (weight * batch["id"].sum()).sum().backward()
            optimizer.step()
            rows += len(batch["id"])
        ray.train.report({"val_rows": rows})


def no_file() -> ray.data.Dataset:
    raise FileNotFoundError("no file numbers.csv")
