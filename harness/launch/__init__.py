"""The launchers: a worker group in, messages out; processes are watched and ended."""
