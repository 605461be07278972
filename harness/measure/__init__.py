"""Windows, clocks and memory: everything that looks at a running training."""
