"""The plan: Experiment + inventory -> cells, trials, worker groups, skips."""
