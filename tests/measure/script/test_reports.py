"""What a script reports: which values are kept, the rows of its learning curve, and the libraries that are read."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness import probe
from harness.config.script import column_of
from harness.measure.script import counting
from harness.measure.script.child import Counting
from harness.measure.script.counting import StepRecorder
from harness.measure.script.messages import EndOfTrial, Finished, Schedule, WindowsBegun
from harness.measure.script.reports import (
    LOGGER,
    MOST_NAMES,
    MOST_ROWS,
    Report,
    Reports,
    _of_ray,
    _of_trainer,
    curve_of,
    first_not_finite,
    judge_reports,
    read_libraries,
)


def reported(*given: dict[str, object]) -> Reports:
    """Reports, one a step and second."""
    reports = Reports()
    for step, values in enumerate(given, start=1):
        reports.add(values, step, lambda step=step: float(step), 10.0 * step)  # type: ignore[misc]
    return reports


def rows(*reports: Report) -> list[tuple[float | None, float | None, dict[str, float | None]]]:
    """The epoch, time and metrics of each row of these reports' curve."""
    joined = Reports()
    for report in reports:
        joined.join(report)
    found = curve_of(joined.end(), lambda report: report.samples)
    fixed = ("epoch", "train_s", "samples", "evaluation_s", "learning_rate")
    return [
        (
            row["epoch"],
            row["train_s"],
            {name: row[name] for name in row if name not in fixed or name == "learning_rate"},
        )
        for row in found
    ]


def report(step: int, epoch: float | None = None, **values: float) -> Report:
    return Report(step, float(step), 0.0, epoch, values)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("val_accuracy", "val_accuracy"),
        ("eval/acc", "val_accuracy"),
        ("validation-loss", "val_loss"),
        ("train_loss_epoch", "train_loss"),
        ("lr", "learning_rate"),
        ("train_s", "reported_train_s"),
        ("train", "reported_train"),
        ("loss", "reported_loss"),
        ("trial_id", "reported_trial_id"),
        ("reported_loss", "reported_loss"),
        ("x" * 500, "reported_" + "x" * 60),
    ],
)
def test_a_metric_is_a_column_that_no_other_column_has_the_name_of(name: str, column: str) -> None:
    assert column_of(name) == column == column_of(column)


def test_numbers_are_kept_and_what_is_none_is_named() -> None:
    reports = reported(
        {
            "val_accuracy": torch.tensor([0.5]),
            "text": "x",
            "flag": True,
            "many": torch.ones(2),
            "f1": math.nan,
            "a": None,
        },
        {"val_loss": math.inf, "epoch": "second"},
        {"epoch": 3},
    )
    first, second = reports.end()
    assert first.values == {"val_accuracy": 0.5} and second.values == {"val_loss": math.inf}
    assert reports.names == ["val_accuracy", "val_loss"] and second.epoch is None
    assert reports.left_out == ["reported_text", "reported_flag", "reported_many", "reported_f1", "reported_a", "epoch"]
    assert reported({f"m{number}": 1.0 for number in range(500)}).names == [f"reported_m{n}" for n in range(MOST_NAMES)]


@pytest.mark.parametrize(("evaluations", "every"), [(0, 16), (3, 1), (MOST_ROWS, 1), (2 * MOST_ROWS + 2, 4)])
def test_the_kept_rows_are_bounded_and_the_last_is_there(evaluations: int, every: int) -> None:
    count = 10 * MOST_ROWS
    given = [{"train_loss": 1.0 / (n + 1)} | ({"val_loss": 1.0 * n} if n < evaluations else {}) for n in range(count)]
    reports = reported(*given)
    kept = reports.end()
    assert len(kept) <= MOST_ROWS + 1 and reports.every == every and reports.end() == kept
    assert kept[-1].step == (evaluations or count)
    assert {two.step - one.step for one, two in pairwise(kept[:-1])} == {every}
    found = [finding.seen for finding in judge_reports([reports.summary()], 0, [])]
    over = f"over {MOST_ROWS} rows of the learning curve: one in {every} is recorded, and the last"
    assert found == [over] * (every > 1)


def test_each_report_of_validation_is_a_row_with_the_latest_other_values_since_the_one_before() -> None:
    found = rows(
        report(1, train_loss=3.0, learning_rate=0.5),
        report(2, train_loss=2.0),
        report(2, 1.0, val_loss=1.5),  # at the same step as one before
        report(4, 2.0, val_loss=1.0),
        report(5, train_loss=9.0),  # with no validation after it
    )
    assert found == [
        (1, 2.0, {"train_loss": 2.0, "learning_rate": 0.5, "val_loss": 1.5}),
        (2, 4.0, {"learning_rate": None, "val_loss": 1.0}),
    ]


@pytest.mark.parametrize(
    ("stated", "epochs"),
    [
        ([1, 2, 5], [1, 2, 5]),
        ([0, 1, 2], [1, 2, 3]),  # counted from 0
        ([None, None, None], [1, 2, 3]),
        ([0.5, 1.0, 1.5], [1, 2, 3]),
        ([1, 1, 2], [1, 2, 3]),
        ([3, None, 5], [1, 2, 3]),
    ],
)
def test_an_epoch_is_stated_or_the_number_of_the_report(stated: list[float | None], epochs: list[int]) -> None:
    found = rows(*(report(step, epoch, train_loss=1.0) for step, epoch in enumerate(stated, start=1)))
    assert [epoch for epoch, _, _ in found] == epochs


def test_a_report_before_the_first_step_is_epoch_0_if_it_says_so() -> None:
    assert [epoch for epoch, _, _ in rows(report(0, 0, val_loss=2.0), report(9, 1, val_loss=1.0))] == [0, 1]


def test_a_loss_that_is_not_finite_is_named() -> None:
    found = curve_of([report(1, val_loss=1.0), report(2, val_loss=math.nan)], lambda each: None)
    assert first_not_finite(found) == "val_loss became nan in epoch 2" and first_not_finite(found[:1]) is None


def test_names_of_other_ranks_and_accuracies_above_1_are_findings() -> None:
    ranks = [reported({"val_loss": 1.0}), reported({"val_loss": 1.0, "val_f1": 0.5})]
    assert [finding.seen for finding in judge_reports(ranks, 0, [{"val_accuracy": 0.9}])] == [
        "reported by other ranks than rank 0, and not by it: val_f1"
    ]
    (found,) = judge_reports(ranks, 1, [{"val_accuracy": 0.9}, {"val_accuracy": 91.0}])
    assert found.seen == "val_accuracy is 91"


# -- libraries


class CallbackHandler:
    """As transformers.trainer_callback has it."""

    def on_log(self, args: object, state: object, control: object, logs: dict[str, object], **more: object) -> str:
        return f"logged {len(logs)}"


class Connector:
    """As Lightning's _LoggerConnector."""

    def __init__(self, fn: str, sanity_checking: bool) -> None:
        self.trainer = SimpleNamespace(state=SimpleNamespace(fn=fn), sanity_checking=sanity_checking, current_epoch=4)

    def log_metrics(self, metrics: dict[str, object], step: int | None = None) -> None:
        pass


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Modules of the names that are read, as if a script had imported them."""
    found = {
        "ray.train": SimpleNamespace(report=lambda metrics, checkpoint=None: checkpoint),
        "transformers.trainer_callback": SimpleNamespace(CallbackHandler=type("X", (CallbackHandler,), {})),
        f"lightning.{LOGGER}": SimpleNamespace(_LoggerConnector=type("X", (Connector,), {})),
    }
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    return found


def test_what_libraries_report_is_read_once_and_their_functions_do_what_they_did(libraries: dict[str, Any]) -> None:
    found: list[Any] = []
    for _ in range(2):
        read_libraries(found.append)
    assert libraries["ray.train"].report({"loss": 1.0}, checkpoint="c") is None  # no trial keeps one
    libraries["ray.train"].report(metrics={"accuracy": 0.5})
    trainer = libraries["transformers.trainer_callback"].CallbackHandler()
    logs = {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1, "epoch": 0.5}
    assert trainer.on_log(None, None, None, logs) == "logged 4"
    trainer.on_log(None, None, None, logs={"eval_loss": 1.0, "eval_runtime": 3.0, "epoch": 1.0})
    trainer.on_log(None, None, None, {"train_loss": 5.0, "train_runtime": 3.0})  # the summary at its end
    connector = libraries[f"lightning.{LOGGER}"]._LoggerConnector
    connector("fit", False).log_metrics({"val_acc": 0.5, "epoch": 4}, step=3)
    connector("fit", True).log_metrics({"val_acc": 0.5})
    connector("test", False).log_metrics({"test_acc": 0.5})
    assert [values for values in found if values] == [
        {"loss": 1.0},
        {"accuracy": 0.5},
        {"learning_rate": 0.1, "epoch": 0.5, "train_loss": 2.0},
        {"eval_loss": 1.0, "epoch": 1.0},
        {"val_acc": 0.5, "epoch": 5},
    ]


def test_arguments_of_another_version_are_the_script_s_own_affair(libraries: dict[str, Any]) -> None:
    libraries["transformers.trainer_callback"].CallbackHandler.on_log = lambda self: "new"
    read_libraries(lambda values: None)
    assert libraries["transformers.trainer_callback"].CallbackHandler().on_log() == "new"


def test_nothing_is_imported_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("transformers", "lightning", "pytorch_lightning", "ray.train")
    for name in [name for name in sys.modules if name.startswith(names)]:
        monkeypatch.delitem(sys.modules, name)
    read_libraries(lambda values: None)
    assert not [name for name in sys.modules if name.startswith(names)]


# -- the recorder


def recorder(*, trains: bool = True) -> tuple[StepRecorder, Any]:
    ours, theirs = Pipe()
    found = StepRecorder(theirs, lambda: None, Counting(trains=trains))
    return found, ours


def test_a_report_has_the_seconds_since_the_end_of_the_first_step_without_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(counting, "clock", lambda: now[0])
    script, parent = recorder()

    def at(second: float, call: Any, *given: Any) -> None:
        now[0] = 100.0 + second
        call(*given)

    at(0, script.report, {"val_loss": 9.0, "epoch": 0})
    at(1, script.pause)
    at(3, script.go_on)  # before the first step: no part of any time
    at(5, script.count, 8)
    at(5, script.step)
    at(7, script.count, 8)
    at(7, script.step)
    at(8, script.pause)
    at(12, script.report, {"val_loss": 2.0, "epoch": 1})  # in the pause
    at(13, script.go_on)
    at(14, script.step)
    at(15, script.report, {"val_loss": 1.0, "epoch": 2})
    script.finish()
    end = parent.recv()
    assert isinstance(end, Finished) and end.reports
    found = [(each.step, each.train_s, each.samples) for each in end.reports.end()]
    assert found == [(0, 0.0, 0.0), (2, 3.0, 16.0), (3, 5.0, 16.0)]


def test_a_training_ends_after_the_step_that_follows_its_last_and_a_trial_of_speed_keeps_no_reports() -> None:
    for trains in (True, False):
        script, parent = recorder(trains=trains)
        script._obey(Schedule(4 + 1))
        parent.send("end")
        with pytest.raises(EndOfTrial):
            for number in range(1, 10):
                script.step()
                script.report({"val_loss": float(number)})
        begun, end = parent.recv(), parent.recv()
        assert isinstance(begun, WindowsBegun) and len(end.steps.ended) == 5 and not end.by_itself
        kept = [each.values["val_loss"] for each in end.reports.end()] if end.reports else None
        assert kept == ([1.0, 2.0, 3.0, 4.0] if trains else None)


def test_the_end_of_a_training_that_ended_by_itself_is_no_schedule() -> None:
    script, parent = recorder()
    script.finish()
    parent.send("end")
    script._follow()
    assert not script._edges


def test_of_several_reports_at_a_step_the_first_of_validation_sets_time_and_values() -> None:
    first = Report(10, 5.0, 80.0, None, {"val_loss": 2.0})
    later = Report(10, 65.0, 80.0, None, {"val_loss": 1.0, "reported_test": 3.0})  # of the best model
    ((_, train_s, values),) = rows(first, later)
    assert (train_s, values["val_loss"], values["reported_test"]) == (5.0, 2.0, 3.0)


def test_an_epoch_that_a_later_report_of_a_step_states_is_kept() -> None:
    reports = Reports()
    reports.join(Report(10, 5.0, 80.0, None, {"val_loss": 2.0}))
    reports.join(Report(10, 6.0, 80.0, 1.0, {"train_loss": 3.0}))
    joined = reports._of_step
    assert joined and (joined.epoch, joined.values) == (1.0, {"val_loss": 2.0, "train_loss": 3.0})


def test_a_trainer_s_summary_and_what_it_times_are_no_metrics(libraries: dict[str, Any]) -> None:
    logs = {"loss": 2.0, "train_runtime": 3.0, "num_input_tokens_seen": 9}  # with include_num_input_tokens_seen
    assert _of_trainer(None, logs) == {"train_loss": 2.0, "num_input_tokens_seen": 9}
    assert _of_trainer(None, {"train_loss": 2.0, "train_runtime": 3.0}) == {}
    assert _of_ray(None, {"eval_loss": 1.0, "eval_runtime": 4.0}) == {"eval_loss": 1.0}


def test_a_best_loss_that_is_infinite_is_no_divergence() -> None:
    reports = reported({"loss": 1.0, "best_val_loss": math.inf})
    assert reports.left_out == ["reported_best_val_loss"] and reports.names == ["reported_loss"]


def test_a_report_inside_a_marked_step_leaves_the_samples_of_that_step(monkeypatch: pytest.MonkeyPatch) -> None:
    script, parent = recorder()
    monkeypatch.setattr(probe, "_recorder", script)
    for _ in probe.steps(range(3)):
        probe.count(8)
        script._after_optimizer(torch.optim.SGD([torch.ones(1)], lr=0.1))  # no step of its own, the first neither
        probe.report(val_loss=1.0)
    script.finish()
    assert list(parent.recv().steps.samples) == [8.0, 8.0, 8.0]


def test_a_marked_step_that_is_left_is_none_and_an_optimizer_of_marked_steps_has_the_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script, _ = recorder()
    monkeypatch.setattr(probe, "_recorder", script)
    for _ in probe.steps(range(3)):
        break
    used = torch.optim.SGD([torch.ones(1)], lr=0.1)
    script._after_optimizer(used)
    assert [*script._optimizers] == [used] and not script._steps.ended


def test_a_row_of_validation_has_the_values_reported_just_before_it_however_many_there_are() -> None:
    given: list[dict[str, object]] = []
    for number in range(2 * MOST_ROWS):
        given += [{"train_loss": -1.0}, {"train_loss": float(number)}, {"val_loss": float(number)}]
    found = curve_of(reported(*given).end(), lambda each: None)
    assert MOST_ROWS / 2 < len(found) <= MOST_ROWS + 1
    assert [row["train_loss"] for row in found] == [row["val_loss"] for row in found]
    assert found[-1]["val_loss"] == 2 * MOST_ROWS - 1
