"""The checks of the doctor by name, with what each looks at; known without importing torch."""

from __future__ import annotations

from collections.abc import Mapping

CHECKS: Mapping[str, str] = {
    "batch transfer": "a batch of the workload's own type can be moved to a device, with all of its tensors",
    "device placement": "every tensor of the forward pass is on the device of the input",
    "randomness": "equal initial parameters on all ranks",
    "random streams": "different dropout masks on different ranks",
    "loss parameters": "every nn.Parameter that the loss depends on belongs to the model",
    "state in forward": "values that a forward pass writes into its module, which DataParallel's replicas lose",
    "output shapes": "the outputs of DataParallel's replicas can be gathered",
    "data sharding": "the same data on every rank, and no second sharding in the data set",
    "validation set": "a validation set that is not empty, and no part of the training set",
    "memory": "the estimated peak against the memory of a device and of a node",
    "batch divisibility": "the samples of each device in every global batch, and in the last one of an epoch",
    "GPU copies": "copies between GPUs, directly and through the host, are identical bit for bit",
    "loss weight": "the weight that loss() returns is the number of the batch's samples or tokens",
    "padding": "the share of real tokens in padded batches, and padding that is counted as tokens",
    "slow rank": "the same step on each rank, without the others",
    "wrapper use": "on several devices every step calls the strategy's wrapper",
    "parameter updates": "after a few steps every trainable parameter has changed, and equally on every rank",
    "train mode": "training steps in train mode, with more than one sample a device for batch statistics",
    "state on ranks": "what forward remembers of its own batches, which other ranks do not",
    "memory growth": "what the steps keep, step by step",
    "threads": "computing threads and loader workers of a node against its processors",
    "divergence": "losses of the first steps that are not finite, or that grow",
    "gradient scaling": "the gradient of a strategy against that of one device at the same global batch",
    "loader throughput": "samples/s of the loader alone against those of the model alone",
    "collectives": "results of all-reduce and broadcast, and their speed at the sizes of the model",
    "links": "the links between the GPUs of each node, their NUMA nodes, and the IOMMU",
    "network": "the interface of each node's ranks and its speed, shared memory, limits, niceness",
    "versions": "the same packages, driver and device libraries on every node",
}
"""A name is that of a check in harness/doctor or in this package; a test compares them."""
