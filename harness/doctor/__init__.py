"""The doctor: whether a cell will measure what its labels say. One file a check; the list is in examine.py."""
