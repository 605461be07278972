"""Each planted fault is named by its check, and healthy workloads have no findings."""

from __future__ import annotations

import pytest

from tests.doctor import recipes
from tests.doctor.conftest import Examined
from tests.doctor.faulty import FAULTS, HEALTHY
from tests.doctor.ranks import BUILTIN_PLACED
from tests.doctor.scripts import SCRIPT_FAULTS, SCRIPTS, Script

pytestmark = pytest.mark.slow

NO_FINDING = "(none)"
FAULTY = [(check, f"{workload.__name__} {strategy}") for check, pairs in FAULTS.items() for workload, strategy in pairs]


def checks(examined: Examined, name: str) -> list[str]:
    """The checks that spoke, or silence."""
    return sorted({finding["check"] for finding in examined[name]["findings"]}) or [NO_FINDING]


@pytest.mark.parametrize(("check", "name"), FAULTY)
def test_a_fault_is_named_by_its_check_and_no_other(examined: Examined, check: str, name: str) -> None:
    assert checks(examined, name) == [check]


CORRECT = [f"{workload.__name__} {strategy}" for workload, strategy in HEALTHY]
CORRECT += [" ".join(placed) for placed in BUILTIN_PLACED]


@pytest.mark.parametrize("name", CORRECT)
def test_healthy_and_built_in_workloads_have_no_findings(examined: Examined, name: str) -> None:
    """A comparison that cannot be made is unknown with its reason."""
    output = examined[name]
    assert output["findings"] == [] and "raised" not in output, output
    unknown = {title: text for title, text in output["figures"].items() if "unknown" in text}
    title, reason = recipes.UNKNOWN.get(name, ("", ""))
    assert list(unknown) == [title] * (name in recipes.UNKNOWN)
    assert all(text.startswith(reason) for text in unknown.values())


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_failure_on_few_samples_is_no_error_and_its_steps_are_examined(examined: Examined, strategy: str) -> None:
    output = examined[f"NeedsMany {strategy}"]
    (finding,) = output["findings"]
    assert (finding["check"], finding["severity"]) == ("execution", "warning"), finding
    assert "too few samples to compare" in finding["seen"] and "memory" in finding["seen"]
    assert "raised" not in output
    assert strategy == "single" or "all-reduce of a number" in output["figures"]


def test_messages_contain_names_and_numbers(examined: Examined) -> None:
    def seen(name: str) -> str:
        return str(examined[name]["findings"][0]["seen"])

    assert "mask (a plain attribute of Net) on cpu" in seen("MaskNotRegistered ddp")
    assert "auxiliary.weight, auxiliary.bias" in seen("UnusedHead ddp")
    assert "trainable parameters that forward modifies: centre" in seen("TrainsItsReplica dp")
    assert "factor 0.5" in seen("MeanOverReplicas dp")
    assert "factor 2.0" in seen("MeanForSum ddp") and ": 2 times" in seen("MeanForSum ddp")
    of_one_rank = "buffers that forward changes on rank 1 of 2, and not on rank 0: "
    assert seen("AddsOnRankOne ddp") == of_one_rank + "shift"
    assert seen("SetsOnRankOne ddp") == of_one_rank + "last.seen"
    assert "AddsOnRankOne.Net.forward" in examined["AddsOnRankOne ddp"]["findings"][0]["place"]
    assert "64 of 256 samples" in seen("SamplerInside dp")
    assert "rank 1" in seen("OneSlowRank ddp")
    assert "steps" in seen("CountsItsSteps dp") and "mean" in seen("RunningMean dp")
    assert "labels are missing" in seen("Raises ddp")
    assert seen("OtherLabels ddp").endswith("in the evaluation of the last validation samples")
    (evaluation,) = examined["LossInTrainMode ddp"]["findings"]
    assert "TypeError: list indices" in evaluation["seen"] and "leave out convergence" in evaluation["advice"]
    assert "raised" not in examined["LossInTrainMode ddp"]  # its steps and the checks after them are examined
    assert "ranks: MeanInTheWorkload.seen.value;" in seen("MeanInTheWorkload ddp")
    assert "ranks: seen[0].value;" in seen("MeanInAHelper ddp") and ": mean;" in seen("MeanInAFrozenParameter ddp")
    assert "ranks: codes, sizes, sums;" in seen("FrozenCodebookOfEachRank ddp")
    assert seen("EvaluatesOnTheFirst ddp") == "names that evaluate() returns on some of 2 ranks alone: mean (rank 0)"
    assert "on rank 1: WorkloadError: evaluate() must return" in seen("EvaluatesToNoneElsewhere ddp")
    alone = seen("NeedsExchange ddp")
    assert "gradients are not reduced" in alone and "throughput.explain: false" in alone
    ppo = examined["NormalisesAdvantages ddp"]["findings"][0]
    assert not ppo.get("stops") and "as PPO" in ppo["advice"] and "without a claim" in ppo["means"]
    assert "temperature" in seen("UpdatesByRank ddp")
    assert "GiB" in seen("KeepsTooMuch ddp") and "a batch of" in examined["KeepsTooMuch ddp"]["findings"][0]["advice"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.__name__))
def test_faulty_scripts_have_findings_and_healthy_ones_none(examined: Examined, script: type[Script]) -> None:
    """Written after public questions, without knowledge of the checks."""
    output = examined[f"{script.__name__} {script.strategy}"]
    named = checks(examined, f"{script.__name__} {script.strategy}")
    if script in SCRIPT_FAULTS:
        assert SCRIPT_FAULTS[script] in named
    else:
        assert named == [NO_FINDING] and "raised" not in output, output
