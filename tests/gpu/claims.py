"""The claims, one line each: what the harness says of GPUs, and the function that puts it to the test."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """A claim about the harness on GPUs.

    ``function``: ``module:function`` in tests/gpu, called with the device and ``arguments`` in a process of its own,
    which is killed after ``limit_s`` seconds. ``gpus``: how many it needs; ``cpu``: whether it runs on a CPU too.
    ``alone``: no other claim may run beside it, since it times steps or fills the memory. ``first``: it is in the
    first of two calls nevertheless. ``expected``: its prediction, made before any run, of a figure that it gives.
    """

    name: str
    function: str
    arguments: tuple[str, ...] = ()
    limit_s: float = 60.0
    gpus: int = 1
    cpu: bool = True
    alone: bool = False
    first: bool = False
    expected: str = ""

    @property
    def part(self) -> int:
        """Return the call that the claim belongs to, if they are split in two (--part)."""
        return 2 if self.alone and not self.first else 1


CLAIMS: tuple[Claim, ...] = (
    # devices
    Claim("GPUs have numbers", "hardware:pci_addresses", cpu=False),
    Claim("copies arrive", "hardware:copies_arrive", cpu=False),
    Claim("batches of every kind move", "hardware:batches_move"),
    Claim("packed LSTM: no false fault", "hardware:lstm_devices"),
    Claim("FLOPs as on a CPU", "hardware:flops_agree"),
    # numbers
    Claim("fp32 is not TF32", "precision:tf32", cpu=False),
    *(
        Claim(f"dtypes: {strategy}, {precision}", "precision:dtypes", (strategy, precision))
        for precision in ("bf16", "fp16")
        for strategy in ("single", "dp", "ddp", "fsdp")
    ),
    Claim("options train alike", "precision:options_train_alike"),
    Claim("ddp, two ranks on one GPU", "ranks:shared_gpu", ("ddp",), limit_s=90),
    Claim("compile over fully_shard", "ranks:compiled_shards", limit_s=150),
    Claim("fp16 skips an infinite step", "training:skips"),
    Claim("a checkpoint goes on", "training:goes_on", limit_s=90),
    Claim("workers load the same", "training:loads", limit_s=90),
    Claim("NCCL's monitor, FileStore", "ranks:heartbeat", cpu=False, limit_s=70),
    # memory
    Claim("fsdp shards before it moves", "memory:fsdp_shards_first", cpu=False),
    Claim("peak of steps, single", "memory:peak_of_steps", ("single",), cpu=False),
    Claim("peak of steps, fsdp", "memory:peak_of_steps", ("fsdp",), cpu=False),
    Claim("planted memory", "planted:memory", cpu=False, expected="peak + 4.000 GiB"),
    Claim("units computed again", "training:recomputed", limit_s=90, expected="the same parameters, 0.6 of the peak"),
    Claim("forecast of the peak", "training:forecasts", limit_s=120, cpu=False, expected="0.9 to 1.0 of the peak"),
    # whole runs and clocks, one claim at a time from here on
    Claim(
        "a run through Ray, whole",
        "runs:whole",
        limit_s=400,
        cpu=False,
        alone=True,
        first=True,
        expected="no null; GPT in bf16 at an MFU of 25 to 45 %, more than twice fp32's samples",
    ),
    Claim("planted waits are idle time", "planted:waits", alone=True, expected="idle + 20 ms, no other phase"),
    Claim("planted work is forward's", "planted:forward", alone=True, expected="forward + 20 ms, no other phase"),
    Claim("planted kernels are busy", "planted:kernels", cpu=False, alone=True, expected="busy + 20 ms"),
    Claim("events against wall clock", "clocks:events_and_wall", alone=True, expected="1.000, 1.000"),
    Claim("phases against steps", "clocks:phases_and_steps", alone=True, expected="off by less than 1e-6"),
    Claim("NVML's energy", "clocks:energy", cpu=False, alone=True, expected="an H100: 400 to 650 W, ratio 1.0"),
    # speed
    Claim(
        "peak of products", "hardware:peak_products", alone=True, expected="an H100 in bf16: 770 to 800 TFLOP/s, 0.8"
    ),
    Claim("overhead of a step", "speed:overhead", limit_s=150, alone=True, expected="1.02 of the MLP's step, 1.00"),
    Claim(
        "ResNet-50 against by hand",
        "speed:resnet50",
        limit_s=100,
        alone=True,
        expected="an H100: above 2,000 images/s, 1.00 by hand",
    ),
    Claim("GPT against by hand", "speed:gpt", limit_s=100, cpu=False, alone=True, expected="an MFU of 25 to 45 %"),
    Claim(
        "two profiles agree", "profiling:profiles_agree", ("0",), cpu=False, alone=True, expected="0 differ, 0 beyond"
    ),
    Claim(
        "two agree, CUPTI taken down",
        "profiling:profiles_agree",
        ("1",),
        cpu=False,
        alone=True,
        expected="0 differ, 0 beyond, unless the teardown races (kineto issue 1554)",
    ),
    Claim(
        "ddp after a profile",
        "profiling:after_a_profile",
        ("0",),
        alone=True,
        expected="a GPU: 1.05 to 1.3",
    ),
    Claim(
        "the same, CUPTI taken down",
        "profiling:after_a_profile",
        ("1",),
        cpu=False,
        alone=True,
        expected="1.00 to 1.02",
    ),
    Claim("the profiler sees kernels", "profiling:kernels_are_seen", cpu=False, alone=True, expected="200 to 400"),
    # failures; under Ray on a CPU in tests/test_faults.py
    Claim("a full GPU's cuBLAS is oom", "memory:cublas_on_a_full_gpu", cpu=False, alone=True),
    Claim("oom and recovery, torchrun", "runs:out_of_memory", ("torchrun",), limit_s=180, cpu=False, alone=True),
    Claim("oom and recovery, Ray", "runs:out_of_memory", ("ray",), limit_s=180, cpu=False, alone=True),
    Claim("an assert on the device, Ray", "runs:device_assert", limit_s=180, cpu=False, alone=True),
    # several GPUs
    Claim("exposed communication, fsdp", "communication:exposed", gpus=2, limit_s=120, alone=True),
    Claim("links of 2 ranks", "communication:links", ("2",), gpus=2, limit_s=120, alone=True),
    Claim("links of 8 ranks", "communication:links", ("8",), gpus=8, cpu=False, limit_s=180, alone=True),
    Claim("copies between GPUs", "communication:peer_copies", gpus=2, cpu=False, alone=True),
    Claim("named GPUs are used", "runs:named_gpus", limit_s=180, gpus=2, cpu=False, alone=True),
)


def named(names: list[str]) -> list[Claim]:
    """Return the claims whose names contain one of these texts, all without any; raise ValueError if one has none."""
    for name in names:
        if not any(name in claim.name for claim in CLAIMS):
            raise ValueError(f"--only: got {name!r}; no claim's name contains this; --list shows the names")
    return [claim for claim in CLAIMS if not names or any(name in claim.name for name in names)]
