"""Worker groups as torchrun starts them, one trial each."""
