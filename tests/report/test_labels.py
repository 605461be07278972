"""Short names: only what differs."""

from __future__ import annotations

import pandas as pd

from harness.report.labels import settings, shown_strategy, spread_options


def rows(*changes: dict[str, object]) -> pd.DataFrame:
    base = {
        "workload": "w",
        "data": "digits",
        "model": "resnet8",
        "scaling": "weak",
        "per_device_batch_size": 8,
        "global_batch_size": 16,
        "precision": "fp32",
        "compile": False,
        "options": {},
    }
    return pd.DataFrame([{**base, **change} for change in changes])


def test_constant_axes_are_omitted_from_labels_but_the_batch() -> None:
    assert settings(rows({}, {})).tolist() == ["batch 8 per device"] * 2


def test_differing_axes_are_named() -> None:
    names = settings(rows({"model": "a", "precision": "bf16"}, {"model": "b", "compile": True}))
    assert names.tolist() == ["a, bf16, eager, batch 8 per device", "b, fp32, compiled, batch 8 per device"]


def test_strong_scaling_names_the_global_batch() -> None:
    assert settings(rows({"scaling": "strong"})).tolist() == ["global batch 16"]


def test_options_that_differ_become_columns() -> None:
    frame = rows(
        {"options": {"optimizer.lr": 0.1, "optimizer.name": "SGD", "ddp.bucket_cap_mb": 25}},
        {"options": {"optimizer.lr": 0.2, "optimizer.name": "SGD"}},
    )
    assert list(spread_options(frame).columns) == ["optimizer.lr"]
    assert settings(frame).tolist() == ["batch 8 per device, optimizer.lr=0.1", "batch 8 per device, optimizer.lr=0.2"]


def test_an_empty_table_has_no_names() -> None:
    assert settings(rows().reindex(columns=rows({}).columns)).tolist() == []


def test_emulated_cells_are_named() -> None:
    assert shown_strategy({"strategy": "dp", "emulated": True, "oversubscribed": False}) == "dp (emulated)"
    assert shown_strategy({"strategy": "ddp", "emulated": False, "oversubscribed": True}) == "ddp (oversubscribed)"
    assert shown_strategy({"strategy": "ddp", "emulated": False, "oversubscribed": False}) == "ddp"
