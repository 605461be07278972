"""Learning curves of training scripts as they are: what each reports, in processes of its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from harness.plan.trial import TrialResult
from tests.processes import ROOT
from tests.test_scripts import forked, results, two_ranks

pytestmark = pytest.mark.slow
__all__ = ["forked", "two_ranks"]
TRAINING = {"throughput": None, "convergence": {"seeds": 0}}
Rows = list[dict[str, Any]]


def training(folder: Path, text: str, **sections: Any) -> TrialResult:
    """The result of the one training of a script."""
    (result,) = results(folder, text, **{**TRAINING, **sections})
    return result


def rows_of(result: TrialResult) -> Rows:
    assert result.outcome == "ok", f"{result.reason}\n{result.detail}"
    return [dict(zip(result.epochs, values, strict=True)) for values in zip(*result.epochs.values(), strict=True)]


def test_a_training_runs_to_its_end_and_its_reports_are_rows(tmp_path: Path) -> None:
    found = rows_of(
        result := training(
            tmp_path,
            """
            from harness import probe
            for epoch in range(3):
                for _ in range(10):
                    probe.count(8)
                    step()
                with probe.pause():
                    time.sleep(1)
                probe.report(train_loss=1.0 / (epoch + 1), accuracy=torch.tensor(epoch / 2), epoch=epoch)
            print("at its end")
            """,
            convergence={"seeds": 0, "target": {"metric": "accuracy", "at_least": 0.5}},
        )
    )
    assert [row["epoch"] for row in found] == [1, 2, 3] and [row["samples"] for row in found] == [80, 160, 240]
    assert [row["reported_accuracy"] for row in found] == [0.0, 0.5, 1.0]
    # 29 steps of at least 5 ms, and not the three pauses
    assert 29 * 0.005 <= found[-1]["train_s"] < 29 * 0.005 + 2
    assert (
        "at its end" in result.detail
        and not result.facts["findings"]
        and result.steps_s == pytest.approx(found[-1]["train_s"], abs=1.5)
    )


@pytest.mark.parametrize(("length", "ends"), [({"steps": 12}, range(12, 13)), ({"seconds": 1.0}, range(20, 4000))])
def test_a_training_ends_at_its_limit_and_what_follows_its_last_step_is_reported(
    tmp_path: Path, length: dict[str, Any], ends: range
) -> None:
    text = """
        from harness import probe
        for number in range(1, 1_000_000):
            step()
            probe.report(val_loss=1.0, train_step=number)
    """
    found = rows_of(training(tmp_path, text, convergence={"seeds": 0, **length}))
    assert found[-1]["train_step"] == len(found) and len(found) in ends


def test_two_ranks_train_together_and_rank_0_is_recorded(tmp_path: Path, two_ranks: dict[str, Any]) -> None:
    text = (ROOT / "experiments" / "my_script.py").read_text()
    arguments = "--batch-size {per_device_batch_size} --width 16 --epochs 3 --seed {seed} --evaluate"
    sections = {**TRAINING, "arguments": arguments, "convergence": {"seeds": 5, "target": TARGET}, **two_ranks}
    (result,) = results(tmp_path, text, **sections)
    found = rows_of(result)
    assert [row["epoch"] for row in found] == [1, 2, 3] and result.facts["connected_ranks"] == 2
    assert [row["samples"] for row in found] == [8192, 16384, 24576]
    assert found[0]["train_s"] < found[-1]["train_s"] and not [row for row in found if row["val_loss"] <= 0]
    text = """
        from harness import probe
        rank = int(os.environ["RANK"])
        step(); step(); step()
        if rank == 1:
            probe.report(val_f1=0.5)
        probe.report(val_loss=float(rank))
    """
    result = training(tmp_path, text, **two_ranks)
    assert [row["val_loss"] for row in rows_of(result)] == [0.0]
    (finding,) = result.facts["findings"]
    assert finding["seen"] == "reported by other ranks than rank 0, and not by it: val_f1"


TARGET = {"metric": "val_loss", "at_most": 0.1}
FAILING = {
    "nothing": (
        "step(); step()",
        "NothingReported on rank 0: the script reported nothing in 2 steps: call harness.probe",
    ),
    "raises": ("step(); raise ValueError('x')", "ValueError on rank 0: x"),
    "no step": ("pass", "NothingReported on rank 0: the script reported nothing in 0 steps"),
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_training_that_fails_is_a_row_that_says_what_to_do(tmp_path: Path, kind: str) -> None:
    text, reason = FAILING[kind]
    result = training(tmp_path, text)
    assert result.outcome == "error" and result.reason.startswith(reason), result.reason


def test_a_loss_that_is_not_finite_ends_the_curve_as_diverged(tmp_path: Path) -> None:
    text = """
        from harness import probe
        for loss in (1.0, float("nan")):
            step()
            probe.report(val_loss=loss)
    """
    result = training(tmp_path, text)
    assert (result.outcome, result.reason) == ("diverged", "val_loss became nan in epoch 2")
    assert len(result.epochs["val_loss"]) == 2


TRAINER = """
    from torch import nn
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)
        def forward(self, x, labels=None):
            logits = self.layer(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    x = torch.randn(96, 4)
    data = [{"x": one, "labels": (one.sum() > 0).long()} for one in x]
    arguments = TrainingArguments(
        "out", num_train_epochs=2, per_device_train_batch_size=8, logging_steps=2, eval_strategy="epoch", report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True,
    )
    accuracy = lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}
    Trainer(Model(), arguments, train_dataset=data[:64], eval_dataset=data[64:], compute_metrics=accuracy).train()
"""
LIGHTNING = """
    import lightning
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)
        def training_step(self, batch, number):
            loss = self.layer(batch[0]).square().mean()
            self.log("train_loss", loss, on_epoch=True)
            return loss
        def validation_step(self, batch, number):
            self.log("val_loss", self.layer(batch[0]).square().mean())
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loaders = [DataLoader(TensorDataset(torch.randn(size, 4)), 8) for size in (64, 32)]
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=1, enable_progress_bar=False,
                                enable_checkpointing=False, logger=lightning.pytorch.loggers.CSVLogger("logs"))
    trainer.fit(Model(), *loaders)
"""
FAKE = '''
class CallbackHandler:
    def on_log(self, args, state, control, logs, **more):
        pass
class Trainer:
    """Logs as Hugging Face's does: every two steps, and after each epoch's evaluation."""
    def __init__(self, step):
        self.step, self.callback_handler = step, CallbackHandler()
    def log(self, **logs):
        self.callback_handler.on_log(None, None, None, logs)
    def train(self):
        for number in range(1, 17):
            self.step()
            if number % 2 == 0:
                self.log(loss=1 / number, grad_norm=1.0, learning_rate=0.1, epoch=number / 8)
            if number % 8 == 0:
                self.log(eval_loss=2 / number, eval_accuracy=0.5, eval_runtime=1.0, epoch=number / 8)
        self.log(train_runtime=1.0, train_loss=9.0, epoch=2.0)
'''


def test_the_logs_of_a_trainer_are_read_in_a_script_that_names_nothing_of_ours(tmp_path: Path) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("from transformers.trainer_callback import Trainer")
    (package / "trainer_callback.py").write_text(FAKE)
    found = rows_of(training(tmp_path, "from transformers import Trainer\nTrainer(step).train()"))
    losses = [(row["epoch"], row["train_loss"], row["val_loss"], row["val_accuracy"]) for row in found]
    assert losses == [(1, 1 / 8, 2 / 8, 0.5), (2, 1 / 16, 2 / 16, 0.5)]
    assert {*found[0]} == {"epoch", "samples", "train_s", "evaluation_s", "learning_rate"} | {
        "train_loss",
        "val_loss",
        "val_accuracy",
    }


@pytest.mark.parametrize(("library", "text"), [("transformers", TRAINER), ("lightning", LIGHTNING)])
def test_the_logs_of_the_library_itself_are_read(tmp_path: Path, library: str, text: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}, of the extra trainers")
    found = rows_of(training(tmp_path, text))
    assert [row["epoch"] for row in found] == [1, 2] and [row["samples"] for row in found] == [64, 128]
    assert all(row["val_loss"] > 0 and row["train_loss"] > 0 for row in found)
