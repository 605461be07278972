"""Findings that compare examinations, and cells that are measured despite one: marked, and out of claims."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from harness.analysis import ratios
from harness.analysis import trials as trial_tables
from harness.analysis.findings import findings, unequal_metrics, with_faulty
from harness.analysis.ratios import leaders
from harness.record.schema import FINDINGS
from harness.report.tables.scaling import scaling_table
from tests.records import epochs_of, line, trials_of, with_set_ids


def examined(strategy: str, distinct: int | None, **columns: Any) -> dict[str, Any]:
    facts = {"findings": [], "figures": {}} | ({} if distinct is None else {"distinct_samples": distinct})
    options = columns.pop("options", {"workload.width": 8, "optimizer.lr": 0.1})
    return line(
        f"{strategy}2", strategy=strategy, kind="diagnostic", purpose="doctor", facts=facts, options=options, **columns
    )


def found(*lines: dict[str, Any]) -> list[tuple[str, str]]:
    table = findings([*lines], trials_of([*lines]))  # type: ignore[list-item]
    return list(zip(table["strategy"], table["seen"], strict=True))


def test_a_strategy_that_reads_fewer_samples_than_one_device_is_a_finding_at_any_learning_rate() -> None:
    seen = found(examined("single", 1000), examined("ddp", 500), examined("fsdp", 1000))
    assert seen == [("ddp", "distinct samples in an epoch: 500; of one device: 1,000")]
    swept = examined("ddp", 500, options={"workload.width": 8, "optimizer.lr": 0.01})
    assert len(found(examined("single", 1000), swept)) == 1


@pytest.mark.parametrize(
    ("single", "ddp"),
    [
        (examined("single", 1000), examined("ddp", 1000)),
        (examined("single", None), examined("ddp", 500)),
        (examined("single", 1000), examined("ddp", None)),
        (examined("single", 1000, data="a"), examined("ddp", 500, data="b")),
        (examined("single", 1000), examined("ddp", 500, options={"workload.width": 16})),
    ],
    ids=["equal", "unknown of one device", "unknown", "other data", "other options"],
)
def test_other_examinations_are_not_compared(single: dict[str, Any], ddp: dict[str, Any]) -> None:
    assert found(single, ddp) == []


def trainings(
    metric: tuple[float, ...] = (0.76, 0.77, 0.76),
    loss: float = 0.5,
    first: tuple[float, ...] = (0.82, 0.83, 0.82),
    batch: int = 20,
    name: str = "val_accuracy",
    known: pd.DataFrame | None = None,
) -> list[str]:
    """Return what is found of ddp's trainings with these values after the last epoch, beside one device's."""
    cells = {"single": (first, 0.5), "ddp2": (metric, loss)}
    lines, epochs = [], []
    for cell, (values, loss_of_cell) in cells.items():
        for seed, value in enumerate(values):
            one = line(cell, kind="convergence", block=seed, seed=seed, trial_id=f"{cell}-s{seed}")
            lines.append({**one, "windows": [], "global_batch_size": batch if cell == "single" else 20})
            values_of = {"val_loss": loss_of_cell, "val_accuracy": None, name: value}
            epochs.append(epochs_of(f"{cell}-s{seed}", [value]).assign(**values_of))
    trials = trials_of(lines)
    table = trial_tables.convergence(trials, pd.concat(epochs), None)
    return list(unequal_metrics(trials, table, FINDINGS.frame([]) if known is None else known)["seen"])


def test_equal_losses_with_unequal_metrics_are_a_finding() -> None:
    said = "val_accuracy after the last epoch: 0.7633, and 0.8233 of its base, over 3 seeds; their losses differ by at"
    assert trainings() == [f"{said} most 0 %"]
    assert trainings(loss=0.501) == [f"{said} most 0.2 %"]


@pytest.mark.parametrize(
    "same",
    [
        {"metric": (0.82, 0.83, 0.82)},
        {"metric": (0.815, 0.826, 0.814)},  # by less than 1 %
        {"metric": (0.76, 0.90, 0.76)},  # seeds disagree
        {"metric": (0.76, 0.70, 0.78), "first": (0.82, 0.76, 0.84)},  # as far apart as seeds are
        {"metric": (0.76, 0.77), "first": (0.82, 0.83)},  # two seeds
        {"metric": (0.5, 0.51, 0.5), "loss": 0.51},  # other losses, other models
        {"loss": 0.5045},  # which may explain the metric
        {"loss": float("nan")},
        {"batch": 10},  # another training
        {"name": "val_perplexity"},  # derived
    ],
)
def test_metrics_that_differ_as_losses_or_seeds_do_are_none(same: dict[str, Any]) -> None:
    assert trainings(**same) == []


@pytest.mark.parametrize(("changed", "count"), [({}, 0), ({"model": "resnet14"}, 1)])
@pytest.mark.parametrize("name", ["val_accuracy", "val_iou"])
def test_what_the_doctor_has_found_of_a_metric_of_the_workload_is_not_said_twice(
    changed: dict[str, Any], count: int, name: str
) -> None:
    seen = "val_accuracy of 64 samples: 0.8 in one batch, 0.7 in two; also val_auc, val_iou"
    metrics = {"check": "metrics", "severity": "warning", "seen": seen, "means": "y", "advice": "z"}
    examination: Any = examined("ddp", None, **{"options": {}, **changed})
    examination["facts"]["findings"] = [metrics]
    known = findings([examination], trials_of([examination]))
    assert len(trainings(name=name)) == 1
    assert len(trainings(name=name, known=known)) == count


def study(check: str, severity: str = "error") -> list[dict[str, Any]]:
    found = {"check": check, "severity": severity, "seen": "x", "means": "y", "advice": "z"}
    rates = {"single": (50.0,), "dp2": (90.0, 90.0), "ddp2": (80.0, 80.0)}
    lines = [
        line(cell, rates=rate, block=block, emulated=False, purpose="")
        for block in range(3)
        for cell, rate in rates.items()
    ]
    examined = line("dp2", kind="diagnostic", purpose="doctor", devices=2, emulated=False, facts={"findings": [found]})
    return [*map(with_set_ids, lines), {**examined, "windows": []}]


def faulty_cells(lines: list[Any]) -> set[str]:
    return {one["cell_id"] for one in lines if one.get("faulty")}


def test_an_error_marks_every_cell_of_its_kind_if_its_check_is_allowed_or_stops_nothing() -> None:
    assert faulty_cells(with_faulty(study("GPU copies"), ("copies",))) == {"dp2"}  # type: ignore[arg-type]
    assert faulty_cells(with_faulty(study("GPU copies"), ("divergence",))) == set()  # type: ignore[arg-type]
    assert faulty_cells(with_faulty(study("GPU copies", "warning"), ("copies",))) == set()  # type: ignore[arg-type]
    assert with_faulty(study("GPU copies"), ()) == study("GPU copies")  # type: ignore[arg-type]
    for stops, cells in ((False, {"dp2"}), (True, set[str]())):
        *measured, examined = study("gradient scaling")
        examined["facts"]["findings"][0]["stops"] = stops
        assert faulty_cells(with_faulty([*measured, examined], ())) == cells  # type: ignore[list-item]


def test_the_latest_examination_counts() -> None:
    *measured, wrong = study("GPU copies")
    right: dict[str, Any] = {**wrong, "attempt": 2, "facts": {"findings": []}}
    lost: dict[str, Any] = {**wrong, "attempt": 3, "outcome": "lost", "facts": {}}

    def marked(*examined: dict[str, Any]) -> set[str]:
        return faulty_cells(with_faulty([*measured, *examined], ("copies",)))  # type: ignore[list-item]

    assert marked(wrong, right) == marked(wrong, right, lost) == set()
    assert marked(right, wrong) == marked(right, wrong, lost) == {"dp2"}


def test_marked_cells_are_labelled_and_in_no_claim() -> None:
    lines: Any = with_faulty(study("GPU copies"), ("copies",))  # type: ignore[arg-type]
    trials = trials_of(lines)
    scaling = ratios.scaling(trials)
    faulty = dict(zip(scaling["cell_id"], scaling["faulty"], strict=True))
    assert faulty == {"single": False, "dp2": True, "ddp2": False}
    assert "dp (faulty) x2" in set(scaling["label"])
    assert {row.kind for row in scaling_table(scaling).rows if "dp (faulty)" in row.cells} == {"apart"}
    assert ratios.versus(trials)["faulty"].tolist() == [True]
    assert "dp2" not in set(leaders(trials)["cell_id"]) | set(leaders(trials)["leader_id"])
    plain = trials_of(study("GPU copies"))
    assert "dp2" in set(leaders(plain)["leader_id"]) and plain["faulty"].isna().all()
