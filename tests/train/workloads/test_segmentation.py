"""Digits on photographs: the model, its data, that it learns, what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.train.workloads.segmentation import Segmentation, read_photographs


def test_an_image_becomes_a_logit_a_pixel() -> None:
    for side in (8, 18, 32):
        assert Segmentation().build_model()(torch.zeros(2, 3, side, side)).shape == (2, side, side)


def test_a_digits_foreground_is_one_brightness_on_a_part_of_a_photograph() -> None:
    train, validation = Segmentation(image_size=16).datasets()
    assert (len(train), len(validation)) == (1437, 360)
    image, mask = train[3]  # type: ignore[misc]
    assert image.shape == (3, 16, 16) and mask.shape == (16, 16)
    assert len(image[:, mask == 1].unique()) == 1
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    rows, columns = mask.nonzero().unbind(1)
    assert (rows.max() - rows.min() < 8) and (columns.max() - columns.min() < 8)  # half the side
    parts = read_photographs()[:, 0].unfold(1, 16, 1).unfold(2, 16, 1)
    parts = parts[(parts[..., 0, 0] - (image[0, 0, 0] + 1) / 2).abs() < 1e-6] if mask[0, 0] == 0 else parts
    same = ((parts - (image[0] + 1) / 2).abs() < 1e-6) | (mask == 1)
    assert same.flatten(-2).all(dim=-1).any()


def test_loss_and_intersection_over_union_by_hand() -> None:
    masks = torch.tensor([[[1.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]])
    logits = torch.tensor([[[9.0, -9.0], [9.0, -9.0]], [[-9.0, -9.0], [-9.0, 9.0]]])
    total, weight = Segmentation().loss(nn.Identity(), (torch.zeros_like(logits), masks))
    assert (float(total), float(weight)) == (pytest.approx(2 * 0.693147), 2)
    found, union = Segmentation().metrics(nn.Identity(), (logits, masks))["iou"]
    assert (int(found), int(union)) == (2, 4)
