"""The experiment file: YAML -> a frozen Experiment, every problem with its place."""
