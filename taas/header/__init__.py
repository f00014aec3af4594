"""What a cell header says: its text becomes a `RunSpec`."""
