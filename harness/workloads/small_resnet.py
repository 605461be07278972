"""Residual networks for small images, 6n+2 layers deep: He et al. 2016, section 4.2 (arXiv 1512.03385)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

DEPTHS = {f"resnet{6 * n + 2}": n for n in (1, 2, 3, 5, 7, 9)}
"""resnet8, 14, 20, 32, 44 and 56: the number of blocks in each of the three stages."""


NORMS = ("batch", "group")


def make_norm(kind: str, channels: int) -> nn.Module:
    """Batch normalisation, or group normalisation in four groups, which keeps no statistics of the batch."""
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(math.gcd(4, channels), channels)


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = make_norm(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = make_norm(norm, outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm1(self.conv1(images)))
        return torch.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


class SmallResNet(nn.Module):
    """Three stages of ``blocks`` blocks with ``width``, 2 ``width`` and 4 ``width`` channels.

    Takes images of shape (batch, channels, height, width), gives logits of shape (batch, classes).
    """

    def __init__(self, blocks: int, *, width: int, channels: int, classes: int, norm: str = "batch") -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm = make_norm(norm, width)
        shapes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
        self.stages = nn.ModuleList(
            Block(inputs if i == 0 else outputs, outputs, stride if i == 0 else 1, norm)
            for inputs, outputs, stride in shapes
            for i in range(blocks)
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.stem(images)))
        for block in self.stages:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden.mean(dim=(2, 3)))
        return logits
