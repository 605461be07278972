"""The run folder: what is recorded, in which tables, and how it is read again."""
