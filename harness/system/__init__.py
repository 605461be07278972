"""This machine: files, signals, processes, scratch folders, secrets."""
