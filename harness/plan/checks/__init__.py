"""Checks of the doctor that need no rank: they judge a plan, or what the nodes recorded."""
