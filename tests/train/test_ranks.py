"""What ranks exchange, without other processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from harness.train.ranks import Ranks

ONE = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (torch.device("cpu"),))


@pytest.mark.parametrize("value", [None, 0, "text"])
def test_every_ranks_value_is_gathered_none_too(monkeypatch: pytest.MonkeyPatch, value: object) -> None:
    def all_gather_object(values: list[object], own: object) -> None:
        values[:] = [own, "other"]

    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    assert ONE.gather(value) == [value]
    assert replace(ONE, world_size=2).gather(value) == [value, "other"]
