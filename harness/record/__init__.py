"""The run folder: its files, the schema of its tables, and their readers and writers."""
