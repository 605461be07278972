"""Errors: the name that was probably meant, and several mistakes as one message."""

from __future__ import annotations

import pytest

from harness.errors import Collected, ExperimentError, HarnessError, RunFolderError, WorkloadError, closest, nearest

BATCHES = ["global_batch_size", "lr", "per_device_batch_size"]


@pytest.mark.parametrize(
    ("name", "allowed", "meant"),
    [
        ("DDP", ["ddp", "dp", "fsdp"], ["ddp"]),
        ("adamw", ["Adam", "AdamW", "SGD"], ["AdamW"]),
        ("Blocks", ["blocks"], ["blocks"]),
        ("stratgy", ["strategy", "device"], ["strategy"]),
        ("STRATGY", ["strategy", "device"], ["strategy"]),
        ("batch_size", BATCHES, ["global_batch_size", "per_device_batch_size"]),
        ("batchsize", BATCHES, ["global_batch_size", "per_device_batch_size"]),
        ("Batch-Size", BATCHES, ["global_batch_size", "per_device_batch_size"]),
        ("batch", BATCHES, ["global_batch_size", "per_device_batch_size"]),
        ("bucket", ["bucket_cap_mb", "gradient_as_bucket_view"], ["bucket_cap_mb"]),
        ("window", ["windows", "window_steps"], ["windows"]),
        ("gpu", ["auto", "cpu", "cuda"], ["cuda"]),
        ("Float32", ["tf32", "fp32", "bf16", "fp16"], ["fp32"]),
        ("DistributedDataParallel", ["dp", "ddp", "fsdp"], ["ddp"]),
        ("gpu", ["gpus"], ["gpus"]),
        ("cap", ["bucket_cap_mb"], []),
        ("colour", BATCHES, []),
        ("x", [], []),
    ],
)
def test_the_names_that_were_probably_meant(name: str, allowed: list[str], meant: list[str]) -> None:
    assert closest(name, allowed) == meant


def test_a_clause_offers_the_near_names_and_lists_all() -> None:
    assert nearest("batch_size", BATCHES[::-1]) == (
        "did you mean 'global_batch_size' or 'per_device_batch_size'? (allowed: global_batch_size, lr, "
        "per_device_batch_size)"
    )
    assert nearest("x", ["ab"]) == "allowed: ab"
    assert nearest("x", []) == "nothing is allowed here"


def collected(*errors: HarnessError) -> HarnessError:
    found = Collected()
    for error in errors:
        with found.also():
            raise error
    with pytest.raises(HarnessError) as caught:
        found.raise_all()
    return caught.value


def test_one_error_stays_itself_no_error_is_raised_for_none_and_other_exceptions_are_not_kept() -> None:
    error = WorkloadError("a")
    assert collected(error) is error
    Collected().raise_all()
    with pytest.raises(ZeroDivisionError), Collected().also():
        raise ZeroDivisionError


def test_several_errors_are_one_of_their_kind_each_once_with_the_name_of_its_source() -> None:
    inner = collected(WorkloadError("a"), WorkloadError("b"))
    joined = collected(inner, WorkloadError("b"), WorkloadError("c"))
    assert isinstance(joined, WorkloadError)
    assert str(joined) == "3 problems\n  - a\n  - b\n  - c"
    assert isinstance(collected(WorkloadError("a"), ExperimentError("--only", ["b"])), HarnessError)
    joined = collected(ExperimentError("e.yaml", ["a", "b"]), ExperimentError("--only", ["c"]))
    assert str(joined) == "e.yaml, --only: 3 problems\n  - e.yaml: a\n  - e.yaml: b\n  - --only: c"
    joined = collected(ExperimentError("--assume", ["a", "b"]), RunFolderError("/r: c"))
    assert str(joined) == "3 problems\n  - --assume: a\n  - --assume: b\n  - /r: c"
