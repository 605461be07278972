"""Schema of the derived tables on what trainings do: equivalence to one device, convergence."""

from __future__ import annotations

from harness.record.schema.recorded import EFFECTIVE_LR, SEED, TRIAL_COLUMNS
from harness.record.schema.table import CELL_COLUMNS, CELL_ID, Table
from harness.record.schema.table import column as _c

CHECKED = (
    _c("equivalence", "string", "equivalent to one device, not equivalent, or unknown; `<NA>` without a check"),
    _c(
        "excluded",
        "string",
        "reason if its ratio is no claim: not equivalent to one device; or missing: other hardware or environment",
    ),
)

EQUIVALENCE = Table(
    "equivalence",
    "one equivalence check of a strategy against one device, in fp32 or in the cell's precision: a few steps without "
    "batch statistics and dropout",
    (
        _c("cell_id", "string", "cell of the check"),
        _c("base_id", "string", "cell of the check on one device"),
        *CELL_COLUMNS,
        _c("computed_in", "string", "precision of the steps: fp32, or the cell's if that is bf16 or fp16"),
        _c("gradient_difference", "Float64", "norm of the difference of both gradients over that of one device's"),
        _c("first_difference", "Float64", "the same of the first update; in 16 bits of its part along one device's"),
        _c("difference", "Float64", "the same of scaled updates; in older runs of three at the recipe's rate"),
        _c("bound", "Float64", "largest difference that counts as rounding: 0.01, in 16 bits 0.05"),
        _c("equivalent", "boolean", "true if each difference is at most the bound; `<NA>` if unknown"),
        _c("reason", "string", "reason if not equivalent or unknown"),
    ),
)

CONVERGENCE = Table(
    "convergence",
    "one training of one cell with one seed",
    (
        *TRIAL_COLUMNS,
        CELL_ID,
        *CELL_COLUMNS,
        SEED,
        EFFECTIVE_LR,
        _c("epochs", "Int64", "number of epochs trained"),
        _c("training_samples", "Int64", "number of samples in the training set", "samples"),
        _c("train_loss", "Float64", "mean training loss over the last epoch"),
        _c("train_accuracy", "Float64", "accuracy on the training set after the last epoch, if it was computed"),
        _c("val_loss", "Float64", "mean validation loss after the last epoch"),
        _c("val_accuracy", "Float64", "validation accuracy after the last epoch"),
        _c("val_perplexity", "Float64", "validation perplexity after the last epoch"),
        _c("val_psnr", "Float64", "peak signal-to-noise ratio over the validation images after the last epoch", "dB"),
        _c("val_iou", "Float64", "intersection over union of the foreground of validation, after the last epoch"),
        _c("best_val_accuracy", "Float64", "validation accuracy, best of all epochs"),
        _c("target", "string", "target of the experiment file"),
        _c("reached", "boolean", "true if the target was reached"),
        _c("time_to_target_s", "Float64", "training time until the end of the epoch that reached the target", "s"),
        _c("samples_to_target", "Int64", "number of samples until then", "samples"),
        _c("epochs_to_target", "Int64", "number of epochs until then"),
        _c("train_s", "Float64", "training time at the end", "s"),
        *CHECKED,
    ),
)
