"""What is trained: workloads, strategies, data loading, optimizers, checkpoints."""
