"""A decoder-only transformer: GPT-2's layout (Radford et al. 2019), layer normalisation before each sublayer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

INITIAL_STD = 0.02


@dataclass(frozen=True)
class Shape:
    """Layers, attention heads, width of the residual stream, and the most tokens that the model looks at."""

    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int = 256


class Block(nn.Module):
    """Causal self-attention and a two-layer net four times as wide, each added to what came in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attention(self.norm1(hidden))
        raised = gelu(self.up(self.norm2(hidden)), approximate="tanh")
        return hidden + self.down(raised)  # type: ignore[no-any-return]

    def _attention(self, hidden: Tensor) -> Tensor:
        split = self.query_key_value(hidden).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, width / heads)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attended(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Takes tokens of shape (batch, length), gives logits of shape (batch, length, vocabulary).

    The output layer shares the token embedding's weights, as in GPT-2. No dropout.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.apply(_initialise)
        for name, weight in self.named_parameters():
            if name.endswith(("attended.weight", "down.weight")):  # however many add to the stream, it keeps its size
                nn.init.normal_(weight, std=INITIAL_STD / math.sqrt(2 * shape.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden)
        return linear(self.norm(hidden), self.tokens.weight)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INITIAL_STD)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
