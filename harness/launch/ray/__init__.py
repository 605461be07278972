"""Worker groups as Ray Train runs them, and the cluster they run on."""
