"""Sequences of very different lengths: labels, padding, packing, that it learns, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from harness.errors import WorkloadError
from harness.train.precision import Precision
from harness.train.strategies import make_strategy
from harness.train.strategies.base import WrapContext, default_units
from harness.train.strategies.dp import ReplicatedModule
from harness.train.workloads import padded_sequences
from harness.train.workloads.padded_sequences import TAGS, MovedOnceLstm, PaddedSequences, passages, tags


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ("if x:", "kk no"),
        ("x = 10  # ten if", "n o ##  cccccccc"),
        ("f'a\\'#' + b", "sssssss o n"),
        ("import_x", "nnnnnnnn"),
        ('"""a\n"b" # c\n"""x', "s" * 16 + "n"),
        ("'open\ny", "onnnn n"),
        ("0xFF.5e", "#######"),
        ("é", "oo"),
    ],
)
def test_classes_of_bytes(source: str, kinds: str) -> None:
    letters = {" ": "space", "k": "keyword", "n": "name", "#": "number", "s": "string", "c": "comment", "o": "operator"}
    expected = bytes(TAGS.index(letters[kind]) for kind in kinds)
    assert tags(source.encode()) == expected


def test_passages_are_separated_by_empty_lines() -> None:
    source = b"def f():\n    pass\n\n\nx = 1\n\n   \n\nlast = 2"
    found = [source[start:end] for start, end in passages(source, 100)]
    assert found == [b"def f():\n    pass", b"\nx = 1", b"last = 2"]
    assert [end - start for start, end in passages(source, 5)] == [5, 5, 5]


def test_lengths_differ_strongly() -> None:
    train, validation = PaddedSequences().datasets()
    lengths = torch.tensor([len(train[i][0]) for i in range(len(train))], dtype=torch.float32)  # type: ignore[arg-type]
    low, high = lengths.quantile(torch.tensor([0.1, 0.9])).tolist()
    assert high > 5 * low and int(lengths.max()) == 256
    assert len(train) > 1000  # type: ignore[arg-type]
    seen, held = (len(dataset.text) for dataset in (train, validation))  # type: ignore[attr-defined]
    assert seen + held == 500_000 and (seen + held) / 20 <= held <= (seen + held) / 10
    assert len(validation) > 50  # type: ignore[arg-type]  # how many depends on the standard library's files
    assert all(tokens.shape == labels.shape for tokens, labels in (train[i] for i in range(20)))


def test_synthetic_sequences_are_of_many_lengths() -> None:
    train, _ = PaddedSequences(data="synthetic", longest=100, samples=400).datasets()
    lengths = [len(train[i][0]) for i in range(400)]
    assert min(lengths) == 4 and 90 < max(lengths) <= 100
    assert torch.equal(train[3][1], train[3][0] % len(TAGS))


def sequences(*lengths: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    drawn = [torch.randint(256, (length,), generator=generator) for length in lengths]
    return [(tokens, tokens % len(TAGS)) for tokens in drawn]


def test_a_batch_is_padded_to_its_own_longest() -> None:
    tokens, lengths, labels = PaddedSequences().collate(sequences(3, 7, 1))
    assert tokens.shape == labels.shape == (3, 7) and lengths.tolist() == [3, 7, 1]
    assert (labels[0, 3:] == padded_sequences.IGNORED).all() and (tokens[0, 3:] == 0).all()
    assert (labels[0, :3] != padded_sequences.IGNORED).all()


def test_padding_changes_nothing() -> None:
    workload = PaddedSequences()
    model = workload.build_model()
    samples = sequences(3, 9, 1, 5)
    total, weight = workload.loss(model, workload.collate(samples))
    alone = [workload.loss(model, workload.collate([sample]))[0] for sample in samples]
    assert float(weight) == 18
    torch.testing.assert_close(total, torch.stack(alone).sum())
    correct, among = workload.metrics(model, workload.collate(samples))["accuracy"]
    right = sum(int(workload.metrics(model, workload.collate([one]))["accuracy"][0]) for one in samples)
    assert (int(correct), int(among)) == (right, 18)


class Short(padded_sequences.Tagger):
    """Pads a replica's part to its own longest."""

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens[:, : int(lengths.max())], lengths)


def test_replicas_with_different_longest_sequences_are_gathered() -> None:
    workload = PaddedSequences()
    model, batch = workload.build_model(), workload.collate(sequences(2, 3, 12, 4, 1))
    expected, _ = workload.loss(model, batch)
    for replicas in (2, 3):
        torch.testing.assert_close(workload.loss(ReplicatedModule(model, replicas), batch)[0], expected)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        workload.loss(ReplicatedModule(Short(padded_sequences.SIZES["small"]), 2), batch)


@pytest.mark.parametrize("kind", [MovedOnceLstm, nn.LSTM])
def test_fsdps_weights_keep_their_storage(kind: type[nn.LSTM], no_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(nn.LSTM, "flatten_parameters", lambda self: calls.append(True))
    monkeypatch.setattr("harness.train.workloads.padded_sequences.MovedOnceLstm", kind)
    workload = PaddedSequences()
    model = workload.build_model().to(torch.float32)
    assert calls  # cuDNN's layout, when it moves to a device
    context = WrapContext([torch.device("cpu")], {}, default_units, Precision("fp32", "cpu"))
    model = make_strategy("fsdp").wrap(model, context)
    calls.clear()
    workload.loss(model, workload.collate(sequences(2, 3)))[0].backward()
    assert bool(calls) == (kind is nn.LSTM)


def test_a_folder_with_too_little_text(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x")
    with pytest.raises(WorkloadError, match="too little text to train on and hold some out"):
        PaddedSequences(data=str(tmp_path)).datasets()
