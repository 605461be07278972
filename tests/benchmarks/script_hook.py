"""The cost of counting a script's steps: ``python -m tests.benchmarks.script_hook``.

In one process: the time of a call of the hook after an optimizer's step, and of the timed iterator of a DataLoader
beside that of torch's own, each the median over rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from multiprocessing import Pipe

import torch
from torch.utils.data import DataLoader, TensorDataset

from harness.measure.script.batches import time_loaders
from harness.measure.script.child import Counting
from harness.measure.script.counting import StepRecorder

ROUNDS, CALLS = 20, 2000


def microseconds(work: Callable[[], object], calls: int) -> float:
    """Return the median time of a call over rounds."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def main() -> None:
    """Print the cost of each hook in microseconds."""
    ours, _ = Pipe()
    recorder = StepRecorder(ours, lambda: None, Counting(pauses=True))
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def hooks() -> None:
        for _ in range(CALLS):
            recorder._after_optimizer(optimizer)

    loader = DataLoader(TensorDataset(torch.zeros(CALLS, 1)), batch_size=1)

    def drain(batches: Iterable[object] = loader) -> None:
        for _ in batches:
            pass

    print(f"after an optimizer's step: {microseconds(hooks, CALLS):.2f} us a step")
    plain = microseconds(drain, CALLS)
    time_loaders(recorder)
    timed = microseconds(drain, CALLS)
    print(f"a batch of a DataLoader: {plain:.2f} us, with counting {timed:.2f} us: {timed - plain:+.2f} us a batch")


if __name__ == "__main__":
    main()
