"""The cell header: parses its text into a `RunSpec`."""
