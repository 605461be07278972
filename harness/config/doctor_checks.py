"""The doctor's checks, a row each, known without importing torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple


class DoctorCheck(NamedTuple):
    """A check that ranks make.

    ``key``: its name in ``allow``; ``place``: its constant in a module of harness/doctor; ``name``: unique; ``shared``:
    the name of its findings, if it is that of another check's.
    """

    key: str
    place: str
    name: str
    shared: str = ""

    @property
    def findings(self) -> str:
        """The name of its findings."""
        return self.shared or self.name


DOCTOR_CHECKS: tuple[DoctorCheck, ...] = (
    DoctorCheck("data", "data.WORKERS_CHECK", "loader workers", shared="data sharding"),
    DoctorCheck("transfer", "placement.TRANSFER_CHECK", "batch transfer"),
    DoctorCheck("devices", "placement.CHECK", "device placement"),
    DoctorCheck("randomness", "state.RANDOMNESS_CHECK", "randomness"),
    DoctorCheck("loss_parameters", "parameters.LOSS_PARAMETERS_CHECK", "loss parameters", shared="parameter updates"),
    DoctorCheck("state", "state.CHECK", "state in forward"),
    DoctorCheck("shapes", "shapes.CHECK", "output shapes"),
    DoctorCheck("data", "data.CHECK", "data sharding"),
    DoctorCheck("validation", "validation.CHECK", "validation set"),
    DoctorCheck("memory", "memory_needs.CHECK", "memory"),
    DoctorCheck("batches", "data.BATCHES_CHECK", "batch divisibility"),
    DoctorCheck("copies", "communication.COPIES_CHECK", "GPU copies"),
    # judged after the real steps:
    DoctorCheck("metrics", "validation.METRICS_CHECK", "metrics"),
    DoctorCheck("loss_weight", "gradients.LOSS_WEIGHT_CHECK", "loss weight"),
    DoctorCheck("padding", "data.PADDING_CHECK", "padding"),
    DoctorCheck("wrapper", "parameters.WRAPPER_CHECK", "wrapper use"),
    DoctorCheck("parameters", "parameters.CHECK", "parameter updates"),
    DoctorCheck("train_mode", "state.TRAIN_MODE_CHECK", "train mode"),
    DoctorCheck("rank_state", "state.RANK_STATE_CHECK", "state on ranks", shared="state in forward"),
    DoctorCheck("memory_growth", "memory_needs.MEMORY_GROWTH_CHECK", "memory growth"),
    DoctorCheck("slow_rank", "speed.SLOW_RANK_CHECK", "slow rank"),
    DoctorCheck("randomness", "state.STREAMS", "random streams", shared="randomness"),
    DoctorCheck("threads", "speed.THREADS_CHECK", "threads"),
    DoctorCheck("divergence", "gradients.DIVERGENCE_CHECK", "divergence"),
    DoctorCheck("gradients", "gradients.CHECK", "gradient scaling"),
    DoctorCheck("loader", "speed.CHECK", "loader throughput"),
    DoctorCheck("collectives", "communication.CHECK", "collectives"),
)
"""In the order in which they are observed and judged."""
WITHOUT_RANKS: Mapping[str, str] = {
    "links": "the links between the GPUs of each node, their NUMA nodes, and the IOMMU",
    "network": "the interface of each node's ranks and its speed, shared memory, limits, niceness",
    "machine state": "frequency governor and boost, a container's CPU quota, the GPUs' persistence mode",
    "versions": "the same packages, driver and device libraries on every node",
}
"""Checks of harness/plan/checks.py, which need no rank, with what each looks at."""
LOOKS_AT: Mapping[str, str] = {
    "loader workers": "the same samples through loader workers as in the process itself",
    "batch transfer": "a batch of the workload's own type can be moved to a device, with all of its tensors",
    "device placement": "every tensor of the forward pass is on the device of the input",
    "randomness": "equal initial parameters on all ranks",
    "loss parameters": "every nn.Parameter that the loss depends on belongs to the model",
    "state in forward": "values that a forward pass writes into its module, which DataParallel's replicas lose",
    "output shapes": "the outputs of DataParallel's replicas can be gathered",
    "data sharding": "the same data on every rank, and no second sharding in the data set",
    "validation set": "a validation set that is not empty, and no part of the training set",
    "memory": "the estimated peak against the memory of a device and of a node",
    "batch divisibility": "the samples of each device in every global batch, and in the last one of an epoch",
    "GPU copies": "copies between GPUs, directly and through the host, are identical bit for bit",
    "metrics": "metrics() that are means over samples, and evaluate() that returns finite numbers",
    "loss weight": "the weight that loss() returns is the number of the batch's samples or tokens",
    "padding": "the share of real tokens in padded batches, and padding that is counted as tokens",
    "wrapper use": "on several devices every step calls the strategy's wrapper",
    "parameter updates": "after a few steps every trainable parameter has changed, and equally on every rank",
    "train mode": "training steps in train mode, with more than one sample a device for batch statistics",
    "state on ranks": "what forward remembers of its own batches, which other ranks do not",
    "memory growth": "what the steps keep, step by step",
    "slow rank": "the same work on each rank, without the others",
    "random streams": "different dropout masks on different ranks",
    "threads": "computing threads and loader workers of a node against its processors",
    "divergence": "losses of the first steps that are not finite, or that grow",
    "gradient scaling": "the gradient of a strategy against that of one device at the same global batch",
    "loader throughput": "samples/s of the loader alone against those of the model alone",
    "collectives": "results of all-reduce and broadcast, and their speed at the sizes of the model",
    **WITHOUT_RANKS,
}
"""What each check looks at, by its name."""
FINDINGS_OF: Mapping[str, str] = {check.key: check.findings for check in DOCTOR_CHECKS}
"""The name of the findings of each check, by its name in ``allow``."""


def allowed_findings(allow: Collection[str]) -> frozenset[str]:
    """Return the names of the findings of these checks."""
    return frozenset(FINDINGS_OF[name] for name in allow)


def how_to_allow(finding: str) -> str:
    """Return the clause on how to measure what findings of this name refuse; empty if that is impossible."""
    name = next((name for name, findings in FINDINGS_OF.items() if findings == finding), "")
    return f" (to reproduce it on purpose: allow: [{name}])" if name else ""
