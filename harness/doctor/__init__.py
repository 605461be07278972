"""Whether an experiment will measure what it says: checks on real ranks, one file each."""
