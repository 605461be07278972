"""What to do next: exactly one command, and why it is the one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.config.load import parse_experiment
from tests.report.test_causes import cause, text_of
from tests.report.test_verdict import CELL, FASTEST, TRUST, verdict_of

RUN = "results/study/1"
WAITS = cause("waiting for data", 0.81, 0.73)
EXCHANGE = cause("exposed communication", 0.1, 0.05)
UNDECIDED, DECIDED = TRUST, {**TRUST, "n": 0}
MISSING = {"topic": "incomplete", "code": "missing", "n": 3}


def said(*statements: dict[str, Any], **given: Any) -> tuple[str, str]:
    """Return why, and the command."""
    found = verdict_of(*statements, **given)
    heading, (last,) = [*found.by_heading.items()][-1]
    assert heading == "What to do next"
    assert [one.command for one in found.sentences if one.command] == [last.command] == [found.command]
    return last.text, last.command


def next_of(*statements: dict[str, Any], **given: Any) -> Any:
    """Return the next experiment file, which runs."""
    content = yaml.safe_load(verdict_of(*statements, **given).next_file)
    assert parse_experiment(content, source="next")
    return content


def test_a_cause_is_tried_with_a_file_that_runs_once_nothing_is_open() -> None:
    why, command = said(FASTEST, WAITS, DECIDED)
    assert why == (
        "81 % of the step is waiting for data. Compare loader.workers: [0, 2, 4] for ddp on 8 devices · batch "
        "32/device, all else as here:"
    )
    assert command == f"python -m harness.run {RUN}/next.yaml"
    assert next_of(FASTEST, WAITS, DECIDED)["grid"]["loader.workers"] == [0, 2, 4]


@pytest.mark.parametrize(
    ("code", "subject", "given", "again"),
    [
        ("trials", "error", {}, True),
        ("trials", "oom", {}, False),  # limits.prune_oom: larger batches are not tried
        ("preflight", "execution", {}, False),  # of a check that is allowed: its cells were measured
        ("tables", "noise", {}, False),  # an error of the harness
        ("trials", "error", {"lines": [{"facts": {"inline": True}}]}, False),
        ("trials", "error", {"experiment": {"workload": "own:Own", "variants": {"a": "x", "b": "y"}}}, False),
    ],
)
def test_what_failed_is_resumed_once_it_is_mended_if_a_resume_measures_it(
    code: str, subject: str, given: dict[str, Any], again: bool
) -> None:
    failed = {"topic": "failed", "code": code, "cell_id": "a", "subject": subject, "n": 1, "reasons": ("it",)}
    why, command = said(FASTEST, WAITS, DECIDED, failed, **given)
    assert why.startswith("Once what failed is mended, --resume measures it. 81 %") == again
    assert "python -m harness.run" in command and "--resume" not in command
    assert not said(FASTEST, WAITS, DECIDED, failed, MISSING)[0].startswith("Once")


def test_an_improvement_is_confirmed_then_measured_alone_and_its_options_are_tried_once() -> None:
    tried = {"topic": "improved", "cell_id": "a", "n": 4, "wall_s": 200.0, "blocks": 5, "value": 1.2}
    why, command = said(FASTEST, WAITS, DECIDED, {**tried, "code": "unfinished"})
    assert (
        why.startswith("To confirm what helped") and command == f"python -m harness.run --resume {RUN} --improve 300s"
    )
    longer = {"experiment": {"improve": "10m"}}
    assert said(FASTEST, WAITS, DECIDED, {**tried, "code": "unfinished"}, **longer)[1].endswith("--improve 600s")
    confirmed = {**tried, "code": "confirmed", "subject": "loader.workers: 2, precision: bf16"}
    why, command = said(FASTEST, WAITS, UNDECIDED, confirmed)
    assert why.startswith("With loader.workers: 2, precision: bf16 ddp on 8 devices") and command.endswith("next.yaml")
    grid = next_of(FASTEST, WAITS, UNDECIDED, confirmed)["grid"]
    assert (grid["loader.workers"], grid["precision"], grid["devices"]) == (2, "bf16", [8])
    for code in ("not confirmed", "no option helped"):
        assert "Compare" not in said(FASTEST, WAITS, DECIDED, {**tried, "code": code})[0]


def test_a_script_s_cause_is_to_be_changed_in_the_program_which_has_no_options_of_harness() -> None:
    grid = {"devices": [8], "per_device_batch_size": [32]}
    script: dict[str, Any] = {"experiment": {"script": "train.py", "grid": grid}}
    last = [*verdict_of(FASTEST, WAITS, DECIDED, **script).by_heading.values()][-1][0]
    assert last.text.startswith("81 % of the step is waiting for data: try more workers of the DataLoader")
    assert last.command == "" and "loader.workers" not in last.text
    assert verdict_of(FASTEST, WAITS, UNDECIDED, **script).command.endswith("--add-blocks 4")  # first what is open
    why = text_of(EXCHANGE, **script)
    assert why.endswith(
        "try other sizes of buckets (bucket_cap_mb), accumulation with no_sync(), or a communication hook."
    )


def test_blocks_that_decide_what_is_open_come_before_an_option() -> None:
    why, command = said(FASTEST, EXCHANGE, UNDECIDED)
    assert why == "About 4 more blocks decide what is open:"
    assert command == f"python -m harness.run --resume {RUN} --add-blocks 4"
    assert "ddp.bucket_cap_mb" in verdict_of(FASTEST, EXCHANGE, UNDECIDED).next_file  # for afterwards
    trial = {**CELL, "trial_id": "a", "cell_id": "a", "kind": "throughput", "outcome": "ok"}
    quiet = {"throughput": {"wait_for_quiet": 10}}
    for doubt, given, waits in (
        ("foreign load", {}, True),
        ("foreign load", quiet, False),
        ("foreign load on the GPU", {}, False),
    ):
        why, _ = said(FASTEST, UNDECIDED, trials=[{**trial, "doubts": (doubt,)}], experiment=given)
        assert why.startswith(
            "About 4 more blocks decide what is open" + ("; fewer on an idle machine" if waits else ":")
        )
    assert said(FASTEST, EXCHANGE)[0].startswith("10 % of the step is exposed communication. Compare ddp.bucket")
    assert said(FASTEST, {**EXCHANGE, "low": -0.01}, DECIDED)[0].startswith("Nothing here calls for")
    larger = {**EXCHANGE, "subject": "slowest rank", "value": 0.4, "low": 0.3, "high": 0.5}
    start = "10 % of the step is exposed communication; no option reduces waiting for the slowest rank. Compare"
    assert said(FASTEST, larger, EXCHANGE)[0].startswith(start)
    unexplained = said(FASTEST, {**larger, "subject": "rest"}, EXCHANGE)[0]
    assert unexplained.startswith("10 % of the step is exposed communication; more of it is unexplained. Compare")


def test_of_several_causes_the_largest_is_tried() -> None:
    other = {**WAITS, "cell_id": "b", "value": 0.3, "low": 0.2}
    assert "fsdp on 8 devices" in said(FASTEST, {**WAITS, "low": 0.1}, other, DECIDED)[0]


def test_what_another_step_precedes_and_a_rule_for_blocks_take_a_new_run() -> None:
    blocks = f"To decide what is open: python -m harness.run --resume {RUN} --add-blocks 4"
    assert verdict_of(MISSING, FASTEST, UNDECIDED).others == (blocks,) and verdict_of(FASTEST, UNDECIDED).others == ()
    rule = {"throughput": {"blocks": {"at_least": 3, "at_most": 6, "halfwidth": 0.05}}}
    statements = (FASTEST, {**UNDECIDED, "subject": "rule"})
    why, command = said(*statements, experiment=rule)
    assert "a rule sets their number, so that it takes a new run" in why and command.endswith("/next.yaml")
    assert next_of(*statements, experiment=rule)["throughput"]["blocks"]["at_most"] == 10
    next_file = next_of(*statements, experiment={"throughput": {"blocks": "decide"}})
    assert next_file["throughput"]["blocks"] == 12  # a number: it takes no looks


@pytest.mark.parametrize(("seconds", "longer"), [(0.2, 0.8), (0, 1.0)])
def test_noise_that_blocks_do_not_narrow_takes_longer_windows(seconds: float, longer: float) -> None:
    given = {"experiment": {"throughput": {"window_seconds": seconds}}}
    statements = (FASTEST, {**UNDECIDED, "n": 857})
    why, command = said(*statements, **given)
    assert why.startswith("The intervals of this run are too wide for a decision. Measure again with")
    assert next_of(*statements, **given)["throughput"]["window_seconds"] == longer and command.endswith("/next.yaml")
    assert not any("--add-blocks" in line for line in verdict_of(*statements, **given).others)


def test_other_programs_are_closed_if_a_trial_saw_them() -> None:
    statements = (FASTEST, cause("rest", 0.9, 0.8), {**UNDECIDED, "n": 857})
    trial = {**CELL, "trial_id": "a", "cell_id": "a", "kind": "throughput", "outcome": "ok"}
    for doubts, again in ((("foreign load",), "Close other programs, then measure"), (("wide spread",), "Measure")):
        assert f"decision. {again} again" in said(*statements, trials=[{**trial, "doubts": doubts}])[0]


def test_a_target_that_no_training_reached_takes_more_epochs() -> None:
    missed = {"topic": "training", "code": "missed", "cell_id": "a", "subject": "val_accuracy >= 0.9", "n": 1}
    given = {"experiment": {"throughput": None, "convergence": {"epochs": 3}}}
    assert said(missed, **given)[0].startswith(
        "No setting reached the target with every seed. With convergence.epochs: 6"
    )
    assert next_of(missed, **given)["convergence"]["epochs"] == 6
    grid = {"devices": [8], "per_device_batch_size": [32]}
    script: dict[str, Any] = {"script": "train.py", "grid": grid, "throughput": None}
    limited = {"experiment": {**script, "convergence": {"seeds": 0, "steps": 5}}}
    assert next_of(missed, **limited)["convergence"]["steps"] == 10
    last = [*verdict_of(missed, experiment={**script, "convergence": {"seeds": 0}}).by_heading.values()][-1][0]
    assert (last.text, last.command) == (
        "No setting reached the target with every seed: let the program train longer, by its own arguments.",
        "",
    )
    reached = {**missed, "code": "reached", "value": 5.0}
    assert "Nothing here calls for another measurement" in said(missed, reached, **given)[0]


def test_times_to_a_target_that_have_no_order_take_more_seeds() -> None:
    few = {"topic": "training", "code": "few seeds", "cell_id": "a", "others": ("b",), "subject": "acc >= 0.9", "n": 3}
    trained = [{**CELL, "cell_id": cell_id, "time_to_target_s": 1.0} for cell_id in "ab"]
    convergence = {"epochs": 3, "seeds": [1, 2, 7]}
    given: dict[str, Any] = {
        "convergence": trained,
        "experiment": {"throughput": None, "convergence": convergence},
    }
    why, command = said(few, **given)
    assert why.startswith("Times to the target have an order from 5 seeds on. With convergence.seeds: [1, 2, 7, 0, 3]")
    assert next_of(few, **given)["convergence"]["seeds"] == [1, 2, 7, 0, 3] and command.endswith("/next.yaml")
    assert "Nothing here calls for" in said({**few, "others": ()}, **given)[0]
    given["experiment"]["convergence"] = {"epochs": 3, "seeds": [*range(5)]}  # of which a training has failed
    assert "Nothing here calls for" in said(few, **given)[0]


def test_a_run_for_a_debugger_is_measured_anew() -> None:
    given = {"lines": [{"facts": {"inline": True}}]}
    why, command = said(MISSING, FASTEST, UNDECIDED, **given)
    assert "(--inline), for a debugger" in why and command == f"python -m harness.run {RUN}/next.yaml"
    assert next_of(MISSING, FASTEST, UNDECIDED, **given)["name"] == "study-next"
    assert not verdict_of(MISSING, FASTEST, UNDECIDED, **given).others


HIGH = {**TRUST, "code": "high", "value": 0.03, "n": 0}
FAILED = {**CELL, "trial_id": "a", "cell_id": "a", "outcome": "oom"}
EXAMINED = {**CELL, "trial_id": "d", "cell_id": "a", "kind": "diagnostic", "purpose": "doctor"}
LINKS = {**CELL, "trial_id": "l", "cell_id": "l", "kind": "diagnostic", "purpose": "links"}
RESUME, EXPORT = f"python -m harness.run --resume {RUN}", f"python -m harness export {RUN} --markdown"
INCOMPLETE = "The run is incomplete. To measure what is missing, and keep what is measured:"
NOTHING = "Nothing here calls for another measurement. To show the verdict to others:"
BESIDE = ", all else as here, in the folder of your experiment file:"


def called(*words: str) -> dict[str, Any]:
    """Return the environment of a run whose last invocation had these words."""
    return {"environment": {"invocations": [{"command": [*words]}]}}


@pytest.mark.parametrize(
    ("statements", "given", "why", "command"),
    [
        ([MISSING, FASTEST, WAITS, UNDECIDED], {}, INCOMPLETE, RESUME),  # before all else
        ([MISSING], {"folder": Path("a b;c")}, INCOMPLETE, "python -m harness.run --resume 'a b;c'"),
        ([MISSING], called("a.yaml", "--address", "head:6379"), INCOMPLETE, f"{RESUME} --address head:6379"),
        ([MISSING], called("--address=head:6379", "a.yaml"), INCOMPLETE, f"{RESUME} --address head:6379"),
        ([MISSING], {"environment": {"invocations": [{}]}}, INCOMPLETE, RESUME),
        (
            [MISSING],
            {
                "environment": {
                    "invocations": [{"command": ["a.yaml", "--address", "h:1"], "submit": "sbatch s a.yaml"}]
                }
            },
            INCOMPLETE,
            "sbatch s a.yaml",  # the address has ended with the job
        ),
        ([MISSING], {"trials": [LINKS]}, NOTHING, EXPORT),  # the links alone are not resumed
        ([FASTEST, HIGH], {}, NOTHING, EXPORT),
        ([], {"trials": [FAILED]}, "Nothing was measured. Once the causes above are mended", RESUME),
        ([], {"trials": [FAILED, EXAMINED]}, "Nothing was measured. Once the causes above are mended", RESUME),
        (
            [FASTEST, WAITS],
            {"experiment": {"workload": "mine:Own"}},
            BESIDE,
            f"cp {RUN}/next.yaml . && python -m harness.run next.yaml",
        ),
    ],
)
def test_what_is_missing_or_failed_is_measured_by_a_command_that_fits_the_run_and_else_the_verdict_is_shown(
    statements: list[dict[str, Any]], given: dict[str, Any], why: str, command: str
) -> None:
    reason, found = said(*statements, **given)
    assert why in reason and found == command
    assert verdict_of(*statements, **given).proposes == (WAITS in statements)
