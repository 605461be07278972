"""A run at a glance: a table of efficiency that is read and not averaged, options as columns, the text of a run."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

import harness
from harness.analysis.results import TABLES, efficiency_table, option_columns
from harness.record.schema import SCALING, TRIALS
from tests.conftest import EXAMPLE


def scaling_row(label: str, **columns: Any) -> dict[str, Any]:
    return {"cell_id": label, "base_id": "base", "label": label, "devices": 2, "blocks": 3, **columns}


def test_each_cell_is_a_row_of_text_with_its_interval_and_an_empty_table_stays_one() -> None:
    ratio = {"speedup": 1.5, "efficiency": 0.75}
    interval = {"low": 1.3, "high": 1.724, "efficiency_low": 0.65, "efficiency_high": 0.862}
    spread = {"least": 1.4, "most": 1.6, "efficiency_least": 0.7, "efficiency_most": 0.8}
    rows = [
        scaling_row("base", devices=1, speedup=1.0, efficiency=1.0, low=0.9, high=1.1),
        scaling_row("ddp x2", **ratio, **interval),
        scaling_row("dp x2", blocks=2, **ratio, **spread),
        scaling_row("fsdp x2", excluded="differs", **ratio, **interval),
        scaling_row("ddp x4"),
    ]
    table = efficiency_table(SCALING.frame(rows))
    assert table.index.tolist() == ["base", "ddp x2", "dp x2", "fsdp x2", "ddp x4"]
    assert table["devices"].tolist() == [1, 2, 2, 2, 2] and table["blocks"].tolist() == [3, 3, 2, 3, 3]
    assert table["efficiency"].tolist() == [
        "base",
        "75 % (65 to 86 %)",
        "75 % (no interval; blocks 70 to 80 %)",
        "75 % (65 to 86 %), not equivalent",
        "-",
    ]
    assert table["speedup"].tolist() == [
        "base",
        "1.50 (1.30 to 1.72)",
        "1.50 (no interval; blocks 1.40 to 1.60)",
        "1.50 (1.30 to 1.72), not equivalent",
        "-",
    ]
    assert list(efficiency_table(SCALING.frame([])).columns) == ["devices", "speedup", "efficiency", "blocks"]


@pytest.mark.filterwarnings("ignore:.*require a `keepdims` parameter:FutureWarning")  # pandas 2.2, of itself
def test_it_cannot_be_averaged() -> None:
    table = harness.load(EXAMPLE).efficiency
    for column in ("efficiency", "speedup"):
        for mean in (table[column].mean, table[column].median, table.mean, table.groupby("devices")[column].mean):
            with pytest.raises(TypeError):
                mean()


def trial(cell: str, strategy: str = "ddp", kind: str = "throughput", **options: Any) -> dict[str, Any]:
    return {"trial_id": cell, "cell_id": cell, "strategy": strategy, "kind": kind, "options": options}


def test_an_option_of_several_strategies_that_differs_is_a_column_with_its_type() -> None:
    sgd = {"optimizer.lr": 0.1, "optimizer.name": "SGD", "loader.workers": 0}
    adam = trial("b", **{"ddp.bucket_cap_mb": 25, "optimizer.lr": 1, "optimizer.name": "Adam", "loader.workers": 0})
    trials = [trial("a", **{"ddp.bucket_cap_mb": 1, **sgd}), adam, adam, trial("c", "single", **sgd)]
    table = option_columns(TRIALS.frame([*trials, trial("d", "single", "diagnostic", **{"loader.workers": 9})]))
    assert table.index.tolist() == ["a", "b", "c"]
    assert {name: str(dtype) for name, dtype in table.dtypes.items()} == {
        "ddp.bucket_cap_mb": "Int64",
        "optimizer.lr": "Float64",
        "optimizer.name": "string",
    }
    assert table["ddp.bucket_cap_mb"].tolist() == [1, 25, pd.NA]
    assert table["optimizer.lr"].tolist() == [0.1, 1.0, 0.1]
    of_one = [trial("a", **{"ddp.static_graph": False}), trial("b", "fsdp"), trial("c", "single")]
    assert option_columns(TRIALS.frame(of_one)).shape == (3, 0)


def test_a_run_is_shown_by_what_it_is_and_what_its_results_have() -> None:
    results = harness.load(EXAMPLE)
    lines = repr(results).splitlines()
    assert lines[0] == f"Results of scaling: {EXAMPLE}"
    assert "114 ok, 50 skipped" in lines[1] and "cells measured: 15" in lines[1] and "finished" in lines[1]
    assert ".efficiency" in lines[2] and ".plot.throughput()" in lines[2]
    assert ".scaling" in lines[3] and max(map(len, lines[1:3])) <= 100
    assert len(results.cells.join(results.options, on="cell_id")) == len(results.cells)
    # trials of cells that no machine can run are a number of cells, not rows
    assert results.impossible == {"single runs on at most one device": 9}
    assert "strategy_devices" not in set(results.trials["skip_code"].dropna())


def test_a_table_is_made_once_and_by_its_name() -> None:
    results = harness.load(EXAMPLE)
    assert results.scaling is results.scaling
    assert set(TABLES) <= set(dir(results))
    with pytest.raises(AttributeError, match="no table 'agreement'; allowed: trials, cells, scaling, "):
        _ = results.agreement
