"""Training scripts as they are: their steps counted in their own processes, followed and ended from outside."""
