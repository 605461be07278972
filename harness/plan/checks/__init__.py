"""Checks of the doctor that need no rank: they judge a plan, recorded sizes, or the environment of the nodes."""
