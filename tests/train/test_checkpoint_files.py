"""Checkpoints on disk: whole or not there, without pickles."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from harness.train import checkpoint
from harness.train.checkpoint import State


def state(number: float) -> State:
    tied = torch.full((4, 2), number)
    model = {"weight": tied, "tied.weight": tied, "steps": torch.tensor(3), "view": tied.t()}
    return State(model, {"weight/momentum_buffer": tied + 1}, {"rank0.cpu": torch.get_rng_state()}, {"a": [1, None]})


def test_a_checkpoint_of_safetensors_and_json_reads_back(tmp_path: Path) -> None:
    here = checkpoint.write(tmp_path, 2, state(0.5), {"rows": [{"loss": 0.1}]})
    back = checkpoint.read(tmp_path, 2)
    assert back is not None
    for name, tensor in state(0.5).model.items():
        assert torch.equal(back.model[name], tensor)
    assert torch.equal(back.optimizer["weight/momentum_buffer"], torch.full((4, 2), 1.5))
    assert torch.equal(back.rng["rank0.cpu"], torch.get_rng_state())
    assert back.values == {"a": [1, None], "rows": [{"loss": 0.1}]}
    tensors = {f"{name}.safetensors" for name in ("model", "optimizer", "rng")}
    assert {path.name for path in here.iterdir()} == {*tensors, "state.json"}
    json.loads((here / "state.json").read_text())


def test_the_newest_two_stay(tmp_path: Path) -> None:
    for epoch in (1, 2, 9, 10):
        checkpoint.write(tmp_path, epoch, state(float(epoch)), {})
    assert checkpoint.epochs(tmp_path) == [10, 9] and checkpoint.epochs(tmp_path / "none") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-10", "epoch-9"]


def test_a_torn_checkpoint_does_not_count_and_is_written_anew(tmp_path: Path) -> None:
    for epoch in (1, 2):
        checkpoint.write(tmp_path, epoch, state(float(epoch)), {})
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / "model.safetensors").write_bytes(b"half")
    assert checkpoint.epochs(tmp_path) == [2, 1]
    for part in ("model.safetensors", "state.json"):
        path = tmp_path / "epoch-2" / part
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        assert checkpoint.read(tmp_path, 2) is None
        path.write_bytes(whole)
    assert checkpoint.read(tmp_path, 2) is not None
    for text in ("[]", "1", "[" * 100_000):
        (tmp_path / "epoch-2" / "state.json").write_text(text)
        assert checkpoint.read(tmp_path, 2) is None
    assert checkpoint.read(tmp_path, 1) is not None
    (tmp_path / "epoch-2" / "rng.safetensors").unlink()
    assert checkpoint.read(tmp_path, 2) is None
    checkpoint.write(tmp_path, 2, state(4.0), {})
    assert not (tmp_path / "partial").exists()
    back = checkpoint.read(tmp_path, 2)
    assert back is not None
    assert float(back.model["weight"][0, 0]) == 4.0
