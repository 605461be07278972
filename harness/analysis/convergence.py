"""Trials and epochs -> the end of each training, and the time to its target."""

from __future__ import annotations

import pandas as pd

from harness.analysis.common import Values, columns_of, order, rows_of, trial_key
from harness.analysis.equivalence import Verdicts, verdict_columns
from harness.config.sections import Target
from harness.record.schema import CONVERGENCE, DESCRIPTION
from harness.record.schema.table import floats

KEPT = ("trial_id", "attempt", "cell_id", "seed", "effective_lr", "training_samples", *DESCRIPTION)
"""The columns of a trial that the row of a training has."""


def convergence(
    trials: pd.DataFrame,
    epochs: pd.DataFrame,
    target: Target | None,
    checked: Verdicts | None = None,
) -> pd.DataFrame:
    """Return one row a training: its last epoch, and the time to the target if it was reached.

    ``target``: the one of the experiment file, if it has any. ``checked``: the verdicts of equivalence checks.
    """
    done = trials[(trials["kind"] == "convergence") & trials["outcome"].isin(["ok", "diverged"])]
    by_trial = {key: group for key, group in epochs.groupby(["trial_id", "attempt"])}
    rows = []
    for trial in rows_of(done):
        curve = by_trial.get(trial_key(trial))
        if curve is None or curve.empty:
            continue
        curve = curve.sort_values("epoch")
        last = curve.iloc[-1]
        rows.append(
            {
                **columns_of(trial, *KEPT),
                "epochs": last["epoch"],
                **{name: last[name] for name in ("train_loss", "train_accuracy", "train_s")},
                **{name: last[name] for name in curve.columns if str(name).startswith("val_")},
                "best_val_accuracy": curve["val_accuracy"].max(),
                **_time_to_target(curve, target),
                **verdict_columns(checked, [trial.check_id]),
            }
        )
    rows.sort(key=order)
    # of a training that diverged, the loss and the metrics may be values that are not finite
    kept = {name: floats(row.get(name) for row in rows) for name in CONVERGENCE.names if name.endswith("_loss")}
    return CONVERGENCE.frame(rows).assign(**kept)


def _time_to_target(curve: pd.DataFrame, target: Target | None) -> Values:
    if not target:
        return {}
    if target.metric not in curve:
        return {"target": f"{target.metric}: no such metric was recorded"}
    values = curve[target.metric].astype("Float64")
    if target.at_least is not None:
        reached, words = values >= target.at_least, f">= {target.at_least:g}"
    else:
        assert target.at_most is not None  # the file gives exactly one of the two
        reached, words = values <= target.at_most, f"<= {target.at_most:g}"
    named: Values = {"target": f"{target.metric} {words}"}
    hits = curve[reached.fillna(False).astype(bool)]
    if hits.empty:
        return {**named, "reached": False}
    first = hits.iloc[0]
    return {
        **named,
        "reached": True,
        "time_to_target_s": first["train_s"],
        "samples_to_target": first["samples"],
        "epochs_to_target": first["epoch"],
    }
