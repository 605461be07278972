"""The claims, one line each: what the harness says of GPUs, and the function that puts it to the test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Claim:
    """A claim about the harness on GPUs.

    ``function``: ``module:function`` in tests/gpu, called with the device and ``arguments`` in a process of its own,
    which is killed after ``limit_s`` seconds. ``expected``: its prediction, made before any run, of a figure that it
    gives, or of its outcome. ``takes_s``: a prediction too, of its process's seconds on an H100. ``gpus``: how many it
    needs; ``cpu``: whether it runs on a CPU too. ``alone``: no other claim may run beside it, since it times steps or
    fills the memory. ``first``: it is in the first of two calls nevertheless.
    """

    name: str
    function: str
    arguments: tuple[str, ...] = ()
    expected: str = ""
    takes_s: float = 20.0
    gpus: int = 1
    cpu: bool = True
    alone: bool = False
    first: bool = False

    @property
    def limit_s(self) -> float:
        """Return twice the predicted seconds, and what a process's start takes on a machine that others use."""
        return 2 * self.takes_s + START_S

    @property
    def part(self) -> int:
        """Return the call that the claim belongs to, if they are split in two (--part)."""
        return 2 if self.alone and not self.first else 1


START_S = 20.0
"""Seconds that are added to a limit, for the start of a process.

A limit ends what hangs. All limits together are more than two calls of 8 minutes; the predictions fit. These are
estimates from the first run on an H100, where nine claims of the second call took 413 s, and a whole run of 18 trials,
in longer windows, more than 282 s.
"""
LOW, H100 = "in {} the layers, in float32 all else", "an H100: "

_first = partial(Claim, cpu=False, alone=True, first=True)
_timing = partial(Claim, alone=True)
CLAIMS: tuple[Claim, ...] = (
    # devices
    Claim("GPUs have numbers", "hardware:pci_addresses", expected="each GPU once", cpu=False),
    Claim("copies arrive", "hardware:copies_arrive", expected="none is corrupt", cpu=False),
    Claim("batches of every kind move", "hardware:batches_move", expected="all 8 kinds"),
    Claim("packed LSTM: no false fault", "hardware:lstm_devices", expected="no fault"),
    Claim("FLOPs as on a CPU", "hardware:flops_agree", expected="equal counts, 0 MiB"),
    # numbers
    Claim("fp32 is not TF32", "precision:tf32", expected="1e-7 to 1e-6, and 3e-4", cpu=False),
    *(
        Claim(
            f"dtypes: {strategy}, {precision}",
            "precision:dtypes",
            (strategy, precision),
            expected=LOW.format(precision),
        )
        for precision in ("bf16", "fp16")
        for strategy in ("single", "dp", "ddp", "fsdp")
    ),
    Claim("options train alike", "precision:options_train_alike", expected="below 0.1 %, the hooks 0.5 %", takes_s=30),
    Claim("ddp, two ranks on one GPU", "ranks:shared_gpu", ("ddp",), expected="below 1e-3 %", takes_s=35),
    Claim("compile over fully_shard", "ranks:compiled_shards", expected="below 1e-5", takes_s=60),
    Claim("fp16 skips an infinite step", "training:skips", expected="scale 1,024 to 512"),
    Claim("a checkpoint goes on", "training:goes_on", expected="0 to 1e-6", takes_s=30),
    Claim("workers load the same", "training:loads", expected="0 to 1e-6", takes_s=30),
    Claim("NCCL's monitor, FileStore", "ranks:heartbeat", expected="the sums of all ranks", takes_s=35, cpu=False),
    # memory
    Claim("fsdp shards before it moves", "memory:fsdp_shards_first", expected="peak 0.25 to 0.38", cpu=False),
    Claim(
        "peak of steps, single",
        "memory:peak_of_steps",
        ("single",),
        expected="construction 1.0, steps 4.0 to 5.0",
        cpu=False,
    ),
    Claim(
        "peak of steps, fsdp",
        "memory:peak_of_steps",
        ("fsdp",),
        expected="construction 1.33, steps 4.0 to 5.5",
        cpu=False,
    ),
    Claim("planted memory", "planted:memory", expected="both + 10.000 GiB", takes_s=30),
    Claim("units computed again", "training:recomputed", expected="the same parameters, 0.6 of the peak", takes_s=30),
    Claim("forecast of the peak", "training:forecasts", expected="0.9 to 1.0 of the peak", takes_s=50, cpu=False),
    # runs that time nothing; oversubscription on a CPU takes as many processes as it has processors, and one more
    Claim("two ranks on one GPU, Ray", "runs:shared", expected="all ok, below 1e-3 %", takes_s=80, cpu=False),
    Claim("a killed training resumes", "runs:resumed", expected="lost, ok; from epoch 1", takes_s=80),
    Claim("a slow data set is the cause", "runs:slow", expected="waiting for data, 20 ms, both doubts", takes_s=70),
    Claim("an assert on the device, Ray", "runs:device_assert", expected="2 ok, 2 error", takes_s=90, cpu=False),
    # the first call's claims that run alone: whole runs, and what fills the memory
    _first(
        "a run through Ray, whole",
        "runs:whole",
        expected="no null; GPT in bf16 at an MFU of 25 to 45 %, more than twice fp32's samples; fsdp x1 over single "
        "0.8 to 1.0; trust low: 2 blocks",
        takes_s=200,
    ),
    *(
        _first(
            f"oom and recovery, {launcher}",
            "runs:out_of_memory",
            (launcher.lower(),),
            expected="oom, ok; 0 GiB kept",
            takes_s=50,
        )
        for launcher in ("Ray", "torchrun")
    ),
    _first("a full GPU's cuBLAS is oom", "memory:cublas_on_a_full_gpu", expected="outcome oom", takes_s=25),
    # the second call's: speed and clocks, the most informative first
    _timing(
        "peak of products",
        "hardware:peak_products",
        expected=f"{H100}770 to 800 TFLOP/s in bf16, 0.8; fp32 50, 0.75; tf32 390, 0.8",
        takes_s=30,
    ),
    _timing("GPT against by hand", "speed:gpt", expected=f"{H100}an MFU of 25 to 45 %", takes_s=65, cpu=False),
    _timing(
        "ResNet-50 against by hand", "speed:resnet50", expected=f"{H100}above 2,000 images/s, 1.00 by hand", takes_s=65
    ),
    _timing(
        "planted seconds", "planted:seconds", expected="idle, forward and busy + 20 ms, no other phase", takes_s=45
    ),
    _timing(
        "events, phases, wall clock",
        "clocks:events_and_phases",
        expected="1.000, 1.000, off by less than 1e-6",
        takes_s=40,
    ),
    _timing(
        "NVML against nvidia-smi",
        "clocks:energy",
        expected=f"{H100}400 to 650 W, ratios 1.0; 1,980 MHz, no reason or a power cap",
        takes_s=45,
        cpu=False,
    ),
    _timing("overhead of a step", "speed:overhead", expected="1.02 of the MLP's step, 1.00", takes_s=60),
    _timing(
        "two profiles agree",
        "profiling:profiles",
        ("0",),
        expected="0 differ, 0 beyond; step time after 1.05 to 1.3",
        takes_s=50,
    ),
    _timing(
        "two agree, CUPTI taken down",
        "profiling:profiles",
        ("1",),
        expected="0 differ, unless the teardown races (kineto issue 1554); step time after 1.00 to 1.02",
        takes_s=50,
        cpu=False,
    ),
    # several GPUs
    _timing(
        "exposed communication, fsdp", "communication:exposed", expected="exposed at most the total", takes_s=50, gpus=2
    ),
    _timing(
        "links of 2 ranks", "communication:links", ("2",), expected="NVLink 4: 150 to 400 GB/s", takes_s=50, gpus=2
    ),
    _timing(
        "links of 8 ranks",
        "communication:links",
        ("8",),
        expected="NVLink 4: 150 to 400 GB/s",
        takes_s=80,
        gpus=8,
        cpu=False,
    ),
    _timing(
        "copies between GPUs", "communication:peer_copies", expected="NVLink 4: 250 to 400 GB/s", gpus=2, cpu=False
    ),
    _timing(
        "named GPUs are used", "runs:named_gpus", expected="cuda:1, cuda:0, then cuda:1", takes_s=90, gpus=2, cpu=False
    ),
)


def one_after_another_s(claims: Sequence[Claim], beside: int) -> float:
    """Return the predicted seconds of claims, of which those that are not alone run some beside each other."""
    return sum(claim.takes_s / (1 if claim.alone else beside) for claim in claims)


def named(names: list[str]) -> list[Claim]:
    """Return the claims whose names contain one of these texts, all without any; raise ValueError if one has none."""
    for name in names:
        if not any(name in claim.name for claim in CLAIMS):
            raise ValueError(f"--only: got {name!r}; no claim's name contains this; --list shows the names")
    return [claim for claim in CLAIMS if not names or any(name in claim.name for name in names)]
