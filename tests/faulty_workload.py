"""A workload that fails for real, in one chosen way, on rank 1 of two; on one rank alone it trains."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info

STEP = 7
SAMPLES = 64
CHUNK_BYTES = 1 << 27


class Unpicklable(Exception):
    """Holds what no other process can have."""

    def __init__(self) -> None:
        super().__init__("holds a generator")
        self.held = (number for number in range(3))

    def __reduce__(self) -> Any:
        raise TypeError("this exception cannot be pickled")


class Samples(Dataset[Any]):
    """``hangs``: whether a loader worker of rank 1 stops in the middle of a sample."""

    def __init__(self, faulty: Faulty) -> None:
        self.faulty = faulty
        self.x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.faulty.fault == "loader" and get_worker_info() and is_faulty_rank():
            self.faulty.mark()
            time.sleep(3600)
        return self.x[index], self.x[index].sum().unsqueeze(0)


class Faults:
    """What happens in step 7, each by its name."""

    held: list[bytes]
    stop_bytes: int

    def step(self, total: Tensor) -> Tensor:
        raise ValueError("a bad sample")

    def unpicklable(self, total: Tensor) -> Tensor:
        raise Unpicklable

    def exits(self, total: Tensor) -> Tensor:
        sys.exit(3)

    def cuda_memory(self, total: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB (injected)")

    def hog(self, total: Tensor) -> Tensor:
        while sum(map(len, self.held)) < self.stop_bytes:
            self.held.append(b"\1" * CHUNK_BYTES)
            time.sleep(0.02)
        return total

    def nan(self, total: Tensor) -> Tensor:
        return total * math.nan

    def sleeps(self, total: Tensor) -> Tensor:
        time.sleep(3600)
        return total

    def sigkill(self, total: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return total

    def node(self, total: Tensor) -> Tensor:
        """Everything that Ray runs on this node is gone at once."""
        raylet = psutil.Process(os.getppid())
        assert raylet.name() == "raylet", raylet.name()
        everything = [raylet, *raylet.children(recursive=True)]
        for process in sorted(everything, key=lambda process: process.pid == os.getpid()):
            process.kill()
        return total


class Faulty(Faults):
    """``fault``: what goes wrong; ``folder``: where the moment is noted, and ``once`` makes it the only one."""

    unit = "samples"

    def __init__(self, fault: str = "none", folder: str = "", once: bool = False, stop_bytes: int = 0) -> None:
        self.fault, self.folder, self.once, self.stop_bytes = fault, Path(folder), once, stop_bytes
        self.steps = 0
        self.held = []

    def build_model(self) -> nn.Module:
        self.steps = 0
        if self.fault == "build" and is_faulty_rank():
            self.mark()
            raise ValueError("a bad model")
        return nn.Linear(4, 1)

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        data = Samples(self)
        return data, data

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        total = (model(x) - y).square().sum()
        if not torch.is_grad_enabled():
            if self.fault == "evaluation" and is_faulty_rank():
                self.mark()
                raise ValueError("a bad validation sample")
            return total, torch.tensor(float(len(x)))
        self.steps += 1
        again = self.once and any(self.folder.glob(f"{self.fault}-*"))
        faulty = is_on_second_node() if self.fault == "node" else is_faulty_rank()
        if self.steps == STEP and faulty and not again and self.fault in dir(Faults):
            self.mark()
            print(f"last words before {self.fault}", flush=True)
            total = getattr(self, self.fault)(total)
        return total, torch.tensor(float(len(x)))

    def mark(self) -> None:
        """Notes when it happened, for the time to recovery."""
        (self.folder / f"{self.fault}-{time.time()}").touch()


def is_faulty_rank() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and os.environ.get("RANK") == "1"


def is_on_second_node() -> bool:
    """Whether this is not the head, which the driver is on."""
    import ray

    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    return not alone and ray.util.get_node_ip_address() != ray.get_runtime_context().gcs_address.split(":")[0]
