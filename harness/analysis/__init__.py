"""Recorded rows -> the tables that a person reads. Pure: rows and frames in, frames out."""
