"""A run at a glance: its summary, options as columns, the text of a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

import harness
from harness.analysis import ratios
from harness.analysis.results import TABLES, option_columns, summary_table
from harness.record.schema import SCALING, TRIALS
from tests.conftest import EXAMPLE


def scaling_row(label: str, **columns: Any) -> dict[str, Any]:
    return {"cell_id": label, "base_id": "base", "label": label, "devices": 2, "blocks": 3, **columns}


def test_each_cell_is_a_row_of_twelve_numbers_without_the_ratios_that_are_excluded() -> None:
    ratio = {"speedup": 1.5, "low": 1.3, "high": 1.7, "p_value": 0.01, "efficiency": 0.75, "throughput_per_s": 4000.0}
    rows = [scaling_row("ddp x2", **ratio), scaling_row("fsdp x2", excluded="differs", **ratio), scaling_row("ddp x4")]
    table = summary_table(SCALING.frame(rows))
    assert table.index.tolist() == ["ddp x2", "fsdp x2", "ddp x4"] and table.shape[1] == 12
    assert all(pd.api.types.is_numeric_dtype(dtype) for dtype in table.dtypes)
    assert table["device_s_per_million"].tolist() == [500.0, 500.0, pd.NA]
    for name in ("speedup", "low", "high", "p_value", "efficiency"):
        assert table[name].tolist() == [ratio[name], pd.NA, pd.NA], name
    assert summary_table(SCALING.frame([])).shape == (0, 12)


def test_the_best_cells_are_those_of_the_verdict() -> None:
    results = harness.load(EXAMPLE)
    assert len(results.summary) == len(results.scaling)
    fastest = results.verdict[results.verdict["topic"] == "fastest"]
    assert results.best["throughput_per_s"].tolist() == fastest["value"].tolist() and len(results.best) == 2


def test_where_no_gain_is_shown_the_best_is_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    results = harness.load(EXAMPLE)
    scaling = results.scaling
    slower = scaling.assign(speedup=scaling["speedup"].where(scaling["cell_id"] == scaling["base_id"], 0.7))
    vars(results)["scaling"] = slower
    chosen = slower["cell_id"].isin(results.verdict["cell_id"][results.verdict["topic"] == "fastest"])
    bases = {*slower["base_id"][chosen]}
    assert {*slower["cell_id"][slower["label"].isin(results.best.index)]} == bases


def test_looks_widen_the_intervals_of_decisions_and_not_that_of_the_a_a_test() -> None:
    trials = harness.load(EXAMPLE).trials
    plain, looked = (ratios.scaling(trials, rule).dropna(subset=["p_value"]) for rule in (None, "decide"))
    apart = plain["cell_id"] != plain["base_id"]
    assert plain["speedup"].equals(looked["speedup"]) and set(plain["blocks"][apart]) == {5}
    wide, usual = (np.log((rows["high"] / rows["speedup"])[apart].astype(float)) for rows in (looked, plain))
    assert (wide / usual).tolist() == pytest.approx([3.747 / 2.776] * apart.sum(), rel=1e-3)  # t at 2 % and 5 %, 4 df
    pd.testing.assert_frame_equal(ratios.noise(trials, "decide"), ratios.noise(trials))


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
    assert "124 ok, 50 skipped" in lines[1] and "cells measured: 15" in lines[1] and "finished" in lines[1]
    assert ".summary" in lines[2] and ".plot.throughput()" in lines[2]
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
