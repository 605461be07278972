"""Checks of the doctor that need no rank: they judge a plan, or the recorded environment of the nodes."""
