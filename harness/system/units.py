"""Units of memory, in bytes."""

MIB = 2**20
GIB = 2**30
