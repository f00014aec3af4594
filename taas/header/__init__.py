"""The ``#pragma taas`` comment of a cell (the *header*): parses its text into a `RunSpec`."""
