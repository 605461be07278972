"""Where a workload's class comes from, and what a wrong one is answered with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.errors import WorkloadError
from harness.plan.cell import Cell
from harness.system.user_code import load_from
from harness.train import workloads

GOOD = """
class Own:
    unit = "samples"
    def __init__(self, width: int = 3): self.width = width
    def build_model(self): ...
    def datasets(self): ...
    def loss(self, model, batch): ...
class NoUnit(Own):
    unit = "bananas"
class NoNumber(Own):
    unit, tokens_per_sample = "tokens", "many"
class Lacking:
    unit = "samples"
    def build_model(self): ...
class Raises(Own):
    def __init__(self, **options): raise ValueError("not today")
NOT_A_CLASS = 3
def numbers(): ...
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_workload.py").write_text(GOOD)
    (tmp_path / "broken_workload.py").write_text("import nothing_like_this\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("own_workload", "broken_workload"):
        sys.modules.pop(name, None)


def cell(workload: str, **changes: object) -> Cell:
    return replace(Cell(workload, None, None, "single", "cpu", 1, 1, "weak", 1, 1), **changes)  # type: ignore[arg-type]


class Collates:
    """A collator whose call has an option of its own, as those of Hugging Face."""

    def __call__(self, samples: list[object], return_tensors: str | None = None) -> tuple[list[object], str | None]:
        return samples, return_tensors


def test_a_collate_gets_training_only_if_it_asks_for_it() -> None:
    asks = lambda samples, training: (samples, training)  # noqa: E731
    for collate, expected in (
        (Collates(), ([1], None)),
        (partial(lambda samples, pad: (samples, pad), pad=0), ([1], 0)),
        (lambda samples, pad_id=7: (samples, pad_id), ([1], 7)),
        (asks, ([1], False)),
    ):
        found = workloads.collate_of(SimpleNamespace(collate=collate), training=False)  # type: ignore[arg-type]
        assert found is not None and found([1]) == expected
    assert workloads.collate_of(SimpleNamespace()) is None  # type: ignore[arg-type]


def test_a_users_own_class_gets_its_parameters() -> None:
    built = workloads.build(cell("own_workload:Own", workload_options={"width": 7}))
    assert built.width == 7  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("workload", "changes", "message"),
    [
        ("nowhere:Own", {}, "importing nowhere failed with ModuleNotFoundError: No module named 'nowhere' (first on"),
        ("broken_workload:X", {}, "importing broken_workload failed with ModuleNotFoundError"),
        ("own_workload:Onw", {}, "own_workload has no class 'Onw'; did you mean 'Own'?"),
        ("os.path:Join", {}, "os.path has no class 'Join'; it has no class at all"),
        ("own_workload:NOT_A_CLASS", {}, "own_workload has no class 'NOT_A_CLASS'"),
        ("own_workload:Lacking", {}, "the class lacks datasets, loss"),
        ("own_workload:NoUnit", {}, "unit must be 'samples' or 'tokens'"),
        ("own_workload:NoNumber", {}, "tokens_per_sample: got 'many', not a positive number"),
        ("own_workload:Raises", {"workload_options": {"a": 1}}, "own_workload:Raises(a=1): ValueError: not today"),
        (
            "own_workload:Own",
            {"workload_options": {"widht": 1}},
            "workload_options.widht: own_workload:Own has no parameter 'widht'; did you mean 'width'?",
        ),
        ("own_workload:Own", {"model": "big"}, "grid.model: own_workload:Own has no parameter 'model'"),
        ("own_workload:Own", {"data": "d"}, "grid.data: own_workload:Own has no parameter 'data'"),
        (
            "image_classification",
            {"workload_options": {"widht": 1}},
            "workload_options.widht: image_classification has no parameter 'widht'; did you mean 'width'?",
        ),
    ],
)
def test_each_mistake_has_one_clear_answer(workload: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        workloads.build(cell(workload, **changes))
    assert message in str(caught.value)


def test_a_function_that_is_not_there_is_answered_with_the_nearest() -> None:
    with pytest.raises(WorkloadError, match=r"own_workload has no function 'nobers'; did you mean 'numbers'\?"):
        load_from("own_workload:nobers", "function", what="datasets.train")
