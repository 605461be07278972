"""Sequences of very different lengths through an LSTM: the shapes of batches differ between steps and between ranks.

Each batch is padded to its longest sequence, and packed so that nothing is computed for the padding. Only real tokens
count, in the loss and in the throughput: ranks with short sequences wait for those with long ones, and the weights of
their shares differ. The output is padded to the input's length (``total_length``), not to the longest sequence of a
replica's chunk: dp could not gather replicas of different lengths.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import Dataset

from harness.config.builtin_workloads import SYNTHETIC
from harness.errors import WorkloadError
from harness.train.workloads import Datasets, datasets

TAGS = ("space", "keyword", "name", "number", "string", "comment", "operator")
_KEYWORDS = frozenset(word.encode() for word in keyword.kwlist)
_TOKEN = re.compile(
    rb"""
      (?P<comment>\#[^\n]*)
    | (?P<string>[rRbBuUfF]{0,2}(?:
        \"{3}(?:\\.|[^\\])*?\"{3} | '{3}(?:\\.|[^\\])*?'{3} | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'))
    | (?P<number>\d[\w.]*)
    | (?P<name>\w+)
    | (?P<operator>[^\w\s])
    """,
    re.VERBOSE | re.DOTALL,
)
BYTES = 256
IGNORED = -100
"""The label of padding: cross_entropy's own default."""
SHORTEST = 4
"""Bytes of the shortest synthetic sequence."""


def tags(source: bytes) -> bytes:
    """Return for each byte the position of its kind in TAGS."""
    found = bytearray(len(source))
    for token in _TOKEN.finditer(source):
        kind = token.lastgroup or ""
        if kind == "name" and token[0] in _KEYWORDS:
            kind = "keyword"
        start, end = token.span()
        found[start:end] = bytes([TAGS.index(kind)]) * (end - start)
    return bytes(found)


def passages(source: bytes, longest: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each passage between empty lines, cut to ``longest`` bytes."""
    start = 0
    for text in source.split(b"\n\n"):
        if text.strip():
            yield start, start + min(len(text), longest)
        start += len(text) + 2


@dataclass(frozen=True)
class Size:
    """Width of the embedding, hidden units of the LSTM and its layers."""

    embedding: int
    hidden: int
    layers: int


SIZES = {"small": Size(32, 64, 1), "medium": Size(128, 256, 2), "large": Size(512, 1024, 2)}
"""33,735 parameters; 956,167; 14.8 M."""


class PaddedSequences:
    """Classification of each byte of Python code (keyword, name, string, comment ...), with the cross-entropy.

    ``data``: stdlib (passages between empty lines of the standard library's sources), a folder of Python files, or
    synthetic. ``model``: small, medium or large. ``longest``: bytes at which a passage is cut. ``text_bytes``: limit
    on the text that is read. ``samples``: the size of a synthetic set.
    """

    unit = "tokens"
    metric_names = ("accuracy",)

    def __init__(
        self,
        data: str = datasets.STDLIB,
        model: str = "small",
        longest: int = 256,
        text_bytes: int = 500_000,
        samples: int = 50_000,
    ) -> None:
        self.size = SIZES[model]
        self.data = data
        self.longest = datasets.whole_number("longest", longest, 2**20)
        self.text_bytes = datasets.whole_number("text_bytes", text_bytes, 2**40)
        self.samples = datasets.whole_number("samples", samples, 2**40)

    def build_model(self) -> nn.Module:
        return Tagger(self.size)

    def datasets(self) -> Datasets:
        if self.data in SYNTHETIC:
            return datasets.synthetic_datasets(self.draw, self.samples)
        return _passages(self.data, self.text_bytes, self.longest)

    def draw(self, index: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return random bytes, labelled by their remainder; lengths are spread evenly on a log scale."""
        shortest = min(SHORTEST, self.longest)
        spread = float(torch.rand((), generator=generator)) * math.log((self.longest + 1) / shortest)
        tokens = torch.randint(BYTES, (int(shortest * math.exp(spread)),), generator=generator)
        return tokens, tokens % len(TAGS)

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, lengths and labels; tokens and labels of shape (samples, longest), padded."""
        tokens, labels = zip(*samples, strict=True)
        lengths = torch.tensor([len(sequence) for sequence in tokens])
        padded = pad_sequence(list(labels), batch_first=True, padding_value=IGNORED)
        return pad_sequence(list(tokens), batch_first=True), lengths, padded

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        tokens, lengths, labels = batch
        logits = model(tokens, lengths)
        total = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total, lengths.sum()

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        tokens, lengths, labels = batch
        correct = (model(tokens, lengths).argmax(dim=2) == labels).sum()
        return {"accuracy": (correct, lengths.sum())}


class MovedOnceLstm(nn.LSTM):
    """An LSTM whose weights are flattened for cuDNN when they move to a device, and not again in a forward pass.

    In a forward pass torch flattens weights whose memory has changed: those that fsdp gathers, as fsdp frees and
    refills their memory at each step. The model would then train on a stale copy.
    """

    _moves = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._moves = True
        try:
            return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]
        finally:
            self._moves = False

    def flatten_parameters(self) -> None:
        if self._moves:
            super().flatten_parameters()


class Tagger(nn.Module):
    """Tokens of shape (batch, length) and each row's length -> logits of shape (batch, length, tags), 0 at padding.

    Packing needs the lengths on the host. They are a tensor on the device, since dp splits only tensors; reading them
    makes the host wait once a step, in every strategy.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, size.embedding)
        self.lstm = MovedOnceLstm(size.embedding, size.hidden, size.layers, batch_first=True)
        self.head = nn.Linear(size.hidden, len(TAGS))

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(tokens, lengths.cpu(), batch_first=True, enforce_sorted=False)
        hidden, _ = self.lstm(PackedSequence(self.embedding(packed.data), *packed[1:]))
        logits = PackedSequence(self.head(hidden.data), *hidden[1:])
        return pad_packed_sequence(logits, batch_first=True, total_length=tokens.shape[1])[0]


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Parts of one long text, each with the labels of its bytes. ``spans``: start and end of each."""

    def __init__(self, text: bytes, labels: bytes, spans: list[tuple[int, int]]) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.labels = torch.frombuffer(bytearray(labels), dtype=torch.uint8)
        self.spans = spans

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start, end = self.spans[index]
        return self.text[start:end].long(), self.labels[start:end].long()


@lru_cache(maxsize=4)
def _passages(data: str, most_bytes: int, longest: int) -> Datasets:
    train, validation = (_labelled(data, texts, longest) for texts in datasets.read_texts(data, most_bytes))
    return train, validation


def _labelled(data: str, texts: tuple[bytes, ...], longest: int) -> Sequences:
    """Return the passages of these files; raise WorkloadError if there are none."""
    spans, start = [], 0
    for text in texts:
        spans += [(start + first, start + last) for first, last in passages(text, longest)]
        start += len(text)
    if not spans:
        raise WorkloadError(f"data {data}: too little text to train on and hold some out; give more files")
    return Sequences(b"".join(texts), b"".join(map(tags, texts)), spans)
