"""Schema of the recorded tables, and of columns computed from one trial alone."""

from __future__ import annotations

from harness.plan.rows import PhaseSeconds, RankRow, RecordedTrial, TrialFacts, WindowRow
from harness.record.schema.table import LABEL_COLUMNS, Table, by_name, columns_of
from harness.record.schema.table import column as _c

_LINE = by_name(RecordedTrial, TrialFacts)
TRIAL_COLUMNS = (_LINE["trial_id"], _LINE["attempt"])
WAIT_FRACTION = _c("wait_fraction", "Float64", "fraction of the steps spent waiting for data, on CUDA by an idle GPU")
KIND, OUTCOME, REASON = _LINE["kind"], _LINE["outcome"], _LINE["reason"]
BLOCK, SEED, ADDED = _LINE["block"], _LINE["seed"], _LINE["added"]
PARAMETERS, EFFECTIVE_LR = _LINE["parameters"], _LINE["effective_lr"]
RANK, THREADS, WINDOW = by_name(RankRow)["rank"], by_name(RankRow)["threads"], by_name(WindowRow)["window"]
"""Columns of several tables."""

_COMPUTED = (
    _c("device_model", "string", "product name of the devices"),
    THREADS,
    _c("throughput_per_s", "Float64", "samples of all ranks over the time of the slowest rank", "samples/s"),
    _c("step_s", "Float64", "step time, median over the timed steps of all ranks", "s"),
    _c(
        "peak_memory_bytes",
        "Int64",
        "peak in the steps, largest over ranks: allocated on the GPU, or resident on a CPU",
        "bytes",
    ),
    WAIT_FRACTION,
    _c("warmup_steps", "Int64", "number of warm-up steps"),
    _c("doubts", "list", "names of the doubts about its figures, explained at the end of results/README.md"),
)
"""What is computed from the windows, ranks and profiles of one trial."""

TRIALS = Table(
    "trials",
    "one attempt at a trial, with any outcome",
    tuple({each.name: each for each in (*TRIAL_COLUMNS, *LABEL_COLUMNS, *_LINE.values(), *_COMPUTED)}.values()),
)

_PHASES = tuple(each for each in columns_of(PhaseSeconds) if each.name != "in_turn_s")
PHASE_COLUMNS = tuple(each for each in _PHASES if not each.name.startswith("host_"))
HOST_PHASE_COLUMNS = tuple(each for each in _PHASES if each.name.startswith("host_"))

WINDOWS = Table(
    "windows",
    "one window of one rank; phases are sums over the steps of the window",
    (*TRIAL_COLUMNS, *(each for each in columns_of(WindowRow) if each not in _PHASES), *_PHASES),
)

RANKS = Table(
    "ranks",
    "one rank of one trial: its place, memory and load",
    (*TRIAL_COLUMNS, *columns_of(RankRow)),
)

STEPS = Table(
    "steps",
    "one optimizer step in a throughput trial; of one rank with throughput.keep_steps: all",
    (
        *TRIAL_COLUMNS,
        _c("rank", "Int64", "rank whose step was longest; with keep_steps: all that of the row"),
        WINDOW,
        _c("step", "Int64", "number of the step in its window"),
        _c("warmup", "boolean", "true for warm-up steps, which enter no figure"),
        _c(
            "step_s",
            "Float64",
            "step time with the wait for data, of the slowest rank; on CUDA by the clock of the device's stream",
            "s",
        ),
        _c("mean_s", "Float64", "step time, mean over ranks; `<NA>` with keep_steps: all", "s"),
        _c(
            "wait_s",
            "Float64",
            "wait for data by the host's clock, of the rank that waited longest: part of a step on a CPU, beside it on "
            "CUDA",
            "s",
        ),
        _c("wait_rank", "Int64", "rank that waited longest; `<NA>` with keep_steps: all"),
        _c("loss", "Float64", "mean loss over the batch; with keep_steps: all over the rank's share"),
    ),
)

CHECKS = Table(
    "checks",
    "one bucket of a gradient or an update in an equivalence check, a count sketch",
    (
        *TRIAL_COLUMNS,
        _c("bucket", "Int64", "number of the bucket"),
        _c("update", "Float64", "sum of the bucket's values of the quantity, each with a random sign"),
        _c(
            "quantity",
            "string",
            "gradient, first_update (a step at the recipe's rate) or scaled_update (steps scaled to the parameters)",
        ),
        _c("computed_in", "string", "precision of the steps: fp32, or the cell's"),
    ),
)

TRAINING_STEPS = Table(
    "training_steps",
    "one optimizer step of a convergence trial; of trainings of over 10,000 steps every second, third ...",
    (
        *TRIAL_COLUMNS,
        _c("epoch", "Int64", "number of the epoch, from 1"),
        _c("step", "Int64", "number of the step, from 1, from the start of the training"),
        _c("loss", "Float64", "mean loss over the global batch"),
        _c("learning_rate", "Float64", "learning rate of the step, with warm-up and schedule"),
    ),
)

EPOCHS = Table(
    "epochs",
    "one epoch of a convergence trial, or one report of a script's; metrics that a script reports come last",
    (
        *TRIAL_COLUMNS,
        _c("epoch", "Int64", "number of the epoch, from 1; of reports that name none, their number"),
        _c("samples", "Int64", "number of samples trained on, from the start of the training", "samples"),
        _c(
            "train_s",
            "Float64",
            "training time from the start, with the first steps' warm-up: of the slowest rank, without evaluation; "
            "of a script from the end of its first step, of the rank that reports, with evaluation, without pauses",
            "s",
        ),
        _c("evaluation_s", "Float64", "time of the evaluation after this epoch; `<NA>` of a script", "s"),
        _c("train_loss", "Float64", "mean training loss over the epoch; of a script as it reports it"),
        _c("learning_rate", "Float64", "learning rate of the epoch's last step, with warm-up and schedule"),
        _c("train_accuracy", "Float64", "the same as val_accuracy on the training set, with convergence.train_metrics"),
        _c("val_loss", "Float64", "mean validation loss, over each sample exactly once"),
        _c("val_accuracy", "Float64", "fraction of the validation samples or tokens classified correctly"),
        _c("val_perplexity", "Float64", "exp of the mean validation loss of a language model"),
        _c("val_psnr", "Float64", "peak signal-to-noise ratio over the validation images", "dB"),
        _c("val_iou", "Float64", "intersection over union of the foreground, over all validation pixels"),
    ),
)
