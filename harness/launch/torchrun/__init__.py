"""Worker groups as torchrun starts them."""
