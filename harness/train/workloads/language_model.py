"""A GPT that reads bytes, on any folder of text files: what most of today's training looks like.

Matrix products and attention on long rows, with throughput in tokens and nothing to download: no tokenizer, and text
that is always there. Its FLOPs per token are 6 (12 layers width^2 + vocabulary width) + 12 layers width context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention
from torch.utils.data import Dataset

from harness.config.builtin_workloads import SYNTHETIC
from harness.errors import WorkloadError
from harness.train.workloads import Datasets, datasets

INITIAL_STD = 0.02
BYTES = 256


@dataclass(frozen=True)
class Shape:
    """Layers, attention heads, width of the residual stream, and the longest context in tokens."""

    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int = 256


class Block(nn.Module):
    """Causal self-attention and a two-layer net four times as wide, each with a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.query_key_value(self.norm1(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, width / heads)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attended(mixed.transpose(1, 2).flatten(2))
        raised = gelu(self.up(self.norm2(hidden)), approximate="tanh")
        return hidden + self.down(raised)  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Tokens of shape (batch, length) -> logits of shape (batch, length, vocabulary).

    The output layer shares the token embedding's weights, as in GPT-2. No dropout.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL_STD)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for name, weight in self.named_parameters():
            if name.endswith(("attended.weight", "down.weight")):  # the residual stream keeps its scale with depth
                nn.init.normal_(weight, std=INITIAL_STD / math.sqrt(2 * shape.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden)
        return linear(self.norm(hidden), self.tokens.weight)


SHAPES = {
    "nano": Shape(layers=2, heads=2, width=64, context=64),
    "micro": Shape(layers=4, heads=4, width=128, context=128),
    "mini": Shape(layers=6, heads=6, width=384, context=256),
    "small": Shape(layers=12, heads=12, width=768, context=1024),
    "gpt2": Shape(layers=12, heads=12, width=768, context=1024, vocabulary=50_257),
}
"""120,576 parameters; 842,496; 10.8 M; 86.0 M; 124.4 M. The last is GPT-2 small, its vocabulary included, of which
bytes use 256 rows: arithmetic and messages are those of the well-known model."""


class LanguageModel:
    """Prediction of the next byte from those before it, with the cross-entropy.

    ``data``: stdlib (the Python standard library's own sources), a folder of text files, or synthetic bytes.
    ``model``: nano, micro, mini, small or gpt2. ``context``: bytes of a sample, by default the model's longest
    context. ``text_bytes``: limit on the text that is read. ``samples``: the size of a synthetic set.
    Reports the perplexity per byte.
    """

    unit = "tokens"
    metric_names = ("perplexity",)

    def __init__(
        self,
        data: str = datasets.STDLIB,
        model: str = "nano",
        context: int | None = None,
        text_bytes: int = 2_000_000,
        samples: int = 50_000,
    ) -> None:
        shape = SHAPES[model]
        self.data = data
        self.shape = replace(shape, context=datasets.whole_number("context", context or shape.context, 2**20))
        self.tokens_per_sample = self.shape.context
        self.text_bytes = datasets.whole_number("text_bytes", text_bytes, 2**40)
        self.samples = datasets.whole_number("samples", samples, 2**40)

    def build_model(self) -> nn.Module:
        return Gpt(self.shape)

    def datasets(self) -> Datasets:
        if self.data in SYNTHETIC:
            return datasets.synthetic_datasets(self.draw, self.samples)
        train, validation = map(_joined, datasets.read_texts(self.data, self.text_bytes))
        return self._windows(train, "training"), self._windows(validation, "validation")

    def draw(self, index: int, generator: torch.Generator) -> Tensor:
        """Return random bytes."""
        return torch.randint(BYTES, (self.shape.context + 1,), generator=generator)

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        """``batch``: tokens of shape (samples, context + 1); each token is predicted from those before it."""
        wanted = batch[:, 1:]
        total = cross_entropy(model(batch[:, :-1]).flatten(0, 1), wanted.flatten(), reduction="sum")
        return total, torch.full((), wanted.numel(), device=total.device)

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """Return exp of the mean loss; infinity if that overflows."""
        try:
            return {"perplexity": math.exp(means["loss"])}
        except OverflowError:
            return {"perplexity": math.inf}

    def _windows(self, text: Tensor, purpose: str) -> Windows:
        windows = Windows(text, self.shape.context)
        if not len(windows):
            raise WorkloadError(
                f"data {self.data}: {len(text)} bytes of {purpose} text are too few for a context of "
                f"{self.shape.context}; give more text, or a smaller workload_options.context"
            )
        return windows


class Windows(Dataset[Tensor]):
    """A text cut into pieces of ``context`` bytes, each with the byte that follows it."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.rows = text.unfold(0, context + 1, context) if len(text) > context else text.new_empty(0)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index].long()


@lru_cache(maxsize=8)
def _joined(texts: tuple[bytes, ...]) -> Tensor:
    """Return the bytes of files, joined by a line feed."""
    joined = bytearray(b"\n".join(texts))
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
