"""The acceptance: its table, its processes, missing modules, and all of it on a CPU."""

from __future__ import annotations

import gzip
import importlib
import inspect
import json
import random
import re
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
import yaml

from harness.config.load import parse_experiment
from harness.measure.telemetry import Reading, summarise
from harness.plan.inventory import Inventory, Node
from harness.plan.planner import make_plan
from harness.plan.rows import POWER_CAP
from harness.record.schema import table_of
from tests.gpu import __main__ as command
from tests.gpu import clocks, hardware, modules, one, runner, setting, table
from tests.gpu.claims import CLAIMS, Claim, named, one_after_another_s
from tests.gpu.runner import Done, Machine, run_all, run_one
from tests.gpu.runs import HUNGRY, NEVER_NULL, ONE_BLOCK, WORKLOAD, nulls_of
from tests.gpu.verdict import NotRun, Verdict, judged

CLAIM = Claim("a claim", "own:claim")


def forever() -> float:
    return time.monotonic() + 1000


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_each_claim_has_a_function_that_takes_its_arguments(claim: Claim) -> None:
    module, _, name = claim.function.partition(":")
    function = getattr(importlib.import_module(f"tests.gpu.{module}"), name)
    inspect.signature(function).bind("device", *claim.arguments)
    assert function.__doc__ and len(claim.name) < table.NAME


def test_each_claim_has_a_name_of_its_own_by_which_it_is_selected() -> None:
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    assert {claim.name for claim in named(["fsdp, bf16", "nvidia"])} == {
        "dtypes: fsdp, bf16",
        "NVML against nvidia-smi",
    }
    assert named([]) == list(CLAIMS)
    with pytest.raises(ValueError, match="--only: got 'energie'"):
        named(["energie"])


def test_the_verdict_of_a_claim_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(error: Exception | None) -> Verdict:
        def claim(device: object) -> Verdict:
            if error:
                raise error
            return judged(True, "fine")

        monkeypatch.setitem(sys.modules, "tests.gpu.own", SimpleNamespace(claim=claim))
        return one.verdict_of(CLAIM, "cpu")

    assert verdict(None).status == "pass"
    assert verdict(NotRun("needs 2 GPUs")) == Verdict("not run", "needs 2 GPUs")
    assert verdict(RuntimeError("no\nroom")) == Verdict("FAIL", "RuntimeError: no room")
    missing = ModuleNotFoundError("No module named 'ray.train'", name="ray.train")
    assert re.fullmatch(r"needs ray==2\.60\.\d+", verdict(missing).text)
    with pytest.raises(ModuleNotFoundError):  # a mistake in the tests themselves is no missing requirement
        verdict(ModuleNotFoundError("No module named 'harness.x'", name="harness.x"))


@pytest.mark.parametrize(
    ("step_ms", "ratio", "status"),
    [
        (0.35, 1.02, "pass"),  # a small MLP: the host launches, 7 us are added
        (0.35, 1.10, "FAIL"),  # 35 us
        (40.0, 1.009, "pass"),
        (40.0, 1.02, "FAIL"),  # a GPU that works all the time is made to wait
    ],
)
def test_the_overhead_of_a_step_is_a_share_or_microseconds(step_ms: float, ratio: float, status: str) -> None:
    from tests.gpu.speed import verdict_of

    fine = {"model": "small ResNet", "strategy": "ddp", "step_s": 0.003, "step": 1.0, "window": 1.0}
    row = {"model": "small MLP", "strategy": "single", "step_s": step_ms / 1000, "step": ratio, "window": ratio}
    assert verdict_of([[row, fine]] * 3, cuda=True).status == status


def test_the_most_that_construction_takes_follows_from_the_units() -> None:
    """Dense(10000, 5000) is two thirds of the model; sharded first, as it is, it takes 1.33."""
    from harness.train.workloads.mlp import Mlp
    from tests.gpu.memory import Tall, most_built

    assert most_built(Mlp(model="large"), "fsdp") == pytest.approx(1 + 50_005_000 / 75_060_010)
    assert most_built(Tall(), "fsdp") == pytest.approx(1 + 1 / 8)  # the whole model twice, 2.0, is beyond each
    assert most_built(Mlp(model="large"), "single") == 1.3


def test_what_a_claim_has_read_is_kept_and_what_is_too_large_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(setting.KEPT, raising=False)
    setting.keep("nowhere", [1])
    monkeypatch.setenv(setting.KEPT, str(tmp_path))
    monkeypatch.setattr(setting, "MOST_KEPT_BYTES", 1000)
    setting.keep("small", [["gemm", [0, 1]]])
    setting.keep("large", random.Random(0).sample(range(10**9), 1000))
    read = {path.name: json.loads(gzip.decompress(path.read_bytes())) for path in tmp_path.iterdir()}
    assert read.keys() == {"small.json.gz", "large.json.gz"} and read["small.json.gz"] == [["gemm", [0, 1]]]
    assert read["large.json.gz"].keys() == {"left out"}
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < setting.MOST_KEPT_BYTES


@pytest.mark.parametrize(
    ("model", "share", "status"),
    [("NVIDIA H100 80GB HBM3", 0.8, "pass"), ("NVIDIA H100 80GB HBM3", 0.5, "FAIL"), ("a new GPU", 0.8, "not run")],
)
def test_measured_peaks_are_judged_by_the_table(
    monkeypatch: pytest.MonkeyPatch, model: str, share: float, status: str
) -> None:
    stated = {"fp32": 67e12, "tf32": 494.5e12, "bf16": 989.5e12}
    monkeypatch.setattr(hardware, "measured_peak", lambda device, name, seconds: share * stated[name])
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: model)
    assert one.verdict_of(replace(CLAIM, function="hardware:peak_products"), "cuda").status == status


def test_lines_of_nvidia_smi_are_read_beside_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\nwhile :; do echo 412.31, 1980, 0x0000000000000004; sleep 0.05; done\n")
    script.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid="a"))
    with clocks.printed_by_nvidia_smi(torch.device("cuda", 0)) as lines:
        time.sleep(0.5)
    assert clocks.numbers_of(lines)[0] == (412.31, 1980.0, "0x0000000000000004")
    assert clocks.numbers_of(["[N/A], 1980, 0x0", 'Field "clocks.sm" is not a valid field to query.']) == []


def test_kept_readings_give_the_columns_again() -> None:
    before = Reading(1_000, 500.0, 0.9, 1980, 1980, 60, (), (7,), (0, 0))
    after = replace(before, energy_mj=9_001_000, throttle=(POWER_CAP,), held_ns=(10**9, 0))
    again = [Reading(**json.loads(json.dumps(asdict(reading)))) for reading in (before, after)]
    columns = [summarise([a], [b], seconds=12.0, shared=False, samples=100) for a, b in ((before, after), again)]
    assert columns[0] == columns[1] and columns[1]["power_w"] == 750.0


def test_every_claim_has_a_prediction_beside_its_figures() -> None:
    assert [claim.name for claim in CLAIMS if not claim.expected] == []
    done = Done(replace(CLAIM, expected="1.0"), judged(True, "ratio 0.9"), 3.0)
    assert "ratio 0.9 (expected: 1.0)" in " ".join(table.lines_of(done).split())


@pytest.mark.parametrize("part", [1, 2])
def test_each_of_two_calls_fits_its_minutes_on_one_gpu(part: int) -> None:
    """By predicted seconds; limits, which are twice as long and more, end what hangs."""
    claims = [claim for claim in CLAIMS if claim.part == part and claim.gpus == 1]
    assert one_after_another_s(claims, command.BESIDE) <= 60 * command.MINUTES
    assert all(2 * claim.takes_s <= claim.limit_s <= 60 * command.MINUTES for claim in claims)
    assert one_after_another_s([replace(CLAIM, takes_s=8), replace(CLAIM, takes_s=3, alone=True)], 4) == 5


def test_the_trial_that_fills_the_device_is_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hungry.py").write_text(WORKLOAD)
    monkeypatch.syspath_prepend(tmp_path)
    content = yaml.safe_load(HUNGRY.replace("LAUNCHER", "ray") + ONE_BLOCK)
    plan = make_plan(parse_experiment(content, source="test"), Inventory((Node("a", "", "a", cores=1, gpus=1),)))
    (group,) = plan.groups
    assert [trial.cell.workload_options["blocks"] for trial in group.trials] == [100_000, 1]


def test_columns_with_a_null_and_empty_tables_are_named() -> None:
    rows = {name: pd.DataFrame({column: [1.0, 2.0] for column in columns}) for name, columns in NEVER_NULL.items()}
    rows["trials"] = rows["trials"].assign(trial_id=["timed", "doctor"], kind=["throughput", "diagnostic"])
    rows["ranks"] = rows["ranks"].assign(trial_id=["timed", "doctor"])
    assert nulls_of(SimpleNamespace(**rows)) == []
    rows["ranks"].loc[1, "power_w"] = None  # of an examination, which reads no power
    rows["cells"].loc[1, "mfu"] = None
    rows["gpus"] = rows["gpus"].iloc[:0]
    empty = [("gpus", name) for name in NEVER_NULL["gpus"]]
    assert nulls_of(SimpleNamespace(**rows)) == [("cells", "mfu"), *empty]
    rows["ranks"].loc[0, "power_w"] = None
    assert ("ranks", "power_w") in nulls_of(SimpleNamespace(**rows))


def test_what_a_run_on_gpus_must_have_is_in_its_tables() -> None:
    assert all(set(names) <= set(table_of(table).names) for table, names in NEVER_NULL.items())


ENDS = {"abort": "killed by signal 6", "leave": "left with exit code 3", "hang": "killed after 2 s"}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("end", ENDS)
def test_a_crash_or_a_hang_costs_one_line(monkeypatch: pytest.MonkeyPatch, end: str, device: str) -> None:
    code = f"from tests.gpu import ends; ends.{end}(None)"
    monkeypatch.setattr(runner, "command_of", lambda claim, device, file: [sys.executable, "-c", code])
    monkeypatch.setattr("tests.gpu.claims.START_S", 0.0)
    claim = replace(CLAIM, function=f"ends:{end}", takes_s=1.0 if end == "hang" else 15.0)
    done = run_one(claim, device, forever())
    assert done.verdict == Verdict("FAIL", ENDS[end])
    assert done.output == "last words\n"
    assert done.seconds < 30


def test_claims_that_time_steps_run_alone_and_last(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def start(claim: Claim, device: str, until: float) -> Done:
        started.append(claim.name)
        return Done(claim, judged(True, ""), 0.0)

    monkeypatch.setattr(runner, "run_one", start)
    claims = [replace(CLAIM, name=name, alone="timed" in name) for name in ("timed 1", "a", "timed 2", "b")]
    done = list(run_all(claims, Machine("cuda", 1, beside=2), forever()))
    assert len(done) == 4 and set(started[:2]) == {"a", "b"} and started[2:] == ["timed 1", "timed 2"]


@pytest.mark.parametrize(
    ("machine", "claim", "left_s", "reason"),
    [
        (Machine("cpu", 0), replace(CLAIM, cpu=False), 1000.0, "needs a GPU"),
        (Machine("cpu", 0), replace(CLAIM, cpu=False, gpus=2), 1000.0, "needs 2 GPUs"),
        (Machine("cuda", 1), replace(CLAIM, gpus=2), 1000.0, "needs 2 GPUs"),
        (Machine("cuda", 1), CLAIM, 1.0, "the time is up (--minutes)"),
    ],
)
def test_a_claim_without_devices_or_time_is_not_run(machine: Machine, claim: Claim, left_s: float, reason: str) -> None:
    (done,) = run_all([claim], machine, time.monotonic() + left_s)
    assert done.verdict == Verdict("not run", reason)


def test_the_table_has_80_columns_and_the_files_hold_every_claim(tmp_path: Path) -> None:
    texts = ["short", "many words " * 30, "x" * 200]
    named = [replace(CLAIM, name=f"claim {i} " + "y" * 30) for i in range(3)]
    done = [Done(claim, judged(i > 0, text), 3.0) for i, (claim, text) in enumerate(zip(named, texts, strict=True))]
    lines = "\n".join([table.HEADING, *map(table.lines_of, done)]).splitlines()
    assert max(map(len, lines)) <= 80 and "many words" in "".join(lines)
    assert table.summary(done) == "2 pass, 1 FAIL"
    table.write(tmp_path / "new", {"GPUs": "1"}, done)
    content = json.loads((tmp_path / "new" / "acceptance.json").read_text())
    assert [row["status"] for row in content["claims"]] == ["FAIL", "pass", "pass"]
    assert (tmp_path / "new" / "acceptance.md").read_text().count("| pass |") == 2


def test_known_good_versions_meet_the_bounds_and_name_all_that_they_need() -> None:
    known = modules.known_good(modules.KNOWN_GOOD.read_text())
    dependencies = "\n".join(tomllib.loads(modules.PYPROJECT.read_text())["project"]["dependencies"])
    for name in modules.required():
        (bound,) = re.findall(rf"^{name}(?:\[\w+\])?>=([\d.]+)$", dependencies, re.IGNORECASE | re.MULTILINE)
        numbers = [tuple(map(int, re.findall(r"\d+", version))) for version in (known[name].version, bound)]
        assert numbers[0] >= numbers[1], f"{name}: {known[name].version} is below {bound}"
    assert {needed for each in known.values() for needed in each.needs} <= known.keys()


def test_missing_modules_are_named_with_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    there = modules.distribution

    def without(name: str) -> Any:
        if name in ("pydantic", "pydantic-core", "ray", "jsonschema"):
            raise PackageNotFoundError(name)
        return there(name)

    assert modules.missing() == []
    monkeypatch.setattr(modules, "distribution", without)
    assert [name.partition("==")[0] for name in modules.missing()] == ["jsonschema", "pydantic", "pydantic-core", "ray"]
    assert all(re.fullmatch(r"[\w-]+==\d[\w.]+", name) for name in modules.missing())


def test_without_a_gpu_there_is_one_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert command.main([]) == 2
    assert capsys.readouterr().err == "--device cuda: torch sees no GPU here; allowed: --device cpu\n"


@pytest.mark.slow
@pytest.mark.parametrize("part", [1, 2])
def test_the_acceptance_on_a_cpu(tmp_path: Path, part: int) -> None:
    asked = ["--part", str(part), "--device", "cpu", "--output", str(tmp_path), "--minutes", "9"]
    started = [sys.executable, "-m", "tests.gpu", *asked]
    done = subprocess.run(started, cwd=runner.ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-6000:]
    rows = json.loads((tmp_path / "acceptance.json").read_text())["claims"]
    found = {row["claim"]: row["status"] in ("pass", "measured") for row in rows}
    assert found == {claim.name: claim.cpu for claim in CLAIMS if claim.part == part}, rows


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_the_claim_holds_on_a_gpu(claim: Claim) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    (done,) = run_all([claim], Machine("cuda", torch.cuda.device_count()), forever())
    assert done.verdict.status != "FAIL", f"{done.verdict.text}\n{done.output[-4000:]}"
