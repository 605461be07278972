"""Tables as text, for the terminal and the report."""
