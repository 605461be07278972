"""Schema of the recorded tables, and of columns computed from one trial alone."""

from __future__ import annotations

from harness.plan.rows import PhaseSeconds, RankRow, RecordedTrial, TrialFacts, WindowRow
from harness.record.schema.table import LABEL_COLUMNS, Table, by_name, columns_of, flag, integer, real, string, texts

_LINE = by_name(RecordedTrial, TrialFacts)
TRIAL_COLUMNS = (_LINE["trial_id"], _LINE["attempt"])
WAIT_FRACTION = real("wait_fraction", "fraction of the steps spent waiting for data, on CUDA by an idle GPU")
KIND, OUTCOME, REASON = _LINE["kind"], _LINE["outcome"], _LINE["reason"]
BLOCK, SEED, ADDED = _LINE["block"], _LINE["seed"], _LINE["added"]
PARAMETERS, EFFECTIVE_LR = _LINE["parameters"], _LINE["effective_lr"]
RANK, THREADS, WINDOW = by_name(RankRow)["rank"], by_name(RankRow)["threads"], by_name(WindowRow)["window"]
"""Columns of several tables."""

_COMPUTED = (
    string("device_model", "product name of the devices"),
    THREADS,
    real("throughput_per_s", "samples of all ranks over the time of the slowest rank", "samples/s"),
    real("step_s", "step time, median over the timed steps of all ranks", "s"),
    integer(
        "peak_memory_bytes",
        "peak in the steps, largest over ranks: allocated on the GPU, or resident on a CPU",
        "bytes",
    ),
    WAIT_FRACTION,
    integer("warmup_steps", "number of warm-up steps"),
    texts("doubts", "names of the doubts about its figures, explained at the end of results/README.md"),
)
"""What is computed from the windows, ranks and profiles of one trial."""

TRIALS = Table(
    "trials",
    "one attempt at a trial, with any outcome",
    *tuple({each.name: each for each in (*TRIAL_COLUMNS, *LABEL_COLUMNS, *_LINE.values(), *_COMPUTED)}.values()),
)

_PHASES = tuple(each for each in columns_of(PhaseSeconds) if each.name not in ("in_turn_s", "late_s"))
PHASE_COLUMNS = tuple(each for each in _PHASES if not each.name.startswith("host_"))
HOST_PHASE_COLUMNS = tuple(each for each in _PHASES if each.name.startswith("host_"))

WINDOWS = Table(
    "windows",
    "one window of one rank; phases are sums over the steps of the window",
    *TRIAL_COLUMNS,
    *(each for each in columns_of(WindowRow) if each not in _PHASES),
    *_PHASES,
)

RANKS = Table(
    "ranks",
    "one rank of one trial: its place, memory and load",
    *TRIAL_COLUMNS,
    *columns_of(RankRow),
)

STEPS = Table(
    "steps",
    "one optimizer step in a throughput trial; of one rank with throughput.keep_steps: all",
    *TRIAL_COLUMNS,
    integer("rank", "rank whose step was longest; with keep_steps: all that of the row"),
    WINDOW,
    integer("step", "number of the step in its window"),
    flag("warmup", "true for warm-up steps, which enter no figure"),
    real(
        "step_s",
        "step time with the wait for data, of the slowest rank; on CUDA by the clock of the device's stream",
        "s",
    ),
    real("mean_s", "step time, mean over ranks; `<NA>` with keep_steps: all", "s"),
    real(
        "wait_s",
        "wait for data by the host's clock, of the rank that waited longest: part of a step on a CPU, beside it on "
        "CUDA",
        "s",
    ),
    integer("wait_rank", "rank that waited longest; `<NA>` with keep_steps: all"),
    real("loss", "mean loss over the batch; with keep_steps: all over the rank's share"),
)

CHECKS = Table(
    "checks",
    "one bucket of a gradient or an update in an equivalence check, a count sketch",
    *TRIAL_COLUMNS,
    integer("bucket", "number of the bucket"),
    real("update", "sum of the bucket's values of the quantity, each with a random sign"),
    string(
        "quantity",
        "gradient, first_update (a step at the recipe's rate) or scaled_update (steps scaled to the parameters)",
    ),
    string("computed_in", "precision of the steps: fp32, or the cell's"),
)

TRAINING_STEPS = Table(
    "training_steps",
    "one optimizer step of a convergence trial; of trainings of over 10,000 steps every second, third ...",
    *TRIAL_COLUMNS,
    integer("epoch", "number of the epoch, from 1"),
    integer("step", "number of the step, from 1, from the start of the training"),
    real("loss", "mean loss over the global batch"),
    real("learning_rate", "learning rate of the step, with warm-up and schedule"),
)

EPOCHS = Table(
    "epochs",
    "one epoch of a convergence trial, or one report of a script's; metrics that a script reports come last",
    *TRIAL_COLUMNS,
    integer("epoch", "number of the epoch, from 1; of reports that name none, their number"),
    integer("samples", "number of samples trained on, from the start of the training", "samples"),
    real(
        "train_s",
        "training time from the start, with the first steps' warm-up: of the slowest rank, without evaluation; "
        "of a script from the end of its first step, of the rank that reports, with evaluation, without pauses",
        "s",
    ),
    real("evaluation_s", "time of the evaluation after this epoch; `<NA>` of a script", "s"),
    real("train_loss", "mean training loss over the epoch; of a script as it reports it"),
    real("learning_rate", "learning rate of the epoch's last step, with warm-up and schedule"),
    real("train_accuracy", "the same as val_accuracy on the training set, with convergence.train_metrics"),
    real("val_loss", "mean validation loss, over each sample exactly once"),
    real("val_accuracy", "fraction of the validation samples or tokens classified correctly"),
    real("val_perplexity", "exp of the mean validation loss of a language model"),
    real("val_psnr", "peak signal-to-noise ratio over the validation images", "dB"),
    real("val_iou", "intersection over union of the foreground, over all validation pixels"),
)
